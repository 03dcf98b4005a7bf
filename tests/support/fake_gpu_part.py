"""Parts of `benchmarks.gpu` that need no torch, and end in every way a part can."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.gpu_part import MARK, NO_DEVICE, Clock, attempt, found, run_named


def good(device: str, clock: Clock) -> None:
    """Notes in a file beside the results that it has run."""
    with Path("fake_gpu_part.count").open("a") as file:
        file.write("x")
    found("one", value=1)
    attempt("two", lambda: {"value": 2})


def bad(device: str, clock: Clock) -> None:
    attempt("broken", lambda: {"value": 1 // 0})
    found("after", value=3)


def late(device: str, clock: Clock) -> None:
    found("begun", pid=os.getpid())
    threading.Event().wait()


def torn(device: str, clock: Clock) -> None:
    """Another process writes into one of its lines."""
    print(f'{MARK}{{"name": "torn", "val an error of another process', flush=True)
    found("whole", value=1)


def leaving(device: str, clock: Clock) -> None:
    """Leaves a process that is no longer of its session, and holds its output."""
    code = "import signal; signal.alarm(60); signal.pause()"
    left = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    found("left", pid=left.pid)


def missing(device: str, clock: Clock) -> None:
    import grpc_health_that_is_not_there  # noqa: F401


def absent(device: str, clock: Clock) -> None:
    print("there is no CUDA device here")
    raise SystemExit(NO_DEVICE)


if __name__ == "__main__":
    run_named(
        {"good": good, "bad": bad, "late": late, "torn": torn, "leaving": leaving, "missing": missing, "absent": absent}
    )
