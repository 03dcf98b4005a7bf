"""Tells routers what this worker's prefix cache can serve: all of it once, then what changes, in small numbered events.

Each session begins with a snapshot and gets another when it asks (its router missed something) or when too much had
changed to be told. Only net changes are told, once a turn at most and nothing in a turn without any, so that a step
that fills no block costs nothing; while no router listens nothing is noted. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cluster.pb import worker_pb2
from engine.kv.block_manager import BlockManager, CacheEvents
from worker.reporter import Reporter

MOST_HASHES = 2048
"""That one event carries: some 37 KB."""


class CacheReporter:
    """Of one worker. Sessions are those of `reporter`, where they are opened before they are here."""

    def __init__(self, blocks: BlockManager, reporter: Reporter) -> None:
        self._blocks = blocks
        self._reporter = reporter
        self._num_told: dict[str, int] = {}
        """Events by session."""

    def open_session(self, session: str) -> None:
        """The first one, and it is told everything."""
        if not self._num_told:
            self._blocks.watch_cache(True)
        self.gather()  # to the others: what follows a snapshot must not be in it already
        self._num_told[session] = 0
        self._tell_all_there_is(session)

    def close_session(self, session: str) -> None:
        if self._num_told.pop(session, None) is not None and not self._num_told:
            self._blocks.watch_cache(False)

    def resync(self, session: str) -> None:
        """Tells one session everything."""
        self.gather()
        if session in self._num_told:
            self._tell_all_there_is(session)

    def gather(self) -> None:
        """Tells every session what has changed since it was last told."""
        events = self._blocks.take_cache_events()
        if events is not None:
            for session in self._num_told:
                self._tell(session, events)

    def _tell_all_there_is(self, session: str) -> None:
        self._tell(session, CacheEvents(list(self._blocks.cached_hashes), [], is_snapshot=True))

    def _tell(self, session: str, events: CacheEvents) -> None:
        for part in _parts(events):
            self._num_told[session] += 1
            part.sequence_number = self._num_told[session]
            self._reporter.tell(session, worker_pb2.Event(cache=part), can_wait=True)


def _parts(events: CacheEvents) -> Iterator[worker_pb2.CacheEvents]:
    """At least one. Evicted before stored: so a listener never has to hold more hashes than the pool has blocks."""
    evicted, stored, is_snapshot = iter(events.evicted), iter(events.stored), events.is_snapshot
    while True:
        part = worker_pb2.CacheEvents(snapshot=is_snapshot, evicted=islice(evicted, MOST_HASHES))
        part.stored.extend(islice(stored, MOST_HASHES - len(part.evicted)))
        if not (is_snapshot or part.evicted or part.stored):
            return
        yield part
        is_snapshot = False
