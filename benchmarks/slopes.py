"""Whether a quantity that is sampled for a long time grows: its slope over time, with the slope's standard error.

Pure. A run may consist of segments, each of them another life of what is sampled: they share a slope and nothing else,
so each is taken around its own mean, and the beginning of each, in which caches fill, is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = Sequence[tuple[float, float]]
"""(seconds since the segment's beginning, value), in the order of time."""
HOUR_S = 3600.0
MOST_CORRELATION = 0.9


@dataclass(frozen=True)
class Slope:
    """Growth per hour, its standard error, and how many points it was found from."""

    per_hour: float
    error: float
    num_points: int

    def is_flat(self, bound: float) -> bool:
        """Whether it is below `bound` (per hour) or cannot be told from what is: two standard errors are its due."""
        return self.per_hour - 2 * self.error <= bound


def means(points: Points, warm_up_s: float, width_s: float) -> list[tuple[float, float]]:
    """The mean of each stretch of `width_s` after the warm-up: (mean time, mean value)."""
    bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at, value in points:
        if at >= warm_up_s:
            bins[int((at - warm_up_s) / width_s)].append((at, value))
    return [_mean(bins[number]) for number in sorted(bins)]


def slope_of(segments: Iterable[Points]) -> Slope | None:
    """The least-squares slope that the segments share, each with a level of its own; None from too few points.

    What is left over at one point is alike at the next (an allocator keeps what it has taken), so that the points say
    less than their number does: as for a process of first order, the error is widened by sqrt((1 + r) / (1 - r)),
    where r is the correlation of neighbours.
    """
    centred = [_centred(points) for points in segments if len(points) > 1]
    num_points = sum(map(len, centred))
    freedom = num_points - len(centred) - 1
    spread = sum(at * at for points in centred for at, _ in points)
    if freedom < 1 or not spread:
        return None
    slope = sum(at * value for points in centred for at, value in points) / spread
    rests = [[value - slope * at for at, value in points] for points in centred]
    squares = sum(rest * rest for each in rests for rest in each)
    if squares <= 1e-18 * (1.0 + sum(value * value for points in centred for _, value in points)):
        return Slope(HOUR_S * slope, 0.0, num_points)
    neighbours = sum(a * b for each in rests for a, b in pairwise(each))
    correlation = min(MOST_CORRELATION, max(0.0, neighbours / squares))
    error = math.sqrt(squares / freedom / spread) * math.sqrt((1 + correlation) / (1 - correlation))
    return Slope(HOUR_S * slope, HOUR_S * error, num_points)


def _mean(points: Points) -> tuple[float, float]:
    return sum(at for at, _ in points) / len(points), sum(value for _, value in points) / len(points)


def _centred(points: Points) -> list[tuple[float, float]]:
    at_mean, value_mean = _mean(points)
    return [(at - at_mean, value - value_mean) for at, value in points]
