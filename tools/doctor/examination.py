"""Runs the checks: each on a thread of its own and within its time, those that send requests one by one at the end.

A check that hangs, fails by a fault of its own or finds nothing to say is a finding as well: the doctor always ends,
and always has a word about each check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cluster.errors import BatonError
from cluster.program import ExitCode
from tools.doctor.bounded import on_thread
from tools.doctor.contact import Asked
from tools.doctor.findings import Check, CheckResult, Finding, Half, Result, problem, skipped
from tools.doctor.programs import NoAnswer
from tools.doctor.subject import Subject

OnOutcome = Callable[[CheckResult], None]


def examine(asked: Asked, checks: Sequence[Check], on_outcome: OnOutcome = lambda _: None) -> list[CheckResult]:
    """One outcome for each check, in their order; `on_outcome` hears of each as soon as it is there.

    Raises InvalidRequest and ConfigError for an API key and TLS files that cannot be used.
    """
    with Subject(asked) as subject:
        found: dict[str, CheckResult] = {}
        quick = [check for check in checks if not check.is_probe]
        for group in (quick, *([check] for check in checks if check.is_probe)):
            for outcome in _run(group, subject, asked.limit_s):
                found[outcome.check.name] = outcome
                on_outcome(outcome)
    return [found[check.name] for check in checks]


def exit_code(outcomes: Iterable[CheckResult]) -> int:
    """That of the configuration before that of a router that does not answer before any other."""
    codes = {outcome.check.exit_code for outcome in outcomes if outcome.result is Result.PROBLEM}
    ranked = (ExitCode.BAD_CONFIG, ExitCode.NOT_REACHABLE, ExitCode.FAILED)
    return next((code for code in ranked if code in codes), ExitCode.DONE)


def as_document(asked: Asked, outcomes: Sequence[CheckResult]) -> dict[str, Any]:
    """What `--json` prints; docs/doctor.md promises its keys."""
    results = [outcome.result for outcome in outcomes]
    return {
        "version": _own_version(),
        "config": str(asked.path),
        "address": asked.address,
        "result": max(results, key=lambda r: r.rank).value,
        "counts": {result.value: results.count(result) for result in Result},
        "checks": [_as_dict(outcome) for outcome in outcomes],
    }


def _as_dict(outcome: CheckResult) -> dict[str, Any]:
    return {
        "name": outcome.check.name,
        "half": outcome.check.half.name.lower(),
        "result": outcome.result.value,
        "seconds": round(outcome.seconds, 3),
        "findings": [
            {"result": f.result.value, "found": f.found, "remedy": f.remedy or None, "values": dict(f.values)}
            for f in outcome.findings
        ],
    }


def _run(checks: Sequence[Check], subject: Subject, limit_s: float) -> Iterable[CheckResult]:
    """Starts them all, then waits for each."""
    began = time.monotonic()
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
    """At least one."""
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
    except Exception as error:  # one check's fault is no reason to keep the other findings back
        told = f"the check itself failed: {type(error).__name__}: {error}"
        findings.append(problem(told, "report it, with what `baton doctor --json` prints"))
    return findings or [skipped("there is nothing to look at")]


def _why_not(check: Check, subject: Subject) -> str:
    """Why a check is not run; empty: it is."""
    if check.needs_config and subject.config is None:
        return "there is no valid configuration; see `configuration`"
    if check.half is Half.CLUSTER and check.name != "router":
        if subject.contact.why_not:
            return "no cluster answers; see `router`"
        if subject.contact.status is None:
            return "the router tells no status; see `router`"
    return ""


def _overdue(limit_s: float) -> Finding:
    return problem(
        f"it did not end within {limit_s:g} s",
        "something that it asks hangs (a driver, a file system, a name server); or give it more time with --limit",
    )


def _own_version() -> str | None:
    try:
        return version("baton")
    except PackageNotFoundError:
        return None
