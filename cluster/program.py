"""The seam between a program and what hosts it: a shell (`python -m worker`) or a Ray actor (`controller.ray_actors`).

A program package (`worker`, `router`) offers `program.create(settings_json, report)`; the host calls `start`, then
`wait`, and `stop` from any thread. Nothing here knows which program it runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.errors import BatonError, CheckpointError, ConfigError
from cluster.signals import Signals

Report = Callable[[str], None]
"""Called with one line of progress at a time, such as `loading weights: 3 of 8 files`."""
SOURCE_ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds Baton's packages."""


class Program(Protocol):
    """One process's work. Errors at start are raised by `start` as `cluster.errors.BatonError`."""

    def prepare(self) -> str:
        """Binds what others need before `start`; returns it as JSON (rank 0: `{"rank_address": "host:port"}`)."""
        ...

    def start(self) -> str:
        """Blocks until ready to serve; returns the program's address card as JSON (`{"address": "host:port", ...}`)."""
        ...

    def wait(self) -> None:
        """Blocks until stopped; raises what ended the program if it failed."""
        ...

    def stop(self) -> None:
        """Asks for a clean end; returns at once; idempotent."""
        ...


@dataclass(frozen=True)
class ExitCode:
    """Exit codes of every Baton program."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    BAD_CONFIG = 3
    NOT_REACHABLE = 4


def child_environment() -> dict[str, str]:
    """This process's environment, with Baton's packages on PYTHONPATH: `python -m worker` works from any folder."""
    path = os.pathsep.join(filter(None, [str(SOURCE_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def host_in_shell(create: Callable[[str, Report], Program], settings_json: str) -> int:
    """Runs a program in the foreground: progress on stderr, one JSON line on stdout when ready, SIGTERM/SIGINT end it.

    Returns an exit code.
    """
    try:
        program = create(settings_json, lambda line: print(line, file=sys.stderr, flush=True))
        Signals(program.stop).start()
        prepared = json.loads(program.prepare())
        if prepared:
            print(json.dumps({"event": "prepared", **prepared}), flush=True)
        ready = json.loads(program.start())
        print(json.dumps({"event": "ready", **ready}), flush=True)
        program.wait()
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitCode.BAD_CONFIG
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitCode.FAILED
    return ExitCode.DONE
