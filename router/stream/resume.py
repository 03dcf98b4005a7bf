"""Generations that outlive their client's call: which call reads each, and how long one without a reader is kept.

    keep -> read -> (the client leaves) -> unread, for `window_s` -> resumed: read again
                                                                 -> freed, and cancelled if it still runs
    resume of one that is not here: taken from the journal, placed with its known tokens

A generation has one reader; a second one replaces it. Owns readers and their windows; the live request owns the output
and its text, the journal what is stored. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cluster.errors import (
    Aborted,
    BatonError,
    FieldViolation,
    IncompatibleProtocol,
    NotFound,
    OutOfRange,
    Unavailable,
)
from cluster.lifecycle import RequestKey, RequestState
from cluster.pb.generation_pb2 import GenerateStreamResponse, GenerationSpec
from cluster.pb.journal_pb2 import JournalEntry, JournalOrigin
from cluster.state import Claim, Store, StoreAway
from router.api.call import Principal
from router.api.violations import invalid, shortened
from router.observe.counters import Counters
from router.stream.client_stream import StreamReader
from router.stream.detokenizer import Detokenizer
from router.stream.failures import RETRY_AFTER_S, weights_lost
from router.stream.journal import Journal
from router.stream.record import Extent, digest_of, entry_of, origin_of, read_record, restore, source_of
from router.stream.request import LiveRequest

log = logging.getLogger(__name__)

MOST_UNREAD = 4096
"""Beyond these, of the tenant that has the most the one whose client left first is freed."""
_MOST_TRIES = 3
_ID = re.compile(r"gen-[0-9a-f]{24}")
_EPOCH_BITS = 16


@dataclass(frozen=True)
class ResumeHooks:
    """The parts of the router that resuming needs."""

    clock: Callable[[], float]
    adopt: Callable[[LiveRequest], None]
    """Goes on with a request that ran elsewhere."""
    cancel: Callable[[str, str], bool]
    """(generation id, why): False when it does not run here."""
    revive: Callable[[RequestKey, JournalEntry, Principal, Sequence[int], bool], LiveRequest]
    """(key of the first attempt, record, principal, first token of each sequence that the client wants, is it
    streaming): makes the request of a record, still without its tokens."""
    new_detokenizers: Callable[[LiveRequest], Sequence[Detokenizer]]
    has_lost_weights: Callable[[str], bool]
    """(revision): no worker has these weights any more."""
    counters: Counters


@dataclass(frozen=True)
class _Resume:
    """One call that resumes."""

    spec: GenerationSpec
    principal: Principal
    is_streaming: bool

    @property
    def generation_id(self) -> str:
        return self.spec.resume.generation_id

    def indexes(self, origin: JournalOrigin) -> Sequence[int]:
        """The first token of each sequence that the client wants. Raises InvalidRequest."""
        resume, num_sequences = self.spec.resume, origin.sampling.params.n
        if not resume.next_token_indexes:
            return [resume.next_token_index] * num_sequences
        if len(resume.next_token_indexes) != num_sequences or resume.next_token_index:
            what = f"must be {num_sequences}, one for each sequence, and next_token_index 0"
            raise invalid((FieldViolation("spec.resume.next_token_indexes", what),))
        return resume.next_token_indexes


@dataclass
class _Kept:
    live: LiveRequest
    origin: JournalOrigin
    epoch: int
    reader: StreamReader | None
    timer: asyncio.TimerHandle | None = None


class Resumables:
    """Lives in one event loop: `start`, then `stop`."""

    def __init__(self, store: Store, hooks: ResumeHooks, *, window_s: float) -> None:
        self._hooks = hooks
        self._window_s = window_s
        # A record is refreshed in the last third of its time, and must outlive its router by a window.
        self._journal: Journal[Extent] = Journal(store, ttl_s=2 * window_s + 15.0, on_fenced=self._lose)
        self._kept: dict[str, _Kept] = {}
        self._unread: dict[str, OrderedDict[str, None]] = {}
        """Generations without a reader by tenant, each in the order in which their clients left."""
        self._unreadable = ""
        """Why a record was not read, as last reported."""
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

    def keep(self, live: LiveRequest, spec: GenerationSpec) -> StreamReader:
        """Keeps a new generation that may be resumed."""
        return self._add(live, origin_of(live, spec), epoch=1)

    async def before_send(self, reader: StreamReader, events: Sequence[GenerateStreamResponse]) -> None:
        """Waits until the events that the reader took are in the journal; the first says so where that has changed.

        Raises Aborted when another call reads the generation now.
        """
        is_stored = await self._journal.catch_up(reader.live.key.request_id)
        reader.check()
        if events and reader.is_resumable is not is_stored:
            events[0].resumable = reader.is_resumable = is_stored

    def remove(self, reader: StreamReader) -> None:
        """The reader's call has ended, in whatever way."""
        generation_id = reader.live.key.request_id
        kept = self._kept.get(generation_id)
        if kept is None or kept.reader is not reader:
            return
        kept.reader = None
        state, error = kept.live.lifecycle.state, kept.live.error
        is_refused = state is RequestState.REJECTED and not isinstance(error, Unavailable)
        if state is RequestState.CANCELLED or is_refused:
            self._forget(generation_id)
            return
        kept.timer = asyncio.get_running_loop().call_later(self._window_s, self._expire, generation_id)
        self._unread.setdefault(kept.origin.tenant, OrderedDict())[generation_id] = None
        if sum(map(len, self._unread.values())) > MOST_UNREAD:
            most = max(self._unread, key=lambda tenant: len(self._unread[tenant]))
            self._free(next(iter(self._unread[most])))

    def abort(self, reader: StreamReader) -> None:
        """Ends a generation whose client does not read: it would hold its place for nobody."""
        generation_id = reader.live.key.request_id
        kept = self._kept.get(generation_id)
        if kept is not None and kept.reader is reader:
            self._forget(generation_id)
            self._hooks.cancel(generation_id, "its client does not read")

    async def resume(self, spec: GenerationSpec, principal: Principal, *, is_streaming: bool) -> StreamReader:
        """Replaces the reader of a generation; the one before gets Aborted.

        Raises NotFound, InvalidRequest, OutOfRange, FailedPrecondition or Unavailable.
        """
        call = _Resume(spec, principal, is_streaming)
        if not _ID.fullmatch(call.generation_id):
            raise _unknown(call.generation_id)
        try:
            for _ in range(_MOST_TRIES):
                async with self._locks.setdefault(call.generation_id, asyncio.Lock()):
                    kept = self._kept.get(call.generation_id)
                    reader = await self._take_over(call) if kept is None else self._resume_here(call, kept)
                if reader is not None:
                    return reader
        except StoreAway as error:
            away = "the state store is away, and this router does not run the generation; try again"
            raise Unavailable(away, retry_after_s=RETRY_AFTER_S) from error
        raise Aborted("several calls resume this generation at once; try again", retry_after_s=RETRY_AFTER_S)

    async def cancel(self, generation_id: str, principal: Principal, why: str) -> bool:
        """Cancels at once, wherever it runs. False when it has ended or is not known."""
        kept = self._kept.get(generation_id)
        if kept is not None and kept.origin.tenant == principal.tenant:
            self._forget(generation_id)
            return self._hooks.cancel(generation_id, why)
        if kept is not None or not _ID.fullmatch(generation_id):
            return False
        try:
            found = await self._find(generation_id, principal)
            return found is not None and await self._journal.take(generation_id, found[1], to_cancel=True) is not None
        except StoreAway:
            return False

    async def _find(self, generation_id: str, principal: Principal) -> tuple[JournalEntry, Claim] | None:
        """The record of a generation in the journal, and its claim; None for another tenant's. Raises StoreAway."""
        found = await self._journal.find(generation_id)
        if found is None:
            return None
        try:
            record = read_record(found.entries)
            why = "" if record is not None else f"{generation_id} is not a record of Baton"
        except IncompatibleProtocol as error:
            record, why = None, error.message
        if why and why != self._unreadable:  # clients ask again and again
            self._unreadable = why
            log.warning("a record in the journal is not read, and left as it is: %s", why)
        return None if record is None or record.origin.tenant != principal.tenant else (record, found.claim)

    def _resume_here(self, call: _Resume, kept: _Kept) -> StreamReader:
        live = kept.live
        if kept.origin.tenant != call.principal.tenant:
            raise _unknown(call.generation_id)
        _check_spec(call.spec, kept.origin)
        indexes = call.indexes(kept.origin)
        _check_indexes(live, indexes)
        if live.error is not None and not isinstance(live.error, Unavailable):
            raise live.error
        self._stop_waiting(kept)
        if kept.reader is not None:
            kept.reader.replace()
        if live.error is None:
            live.rewind(indexes, self._hooks.new_detokenizers(live), is_streaming=call.is_streaming)
            kept.reader = StreamReader(live, is_kept=True)
            return kept.reader
        record = entry_of(live, kept.origin)
        return self._adopt(self._revive(call, record, kept.epoch + 1), record, kept.epoch + 1)

    async def _take_over(self, call: _Resume) -> StreamReader | None:
        """Takes it from the journal; None when another router was faster. Raises StoreAway."""
        found = await self._find(call.generation_id, call.principal)
        if found is None:
            raise _unknown(call.generation_id)
        record, claim = found
        _check_spec(call.spec, record.origin)
        live = self._revive(call, record, claim.epoch + 1)
        _check_indexes(live, call.indexes(record.origin))
        if not live.is_complete and self._hooks.has_lost_weights(live.weights_revision):
            raise weights_lost(live.weights_revision)
        epoch = await self._journal.take(call.generation_id, claim)
        return None if epoch is None else self._adopt(live, record, epoch)

    def _revive(self, call: _Resume, record: JournalEntry, epoch: int) -> LiveRequest:
        """Attempts of two epochs have different numbers, as a worker may still have connections to both routers."""
        key = RequestKey(call.generation_id, ((epoch - 1) << _EPOCH_BITS) + 1)
        live = self._hooks.revive(key, record, call.principal, call.indexes(record.origin), call.is_streaming)
        restore(live, record)
        return live

    def _adopt(self, live: LiveRequest, record: JournalEntry, epoch: int) -> StreamReader:
        self._hooks.adopt(live)
        return self._add(live, record.origin, epoch)

    def _add(self, live: LiveRequest, origin: JournalOrigin, epoch: int) -> StreamReader:
        reader = StreamReader(live, is_kept=True, traceparent=origin.traceparent)
        self._kept[live.key.request_id] = _Kept(live, origin, epoch, reader)
        self._journal.open(live.key.request_id, source_of(live, origin), epoch)
        return reader

    def _stop_waiting(self, kept: _Kept) -> None:
        of_tenant = self._unread.get(kept.origin.tenant, OrderedDict())
        of_tenant.pop(kept.live.key.request_id, None)
        if not of_tenant:
            self._unread.pop(kept.origin.tenant, None)
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None

    def _expire(self, generation_id: str) -> None:
        """Its client left a window ago. One that has ended since is kept for a window from then on."""
        kept = self._kept[generation_id]
        live, left_s = kept.live, 0.0
        if live.is_over:
            left_s = live.lifecycle.history[-1].at + self._window_s - self._hooks.clock()
        if left_s > 0.0:
            kept.timer = asyncio.get_running_loop().call_later(left_s, self._expire, generation_id)
        else:
            self._free(generation_id)

    def _free(self, generation_id: str) -> None:
        self._forget(generation_id)
        if self._hooks.cancel(generation_id, "its client left and nobody resumed it"):
            self._hooks.counters.orphaned += 1

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
        self._hooks.cancel(generation_id, why)


def _unknown(generation_id: str) -> BatonError:
    return NotFound(
        f"generation {shortened(generation_id)!r} is not known, or not any more; one can be resumed if its first call "
        "set spec.resume, for as long as the router keeps it",
        violations=(FieldViolation("spec.resume.generation_id", "names no generation that can be resumed"),),
    )


def _check_spec(spec: GenerationSpec, origin: JournalOrigin) -> None:
    """All but `resume` and `request_id` must be empty, or equal to the first call's."""
    digest = digest_of(spec)
    if digest not in (origin.spec_digest, digest_of(GenerationSpec())):
        what = "of a call that resumes: leave everything but resume empty, or repeat the first call's"
        raise invalid((FieldViolation("spec", what),))


def _check_indexes(live: LiveRequest, indexes: Sequence[int]) -> None:
    index, most = max(indexes), live.request.sampling.stopping.max_output_tokens
    if live.is_complete:
        most = max(sequence.num_tokens for sequence in live.sequences)
    if index > most:
        description = f"must be at most {most}, as there are no more tokens (got {index})"
        violation = FieldViolation("spec.resume.next_token_index", description)
        raise OutOfRange(f"{violation.field} {description}", violations=(violation,))
