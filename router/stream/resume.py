"""Generations that outlive their client's call: who reads each, how long one without a reader is kept.

    keep -> read -> (the client leaves) -> unread, for `window_s` -> resumed: read again
                                                                 -> freed, and cancelled if it still runs
    resume of one that is not here: taken from the journal, placed with its known tokens

A generation has one reader; a second one takes it over. Owns readers and their windows; what is told, and its text, is
the live request's; what is stored, the journal's. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cluster.errors import (
    Aborted,
    BatonError,
    FailedPrecondition,
    FieldViolation,
    NotFound,
    OutOfRange,
    Unavailable,
)
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2
from cluster.pb.journal_pb2 import JournalOrigin
from cluster.request_key import RequestKey
from cluster.state import Store, StoreAway
from router.api.call import Principal
from router.api.violations import invalid
from router.routing.dispatcher import Dispatcher
from router.stream.detokenizer import Detokenizer
from router.stream.failures import RETRY_AFTER_S
from router.stream.journal import Journal
from router.stream.record import GenerationRecord, digest_of, origin_of, restore
from router.stream.request import LiveRequest
from router.stream.stream_reader import StreamReader

MOST_UNREAD = 4096
"""Beyond these, the one whose client left first is freed."""
_MOST_TRIES = 3
_ID = re.compile(r"gen-[0-9a-f]{24}")
_EPOCH_BITS = 16

Revive = Callable[[RequestKey, GenerationRecord, Principal, int, bool], LiveRequest]
"""(key of the first attempt, record, principal, first token that the client wants, is it streaming): makes the request
of a record, still without its tokens."""


@dataclass
class _Kept:
    live: LiveRequest
    origin: JournalOrigin
    reader: StreamReader | None
    timer: asyncio.TimerHandle | None = None


class Resumables:
    """Lives in one event loop: `start`, then `stop`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        store: Store,
        *,
        window_s: float,
        revive: Revive,
        new_detokenizers: Callable[[LiveRequest], Sequence[Detokenizer]],
    ) -> None:
        self._dispatcher = dispatcher
        self._window_s = window_s
        self._revive = revive
        self._new_detokenizers = new_detokenizers
        # A record is refreshed in the last third of its time, and must outlive its router by a window.
        self._journal = Journal(store, ttl_s=2 * window_s + 15.0, on_fenced=self._lose)
        self._kept: dict[str, _Kept] = {}
        self._unread: OrderedDict[str, None] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One call at a time takes a generation from the journal."""

    def start(self) -> None:
        self._journal.start()

    async def stop(self) -> None:
        """The journal keeps what another router may go on with."""
        for kept in self._kept.values():
            if kept.timer is not None:
                kept.timer.cancel()
        await self._journal.stop()

    def keep(self, live: LiveRequest, spec: generation_pb2.GenerationSpec) -> StreamReader:
        """A new generation that may be resumed."""
        return self._add(live, origin_of(live, spec, self._dispatcher.fleet.weights_revision), epoch=1)

    async def before_telling(self, reader: StreamReader) -> None:
        """Has what was taken of the generation in the journal. Raises Aborted when it is not to be told any more."""
        await self._journal.catch_up(reader.live.key.request_id)
        reader.check()

    def leave(self, reader: StreamReader) -> None:
        """The call has ended, in whatever way."""
        generation_id = reader.live.key.request_id
        kept = self._kept.get(generation_id)
        if kept is None or kept.reader is not reader:
            return
        kept.reader = None
        state, error = kept.live.lifecycle.state, kept.live.error
        is_turned_away = state is RequestState.REJECTED and not isinstance(error, Unavailable)
        if state is RequestState.CANCELLED or is_turned_away:
            self._forget(generation_id)
            return
        kept.timer = asyncio.get_running_loop().call_later(self._window_s, self._expire, generation_id)
        self._unread[generation_id] = None
        if len(self._unread) > MOST_UNREAD:
            self._free(next(iter(self._unread)))

    def give_up(self, reader: StreamReader) -> None:
        """Its client does not read: the generation ends now, as it would hold its place for nobody."""
        generation_id = reader.live.key.request_id
        kept = self._kept.get(generation_id)
        if kept is not None and kept.reader is reader:
            self._forget(generation_id)
            self._dispatcher.cancel(generation_id, "its client does not read")

    async def resume(
        self, spec: generation_pb2.GenerationSpec, caller: Principal, *, is_streaming: bool
    ) -> StreamReader:
        """Whoever read it so far is told Aborted. Raises NotFound, InvalidRequest, OutOfRange, FailedPrecondition or
        Unavailable."""
        generation_id = spec.resume.generation_id
        if not _ID.fullmatch(generation_id):
            raise _unknown(generation_id)
        try:
            for _ in range(_MOST_TRIES):
                async with self._lock(generation_id):
                    if generation_id in self._kept:
                        return self._resume_here(generation_id, spec, caller, is_streaming=is_streaming)
                    reader = await self._take_over(generation_id, spec, caller, is_streaming=is_streaming)
                if reader is not None:
                    return reader
        except StoreAway as error:
            away = "the state store is away, and this router does not run the generation; try again"
            raise Unavailable(away, retry_after_s=RETRY_AFTER_S) from error
        raise Aborted("several calls resume this generation at once; try again", retry_after_s=RETRY_AFTER_S)

    async def cancel(self, generation_id: str, caller: Principal, why: str) -> bool:
        """At once, wherever it runs. False when it has ended or is not known."""
        kept = self._kept.get(generation_id)
        if kept is not None and kept.origin.tenant == caller.tenant:
            self._forget(generation_id)
            return self._dispatcher.cancel(generation_id, why)
        if kept is not None or not _ID.fullmatch(generation_id):
            return False
        try:
            found = await self._journal.find(generation_id)
            if found is None or found.record.origin.tenant != caller.tenant:
                return False
            return await self._journal.take(generation_id, found, to_cancel=True) is not None
        except StoreAway:
            return False

    def _lock(self, generation_id: str) -> asyncio.Lock:
        return self._locks.setdefault(generation_id, asyncio.Lock())

    def _resume_here(
        self, generation_id: str, spec: generation_pb2.GenerationSpec, caller: Principal, *, is_streaming: bool
    ) -> StreamReader:
        kept = self._kept[generation_id]
        if kept.origin.tenant != caller.tenant:
            raise _unknown(generation_id)
        live, index = kept.live, spec.resume.next_token_index
        _check_spec(spec, kept.origin)
        _check_index(live, index)
        if live.error is not None and not isinstance(live.error, Unavailable):
            raise live.error
        self._stop_waiting(kept)
        if kept.reader is not None:
            kept.reader.replace()
        if live.error is None:
            live.rewind(index, self._new_detokenizers(live), is_streaming=is_streaming)
            kept.reader = StreamReader(live, is_kept=True)
            return kept.reader
        record, epoch = self._journal.record(generation_id)
        again = self._bring_back(generation_id, record, caller, epoch + 1, index, is_streaming=is_streaming)
        return self._go_on(again, record, epoch + 1)

    async def _take_over(
        self, generation_id: str, spec: generation_pb2.GenerationSpec, caller: Principal, *, is_streaming: bool
    ) -> StreamReader | None:
        """From the journal; None when another was faster. Raises StoreAway."""
        found = await self._journal.find(generation_id)
        if found is None or found.record.origin.tenant != caller.tenant:
            raise _unknown(generation_id)
        record, index = found.record, spec.resume.next_token_index
        _check_spec(spec, record.origin)
        self._check_weights(record.origin)
        next_epoch = found.claim.epoch + 1
        live = self._bring_back(generation_id, record, caller, next_epoch, index, is_streaming=is_streaming)
        _check_index(live, index)
        epoch = await self._journal.take(generation_id, found)
        if epoch is None:
            return None
        return self._go_on(live, record, epoch)

    def _bring_back(
        self,
        generation_id: str,
        record: GenerationRecord,
        caller: Principal,
        epoch: int,
        index: int,
        *,
        is_streaming: bool,
    ) -> LiveRequest:
        """Attempts of one epoch are never those of another, as the worker may still hear both routers."""
        key = RequestKey(generation_id, ((epoch - 1) << _EPOCH_BITS) + 1)
        live = self._revive(key, record, caller, index, is_streaming)
        restore(live, record)
        return live

    def _go_on(self, live: LiveRequest, record: GenerationRecord, epoch: int) -> StreamReader:
        self._dispatcher.adopt(live)
        return self._add(live, record.origin, epoch)

    def _add(self, live: LiveRequest, origin: JournalOrigin, epoch: int) -> StreamReader:
        reader = StreamReader(live, is_kept=True, traceparent=origin.traceparent)
        self._kept[live.key.request_id] = _Kept(live, origin, reader)
        self._journal.open(live, origin, epoch)
        return reader

    def _stop_waiting(self, kept: _Kept) -> None:
        self._unread.pop(kept.live.key.request_id, None)
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None

    def _expire(self, generation_id: str) -> None:
        """Its client left a window ago. One that has ended since is kept for a window from then on."""
        live = self._kept[generation_id].live
        left_s = live.lifecycle.history[-1].at + self._window_s - self._dispatcher.clock() if live.is_over else 0.0
        if left_s > 0.0:
            loop = asyncio.get_running_loop()
            self._kept[generation_id].timer = loop.call_later(left_s, self._expire, generation_id)
        else:
            self._free(generation_id)

    def _free(self, generation_id: str) -> None:
        self._forget(generation_id)
        if self._dispatcher.cancel(generation_id, "its client left and nobody resumed it"):
            self._dispatcher.counters.orphaned += 1

    def _forget(self, generation_id: str) -> None:
        self._stop_waiting(self._kept.pop(generation_id))
        self._journal.close(generation_id)

    def _lose(self, generation_id: str, is_cancelled: bool) -> None:
        """Another router has taken it: it was resumed there, or cancelled."""
        kept = self._kept.pop(generation_id)
        self._stop_waiting(kept)
        if kept.reader is not None and not is_cancelled:
            kept.reader.replace()
        why = "by CancelGeneration" if is_cancelled else "another router has taken it over"
        self._dispatcher.cancel(generation_id, why)

    def _check_weights(self, origin: JournalOrigin) -> None:
        here = self._dispatcher.fleet.weights_revision
        if here and origin.weights_revision and here != origin.weights_revision:
            raise FailedPrecondition("the model's weights have changed since this generation began; ask anew")


def _unknown(generation_id: str) -> BatonError:
    shown = generation_id if len(generation_id) <= 100 else generation_id[:100] + "…"
    return NotFound(
        f"generation {shown!r} is not known, or not any more; one can be resumed if its first call set spec.resume, "
        "for as long as the router keeps it",
        violations=(FieldViolation("spec.resume.generation_id", "names no generation that can be resumed"),),
    )


def _check_spec(spec: generation_pb2.GenerationSpec, origin: JournalOrigin) -> None:
    """All but `resume` and `request_id` must be empty, or what the first call said."""
    digest = digest_of(spec)
    if digest not in (origin.spec_digest, digest_of(generation_pb2.GenerationSpec())):
        what = "of a call that resumes: leave everything but resume empty, or repeat the first call's"
        raise invalid((FieldViolation("spec", what),))


def _check_index(live: LiveRequest, index: int) -> None:
    most = live.request.sampling.max_output_tokens
    if live.is_complete:
        most = max(sequence.num_tokens for sequence in live.sequences)
    if index > most:
        description = f"must be at most {most}, as there are no more tokens (got {index})"
        violation = FieldViolation("spec.resume.next_token_index", description)
        raise OutOfRange(f"{violation.field} {description}", violations=(violation,))
