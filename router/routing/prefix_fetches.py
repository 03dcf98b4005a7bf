"""Fetches under way: prefixes that workers are to have from others before requests are sent to them.

    begin -> both workers are told -> Fetched | Failed | a worker is lost | late | nobody waits any more -> on_over

A fetch is a hand-off under a key of its own (docs/handoff.md). Requests for the same prefix on the same target wait for
the same one. Whatever becomes of it, each that waits goes on: without it, its worker computes what is not there.
Runs on the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from router.observe.counters import Counters
from router.routing.fetch_times import FetchTimes
from router.routing.load_tracker import NOT_FETCHED, Fetch, FetchedPrefix
from router.routing.prefix_index import PromptHashes
from router.routing.worker_client import WorkerClient

log = logging.getLogger(__name__)

EVENTS = frozenset({"fetched", "failed"})
"""Kinds of events that may concern a fetch."""
LEAST_SHARE = 0.5
"""A request waits for a fetch that is under way if that brings so much of what its own would."""


OnOver = Callable[[FetchedPrefix], None]


@dataclass(eq=False)
class _UnderWay:
    key: RequestKey
    fetch: Fetch
    holder: WorkerClient
    target: WorkerClient
    num_to_move: int
    """Tokens that the target lacks, as far as that is known."""
    block_size: int
    digest: bytes
    """Hash of the whole prefix, in blocks of this size."""
    begun_at: float
    timer: asyncio.TimerHandle
    waiting: dict[object, OnOver] = field(default_factory=dict)


class PrefixFetches:
    """`on_fetched` is called with the seconds that each one took which went well."""

    def __init__(self, times: FetchTimes, counters: Counters, clock: Callable[[], float]) -> None:
        self.on_fetched: Callable[[float], None] = lambda seconds: None
        self._times = times
        self._counters = counters
        self._clock = clock
        self._under_way: dict[RequestKey, _UnderWay] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(
        self,
        who: object,
        key: RequestKey,
        fetch: Fetch,
        holder: WorkerClient,
        target: WorkerClient,
        prompt: PromptHashes,
        on_over: OnOver,
    ) -> None:
        """Calls `on_over` later, once, unless `who` leaves before. `key`: no other fetch has it."""
        joined = next(self._joinable(fetch, target, prompt), None)
        if joined is not None:
            joined.waiting[who] = on_over
            return
        assert holder.info is not None, f"worker {holder.worker_id} is not ready: its info has not come"
        loop, size = asyncio.get_running_loop(), holder.info.block_size
        digest = prompt.of(size).of_first(fetch.num_tokens // size)
        num_to_move = max(0, fetch.num_tokens - target.num_cached_tokens(prompt))
        timer = loop.call_later(fetch.limit_s, lambda: self._end(key, "late"))
        self._under_way[key] = _UnderWay(
            key, fetch, holder, target, num_to_move, size, digest, self._clock(), timer, {who: on_over}
        )
        self._times.begun(holder.worker_id, target.worker_id, num_to_move)
        admit = worker_pb2.Admit(
            key=key.to_proto(),
            role=worker_pb2.ROLE_PREFILL,
            prompt_token_ids=prompt.first_tokens(fetch.num_tokens),
            cache_salt=prompt.salt,
            decode_peer=target.peer,
            prefix_only=True,
        )
        admit.sampling.stopping.max_output_tokens = 1
        holder.send(worker_pb2.Command(admit=admit))
        admit.role, admit.expect_handoff = worker_pb2.ROLE_DECODE, True
        admit.ClearField("decode_peer")
        target.send(worker_pb2.Command(admit=admit))

    def leave(self, who: object) -> None:
        """A request waits no more; a fetch for which nobody waits is given up."""
        for under_way in [each for each in self._under_way.values() if who in each.waiting]:
            del under_way.waiting[who]
            if not under_way.waiting:
                self._end(under_way.key, "cancelled")

    def on_event(self, worker: WorkerClient, kind: str, message: Any) -> bool:
        """False: it does not concern a fetch."""
        key = RequestKey.of(message.key)
        under_way = self._under_way.get(key)
        if under_way is None:
            return False
        if kind == "fetched":
            self._end(key, "done", fetched=FetchedPrefix(message.num_tokens, message.num_cached_tokens))
        elif message.reason == worker_pb2.Failed.REASON_CAPACITY:
            self._end(key, "no_room" if worker is under_way.target else "evicted", message.message, by=worker)
        else:
            self._end(key, "failed", message.message, by=worker)
        return True

    def on_worker_lost(self, worker: WorkerClient) -> None:
        for key in [key for key, each in self._under_way.items() if worker in (each.holder, each.target)]:
            self._end(key, "worker_lost", by=worker)
        self._times.on_worker_lost(worker.worker_id)

    def _joinable(self, fetch: Fetch, target: WorkerClient, prompt: PromptHashes) -> Iterator[_UnderWay]:
        for other in self._under_way.values():
            num_blocks, hashes = other.fetch.num_tokens // other.block_size, prompt.of(other.block_size)
            is_enough = LEAST_SHARE * fetch.num_tokens <= other.fetch.num_tokens and num_blocks <= hashes.num_blocks
            if other.target is target and is_enough and hashes.of_first(num_blocks) == other.digest:
                yield other

    def _end(
        self,
        key: RequestKey,
        result: str,
        why: str = "",
        *,
        fetched: FetchedPrefix = NOT_FETCHED,
        by: WorkerClient | None = None,
    ) -> None:
        """Has those that wait go on. `by`: the worker that holds nothing of it any more."""
        under_way, now = self._under_way.pop(key), self._clock()
        holder, target = under_way.holder, under_way.target
        pair, seconds = (holder.worker_id, target.worker_id), now - under_way.begun_at
        under_way.timer.cancel()
        self._times.ended(*pair, under_way.num_to_move)
        self._counters.fetches[result] += 1
        if result == "done":
            num_moved = max(0, fetched.num_tokens - fetched.num_before)
            self._counters.fetched_tokens += num_moved
            self._times.took(*pair, num_moved, seconds, now)
            self.on_fetched(seconds)
        else:
            cancel = worker_pb2.Command(cancel=worker_pb2.Cancel(key=key.to_proto()))
            for worker in (holder, target):
                if worker is not by:
                    worker.send(cancel)
            if result not in ("cancelled", "evicted"):
                self._times.failed(*pair, now)
            text = (
                "a prefix of %d tokens was not fetched from %s by %s, after %.3f s: %s; what waits goes on without it"
            )
            log.info(text, under_way.fetch.num_tokens, *pair, seconds, why or result)
        for on_over in under_way.waiting.values():
            on_over(fetched)
