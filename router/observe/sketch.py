"""Durations, counted in buckets that grow by 8 %: percentiles within 4 %, in a few bytes for each bucket that is used.

Sketches add up, so that a minute is the sum of its seconds. Pure.
"""

from __future__ import annotations

import math
from collections import Counter

from cluster.pb import admin_pb2

_LEAST_S = 1e-6
"""What is shorter counts as this."""
_SCALE = 1 / math.log(1.08)
_LOG = math.log


class Sketch:
    """Of as many durations as come; there are some 300 buckets from a microsecond to hours."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many durations are in it."""
        return self._counts.total()

    def add(self, seconds: float) -> None:
        self._counts[int(_LOG(seconds / _LEAST_S) * _SCALE) if seconds > _LEAST_S else 0] += 1

    def merge(self, other: Sketch) -> None:
        self._counts.update(other._counts)

    def quantile(self, share: float) -> float:
        """In seconds; the middle of the bucket. 0.0 when nothing is in it."""
        wanted, seen = share * len(self), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return _LEAST_S * math.exp((bucket + 0.5) / _SCALE)
        return 0.0

    def to_proto(self) -> admin_pb2.Quantiles:
        p50, p95, p99 = (self.quantile(share) for share in (0.5, 0.95, 0.99))
        return admin_pb2.Quantiles(count=len(self), p50=p50, p95=p95, p99=p99)
