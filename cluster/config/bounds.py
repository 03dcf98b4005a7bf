"""Limits of the numbers in the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, both inclusive unless `above` is set, which excludes itself."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None


def bounded(
    default: float | None, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> Any:
    """A dataclass field with a default and the limits that a reader checks."""
    return field(default=default, metadata={"bounds": Bounds(at_least, above, at_most)})
