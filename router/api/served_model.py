"""The served model as the router knows it: the facts against which requests are checked.

Owns reading config.json and generation_config.json of the model folder. Knows no weights and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError, ConfigError, FieldViolation, NotFound
from cluster.model_folder import CONTEXT_NAMES, longest_context, model_name, read_model_json
from cluster.pb import generation_pb2 as pb
from router.api.sampling import default_sampling, model_defaults
from router.api.violations import shortened

MOST_SEQUENCES = 16
"""Largest `n` of a request, however many sequences a worker can hold."""
_GENERATION = "generation_config.json"
_LARGEST_INT = 2**31 - 1


@dataclass(frozen=True)
class ServedModel:
    """The one model this router serves."""

    name: str
    vocab_size: int
    max_model_len: int
    max_sequences: int
    """Largest `n` of a request."""
    eos_token_ids: tuple[int, ...]
    defaults: pb.SamplingParams = field(default_factory=default_sampling)
    """From generation_config.json."""
    max_new_tokens: int | None = None
    """Caps `max_output_tokens` where the client sets none; None: the rest of the context."""

    @classmethod
    def from_folder(cls, folder: Path, *, name: str, max_model_len: int | None, max_num_seqs: int) -> ServedModel:
        """Raises CheckpointError for a folder that cannot be read, ConfigError for a length it does not allow."""
        config = read_model_json(folder / "config.json")
        generation = read_model_json(folder / _GENERATION, required=False)
        longest = _positive_int(CONTEXT_NAMES[0], longest_context(config))
        if max_model_len is not None and not 2 <= max_model_len <= longest:
            raise ConfigError(f"max_model_len must be between 2 and the model's {longest} (got {max_model_len})")
        cap = generation.get("max_new_tokens")
        own_ends = generation.get("eos_token_id") is not None
        return cls(
            name=name or model_name(folder),
            vocab_size=_positive_int("vocab_size", config.get("vocab_size")),
            max_model_len=max_model_len or longest,
            max_sequences=min(MOST_SEQUENCES, max_num_seqs),
            eos_token_ids=_end_tokens(generation, _GENERATION) if own_ends else _end_tokens(config, "config.json"),
            defaults=model_defaults(generation),
            max_new_tokens=_positive_int("max_new_tokens", cap, _GENERATION) if cap else None,
        )

    def check_name(self, path: str, name: str) -> None:
        """An empty name means the served model. Raises NotFound for any other than its own."""
        if name and name != self.name:
            raise NotFound(
                f"model {shortened(name)!r} is not served here; this router serves {self.name!r}",
                violations=(FieldViolation(path, f"must be empty or {self.name!r}"),),
            )


def _end_tokens(values: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Reads `eos_token_id`: one, a list of them, or none."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or not 0 <= token <= _LARGEST_INT for token in ids):
        raise CheckpointError(f"{where}: eos_token_id must be a token id or a list of them (got {value!r:.100})")
    return tuple(ids)


def _positive_int(key: str, value: object, where: str = "config.json") -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST_INT:
        raise CheckpointError(f"{where}: {key} must be a positive integer (is {value!r:.100})")
    return value
