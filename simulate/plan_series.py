"""Figures of a plan over its ratio, its rate, its load and the time of day: what its page draws.

All are answers of the planner, asked about other divisions of the same devices, other rates, or the load of a part of
the day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from simulate.estimates import OfferedLoad
from simulate.plan_choice import PlanChoice
from simulate.planner import DevicePlan, Planner, RolePlan
from simulate.workload import DayShape, RequestShape

_MOST_RATIOS = 33
_NUM_RATES = 40
_BEYOND = 1.3
_FALLEN = 0.15
"""Rates are shown until no more than this share keeps the objectives, or up to `_MOST_BEYOND` times the rate."""
_MOST_BEYOND = 5.0
_MOST_IN_WINDOW = 11
_NUM_WINDOWS = 72
_NUM_OF_TRACE = 24
_LEAST_REQUESTS = 50
"""In a window of a trace on the mean."""
_MOST_LENGTHS = 100
_FACTORS = (0.5, 0.8, 1.0, 1.25, 1.5)


@dataclass(frozen=True)
class RatioPoint:
    """One division of the devices between the roles, and the highest rate at which it keeps the objectives."""

    plan: DevicePlan
    most_rate: float

    @property
    def num_prefill(self) -> int:
        return self.plan.prefill.num_workers if self.plan.prefill else 0

    @property
    def name(self) -> str:
        return f"{self.num_prefill}:{self.plan.decode.num_workers}"


def by_ratio(planner: Planner, choice: PlanChoice) -> list[RatioPoint]:
    """Divisions of the devices of the larger plan, by prefill workers; first those that each compute both, if any."""
    split, both, total = choice.split, choice.colocated, choice.num_devices
    plans = [] if both is None else [planner.of_workers(None, _most_of(both.decode, total))]
    if split is not None:
        plans += [
            divided(planner, split, total, num) for num in _some(divisions(split, total), _of(split), _MOST_RATIOS)
        ]
    return [RatioPoint(plan, planner.most_rate(plan)) for plan in plans]


def divisions(split: DevicePlan, num_devices: int) -> range:
    """Numbers of prefill workers that leave devices for a decode worker."""
    assert split.prefill is not None
    left = num_devices - split.decode.option.layout.num_devices
    return range(1, left // split.prefill.option.layout.num_devices + 1)


def divided(planner: Planner, split: DevicePlan, num_devices: int, num_prefill: int) -> DevicePlan:
    """So many workers of the split's prefill layout, and as many of its decode layout as the other devices make."""
    assert split.prefill is not None
    prefill = replace(split.prefill, num_workers=num_prefill)
    return planner.of_workers(prefill, _most_of(split.decode, num_devices - prefill.num_devices))


def _most_of(role: RolePlan, num_devices: int) -> RolePlan:
    return replace(role, num_workers=num_devices // role.option.layout.num_devices)


def _of(split: DevicePlan) -> int:
    assert split.prefill is not None
    return split.prefill.num_workers


def _some(numbers: range, wanted: int, most: int) -> list[int]:
    """At most so many of them, evenly picked, and the one that is wanted."""
    step = max(1.0, len(numbers) / most)
    picked = {numbers[int(step * n)] for n in range(min(len(numbers), most))}
    return sorted(picked | {wanted})


@dataclass(frozen=True)
class RatePoint:
    """Shares of the requests that keep each objective at a rate."""

    rate: float
    ttft_share: float
    tpot_share: float
    kept_share: float


def by_rate(planner: Planner, plan: DevicePlan, most_rate: float) -> list[RatePoint]:
    """Evenly spaced rates from low ones to those at which few requests keep the objectives."""

    def at(rate: float) -> RatePoint:
        found = planner.at_rate(rate).of_workers(plan.prefill, plan.decode).estimate
        return RatePoint(rate, found.ttft_share, found.tpot_share, found.kept_share)

    near = max(most_rate, planner.question.load.rate)
    top = _BEYOND * near
    while at(top).kept_share > _FALLEN and top < _MOST_BEYOND * near:
        top *= _BEYOND
    return [at(top * number / _NUM_RATES) for number in range(1, _NUM_RATES + 1)]


def other_loads(load: OfferedLoad) -> Iterator[tuple[str, OfferedLoad]]:
    """The load with more and less of one thing: rate, prompt tokens, output tokens; each with its name."""
    for factor in _FACTORS:
        rate = factor * load.rate
        yield f"{rate:.4g} requests/s", replace(load, rate=rate)
    for what, prompt, output in (("prompts", 1, 0), ("outputs", 0, 1)):
        for factor in (_FACTORS[0], _FACTORS[-1]):
            yield f"{what} {factor:g} times as long", load.stretched(factor if prompt else 1, factor if output else 1)


@dataclass(frozen=True)
class LoadWindow:
    """A part of a day, or of a trace."""

    begin_s: float
    end_s: float
    load: OfferedLoad


def windows_of_trace(shapes: Sequence[RequestShape], rate: float | None = None) -> list[LoadWindow]:
    """Even parts with the requests that came in them; `rate`: so many a second over all, instead of the trace's.

    A part without a request is left out.
    """
    span_s = shapes[-1].at
    num = max(1, min(_NUM_OF_TRACE, len(shapes) // _LEAST_REQUESTS))
    if num < 2 or span_s <= 0:
        return []
    width_s = span_s / num
    scale = 1.0 if rate is None else rate / (len(shapes) / span_s)
    lengths: list[list[tuple[int, int]]] = [[] for _ in range(num)]
    for shape in shapes:
        place = min(num - 1, int(shape.at / width_s))
        lengths[place].append((shape.num_prompt_tokens, shape.num_output_tokens))
    return [
        LoadWindow(n * width_s, (n + 1) * width_s, OfferedLoad(scale * len(one) / width_s, tuple(one)))
        for n, one in enumerate(lengths)
        if one
    ]


def windows_of_day(load: OfferedLoad, day: DayShape) -> list[LoadWindow]:
    """Even parts of a generated day: the rate and the lengths in the middle of each."""
    width_s = day.day_s / _NUM_WINDOWS
    windows = []
    for n in range(_NUM_WINDOWS):
        middle = (n + 0.5) * width_s
        drift = day.drift(middle)
        moved = replace(load.stretched(drift, 1 / drift), rate=day.rate(middle))
        windows.append(LoadWindow(n * width_s, (n + 1) * width_s, moved))
    return windows


@dataclass(frozen=True)
class WindowSplit:
    """The best division of the devices under the load of a part of the day."""

    window: LoadWindow
    most_rates: Mapping[int, float]
    """The highest rate that each division serves within the objectives, by its prefill workers."""

    @cached_property
    def best(self) -> int:
        """The prefill workers of the one that serves most."""
        return max(self.most_rates, key=lambda num: self.most_rates[num])

    @property
    def most_rate(self) -> float:
        return self.most_rates[self.best]

    @cached_property
    def enough(self) -> list[int]:
        """Prefill workers of those that serve the window's rate."""
        return [num for num, rate in self.most_rates.items() if rate >= self.window.load.rate]


def over_time(
    planner: Planner, split: DevicePlan, num_devices: int, windows: Sequence[LoadWindow]
) -> list[WindowSplit]:
    """Returns what divisions of the devices serve in each window, with the layouts of `split`."""
    known: dict[tuple[tuple[int, int], ...], Mapping[int, float]] = {}
    found = []
    for window in windows:
        lengths = window.load.lengths[:: max(1, len(window.load.lengths) // _MOST_LENGTHS)]
        if lengths not in known:
            known[lengths] = _most_rates(planner, split, num_devices, replace(window.load, lengths=lengths))
        found.append(WindowSplit(window, known[lengths]))
    return found


def _most_rates(planner: Planner, split: DevicePlan, num_devices: int, load: OfferedLoad) -> Mapping[int, float]:
    other, moved = planner.under(load, split)
    numbers = _some(divisions(split, num_devices), _of(split), _MOST_IN_WINDOW)
    return {num: other.most_rate(divided(other, moved, num_devices, num)) for num in numbers}
