"""From the operator's file to a ServingConfig, or to one ConfigError that lists every mistake with its position.

Owns the order of the work: read the file, parse YAML into nodes, read `metadata.serving` against the schema, then check
the keys against one another and the model folder on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import yaml

from cluster.address import format_address
from cluster.config.access import AuthSection, InternalTlsSection, TlsSection
from cluster.config.checks import ConfigFinding, check
from cluster.config.read import ConfigReader
from cluster.config.schema import ServingConfig
from cluster.config.source import (
    ConfigSource,
    SourcePosition,
    clip,
    compose,
    entries,
    join,
    nearest,
    place_of,
    read_text,
    report_doubled_keys,
)
from cluster.errors import CheckpointError, ConfigError
from cluster.model_folder import gguf_file, model_name, read_model_file

ROOT = "metadata.serving"
_OF_FILES = ("auth", "tls", "internal_tls")
"""Sections whose values are all names of files."""
S = TypeVar("S", AuthSection, TlsSection, InternalTlsSection)


def load_config(path: str | Path, *, model_path: str | None = None, chat_template: str | None = None) -> ServingConfig:
    """The configuration in a file; `model_path` and `chat_template` (relative to the working directory) replace the
    model that it names, and its templates.

    Raises ConfigError with all problems, each as `cluster.yaml:41:17: metadata.serving....: what` and the line.
    """
    return parse_config(read_text(path), str(path), model_path=model_path, chat_template=chat_template)


def parse_config(
    text: str, filename: str, *, model_path: str | None = None, chat_template: str | None = None
) -> ServingConfig:
    """The configuration in a text; `filename` is shown in errors, and relative paths start at its folder."""
    source = ConfigSource(filename, text)
    serving = _find_serving(source, compose(source, text, f"Baton's part goes under {ROOT}"))
    reader = ConfigReader(source, ServingConfig)
    config = reader.read_section(ServingConfig, ROOT, serving)
    config = _resolve_paths(config, Path(filename).parent, model_path)
    if chat_template is not None:
        config = replace(config, model=replace(config.model, chat_template=str(Path(chat_template).absolute())))
        if wrong_template := _wrong_template(config.model.chat_template):
            raise ConfigError(f"--chat-template: {wrong_template}")
    wrong_model = _wrong_model(Path(config.model.path))
    if wrong_model and model_path is not None:
        raise ConfigError(f"--model: {wrong_model}")
    model = [ConfigFinding("model.path", wrong_model)] if wrong_model else []
    for finding in (*check(config), *model, *_missing_files(config)):
        keys = [join(ROOT, key) for key in (finding.key, *finding.rests_on)]
        if not any(source.has_problem(key) for key in keys):
            source.report(_nearest_place(reader, keys), keys[0], finding.what)
    _raise_if_wrong(source)
    return config


def _raise_if_wrong(source: ConfigSource) -> None:
    if source.num_problems:
        raise ConfigError(source.render())


def _find_serving(source: ConfigSource, root: yaml.Node) -> yaml.Node:
    """The node of `metadata.serving`; raises ConfigError when the way there is missing."""
    report_doubled_keys(source, root)
    node, path = root, ""
    for wanted in ROOT.split("."):
        found = {key: value for key, _, value in entries(node)} if isinstance(node, yaml.MappingNode) else {}
        path = join(path, wanted)
        if wanted not in found:
            close = nearest(wanted, found)
            hint = f'; did you mean "{clip(close)}" to be it?' if close else "; Baton's settings go there"
            source.report(place_of(node), path, f"is missing{hint}")
            _raise_if_wrong(source)
        node = found[wanted]
    return node


def _resolve_paths(config: ServingConfig, folder: Path, model_path: str | None) -> ServingConfig:
    """Paths made absolute; a model given from outside also drops what the file says of its own alone."""
    model = config.model
    if model_path is not None:
        model = replace(model, path=str(Path(model_path).absolute()), name=None, chat_template=None)
    else:
        template = None if model.chat_template is None else str((folder / model.chat_template).absolute())
        model = replace(model, path=str((folder / model.path).absolute()), chat_template=template)
    log_dir = None if config.log_dir is None else str((folder / config.log_dir).absolute())
    sections = {name: _with_paths(getattr(config, name), folder) for name in _OF_FILES}
    router, batches = config.router, config.router.batch_store
    if batches is not None and not batches.startswith("~") and "://" not in batches:
        router = replace(router, batch_store=str((folder / batches).absolute()))
    engine, timed = config.engine, config.engine.timed_steps
    if timed.script is not None:
        engine = replace(engine, timed_steps=replace(timed, script=str((folder / timed.script).absolute())))
    paths = {name: getattr(engine, name) for name in ("kv_disk_path", "kv_store_path", "kv_key_file")}
    absolute = {
        name: str((folder / path).absolute())
        for name, path in paths.items()
        if path and not path.startswith("~") and "://" not in path
    }
    engine = replace(engine, **absolute)  # type: ignore[arg-type]
    return replace(config, model=model, log_dir=log_dir, router=router, engine=engine, **sections)


def _with_paths(section: S, folder: Path) -> S:
    """A section whose values are all names of files."""
    return replace(section, **{name: str((folder / path).absolute()) for name, path in vars(section).items() if path})


def _wrong_model(path: Path) -> str | None:
    """Why the model's folder cannot be one, or nothing; looks only at what exists."""
    try:
        if gguf_file(path) is not None:
            read_model_file(path / "config.json")
            return None
    except (CheckpointError, OSError) as error:
        return str(error)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "no such folder"
        return f"{what}: {path}; name a Hugging Face checkpoint with config.json, or a .gguf file"
    if not (path / "config.json").is_file():
        return f"no config.json in {path}; name a Hugging Face checkpoint, or a .gguf file"
    return None


def _wrong_template(path: str | None) -> str | None:
    """Why there can be no chat template, or nothing; looks only at what exists."""
    if path is None or Path(path).is_file():
        return None
    close = nearest(Path(path).name, [each.name for each in Path(path).parent.glob("*.jinja")])
    return f"no such file: {path}; " + (f'did you mean "{close}"?' if close else "name a Jinja file")


def _missing_files(config: ServingConfig) -> Iterator[ConfigFinding]:
    if wrong_template := _wrong_template(config.model.chat_template):
        yield ConfigFinding("model.chat_template", wrong_template)
    for section in _OF_FILES:
        for name, path in vars(getattr(config, section)).items():
            if path is not None and not Path(path).is_file():
                made_by = f"make it with `baton keys create --file {path}`" if section == "auth" else "docs/security.md"
                yield ConfigFinding(f"{section}.{name}", f"no such file: {path}; {made_by}")
    script = config.engine.timed_steps.script
    if script is not None and not Path(script).is_file():
        yield ConfigFinding("engine.timed_steps.script", f"no such file: {script}; docs/timed.md says what is in one")


def _nearest_place(reader: ConfigReader, keys: list[str]) -> SourcePosition | None:
    """The place in the file: that of the first key it contains, else of the closest section around the first."""
    parts = keys[0].split(".")
    parents = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    return next((reader.places[key] for key in (*keys, *parents) if key in reader.places), None)


def describe_config(config: ServingConfig) -> str:
    """`1 prefill + 2 decode workers (tensor parallel 1 + 2), tiny-shakespeare in float32 on cpu, gRPC on ...`."""
    prefill, decode = config.roles.prefill, config.roles.decode
    split = f"{prefill.num_workers} prefill + " if prefill.num_workers else ""
    workers = "worker" if decode.num_workers == 1 else "workers"
    parallel = ""
    if (prefill.tensor_parallel, decode.tensor_parallel) != (1, 1):
        parallel = f" (tensor parallel {prefill.tensor_parallel} + {decode.tensor_parallel})"
    name = config.model.name or model_name(Path(config.model.path))
    address = format_address(config.router.host, config.router.port)
    return (
        f"{split}{decode.num_workers} decode {workers}{parallel}, {name} in "
        f"{config.model.dtype} on {config.engine.device}, gRPC on {address}"
    )
