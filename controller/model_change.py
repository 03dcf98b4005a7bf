"""Whether workers may change to other weights while the cluster runs: what routers have read of the model must stay.

Looks at the two folders on this machine. Knows no worker and no plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.config.schema import ModelSection
from cluster.errors import CheckpointError, FailedPrecondition
from cluster.model_folder import has_model_file, model_name, read_model_file, weight_files

_CONFIG = "config.json"
_OF_TEXT = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)
"""Files that routers read, by which prompts become tokens and tokens text, beside templates with names of their own."""
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
_OF_WEIGHTS = frozenset(
    {"_name_or_path", "_from_model_config", "dtype", "torch_dtype", "quantization_config", "transformers_version"}
)
"""Keys of JSON files that say how weights were written, and nothing of the model."""


def refuse_other_model(running: ModelSection, wanted: ModelSection) -> None:
    """Raises FailedPrecondition that names each difference beyond the weights."""
    obstacles = list(_obstacles(running, wanted))
    if obstacles:
        remedy = "only weights change while the cluster runs: restart `baton serve` for another model"
        raise FailedPrecondition(f"{'; '.join(obstacles)}; {remedy}")


def _obstacles(running: ModelSection, wanted: ModelSection) -> Iterator[str]:
    old, new = _name_of(running), _name_of(wanted)
    if new != old:
        yield f"model.name: clients know the model as {old!r}, and it would be {new!r}; set model.name: {old}"
    before, after = Path(running.path), Path(wanted.path)
    if after == before:
        return
    if not weight_files(after):
        yield f"model.path: {after} has no *.safetensors"
    try:
        config, other = (_read(folder / _CONFIG) for folder in (before, after))
        for key in sorted(config.keys() | other.keys()):
            if config.get(key) != other.get(key):
                told = f"{key} is {other.get(key)!r} in its {_CONFIG}, and {config.get(key)!r} in that of {before}"
                yield f"model.path: {after} holds another model: {told}"
        named = {str(path.relative_to(each)) for each in (before, after) for path in each.glob(_NAMED_TEMPLATES)}
        for name in (*_OF_TEXT, *sorted(named)):
            if not _is_same(before / name, after / name):
                yield f"model.path: {after} has another {name} than {before}, which routers have read"
    except (OSError, ValueError, CheckpointError) as error:
        yield f"model.path: {before} and {after} cannot be compared: {error}"


def _name_of(model: ModelSection) -> str:
    """The name that clients use."""
    return model.name or model_name(Path(model.path))


def _is_same(one: Path, other: Path) -> bool:
    if not (has_model_file(one) and has_model_file(other)):
        return has_model_file(one) == has_model_file(other)
    if read_model_file(one) == read_model_file(other):
        return True
    return one.suffix == ".json" and _read(one) == _read(other)


def _read(path: Path) -> dict[str, Any]:
    """The part of a JSON object that does not say how weights were written. Raises OSError, ValueError."""
    content = json.loads(read_model_file(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return {key: value for key, value in content.items() if key not in _OF_WEIGHTS}
