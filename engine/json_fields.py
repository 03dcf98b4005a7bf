"""Typed values of the JSON objects in a checkpoint folder. Loads no torch."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from cluster.errors import CheckpointError

N = TypeVar("N", int, float)
_MOST_DIGITS = 40
_LARGEST_SIZE = 2**31 - 1
_LARGEST_NUMBER = 1e30
"""No model has larger numbers; products of these are still finite."""


class Fields:
    """Typed look-ups in a JSON object; what is wrong is a CheckpointError that names file, field and value."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    @property
    def where(self) -> str:
        """The file, and the field that these are within, to begin an error with."""
        return self._where

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def first(self, *names: str) -> str:
        """Returns the first of these names that has a value, else the first: transformers 4 and 5 call some fields
        differently."""
        return next((name for name in names if self.get(name) is not None), names[0])

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer; a null counts as absent."""
        return self._integer(name, default, 1, "a positive integer")

    def count(self, name: str, default: int) -> int:
        """Returns an integer from 0 on; a null counts as absent."""
        return self._integer(name, default, 0, "an integer from 0 on")

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive finite number; a null counts as absent."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._where}: {name} must be a positive number (got {value!r})")
        return float(self._at_most(name, value, _LARGEST_NUMBER))

    def optional_number(self, name: str) -> float | None:
        return None if self._values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise CheckpointError(f"{self._where}: {name} must be true or false (got {value!r})")
        return value

    def within(self, name: str) -> Fields:
        """Returns the object below `name`; empty when absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{self._where}: {name} must be an object (got {value!r})")
        return Fields(value or {}, f"{self._where}: {name}")

    def _integer(self, name: str, default: int | None, least: int, what: str) -> int:
        value = default if self._values.get(name) is None else self._values[name]
        if type(value) is not int or value < least:
            raise CheckpointError(f"{self._where}: {name} must be {what} (got {value!r})")
        return self._at_most(name, value, _LARGEST_SIZE)

    def _at_most(self, name: str, value: N, limit: float) -> N:
        if value > limit:
            raise CheckpointError(f"{self._where}: {name} must be at most {limit:,} (got {_shown(value)})")
        return value


def _shown(value: float) -> str:
    """Shortens an integer of very many digits."""
    text = repr(value)
    return text if len(text) <= _MOST_DIGITS else f"a number of {len(text)} digits"


def architecture_of(fields: Fields) -> str:
    """Returns the first of config.json's `architectures`; empty if it names none."""
    names = fields.get("architectures") or []
    return str(names[0]) if isinstance(names, list) and names else ""
