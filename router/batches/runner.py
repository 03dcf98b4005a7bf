"""Runs batches: claims those that are open, brings each from status to status, and ends them.

    claim -> validate -> run lines in idle capacity, storing each answer -> write the results -> close
      the claim is lost, or the store is away -> this router drops its work; the next one goes on from the answers
      cancelled, or the time is over          -> running lines are dropped, and the results hold what was answered

A line is tried until it has an answer: one that workers had no capacity for, or that lost its worker, runs again. What
is begun is recorded before: a line that was being computed when its router was lost runs next beside no other one, and
is answered with an error when a router is lost with it again. Owns the tasks; its caller says how a line is answered
(`AnswerLine`), and `lines` what a file must be.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from cluster.state import StoreAway
from router.batches.idle import IdleCapacity
from router.batches.lines import (
    Checker,
    ClaimLost,
    Line,
    LineResult,
    answer_line,
    answer_lost_line,
    lines_of,
    write_results,
)
from router.batches.store import (
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    KEPT_S,
    VALIDATING,
    Batch,
    BatchClaim,
    BatchProblem,
    BatchStore,
    InputGone,
    StoredRecord,
    pieces_of,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_S = 6.0
"""A claim that is not renewed for so long may be taken by another router."""
SWEEP_EVERY_S = 60.0
MOST_BATCHES, MOST_OF_A_TENANT = 64, 8
"""Batches that one router works on at a time, and how many of them are one tenant's."""
MOST_LINES = 256
"""Lines of one batch that run or wait for capacity."""
MOST_FAILURES = 10
"""A line with which workers were lost so often is answered with that error: it may be the cause."""
MOST_LOST_ROUTERS = 2
"""A line that was being computed when so many routers were lost is answered with an error."""
_LONGEST_PAUSE_S, _LONGER_EACH_TIME, _LONGEST_AFTER = 60.0, 1.5, 20
_SWEEP_AT_ONCE = 100


AnswerLine = Callable[[Batch, Line, str], Awaitable[LineResult]]
"""Answers one line of a batch, under a request id."""


@dataclass
class ClaimedBatch:
    """A batch that this router works on."""

    claim: BatchClaim
    record: StoredRecord
    batch: Batch
    changed: asyncio.Event
    """Set when its record may have changed: it may have been cancelled."""


class BatchRunner:
    """Lives in one event loop: `start`, then `stop`."""

    def __init__(
        self,
        store: BatchStore,
        idle: IdleCapacity,
        answer: AnswerLine,
        counts: Counter[str],
        *,
        most_line_bytes: int,
        lease_s: float = LEASE_S,
    ) -> None:
        """`counts`: lines that were completed, failed and retried."""
        self._store = store
        self._idle = idle
        self._answer = answer
        self._counts = counts
        self._most_line_bytes = most_line_bytes
        self._lease_s = lease_s
        self._owner = secrets.token_hex(12)
        self._held: dict[str, ClaimedBatch] = {}
        self._unreadable: set[str] = set()
        """Open batches that only routers of another version can go on with."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._is_away = False
        self._swept_at = -SWEEP_EVERY_S

    def start(self) -> None:
        self._begin(self._follow(), "batches")

    async def stop(self) -> None:
        """Drops running lines and releases the claims, so that other routers can go on at once."""
        held = list(self._held.values())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            for one in held:
                await self._store.release(one.claim)
        except StoreAway as error:
            log.warning(
                "claims on batches were not released, other routers go on with them in %g s: %s", self._lease_s, error
            )

    def wake(self, batch_id: str = "") -> None:
        """Looks for new batches now, and at this one, which was changed."""
        self._woken.set()
        if batch_id in self._held:
            self._held[batch_id].changed.set()

    def _begin(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self) -> None:
        """Looks for batches when there is a new one, and regularly for those that other routers have left."""
        while True:
            self._woken.clear()
            try:
                await self._claim()
                await self._sweep()
                if self._is_away:
                    log.warning("the batch store is back")
                self._is_away = False
            except StoreAway as error:
                if not self._is_away:
                    log.warning("the batch store is away, no batch is worked on meanwhile: %s", error)
                self._is_away = True
            except Exception:
                log.exception("looking for batches failed")
            try:
                async with asyncio.timeout(self._lease_s / 3):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _claim(self) -> None:
        while len(self._held) < MOST_BATCHES:
            held_of = Counter(held.batch.tenant for held in self._held.values())
            enough = [tenant for tenant, number in held_of.items() if number >= MOST_OF_A_TENANT]
            but = [*self._held, *self._unreadable]
            found = await self._store.claim(self._owner, self._lease_s, but_of=enough, but=but)
            if found is None:
                return
            claim, record = found
            if not record.is_readable:
                self._unreadable.add(claim.batch_id)
                await self._store.release(claim)
                continue
            held = ClaimedBatch(claim, record, Batch.from_json(record.data), asyncio.Event())
            self._held[claim.batch_id] = held
            self._begin(self._hold(held), f"batch {claim.batch_id}")

    async def _sweep(self) -> None:
        """Removes files that have expired, and the records of batches that ended long ago."""
        now = time.monotonic()
        if now - self._swept_at < SWEEP_EVERY_S:
            return
        ended = await self._store.ended(time.time(), _SWEEP_AT_ONCE)
        for record in ended:
            await self._store.remove(record.kind, record.tenant, record.record_id)
        if len(ended) < _SWEEP_AT_ONCE:
            self._swept_at = now

    async def _hold(self, held: ClaimedBatch) -> None:
        """Works on a batch while its claim holds."""
        try:
            async with asyncio.TaskGroup() as group:
                renewal = group.create_task(self._renew(held))
                await self._advance(held)
                renewal.cancel()
        except* ClaimLost:
            log.warning("batch %s is worked on by another router now, or was lost", held.claim.batch_id)
            await self._end_lines(held)
        except* StoreAway as errors:
            log.warning("batch %s waits for the store: %s", held.claim.batch_id, _first_of(errors))
        except* Exception:
            log.exception("batch %s could not go on; it is tried again", held.claim.batch_id)
            await self._end_lines(held)
        finally:
            if self._held.get(held.claim.batch_id) is held:
                del self._held[held.claim.batch_id]
            self._woken.set()

    async def _end_lines(self, held: ClaimedBatch) -> None:
        """This router lives: what was begun here was not lost with it."""
        try:
            await self._store.end_lines(held.claim)
        except StoreAway as error:
            log.warning("lines of batch %s still count as running here: %s", held.claim.batch_id, error)

    async def _renew(self, held: ClaimedBatch) -> None:
        """Renews the claim, and checks whether the batch was cancelled. Raises ClaimLost."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._store_held(lambda: self._store.renew(held.claim, self._lease_s))
            record = await self._store_call(
                lambda: self._store.find("batch", held.record.tenant, held.record.record_id)
            )
            if record is None:
                raise ClaimLost
            if record.version != held.record.version:
                held.changed.set()

    async def _advance(self, held: ClaimedBatch) -> None:
        """Brings a batch from status to status. It may be cancelled before any of them."""
        while not held.batch.is_over:
            try:
                match held.batch.status:
                    case "validating":
                        await self._validate(held)
                    case "in_progress":
                        await self._run(held)
                    case _:
                        await self._finalize(held)
            except InputGone:
                problem = BatchProblem("input_file_gone", "the input file was deleted, or has expired")
                await self._fail(held, [problem])
        await self._store.close_batch(held.claim)

    async def _validate(self, held: ClaimedBatch) -> None:
        batch = held.batch
        checker = Checker(batch.endpoint, self._most_line_bytes)
        async for piece in pieces_of(self._store, batch.tenant, batch.input_file_id):
            if not await asyncio.to_thread(checker.feed, piece):
                break
        else:
            await asyncio.to_thread(checker.end)
        if checker.problems:
            await self._fail(held, checker.problems)
        else:
            await self._change(held, VALIDATING, lambda b: b.to(IN_PROGRESS, time.time(), total=checker.total))

    async def _run(self, held: ClaimedBatch) -> None:
        """Runs lines until each has its answer, the time is over, or the batch was cancelled."""
        lines = asyncio.create_task(self._run_lines(held), name=f"lines of {held.batch.batch_id}")
        try:
            while held.batch.status == IN_PROGRESS and not lines.done() and time.time() < held.batch.expires_at:
                await self._until_changed(held, lines)
        finally:
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)
        error = None if lines.cancelled() else lines.exception()
        if error is not None:
            raise _first_of(error)
        await self._change(held, IN_PROGRESS, lambda b: b.to(FINALIZING, time.time()))

    async def _until_changed(self, held: ClaimedBatch, lines: asyncio.Task[None]) -> None:
        """Returns when the batch was changed, its lines have ended, or the time is over."""
        changed = asyncio.create_task(held.changed.wait())
        try:
            time_left_s = max(0.0, held.batch.expires_at - time.time())
            await asyncio.wait((lines, changed), timeout=time_left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if held.changed.is_set():
            held.changed.clear()
            await self._reload(held)

    async def _run_lines(self, held: ClaimedBatch) -> None:
        batch, under_way = held.batch, asyncio.Semaphore(MOST_LINES)
        answered = await self._store.answered(batch.batch_id)
        lost = await self._store.lost_lines(held.claim)
        async with asyncio.TaskGroup() as group:
            async for line in lines_of(self._store, batch, self._most_line_bytes):
                if line.number not in answered:
                    await under_way.acquire()
                    task = group.create_task(self._run_line(held, line, lost.get(line.number, 0)))
                    task.add_done_callback(lambda _: under_way.release())

    async def _run_line(self, held: ClaimedBatch, line: Line, num_lost_routers: int) -> None:
        request_id = held.batch.request_id(line.number)
        if num_lost_routers >= MOST_LOST_ROUTERS:
            log.warning(
                "line %d of batch %s fails: %d routers were lost while they computed it",
                line.number,
                held.claim.batch_id,
                num_lost_routers,
            )
            answer = answer_lost_line(line, request_id, num_lost_routers)
        else:
            tried = await self._until_answered(held, line, request_id, is_alone=num_lost_routers > 0)
            answer = answer_line(line, request_id, tried.status, tried.body)
        await self._store_held(lambda: self._store.answer(held.claim, answer))
        self._counts["completed" if answer.is_good else "failed"] += 1

    async def _until_answered(self, held: ClaimedBatch, line: Line, request_id: str, *, is_alone: bool) -> LineResult:
        batch, num_tries, num_failures = held.batch, 0, 0
        while True:
            async with self._idle.place(batch.tenant, is_alone=is_alone):
                await self._store_held(lambda: self._store.begin_line(held.claim, line.number))
                tried = await self._answer(batch, line, request_id)
            num_tries, num_failures = num_tries + 1, num_failures + (not tried.is_refusal)
            if tried.retry_after_s is None or num_failures >= MOST_FAILURES:
                return tried
            self._counts["retried"] += 1
            await self._store_call(lambda: self._store.end_lines(held.claim, line.number))
            pause_s = tried.retry_after_s * _LONGER_EACH_TIME ** min(num_tries - 1, _LONGEST_AFTER)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, pause_s) * random.uniform(1.0, 1.5))

    async def _finalize(self, held: ClaimedBatch) -> None:
        """Writes the results, also of a cancelled batch: they hold what was answered."""
        over = await write_results(self._store, held.claim, held.batch, self._most_line_bytes, time.time())
        await self._change(held, held.batch.status, lambda _: over)

    async def _fail(self, held: ClaimedBatch, problems: list[BatchProblem]) -> None:
        stored = [asdict(problem) for problem in problems]
        completed, failed = await self._store.counts(held.batch.batch_id)
        counts = {"completed": completed, "failed": failed}
        await self._change(held, held.batch.status, lambda b: b.to(FAILED, time.time(), problems=stored, **counts))

    async def _change(self, held: ClaimedBatch, status: str, change: Callable[[Batch], Batch]) -> None:
        """Changes a batch while it has this status; a cancellation that came meanwhile wins."""
        while held.batch.status == status:
            wanted = change(held.batch)
            ends_at = (time.time() if wanted.is_over else wanted.expires_at) + KEPT_S
            record = replace(held.record, data=wanted.to_json(), ends_at=ends_at)
            if await self._store.replace(record, held.claim):
                held.record, held.batch = replace(record, version=record.version + 1), wanted
                return
            if not await self._reload(held):
                raise ClaimLost

    async def _reload(self, held: ClaimedBatch) -> bool:
        """Returns False where nobody has changed the record. Raises ClaimLost when it does not exist any more."""
        record = await self._store.find("batch", held.record.tenant, held.record.record_id)
        if record is None or not record.is_readable:
            raise ClaimLost
        is_new = record.version != held.record.version
        held.record, held.batch = record, Batch.from_json(record.data)
        return is_new

    async def _store_held(self, call: Callable[[], Awaitable[bool]]) -> None:
        """Raises ClaimLost where the store refuses, as another router has the batch."""
        if not await self._store_call(call):
            raise ClaimLost

    async def _store_call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retries while the store is away for a moment: an answer was paid for, and one that comes late is fenced."""
        until = time.monotonic() + 10 * self._lease_s
        while True:
            try:
                return await call()
            except StoreAway:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(self._lease_s / 12)


def _first_of(error: BaseException) -> BaseException:
    """The first error of a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
