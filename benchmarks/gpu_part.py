"""A part of `benchmarks.gpu`: how it tells what it found, its flags, and the plugin that tells of each test."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

MARK = "@found "
"""Begins a line of output that is a finding."""
NO_DEVICE = 77
"""Exit code of a part that finds no GPU."""


def found(name: str, **values: Any) -> None:
    """Tells one finding at once; `error` is what went wrong."""
    print(f"{MARK}{json.dumps({'name': name, **values})}", flush=True)


def attempt(name: str, work: Callable[[], dict[str, Any]]) -> None:
    """Tells what `work` finds, or why it failed; what comes after it goes on."""
    began = time.perf_counter()
    try:
        values = work()
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        values = {"error": f"{type(error).__name__}: {line}"}
    found(name, **values, seconds=round(time.perf_counter() - began, 2))


class Clock:
    """The time that a part has."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()


def run_named(parts: Mapping[str, Callable[[str, Clock], None]]) -> None:
    """`python -m MODULE PART --device D --seconds S`: runs the function of that name. Exits NO_DEVICE without a GPU."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0)
    flags = parser.parse_args()
    if flags.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print("there is no CUDA device here; --device cpu tries the program out with tiny sizes")
            raise SystemExit(NO_DEVICE)
    parts[flags.part](flags.device, Clock(flags.seconds))


# As a plugin of pytest: tells at once of a test that fails or records properties, and at the end how many did what.

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""One of several processes, whose reports another one gets."""
_outcomes: Counter[str] = Counter()
_skipped: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _IS_WORKER:
        return
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(getattr(crash, "message", report.longrepr)).strip().splitlines()
        found(report.nodeid, error=message[0][:300] if message else "failed")
    if report.when == "call" and report.user_properties:
        found(report.nodeid, **dict(report.user_properties))
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.outcome] += 1
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_sessionfinish() -> None:
    if not _IS_WORKER:
        found("tests", **_outcomes, **({"why_skipped": dict(_skipped.most_common(8))} if _skipped else {}))
