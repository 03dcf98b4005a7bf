"""What a check says: findings, each with a result, what was found, and what to do about it.

Plain values; a check is a function over a `Subject` that yields them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.program import ExitCode

if TYPE_CHECKING:
    from tools.doctor.subject import Subject

Value = str | int | float | bool | None | Sequence["Value"] | Mapping[str, "Value"]


class Result(enum.Enum):
    """From best to worst, but for the first, which says nothing."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def rank(self) -> int:
        return list(Result).index(self)


class Half(enum.Enum):
    """What a check looks at."""

    HERE = "this machine and its configuration"
    CLUSTER = "the running cluster"


@dataclass(frozen=True)
class Finding:
    result: Result
    found: str
    """With its value; of a skipped check, why it was."""
    remedy: str = ""
    """What to do about it; empty where nothing is to be done."""
    values: Mapping[str, Value] = field(default_factory=dict)
    """The numbers behind it, for programs."""


def ok(found: str, **values: Value) -> Finding:
    return Finding(Result.OK, found, values=values)


def warning(found: str, remedy: str, **values: Value) -> Finding:
    """Something that serves, but not as well or as safely as it could."""
    return Finding(Result.WARNING, found, remedy, values)


def problem(found: str, remedy: str, **values: Value) -> Finding:
    """Something that keeps a cluster from serving as its configuration says."""
    return Finding(Result.PROBLEM, found, remedy, values)


def skipped(why: str) -> Finding:
    return Finding(Result.SKIPPED, why)


@dataclass(frozen=True)
class Check:
    """One entry of the catalogue."""

    name: str
    about: str
    """One line: what is looked at, and what is a problem."""
    run: Callable[[Subject], Iterator[Finding]]
    half: Half = Half.HERE
    needs_config: bool = True
    is_probe: bool = False
    """It sends requests, so it has the cluster to itself among the checks."""
    exit_code: int = ExitCode.FAILED
    """Of the program, where this one finds a problem."""


@dataclass(frozen=True)
class CheckResult:
    """What one check came to."""

    check: Check
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def result(self) -> Result:
        """The worst of its findings."""
        return max((f.result for f in self.findings), key=lambda r: r.rank)
