"""Defines what a check is, what it reports, and how checks are run.

A check is a function that takes a `Subject` and yields findings; it changes nothing and leaves nothing behind. Checks
run at once, each on a thread of its own and within its time; those that send requests run one by one at the end. A
check that hangs, fails by a fault of its own or has nothing to look at is reported too: every check has a result.
"""

from __future__ import annotations

import enum
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cluster.errors import BatonError
from cluster.program import ExitCode
from tools.doctor.bounded import NoAnswer, on_thread
from tools.doctor.subject import DoctorOptions, Subject

Value = str | int | float | bool | None | Sequence["Value"] | Mapping[str, "Value"]


class Result(enum.Enum):
    """From best to worst, except for SKIPPED, which says nothing."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def rank(self) -> int:
        return list(Result).index(self)


class Half(enum.Enum):
    """The half of the report that a check belongs to."""

    HERE = "this machine and its configuration"
    CLUSTER = "the running cluster"


@dataclass(frozen=True)
class Finding:
    result: Result
    found: str
    """The fact that was found, with its value; for a skipped check, the reason."""
    remedy: str = ""
    """Advice for the operator; empty: nothing needs to be done."""
    values: Mapping[str, Value] = field(default_factory=dict)
    """The numbers behind it, for programs."""


def ok(found: str, **values: Value) -> Finding:
    return Finding(Result.OK, found, values=values)


def warning(found: str, remedy: str, **values: Value) -> Finding:
    """Returns the finding of something that works, but not as well or as safely as it could."""
    return Finding(Result.WARNING, found, remedy, values)


def problem(found: str, remedy: str, **values: Value) -> Finding:
    """Returns the finding of something that keeps a cluster from serving as its configuration says."""
    return Finding(Result.PROBLEM, found, remedy, values)


def skipped(why: str) -> Finding:
    return Finding(Result.SKIPPED, why)


CheckFunction = Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """One entry of the catalogue."""

    name: str
    about: str
    """One line for docs/doctor.md: what is looked at, and what is a problem."""
    run: CheckFunction
    half: Half = Half.HERE
    needs_config: bool = True
    is_probe: bool = False
    """It sends requests, so it runs alone."""
    exit_code: int = ExitCode.FAILED
    """Exit code of `baton doctor` when this check finds a problem."""


def check(
    half: Half = Half.HERE, *, needs_config: bool = True, is_probe: bool = False, exit_code: int = ExitCode.FAILED
) -> Callable[[CheckFunction], Check]:
    """Makes a check of a function. Its name is the function's, with dashes; its line in docs/doctor.md is the first
    paragraph of the docstring."""

    def wrap(run: CheckFunction) -> Check:
        about = " ".join(inspect.getdoc(run).partition("\n\n")[0].split())  # type: ignore[union-attr]
        return Check(run.__name__.replace("_", "-"), about, run, half, needs_config, is_probe, exit_code)

    return wrap


@dataclass(frozen=True)
class CheckResult:
    """The findings of one check."""

    check: Check
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def result(self) -> Result:
        """The worst of its findings."""
        return max((f.result for f in self.findings), key=lambda r: r.rank)


def examine(options: DoctorOptions, checks: Sequence[Check]) -> list[CheckResult]:
    """Runs the checks; one result for each, in their order.

    Raises InvalidRequest and ConfigError for an API key and TLS files that cannot be used.
    """
    with Subject(options) as subject:
        groups = [[check for check in checks if not check.is_probe], *([probe] for probe in checks if probe.is_probe)]
        results = {result.check.name: result for group in groups for result in _run(group, subject)}
    return [results[check.name] for check in checks]


def exit_code(results: Iterable[CheckResult]) -> int:
    """Exit code of `baton doctor`. A bad configuration comes before a router that does not answer, and both before
    any other problem."""
    codes = {result.check.exit_code for result in results if result.result is Result.PROBLEM}
    ranked = (ExitCode.BAD_CONFIG, ExitCode.NOT_REACHABLE, ExitCode.FAILED)
    return next((code for code in ranked if code in codes), ExitCode.DONE)


def as_document(options: DoctorOptions, results: Sequence[CheckResult]) -> dict[str, Any]:
    """The document of `--json`, whose keys docs/doctor.md promises."""
    kinds = [result.result for result in results]
    return {
        "version": baton_version(),
        "config": str(options.path),
        "address": options.address,
        "result": max(kinds, key=lambda r: r.rank).value,
        "counts": {kind.value: kinds.count(kind) for kind in Result},
        "checks": [_as_dict(result) for result in results],
    }


def baton_version() -> str | None:
    """The version of Baton here; None: it is not installed as a package."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return None


def _as_dict(result: CheckResult) -> dict[str, Any]:
    return {
        "name": result.check.name,
        "half": result.check.half.name.lower(),
        "result": result.result.value,
        "seconds": round(result.seconds, 3),
        "findings": [
            {"result": f.result.value, "found": f.found, "remedy": f.remedy or None, "values": dict(f.values)}
            for f in result.findings
        ],
    }


def _run(checks: Sequence[Check], subject: Subject) -> Iterator[CheckResult]:
    """Starts all of them, then waits for each."""
    limit_s, began = subject.options.limit_s, time.monotonic()
    running = [(c, on_thread(partial(_timed, c, subject), f"check {c.name}")) for c in checks]
    for check, future in running:
        try:
            findings, seconds = future.result(max(0.0, began + limit_s - time.monotonic()))
        except TimeoutError:
            findings, seconds = [_overdue(limit_s)], limit_s
        yield CheckResult(check, tuple(findings), seconds)


def _timed(check: Check, subject: Subject) -> tuple[list[Finding], float]:
    began = time.monotonic()
    findings = _findings(check, subject)
    return findings, time.monotonic() - began


def _findings(check: Check, subject: Subject) -> list[Finding]:
    """At least one finding."""
    why_not = _why_not(check, subject)
    if why_not:
        return [skipped(why_not)]
    findings: list[Finding] = []
    try:
        findings.extend(check.run(subject))
    except NoAnswer as error:
        findings.append(skipped(f"{error.message}; see `programs`"))
    except BatonError as error:
        findings.append(problem(error.message, f"see the other findings; `{check.name}` came no further"))
    except Exception as error:  # the fault of one check must not hide what the others found
        what = f"the check itself failed: {type(error).__name__}: {error}"
        findings.append(problem(what, "report it, with what `baton doctor --json` prints"))
    return findings or [skipped("there is nothing to look at")]


def _why_not(check: Check, subject: Subject) -> str:
    """Why a check is not run; empty: it is."""
    if check.needs_config and subject.config is None:
        return "there is no valid configuration; see `configuration`"
    if check.half is Half.CLUSTER and check.name != "router":
        if subject.cluster.why_not:
            return "no cluster answers; see `router`"
        if subject.cluster.status is None:
            return "the router does not report its status; see `router`"
    return ""


def _overdue(limit_s: float) -> Finding:
    return problem(
        f"it did not end within {limit_s:g} s",
        "something that it asks hangs (a driver, a file system, a name server); or give it more time with --limit",
    )
