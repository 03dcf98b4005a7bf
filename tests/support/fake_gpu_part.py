"""Parts of `benchmarks.gpu` that need no torch, and end in every way a part can."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from benchmarks.gpu_part import NO_DEVICE, Clock, attempt, found, run_named


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


def missing(device: str, clock: Clock) -> None:
    import grpc_health_that_is_not_there  # noqa: F401


def absent(device: str, clock: Clock) -> None:
    print("there is no CUDA device here")
    raise SystemExit(NO_DEVICE)


if __name__ == "__main__":
    run_named({"good": good, "bad": bad, "late": late, "missing": missing, "absent": absent})
