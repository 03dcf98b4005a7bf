"""Every block of commands, Python and JSON in README.md and docs/ is run at a cluster (`make docs-check`); of what a
page says that a command prints, the command prints at least that.

Blocks of YAML are read by the configuration's own reader in test_docs_pages.py, which `make test` runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
import yaml
from doc_pages import Block, Page, pages
from doc_session import NOT_RUN, Newcomer, first_command

pytestmark = [pytest.mark.battery, pytest.mark.timeout(900)]


def blocks_to_run(page: Page, language: str) -> list[Block]:
    return [b for b in page.written_in(language) if first_command(b) not in NOT_RUN]


def pages_with(language: str) -> list[Page]:
    return [page for page in pages() if blocks_to_run(page, language)]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    someone = Newcomer(tmp_path_factory.mktemp("docs") / "baton")
    yield someone
    someone.close()


@pytest.mark.parametrize("page", pages_with("sh"), ids=lambda page: page.name)
def test_the_commands_of_a_page_run_and_print_what_it_says(newcomer: Newcomer, page: Page) -> None:
    commands = blocks_to_run(page, "sh")
    outputs = dict(zip(commands, newcomer.run_shell(commands), strict=True))
    for shown in page.written_in("console"):
        before = [block for block in commands if block.line < shown.line]
        assert before, f"{shown}: nothing is run before it that could print this"
        assert_prints(outputs[before[-1]].out, shown)


def assert_prints(printed: str, shown: Block) -> None:
    """Each line that is shown is printed, in this order, whatever its numbers and addresses are."""
    rest = iter(shape_of(line) for line in printed.splitlines())
    for line in filter(str.strip, shown.text.splitlines()):
        assert shape_of(line) in rest, f"{shown}: this was not printed, or not here: {line!r}\n{printed}"


def shape_of(line: str) -> str:
    return re.sub(r"\d+", "N", re.sub(r" --(admin-)?address [^\s,]+", "", line.rstrip()))


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_the_python_of_a_page_runs_as_one_program(newcomer: Newcomer, page: Page) -> None:
    ran = newcomer.run_python(blocks_to_run(page, "python"))
    assert ran.code == 0, ran
    assert ran.out.strip(), "it printed nothing"


def test_the_error_that_http_md_shows_is_the_answer_to_a_wrong_temperature(newcomer: Newcomer) -> None:
    (shown,) = Page("docs/http.md").written_in("json")
    body = {"model": "tiny-shakespeare", "prompt": "ROMEO:", "temperature": 3}
    answer = httpx2.post(f"http://{newcomer.http_address}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json() == json.loads(shown.text)


def test_a_cluster_set_up_as_security_md_says_serves_whoever_has_a_key(newcomer: Newcomer) -> None:
    page = Page("docs/security.md")
    newcomer.run_shell(page.written_in("sh"))
    file = newcomer.folder / "secure.yaml"
    keys, tls = (yaml.safe_load(block.text)["metadata"]["serving"] for block in page.written_in("yaml"))
    parts = {"auth": keys["auth"], "internal_tls": tls["internal_tls"]}
    file.write_text(with_parts(newcomer.folder / "cluster.yaml", parts), encoding="utf-8")
    made = newcomer.run("baton keys create --tenant acme --scope generate --file keys.yaml").out.strip()
    with closing(newcomer.serve("--config", file.name, "--port", "0")) as cluster:
        ask = f'baton generate "ROMEO:" --address {cluster.address} --max-tokens 4'
        assert newcomer.run(f"{ask} --api-key {made}").code == 0
        refused = newcomer.run(ask)
        assert refused.code == 1
        assert "--api-key" in refused.err
        assert cluster.press_ctrl_c() == 0


def with_parts(file: Path, parts: Mapping[str, object]) -> str:
    """The file's text with these sections of `metadata.serving`."""
    whole = yaml.safe_load(file.read_text(encoding="utf-8"))
    whole["metadata"]["serving"].update(parts)
    return yaml.safe_dump(whole)


def test_no_other_block_of_json_is_left_unlooked_at() -> None:
    assert [block.page for page in pages() for block in page.written_in("json")] == ["docs/http.md"]


def test_the_cluster_has_lived_through_all_of_it_and_ends_well_at_ctrl_c(newcomer: Newcomer) -> None:
    assert newcomer.cluster.press_ctrl_c() == 0, newcomer.cluster.output
