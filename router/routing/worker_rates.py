"""How fast each worker computes and sends, from the counters that it tells of itself. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cluster.pb import admin_pb2, worker_pb2

_SPAN = 5
"""Rates are over so many looks."""

_Look = tuple[float, str, tuple[int, int, int, int]]
"""When, at which life of the worker, and what its counters said."""


class WorkerRates:
    """`look` at the same worker again and again; one that is not looked at any more is forgotten."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[_Look]] = {}

    def look(self, now: float, workers: Iterable[tuple[worker_pb2.WorkerInfo, worker_pb2.WorkerStats]]) -> None:
        """At all that are there. Counters of a worker that was restarted begin again."""
        seen: dict[str, deque[_Look]] = {}
        for info, stats in workers:
            looks = self._looks.get(info.worker_id, deque(maxlen=_SPAN + 1))
            if looks and looks[-1][1] != info.incarnation:
                looks = deque(maxlen=_SPAN + 1)
            tokens = (stats.num_prefill_tokens, stats.num_decode_tokens)
            looks.append((now, info.incarnation, (*tokens, stats.kv_bytes_sent, stats.kv_bytes_received)))
            seen[info.worker_id] = looks
        self._looks = seen

    def told(self) -> list[admin_pb2.WorkerRates]:
        """Of the last few seconds; of a worker that was looked at once, nothing is known and all is 0."""
        return [self._rates(worker_id, looks) for worker_id, looks in self._looks.items()]

    @staticmethod
    def _rates(worker_id: str, looks: deque[_Look]) -> admin_pb2.WorkerRates:
        (begin, _, first), (end, _, last) = looks[0], looks[-1]
        seconds = max(end - begin, 1e-9)
        prefill, decode, sent, received = (max(0, b - a) / seconds for a, b in zip(first, last, strict=True))
        return admin_pb2.WorkerRates(
            worker_id=worker_id,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
            kv_sent_bytes_per_s=sent,
            kv_received_bytes_per_s=received,
        )
