"""How a benchmark tells what it found, and that it could not run: the same for all that start clusters."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.cpu_share import NoControlGroups
from benchmarks.plain_cluster import ProgramFailed
from cluster import rpc
from cluster.errors import BatonError
from cluster.program import ExitCode


@contextlib.contextmanager
def telling_failures() -> Iterator[None]:
    """What keeps a benchmark from running becomes a line on stderr and the exit code that says so. A SIGTERM ends it as
    Ctrl-C does, with all that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except (ProgramFailed, BatonError, NoControlGroups, grpc.RpcError) as error:
        typer.echo(f"error: {rpc.from_rpc_error(error) if isinstance(error, grpc.RpcError) else error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None


def bars() -> Progress:
    """On stderr, where that is a terminal."""
    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())


def tell(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """One JSON object, or what `show` prints."""
    if as_json:
        json.dump(found, sys.stdout)
        print()
    else:
        show(found)
