"""Searches over placements: the fewest machines for a rate, the highest rate within objectives, the best parallelism.

What is searched is monotone: more machines, or fewer requests a second, never keep an objective worse. So each search
halves an interval. Pure: whatever decides whether objectives are kept comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from simulate.pools import PoolSpec, RequestTimes, run_pools
from simulate.workload import RequestShape


def fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to `most` that is enough; None where `most` is not."""
    if most < 1 or not is_enough(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def highest_rate(is_kept: Callable[[float], bool], most: float, tolerance: float = 0.01) -> float:
    """The highest rate up to `most` that is kept, to within a share `tolerance` of itself; 0 where none is."""
    if is_kept(most):
        return most
    low, high = 0.0, most
    while high - low > tolerance * high and high > most / 1024:
        middle = (low + high) / 2
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


class GroupShape(NamedTuple):
    """Devices that hold a model once: so many ranks in each of so many pipeline stages."""

    tensor_parallel: int
    pipeline_parallel: int

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def __str__(self) -> str:
        return f"{self.tensor_parallel}x{self.pipeline_parallel}"


class ParallelPlacement(NamedTuple):
    """One group of each role."""

    prefill: GroupShape
    decode: GroupShape

    @property
    def num_devices(self) -> int:
        return self.prefill.num_devices + self.decode.num_devices


def placements(
    shapes: Iterable[GroupShape], node_devices: int, crosses: Sequence[int] = (1,)
) -> Iterator[ParallelPlacement]:
    """Yields the placements that fit where links between nodes are slow, as DistServe's search has them.

    Both groups lie on the same nodes, an equal part of the stages of each on every node, so that KV crosses no slow
    link. `crosses`: on how many nodes they may lie; `node_devices`: the devices of one.
    """
    known = sorted(set(shapes))
    for prefill, decode in product(known, known):
        placement = ParallelPlacement(prefill, decode)
        if any(
            placement.num_devices <= num * node_devices and not any(s.pipeline_parallel % num for s in placement)
            for num in crosses
        ):
            yield placement


@dataclass(frozen=True)
class Goodput:
    """The rate that a placement serves within the objectives."""

    placement: ParallelPlacement
    rate: float
    """Requests a second."""

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.placement.num_devices


@dataclass(frozen=True)
class LatencyGoal:
    """The latencies that are asked for: both within their limits in `share` of the requests."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9


def kept_share(times: Sequence[RequestTimes], goal: LatencyGoal) -> float:
    """The share of the requests that keep both objectives."""
    return sum(t.ttft_s <= goal.ttft_s and t.tpot_s <= goal.tpot_s for t in times) / max(1, len(times))


def goodputs(
    candidates: Iterable[ParallelPlacement],
    pools: Mapping[GroupShape, PoolSpec],
    load: Callable[[float], Sequence[RequestShape]],
    goal: LatencyGoal,
    most_per_device: float,
) -> list[Goodput]:
    """The highest rate of each placement, the best per device first. `load` makes requests at a rate."""

    def of_one(placement: ParallelPlacement) -> Goodput:
        prefill, decode = pools[placement.prefill], pools[placement.decode]
        most = most_per_device * placement.num_devices
        rate = highest_rate(lambda r: kept_share(run_pools(load(r), prefill, decode), goal) >= goal.share, most)
        return Goodput(placement, rate)

    return sorted(map(of_one, candidates), key=lambda found: found.rate_per_device, reverse=True)
