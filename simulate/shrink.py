"""Less of a scenario that still fails in the same way: halves are left out, then quarters, down to single parts.

    Shrinker(scenario, how_it_fails(scenario)).shrink() -> Kept, written as `requests=0,3/events=1/rates=/workers=...`

A run depends on its scenario alone, so what is left fails again wherever it is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from cluster.errors import ConfigError
from simulate.client import SimRequest
from simulate.scenario import Scenario

PARTS = ("requests", "events", "rates", "workers")
MOST_RUNS = 200
MOST_HALVINGS = 8


@dataclass(frozen=True)
class Kept:
    """The parts of a scenario that are left."""

    requests: tuple[str, ...]
    """Numbers, in the order of the load."""
    events: tuple[str, ...]
    """Numbers of faults."""
    rates: tuple[str, ...]
    """Names of faults that strike by chance, with - for each space."""
    workers: tuple[str, ...]
    num_halvings: int = 0
    """Times that prompts and outputs are halved."""

    @classmethod
    def all_of(cls, scenario: Scenario) -> Self:
        faults = scenario.faults
        return cls(
            tuple(map(str, range(len(scenario.requests)))),
            tuple(map(str, range(len(faults.events)))),
            tuple(name.replace(" ", "-") for name, rate in faults.rates.items() if rate),
            tuple(worker.worker_id for worker in scenario.spec.workers),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError."""
        parts = dict(part.partition("=")[::2] for part in text.split("/"))
        if list(parts) != [*PARTS, "halved"] or not parts["halved"].isdecimal():
            raise ConfigError(f"what is kept of a scenario looks like {'=.../'.join(PARTS)}=.../halved=0, not {text!r}")
        requests, events, rates, workers = (tuple(filter(None, parts[name].split(","))) for name in PARTS)
        return cls(requests, events, rates, workers, int(parts["halved"]))

    def __str__(self) -> str:
        kept = "/".join(f"{name}={','.join(getattr(self, name))}" for name in PARTS)
        return f"{kept}/halved={self.num_halvings}"

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario without the parts that are not kept."""
        workers = tuple(worker for worker in scenario.spec.workers if worker.worker_id in self.workers)
        events = (event for number, event in enumerate(scenario.faults.events) if str(number) in self.events)
        faults = replace(
            scenario.faults,
            events=tuple(event for event in events if event.worker_id in self.workers),
            rates={name: r for name, r in scenario.faults.rates.items() if name.replace(" ", "-") in self.rates},
        )
        requests = (request for number, request in enumerate(scenario.requests) if str(number) in self.requests)
        return replace(
            scenario,
            spec=replace(scenario.spec, workers=workers),
            requests=tuple(_halved(request, self.num_halvings) for request in requests),
            faults=faults,
        )


def how_it_fails(scenario: Scenario) -> str:
    """Returns what a run of the scenario raises, without numbers; empty when all is well."""
    try:
        scenario.run()
    except Exception as error:
        return re.sub(r"\d+", "#", f"{type(error).__name__}: {error}")[:80]
    return ""


class Shrinker:
    """Looks for less of a scenario that fails as it does (`how`, as `how_it_fails` says it), in so many runs."""

    def __init__(self, scenario: Scenario, how: str, most_runs: int = MOST_RUNS) -> None:
        self.kept = Kept.all_of(scenario)
        self.num_runs = 0
        self._scenario = scenario
        self._how = how
        self._most_runs = most_runs

    def shrink(self) -> Kept:
        """Returns the least that was found: without any one of its parts it fails no more, or runs were short."""
        before = None
        while self.kept != before and self.num_runs < self._most_runs:
            before = self.kept
            for name in PARTS:
                self._leave_out(name)
            while self._takes(replace(self.kept, num_halvings=self.kept.num_halvings + 1)):
                pass
        return self.kept

    def _leave_out(self, name: str) -> None:
        """Leaves parts of one kind out, many at a time first."""
        size = len(getattr(self.kept, name))
        while size:
            at = 0
            while at < len(parts := getattr(self.kept, name)):
                if not self._takes(replace(self.kept, **{name: parts[:at] + parts[at + size :]})):
                    at += size
            size //= 2

    def _takes(self, kept: Kept) -> bool:
        """Whether this is enough to fail in the same way; if so, no more is kept."""
        if self.num_runs >= self._most_runs or kept.num_halvings > MOST_HALVINGS:
            return False
        self.num_runs += 1
        if how_it_fails(kept.of(self._scenario)) != self._how:
            return False
        self.kept = kept
        return True


def _halved(request: SimRequest, times: int) -> SimRequest:
    shape = request.shape
    num_prompt, num_output = (max(1, n >> times) for n in (shape.num_prompt_tokens, shape.num_output_tokens))
    return replace(request, shape=replace(shape, num_prompt_tokens=num_prompt, num_output_tokens=num_output))
