"""Limits of the numbers in the configuration, and which keys change at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, both inclusive unless `above` is set, which excludes itself."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None


RUN_TIME = {"is_run_time": True}
"""Metadata of a field that may change while the cluster runs, with all below it."""


def bounded(
    default: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    is_run_time: bool = False,
) -> Any:
    """A dataclass field with a default and the limits that a reader checks."""
    metadata = {"bounds": Bounds(at_least, above, at_most)}
    return field(default=default, metadata=metadata | RUN_TIME if is_run_time else metadata)
