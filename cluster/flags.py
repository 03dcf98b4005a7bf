"""Flags of `python -m worker` and `python -m router`: one for each field of their settings, nothing else."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from cluster.settings import JsonSettings

S = TypeVar("S", bound=JsonSettings)


def parse_flags(kind: type[S], program: str, arguments: Sequence[str] | None = None) -> S:
    """Settings from flags named like the fields (`--tp-rank 1`), on top of `--settings JSON` where it is given.

    A wrong flag ends the process with exit code 2 and a usage line.
    """
    assert dataclasses.is_dataclass(kind)
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    parser.add_argument("--settings", metavar="JSON", help="settings as JSON; flags override it")
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, **_options(hints[field.name])
        )
    values = vars(parser.parse_args(arguments))
    text = values.pop("settings", None)
    try:
        base = kind.from_json(text).as_dict() if text else {}
        return kind(**{**base, **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}})
    except (TypeError, ValueError) as error:
        parser.error(str(error).replace(f"{kind.__name__}.__init__()", "settings").replace("_", "-"))


def _options(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type; `X | None` reads as X."""
    if isinstance(hint, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is tuple:
        return {"action": "append", "type": str}
    return {"type": hint}
