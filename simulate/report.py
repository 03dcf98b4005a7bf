"""The figures of a run: throughput, latencies by percentile, goodput, and how busy each role was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.config.schema import SloSection
from router.routing.policies.interface import Objectives
from simulate.client import RequestOutcome
from simulate.controller import SplitSince

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class WorkerUse:
    """The work of one worker in a run."""

    worker_id: str
    role: str
    num_steps: int
    busy_s: float
    """In steps."""
    num_preemptions: int
    kv_bytes_sent: int


@dataclass(frozen=True)
class RunResult:
    """A run, from its begin to the end of its last request."""

    outcomes: tuple[RequestOutcome, ...]
    workers: tuple[WorkerUse, ...]
    duration_s: float
    """Virtual seconds."""
    wall_s: float
    """Real seconds that the run took."""
    num_calls: int
    """Calls of the event loop."""
    trace: tuple[str, ...]
    """Everything that was noted, in order; empty unless it was asked for."""
    num_faults: Mapping[str, int] = field(default_factory=dict)
    """Faults that took effect, by name."""
    splits: tuple[SplitSince, ...] = ()
    """The splits at first, and after each change, where there is a controller."""


@dataclass(frozen=True)
class Distribution:
    """Percentiles of a latency in seconds; NaN where there is none."""

    mean: float
    by_percentile: Mapping[int, float]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        found = [value for value in values if value is not None] or [math.nan]
        percentiles = map(float, np.percentile(found, PERCENTILES))
        return cls(sum(found) / len(found), dict(zip(PERCENTILES, percentiles, strict=True)))


@dataclass(frozen=True)
class RunReport:
    """The numbers of one run; rates are per second of its duration."""

    num_requests: int
    duration_s: float
    outcomes: Mapping[str, int]
    """Requests by how they ended."""
    requests_per_s: float
    """Requests that finished, a second."""
    output_tokens_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    """Seconds from end to end of the requests that finished."""
    goodput_per_s: float
    """Requests that kept both objectives."""
    kept_share: float
    """Share of all requests that did."""
    utilization: Mapping[str, float]
    """The share of the time in which its workers had a step under way, by role."""
    speed: float
    """Virtual seconds for each real one."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """The workers of each role, by the second from which on there were so many; empty without a controller."""

    @classmethod
    def of(cls, result: RunResult, slo: SloSection) -> RunReport:
        duration_s, objectives = max(result.duration_s, 1e-9), Objectives.of(slo)
        finished = [outcome for outcome in result.outcomes if outcome.is_finished]
        num_kept = sum(is_kept(outcome, objectives) for outcome in finished)
        roles = sorted({worker.role for worker in result.workers})
        return cls(
            num_requests=len(result.outcomes),
            duration_s=result.duration_s,
            outcomes=dict(Counter(outcome.state.value for outcome in result.outcomes)),
            requests_per_s=len(finished) / duration_s,
            output_tokens_per_s=sum(outcome.num_tokens for outcome in result.outcomes) / duration_s,
            ttft_s=Distribution.of(outcome.ttft_s for outcome in finished),
            tpot_s=Distribution.of(outcome.tpot_s for outcome in finished),
            e2e_s=Distribution.of(outcome.e2e_s for outcome in finished),
            goodput_per_s=num_kept / duration_s,
            kept_share=num_kept / max(1, len(result.outcomes)),
            utilization={role: _utilization(result, role) for role in roles},
            speed=result.duration_s / max(result.wall_s, 1e-9),
            splits={f"{split.at_s:.1f}": f"{split.num_prefill}:{split.num_decode}" for split in result.splits},
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON has it: None where there is no number."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def lines(self) -> list[str]:
        """A table for people."""
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        busy = ", ".join(f"{role} {share:.0%}" for role, share in self.utilization.items())
        splits = ", ".join(f"{ratio} at {at} s" for at, ratio in self.splits.items())
        heads = "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES)
        rows = [("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("end to end", self.e2e_s)]
        return [
            f"requests    {self.num_requests} in {self.duration_s:.1f} s: {ends}",
            f"throughput  {self.requests_per_s:.2f} requests/s, {self.output_tokens_per_s:.0f} output tokens/s",
            f"goodput     {self.goodput_per_s:.2f} requests/s ({self.kept_share:.1%} kept both objectives)",
            f"busy        {busy}",
            *([f"splits      {splits}"] if splits else []),
            f"{'ms':<12}{'mean':>10}{heads}",
            *(f"{name:<12}{_row(distribution)}" for name, distribution in rows),
            f"simulated   {self.speed:.0f} times as fast as real time",
        ]


def _row(distribution: Distribution) -> str:
    values = [distribution.mean, *distribution.by_percentile.values()]
    return "".join(f"{'–':>10}" if math.isnan(value) else f"{1000 * value:>10.2f}" for value in values)


def _plain(value: object) -> Any:
    if isinstance(value, Distribution):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_kept(outcome: RequestOutcome, objectives: Objectives) -> bool:
    """Whether a request that finished was in time."""
    if outcome.first_token_s is None or outcome.last_token_s is None:
        return False
    at_s = outcome.request.at_s
    return objectives.are_kept(outcome.first_token_s - at_s, outcome.last_token_s - at_s, outcome.num_tokens)


def _utilization(result: RunResult, role: str) -> float:
    busy = [worker.busy_s for worker in result.workers if worker.role == role]
    return sum(busy) / (len(busy) * max(result.duration_s, 1e-9))
