"""Owns the requests of a worker that wait to hear what the store has of their prompts; holds up no other.

add -> (looked up aside, on a thread of its own) -> the books learn what is there -> admitted
  the router cancels it, or is gone -> forgotten

A store that does not answer in time, or fails, has nothing: the request goes on with what is here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue

from cluster.lifecycle import RequestKey
from engine.kv.kv_tier import TierKey
from engine.kv.stored_blocks import StoredBlocks
from engine.sequence import Request
from kv_transfer.block_store import StoreObjects, StoreSilent
from worker.grammar_queue import WaitingAdmit, WaitingAdmits

logger = logging.getLogger(__name__)

LOOK_UP_S = 0.5
"""The most that a request waits for the store to say what it has."""
_ROWS = 32
"""Blocks of a prompt that are asked for at a time."""


@dataclass
class LookUpCounts:
    """Look-ups since the start."""

    found: int = 0
    nothing: int = 0
    failed: int = 0
    seconds: float = 0.0


class StoreLookups(WaitingAdmits):
    """Requests whose prompts are looked up in `objects`, rank 0's part of the store. Runs on the engine thread."""

    def __init__(
        self,
        objects: StoreObjects,
        blocks: StoredBlocks,
        post: Callable[..., None],
        admit: Callable[[WaitingAdmit], None],
    ) -> None:
        """`post` has a call made on the engine thread; `admit` is called there."""
        super().__init__()
        self.objects, self.counts = objects, LookUpCounts()
        self._blocks, self._post, self._admit = blocks, post, admit
        self._is_away = False
        """It did not answer the last look-up: told once, counted each time."""
        self._asked: SimpleQueue[tuple[RequestKey, list[list[TierKey]], float]] = SimpleQueue()
        threading.Thread(target=self._list, name="kv-store-list", daemon=True).start()
        threading.Thread(target=self._look_up_all, name="kv-lookup", daemon=True).start()

    def takes(self, waiting: WaitingAdmit, request: Request) -> bool:
        """Whether a request has to wait, and is admitted later; False: nothing of it can be in the store alone."""
        if not request.use_prefix_cache or request.prompt_logprobs is not None:
            return False
        tokens = (*request.prompt_token_ids, *request.known_start)
        rows = self._blocks.to_look_up(tokens, request.cache_salt)
        if not rows:
            return False
        self._waiting[request.key] = waiting
        self._asked.put((request.key, rows, time.monotonic()))
        return True

    def _list(self) -> None:
        """Says once how full the store is, which may take long."""
        try:
            self.objects.look()
        except OSError as error:
            logger.warning("the KV store cannot be listed: %s", error)

    def _look_up_all(self) -> None:
        """On the thread of look-ups, for as long as the process lives."""
        while True:
            key, rows, asked_at = self._asked.get()
            found, gone, problem = list[TierKey](), list[TierKey](), ""
            try:
                self._look_up(rows, asked_at + LOOK_UP_S, found, gone)
            except OSError as error:
                problem = str(error) or type(error).__name__
            except Exception as error:
                logger.exception("a look-up of the KV store failed")
                problem = type(error).__name__
            self._post(self._looked_up, key, found, gone, problem, time.monotonic() - asked_at)

    def _look_up(
        self, rows: Sequence[Sequence[TierKey]], deadline: float, found: list[TierKey], gone: list[TierKey]
    ) -> None:
        """Adds what is there and what is not, up to the first block of which nothing is. Raises OSError."""
        begin, num = 0, 1  # most prompts have nothing there
        while begin < len(rows):
            keys = list(chain.from_iterable(rows[begin : begin + num]))
            if (left_s := deadline - time.monotonic()) <= 0:
                raise StoreSilent(f"it took more than {LOOK_UP_S:g} s")
            are_there = self.objects.find(keys, left_s)
            for key, is_there in zip(keys, are_there, strict=True):
                (found if is_there else gone).append(key)
            if not any(are_there[-len(rows[0]) :]):
                break
            begin, num = begin + num, _ROWS

    def _looked_up(
        self, key: RequestKey, found: Sequence[TierKey], gone: Sequence[TierKey], problem: str, seconds: float
    ) -> None:
        counts = self.counts
        counts.seconds += seconds
        counts.found += bool(found)
        counts.nothing += not found and not problem
        counts.failed += bool(problem) and not found
        if problem and not self._is_away:
            logger.warning("the KV store does not say what it has, and prompts are computed until it does: %s", problem)
        elif self._is_away and not problem:
            logger.info("the KV store says again what it has")
        self._is_away = bool(problem)
        if found or not problem:
            self._blocks.learn(found, gone)
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._admit(waiting)
