"""The files of a model by their names in a Hugging Face folder: those of a folder, or what a GGUF file says in their
stead.

`model.path` may be a folder with config.json, a .gguf file, or a folder with one such file and no config.json. Whoever
reads a file of the model reads it here, by the path that it has in such a folder. Owns also what readers of config.json
on both sides must agree on without torch. Knows no weights.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError
from cluster.gguf.config import model_config
from cluster.gguf.header import GgufHeader, read_header
from cluster.gguf.tokenizer import tokenizer_config, tokenizer_definition

GGUF_SUFFIX = ".gguf"
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""What config.json calls the longest context: the first is the usual name, the second GPT-2's."""
LONGROPE_CONTEXT = 4096
"""The original context with longrope, where config.json names none."""
_LARGEST_FILE = 256 << 20
"""Bytes; the largest tokenizer.json and indices of tensors have some tens of millions."""
_FROM_GGUF: dict[str, Callable[[GgufHeader], bytes]] = {
    "config.json": lambda header: _json(model_config(header)),
    "tokenizer.json": tokenizer_definition,
    "tokenizer_config.json": lambda header: _json(tokenizer_config(header)),
}


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file that is the model, or None where it is a folder with config.json.

    Raises CheckpointError for a folder with several.
    """
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(found) > 1:
        raise CheckpointError(f"{path}: has {len(found)} GGUF files ({found[0].name} and others); name one of them")
    return found[0] if found else None


def has_model_file(path: Path) -> bool:
    """Whether the model has such a file, or says the same in another."""
    return path.exists() if gguf_file(path.parent) is None else path.name in _FROM_GGUF


def read_model_file(path: Path) -> bytes:
    """Returns a file's content. Raises OSError, or CheckpointError for what is no file of a folder (a directory, a
    pipe), for one that is too large, and for a GGUF file that cannot say it."""
    file = gguf_file(path.parent)
    if file is None:
        return _content(path)
    if path.name not in _FROM_GGUF:
        raise FileNotFoundError(f"{file} says nothing of {path.name}")
    return _FROM_GGUF[path.name](read_header(file))


def _content(path: Path) -> bytes:
    """A pipe is not opened: that would wait for whoever writes it."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is a directory, pipe or device; it must be a file")
    if status.st_size > _LARGEST_FILE:
        raise CheckpointError(f"{path}: has {status.st_size:,} bytes; at most {_LARGEST_FILE:,} are read")
    return path.read_bytes()


def read_model_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Returns a JSON object of the model; an empty one where it has no such file and that is not `required`. Raises
    CheckpointError."""
    if not required and not has_model_file(path):
        return {}
    try:
        content = json.loads(read_model_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a folder in Hugging Face's format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object (got {type(content).__name__})")
    return content


def weight_files(path: Path) -> list[Path]:
    """Returns the files of a model's weights, in the order of their names."""
    file = gguf_file(path)
    return sorted(path.glob("*.safetensors")) if file is None else [file]


def longest_context(config: Mapping[str, Any]) -> object:
    """Returns the tokens up to which a model is served, as config.json has the number; None where it has none.

    With longrope they are those of the original context: beyond it a whole sequence would be computed by other factors.
    """
    longest = next((config[name] for name in CONTEXT_NAMES if config.get(name) is not None), None)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("short_factor") is None:
        return longest
    named = [fields.get("original_max_position_embeddings") for fields in (config, rope)]
    original = next((length for length in named if length is not None), LONGROPE_CONTEXT)
    return min(longest, original) if isinstance(longest, int) and isinstance(original, int) else longest


def model_name(path: Path) -> str:
    """Returns the name of a model that has no other: its folder's or its file's."""
    return path.resolve().name.removesuffix(GGUF_SUFFIX)


def _json(fields: object) -> bytes:
    return json.dumps(fields).encode("utf-8")
