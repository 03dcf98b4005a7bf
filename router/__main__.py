"""`python -m router`: the router in a shell. Its flags are the fields of RouterSettings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import typing
from collections.abc import Sequence
from typing import Any

from cluster.program import host_in_shell
from cluster.settings import RouterSettings
from router.program import create


def main(arguments: Sequence[str]) -> int:
    """An exit code of cluster.program.ExitCode; wrong flags exit by argparse with 2."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return host_in_shell(create, settings_json(arguments))


def settings_json(arguments: Sequence[str]) -> str:
    """Flags win over `--settings`."""
    parser = argparse.ArgumentParser(prog="python -m router", description=RouterSettings.__doc__)
    parser.add_argument("--settings", default="{}", metavar="JSON", help="all settings as one JSON object")
    types = typing.get_type_hints(RouterSettings)
    for field in dataclasses.fields(RouterSettings):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, dest=field.name, default=None, **_how(types[field.name]))
    given = vars(parser.parse_args(arguments))
    settings: dict[str, Any] = json.loads(given.pop("settings"))
    settings |= {name: value for name, value in given.items() if value is not None}
    if "model_path" not in settings:
        parser.error("--model-path is required")
    return json.dumps(settings)


def _how(kind: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == tuple[str, ...]:
        return {"nargs": "*", "metavar": "ROLE:ID=HOST:PORT"}
    return {"type": next(t for t in (*typing.get_args(kind), kind) if t is not type(None))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
