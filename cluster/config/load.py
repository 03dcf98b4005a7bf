"""From the operator's file to a ServingConfig, or to one ConfigError that lists every mistake with its position.

Owns the order of the work: read the file, parse YAML into nodes (`yaml.compose`, so nothing is constructed), read
`metadata.serving` against the schema, then check the keys against one another and the model folder on disk.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from cluster.config.checks import Finding, check
from cluster.config.read import Reader, entries, join, nearest, place_of, report_doubled_keys
from cluster.config.schema import ServingConfig
from cluster.config.source import Place, Source, clip
from cluster.errors import ConfigError

ROOT = "metadata.serving"


def load_config(path: str | Path, *, model_path: str | None = None) -> ServingConfig:
    """The configuration in a file; `model_path` (relative to the working directory) replaces the model it names.

    Raises ConfigError with all problems, each as `cluster.yaml:41:17: metadata.serving....: what` and the line.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return parse_config(text, str(path), model_path=model_path)


def parse_config(text: str, filename: str, *, model_path: str | None = None) -> ServingConfig:
    """The same from text; `filename` is shown in errors, and relative paths start at its folder."""
    source = Source(filename, text)
    serving = _find_serving(source, _compose(source, text))
    reader = Reader(source, ServingConfig)
    config = reader.read_section(ServingConfig, ROOT, serving)
    config = _resolve_paths(config, Path(filename).parent, model_path)
    wrong_model = _wrong_model(Path(config.model.path))
    if wrong_model and model_path is not None:
        raise ConfigError(f"--model: {wrong_model}")
    model = [Finding("model.path", wrong_model)] if wrong_model else []
    for finding in (*check(config), *model):
        keys = [join(ROOT, key) for key in (finding.key, *finding.rests_on)]
        if not any(source.has_problem(key) for key in keys):
            source.report(_nearest_place(reader, keys), keys[0], finding.what)
    _raise_if_wrong(source)
    return config


def _raise_if_wrong(source: Source) -> None:
    if source.num_problems:
        raise ConfigError(source.render())


def _compose(source: Source, text: str) -> yaml.Node:
    """The node graph of a single document; bad YAML is raised at once, since nothing after it can be trusted."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces" if "\\t" in str(error.problem) else ""
        context = f" {error.context}" if error.context else ""
        place = Place(mark.line + 1, mark.column + 1) if mark else None
        source.report(place, "", f"is not valid YAML: {error.problem}{context}{hint}")
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(before.count("\n") + 1, error.position - before.rfind("\n"))
        source.report(place, "", f"is not valid YAML: the character U+{error.character:04X} may not stand in a file")
    except RecursionError:
        source.report(None, "", "is not valid YAML: nested too deeply")
    else:
        if isinstance(root, yaml.MappingNode):
            return root
        what = "is empty" if root is None else "must be a mapping of keys to values at its top"
        source.report(place_of(root) if root else None, "", f"{what}; Baton's part goes under {ROOT}")
    raise ConfigError(source.render())


def _find_serving(source: Source, root: yaml.Node) -> yaml.Node:
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
    """Paths made absolute; a model given from outside also drops the name that the file gave to its own."""
    if model_path is not None:
        model = replace(config.model, path=str(Path(model_path).absolute()), name=None)
    else:
        model = replace(config.model, path=str((folder / config.model.path).absolute()))
    log_dir = None if config.log_dir is None else str((folder / config.log_dir).absolute())
    return replace(config, model=model, log_dir=log_dir)


def _wrong_model(path: Path) -> str | None:
    """What is wrong with the model's folder, as far as its being there goes."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "no such folder"
        return f"{what}: {path}; name a Hugging Face checkpoint with config.json"
    if not (path / "config.json").is_file():
        return f"no config.json in {path}; name a Hugging Face checkpoint"
    return None


def _nearest_place(reader: Reader, keys: list[str]) -> Place | None:
    """Where the file says it: the first of the keys it contains, else the closest section around the first."""
    parts = keys[0].split(".")
    parents = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    return next((reader.places[key] for key in (*keys, *parents) if key in reader.places), None)
