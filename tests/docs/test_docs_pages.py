"""What README.md and docs/ say is there: files, anchors, commands, options, targets of make, keys of the configuration.

Whether their commands do what they say is looked at by running them: test_docs_run.py (`make docs-check`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from doc_commands import baton_lines, commands, config_keys, make_targets, wrong_in
from doc_pages import ROOT, Block, Page, all_pages, pages
from doc_session import NOT_RUN, RUN, first_command, make_checkout, would_make

from cluster.config.load import load_config

PLAIN = {"text", "console", "mermaid", "json"}
"""Nothing to run: diagrams and formats; `console` is what the commands before it print, which is compared."""
SECTIONS = {key for key in config_keys() if "." not in key}
OPTIONS_OF_OTHERS = {"--no-restart", "--save-detailed"}
"""Of `ray up`, and of vLLM's `bench serve`."""
FIELDS_OF_OTHERS = {"router.metrics_address"}
"""Written like keys of the configuration: of `baton status --json`."""
A_PATH = re.compile(r"[a-z_]+(/[\w.-]+)+")


def named(pages: Iterable[Page]) -> Any:
    return pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in pages])


@named(pages())
def test_every_block_says_what_it_is_written_in(page: Page) -> None:
    unknown = {str(block): block.language or "none" for block in page.blocks if block.language not in PLAIN | RUN}
    assert not unknown, f"blocks of no known language (text for what is none): {unknown}"


def test_each_exception_from_running_is_a_block_that_is_there() -> None:
    there = {first_command(block) for page in pages() for block in page.blocks}
    assert not NOT_RUN.keys() - there, "no such blocks any more"


@named(all_pages())
def test_links_lead_to_files_and_anchors_that_are_there(page: Page) -> None:
    broken = []
    for link in page.links:
        path, _, anchor = link.text.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (ROOT / page.name).parent / path if path else ROOT / page.name
        if not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in Page(str(target.resolve().relative_to(ROOT))).anchors:
            broken.append(f"{link}: no such heading")
    assert not broken, "\n".join(broken)


def test_the_readme_leads_to_every_page() -> None:
    linked = {link.text.partition("#")[0] for link in Page("README.md").links}
    missing = {page.name for page in pages()} - linked - {"README.md"}
    assert not missing, f"README.md has no link to {missing}"


@named(all_pages())
def test_files_that_are_named_are_there(page: Page) -> None:
    missing = []
    for span in page.spans:
        for word in span.text.removeprefix("python ").split()[:1]:
            is_made = word.startswith("build/")  # by a command, where one has run
            is_ours = A_PATH.fullmatch(word) and not is_made and (ROOT / word.split("/")[0]).is_dir()
            if is_ours and not ((ROOT / word).exists() or list(ROOT.glob(f"{word}.*"))):
                missing.append(str(span))
        module = re.match(r"python -m ([a-z_]+[\w.]*)", span.text)
        if module and find_spec(module[1].split(".")[0]) is None:
            missing.append(str(span))
    assert not missing, "\n".join(missing)


@named(all_pages())
def test_commands_of_baton_have_the_names_and_options_that_are_written(page: Page) -> None:
    wrong = [f"{line}: {what}" for line in baton_lines(page) if (what := wrong_in(line.text))]
    assert not wrong, "\n".join(wrong)


@named(pages())
def test_options_that_are_named_alone_are_those_of_some_command_of_baton(page: Page) -> None:
    known = {option for options in commands().values() for option in options} | OPTIONS_OF_OTHERS
    named_alone = [(span, option) for span in page.spans for option in re.findall(r"^--[a-z][a-z0-9-]*", span.text)]
    wrong = [str(span) for span, option in named_alone if option not in known and not option.endswith("-")]
    assert not wrong, "\n".join(wrong)


@named(all_pages())
def test_targets_of_make_that_are_named_are_in_the_makefile(page: Page) -> None:
    said = [(block, block.text) for block in page.written_in("sh")] + [(span, span.text) for span in page.spans]
    wrong = [
        f"{where}: make {target}"
        for where, text in said
        for target in re.findall(r"(?:^|[\s=])make ([a-z][a-z-]*)", text)
        if target not in make_targets()
    ]
    assert not wrong, "\n".join(wrong)


def test_extras_that_are_named_are_installed_though_others_are(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "baton")
    assert "pip install" not in would_make(checkout, "setup")
    assert "--editable '.[dev,cuda]'" in would_make(checkout, "setup", "EXTRAS=dev,cuda")


@named(all_pages())
def test_keys_of_the_configuration_that_are_named_are_in_its_schema(page: Page) -> None:
    wrong = []
    for span in page.spans:
        key = re.match(r"([a-z_]+)(\.(?!py$)[a-z_]+)+(?=$|:|=)", span.text)
        is_key = key and key[1] in SECTIONS and not (ROOT / key[0].replace(".", "/")).with_suffix(".py").exists()
        if key and is_key and key[0] not in config_keys() | FIELDS_OF_OTHERS and not is_python(key[0]):
            wrong.append(str(span))
    assert not wrong, "\n".join(wrong)


@named(all_pages())
def test_metrics_that_are_named_are_in_the_references(page: Page) -> None:
    references = [Page(f"docs/{name}.md").text for name in ("metrics", "router-metrics", "controller-metrics")]
    known = {name for text in references for name in re.findall(r"^\| `(baton_\w+)`", text, re.M)}
    wrong = [str(span) for span in page.spans if (m := re.match(r"baton_\w+", span.text)) and m[0] not in known]
    assert not wrong, "\n".join(wrong)


def is_python(name: str) -> bool:
    """`engine.sampling.sampler.check_finish`, `engine.layers.ops`: packages have the names of sections."""
    package, module = name.split(".")[:2]
    return (ROOT / package / f"{module}.py").is_file() or (ROOT / package / module).is_dir()


@named(pages())
def test_blocks_of_json_and_yaml_can_be_read(page: Page) -> None:
    for block in page.written_in("json"):
        json.loads(block.text)
    for block in page.written_in("yaml"):
        assert isinstance(yaml.safe_load(block.text), dict), block


YAML_BLOCKS = [block for page in pages() for block in page.written_in("yaml")]


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=str)
def test_blocks_of_yaml_are_parts_of_a_valid_cluster_file(block: Block, tmp_path: Path) -> None:
    part = yaml.safe_load(block.text)
    if part.keys() <= SECTIONS:
        part = {"metadata": {"serving": part}}
    whole = merged(yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8")), part)
    whole["metadata"]["serving"]["model"]["path"] = str(ROOT / "models" / "tiny-shakespeare")
    for section in ("auth", "tls", "internal_tls"):
        for name in filter(None, part.get("metadata", {}).get("serving", {}).get(section, {}).values()):
            (tmp_path / name).touch()
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(whole), encoding="utf-8")
    load_config(file)
    if part.keys() - {"metadata"}:
        ray = find_spec("ray")
        assert ray is not None and ray.origin is not None
        schema = Path(ray.origin).parent / "autoscaler" / "ray-schema.json"
        jsonschema.validate(whole, json.loads(schema.read_text(encoding="utf-8")))


def merged(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`part` over `whole`, section by section."""
    over = {
        key: merged(whole[key], value) if isinstance(value, dict) and isinstance(whole.get(key), dict) else value
        for key, value in part.items()
    }
    return {**whole, **over}
