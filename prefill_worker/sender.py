"""The sending side of every hand-off of one worker: events in, actions out. No clock, socket or tensor.

A hand-off is (request, attempt, pair epoch); an event for one that is not here, or not in a state that TABLE lists for
it, is dropped. Each range of the prompt that is computed, or about to be, becomes chunks, in order:

    WAITING (for a slot) -> GATHERING (pages to slot) -> OFFERED -> SENDING (granted) -> slot free again

A granted chunk is always sent, also after an abort: the receiver has posted for it. An offered chunk keeps its slot
until it is granted or the receiver has answered the abort, so that a grant on its way finds what it was given for.
Pages are released once no gather can touch them. Each connection has slots of its own: a peer that stalls holds up
only itself.

Where the receiver reads this worker's pages itself (`shares_pages`), a slot holds only where they lie, and they are
held for as long as a chunk has one: until it is read, or can no longer be granted. Those of a connection that was lost
are quarantined until its pair is closed on every rank: what the receiver reads after that it does not count as landed
(docs/adr/0011-who-holds-pages-that-another-worker-reads.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from cluster.kv_groups import KvGroup, num_rows
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from kv_transfer.actions import (
    Actions,
    BeginPrefill,
    Chunk,
    Fail,
    Gather,
    Range,
    ReleasePages,
    SendMessage,
    Transmit,
)

MIN_LAYER_PARTS = 4
"""Parts into which the layers of a prompt's last step are cut, so that the first travel while the last compute."""
MIN_LAYERED_TOKENS = 64
"""A last step shorter than this is not cut: its transfer is shorter than the messages of one more chunk."""


class SendState(Enum):
    OPENING = "opening"  # Open is sent
    STREAMING = "streaming"  # the receiver has reserved; chunks move
    COMMITTING = "committing"  # everything is offered and Commit sent
    CLOSING = "closing"  # Abort is sent; grants given before it arrived may still come
    SETTLED = "settled"  # no grant can come any more; what was granted drains


class SendEvent(Enum):
    RESERVED = "reserved"
    COMPUTED = "computed"
    COMMIT = "commit"
    COMMITTED = "committed"
    ABORT = "abort"
    PEER_ABORTED = "peer aborted"
    CONNECTION_LOST = "connection lost"


_ENDS = {SendEvent.PEER_ABORTED: SendState.SETTLED, SendEvent.CONNECTION_LOST: SendState.SETTLED}
TABLE: Mapping[SendState, Mapping[SendEvent, SendState]] = MappingProxyType(
    {
        SendState.OPENING: {SendEvent.RESERVED: SendState.STREAMING, SendEvent.ABORT: SendState.CLOSING, **_ENDS},
        SendState.STREAMING: {
            SendEvent.COMPUTED: SendState.STREAMING,
            SendEvent.COMMIT: SendState.COMMITTING,
            SendEvent.ABORT: SendState.CLOSING,
            **_ENDS,
        },
        SendState.COMMITTING: {SendEvent.COMMITTED: SendState.SETTLED, SendEvent.ABORT: SendState.CLOSING, **_ENDS},
        SendState.CLOSING: {SendEvent.COMMITTED: SendState.SETTLED, **_ENDS},
        SendState.SETTLED: {},
    }
)
"""Every legal move. What is not here is dropped: it belongs to a moment that is over."""


class ChunkStage(Enum):
    """The stage that a chunk which has a slot has come to."""

    GATHERING = "gathering"
    OFFERED = "offered"
    SENDING = "sending"


@dataclass
class Outgoing:
    """One hand-off."""

    key: RequestKey
    epoch: str
    num_tokens: int
    state: SendState = SendState.OPENING
    next_token: int = 0
    """Tokens before it are the receiver's already, or in a chunk."""
    waiting: deque[tuple[Range, int]] = field(default_factory=deque)
    """Ranges that wait for a slot, each with the number of steps that write it."""
    chunks: dict[int, tuple[Chunk, ChunkStage]] = field(default_factory=dict)
    num_chunks: int = 0
    first_tokens: list[handoff_pb2.FirstToken] | None = None
    holds_pages: bool = True

    @property
    def is_live(self) -> bool:
        return self.state in (SendState.OPENING, SendState.STREAMING, SendState.COMMITTING)

    @property
    def is_gathering(self) -> bool:
        return any(stage is ChunkStage.GATHERING for _, stage in self.chunks.values())

    def advance(self, event: SendEvent) -> bool:
        """False, and nothing changed, when the table has no such move."""
        state = TABLE[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True


@dataclass
class SendSlots:
    """The send slots of one connection that is open."""

    capacity: int
    """Tokens times layers that one slot holds."""
    free_slots: list[int]
    num_slots: int
    is_suspect: bool = False
    shares_pages: bool = False
    """The receiver reads this worker's pages itself."""


class Sender:
    """All hand-offs out of one worker, whose model has these groups of layers. Of a window no more is sent than the
    token behind the handed over ones sees."""

    def __init__(self, groups: Sequence[KvGroup]) -> None:
        self._groups = groups
        self._num_layers = sum(len(group.layers) for group in groups)
        self._outgoing: dict[RequestKey, Outgoing] = {}
        self._slots: dict[str, SendSlots] = {}
        self._closing: set[str] = set()
        """Lost connections over which pages may still be read: their pairs are not closed on every rank."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._outgoing

    def is_live(self, key: RequestKey) -> bool:
        """Whether the hand-off can still succeed."""
        out = self._outgoing.get(key)
        return out is not None and out.is_live

    def num_on(self, epoch: str) -> int:
        """Hand-offs that still need the connection."""
        return sum(out.epoch == epoch for out in self._outgoing.values())

    def count_stages(self) -> dict[str, int]:
        """Slots of all connections by what is in them."""
        counts = {stage.value: 0 for stage in ChunkStage}
        for out in self._outgoing.values():
            for _, stage in out.chunks.values():
                counts[stage.value] += 1
        return counts | {"free": sum(len(slots.free_slots) for slots in self._slots.values())}

    # Connections

    def connection_open(self, epoch: str, chunk_tokens: int, num_slots: int, *, shares_pages: bool = False) -> Actions:
        """The pair is open on every rank; a slot is for `chunk_tokens` tokens of all layers."""
        capacity, free_slots = chunk_tokens * self._num_layers, list(range(num_slots))
        self._slots[epoch] = SendSlots(capacity, free_slots, num_slots, shares_pages=shares_pages)
        return self._pump(epoch)

    def connection_suspected(self, epoch: str, is_suspect: bool) -> Actions:
        """The peer is silent, or no longer silent: nothing new is gathered for a suspect."""
        slots = self._slots.get(epoch)
        if slots is None:
            return []
        slots.is_suspect = is_suspect
        return self._pump(epoch)

    def connection_lost(
        self,
        epoch: str,
        reason: worker_pb2.Failed.Reason = worker_pb2.Failed.REASON_PEER_LOST,
        why: str = "the decode worker was lost during the hand-off",
    ) -> Actions:
        """The connection is retired: no grant can come, and its slots go with the pair."""
        slots = self._slots.pop(epoch, None)
        if slots is not None and slots.shares_pages:
            self._closing.add(epoch)
        actions: Actions = []
        for out in [o for o in self._outgoing.values() if o.epoch == epoch]:
            actions += self._settle(out, SendEvent.CONNECTION_LOST, reason, why)
        return actions

    def connection_closed(self, epoch: str) -> Actions:
        """The pair of a lost connection is closed on every rank: nothing that is read now counts as landed."""
        self._closing.discard(epoch)
        actions: Actions = []
        for out in [o for o in self._outgoing.values() if o.epoch == epoch]:
            actions += self._release_pages(out)
        return actions

    # One hand-off

    def open(self, key: RequestKey, epoch: str, num_tokens: int) -> Actions:
        """The router named a decode worker, to which `epoch` is the connection, for a prompt of `num_tokens` tokens."""
        self._outgoing[key] = Outgoing(key, epoch, num_tokens)
        message = handoff_pb2.Open(key=key.to_proto(), num_tokens=num_tokens)
        return [SendMessage(epoch, handoff_pb2.SenderMessage(open=message))]

    def reserved(self, epoch: str, key: RequestKey, num_cached_tokens: int) -> Actions:
        """The receiver holds blocks for the prompt and has its first `num_cached_tokens` tokens."""
        out = self._find(epoch, key)
        if out is None or not out.advance(SendEvent.RESERVED):
            return []
        out.next_token = num_cached_tokens
        return [BeginPrefill(key)]

    def computing(self, key: RequestKey, token_end: int, after_step: int) -> Actions:
        """Step number `after_step` is about to compute this prompt's tokens up to `token_end`, layer by layer."""
        out = self._outgoing.get(key)
        if out is None or not out.advance(SendEvent.COMPUTED):
            return []
        is_cut = token_end - out.next_token >= MIN_LAYERED_TOKENS
        self._queue(out, token_end, after_step, MIN_LAYER_PARTS if is_cut else 1)
        return self._pump(out.epoch)

    def computed(self, key: RequestKey, num_computed: int, after_step: int) -> Actions:
        """The KV of tokens [0, num_computed) lies in this worker's pages since step `after_step`."""
        out = self._outgoing.get(key)
        if out is None or not out.advance(SendEvent.COMPUTED):
            return []
        self._queue(out, num_computed, after_step, 1)
        return self._pump(out.epoch)

    def commit(self, key: RequestKey, first_tokens: list[handoff_pb2.FirstToken]) -> Actions:
        """The prompt is computed and its first tokens are sampled."""
        out = self._outgoing.get(key)
        if out is None or out.state is not SendState.STREAMING:
            return []
        out.first_tokens = first_tokens
        return self._pump(out.epoch) + self._commit_if_offered(out)

    def gathered(self, chunk: Chunk) -> Actions:
        """The chunk lies in its send slot on every rank."""
        out = self._outgoing[chunk.key]
        if not out.is_live:
            return self._finish(out, chunk)
        out.chunks[chunk.index] = (chunk, ChunkStage.OFFERED)
        offer = SendMessage(out.epoch, handoff_pb2.SenderMessage(offer=chunk.to_proto()))
        return [offer, *self._commit_if_offered(out)]

    def granted(self, epoch: str, key: RequestKey, chunk_index: int) -> Actions:
        """The receiver has posted a receive for the chunk."""
        out = self._find(epoch, key)
        if out is None or out.state is SendState.SETTLED:
            return []
        chunk, stage = out.chunks.get(chunk_index, (None, None))
        if chunk is None or stage is not ChunkStage.OFFERED:
            return []
        out.chunks[chunk_index] = (chunk, ChunkStage.SENDING)
        return [Transmit(chunk)]

    def sent(self, chunk: Chunk) -> Actions:
        """The transport is done with the chunk's slot, whether or not it arrived."""
        return self._finish(self._outgoing[chunk.key], chunk)

    def committed(self, epoch: str, key: RequestKey) -> Actions:
        """The receiver has everything."""
        out = self._find(epoch, key)
        if out is None or not out.advance(SendEvent.COMMITTED):
            return []
        return self._drop_offers(out)

    def abort(self, key: RequestKey, reason: str) -> Actions:
        """The router cancelled, or this worker cannot go on. The receiver will answer with its own Abort."""
        out = self._outgoing.get(key)
        if out is None or not out.advance(SendEvent.ABORT):
            return []
        out.waiting.clear()
        message = handoff_pb2.Abort(key=key.to_proto(), reason=reason)
        return [SendMessage(out.epoch, handoff_pb2.SenderMessage(abort=message)), *self._release_pages(out)]

    def peer_aborted(self, epoch: str, key: RequestKey) -> Actions:
        """The receiver gave the request up, or answers an abort: every grant it made has arrived by now."""
        out = self._find(epoch, key)
        if out is None:
            return []
        reason, why = worker_pb2.Failed.REASON_TRANSFER_FAILED, "the decode worker gave the hand-off up"
        return self._settle(out, SendEvent.PEER_ABORTED, reason, why)

    def check_idle(self) -> None:
        """Raises AssertionError unless every hand-off is over and every slot of the open connections is back."""
        assert not self._outgoing, self._outgoing
        for slots in self._slots.values():
            assert sorted(slots.free_slots) == list(range(slots.num_slots)), slots

    def _find(self, epoch: str, key: RequestKey) -> Outgoing | None:
        out = self._outgoing.get(key)
        return out if out is not None and out.epoch == epoch else None

    def _settle(self, out: Outgoing, event: SendEvent, reason: worker_pb2.Failed.Reason, why: str) -> Actions:
        was_live = out.is_live
        if not out.advance(event):
            return []
        failed: Actions = [Fail(out.key, reason, why)] if was_live else []
        return failed + self._drop_offers(out)

    def _drop_offers(self, out: Outgoing) -> Actions:
        """Nothing more can be granted: what waits or is offered will never be sent."""
        out.waiting.clear()
        for index, (chunk, stage) in list(out.chunks.items()):
            if stage is ChunkStage.OFFERED:
                del out.chunks[index]
                self._free_slot(chunk)
        return self._release_pages(out) + self._pump(out.epoch)

    def _queue(self, out: Outgoing, token_end: int, after_step: int, num_parts: int) -> None:
        """Appends what the receiver lacks of tokens [next_token, token_end), the layers in parts.

        They are cut into what a slot holds when one is free: only then is the connection open and the slot size known.
        """
        if out.next_token >= token_end:
            return
        most = num_rows(self._groups)
        size = -(-most // min(num_parts, most))
        for layer in range(0, most, size):
            for place, group in enumerate(self._groups):
                start, end = max(out.next_token, group.first_seen(out.num_tokens)), min(layer + size, len(group.layers))
                if start < token_end and layer < end:
                    out.waiting.append((Range(start, token_end, layer, end, place), after_step))
        out.next_token = token_end

    def _pump(self, epoch: str) -> Actions:
        """Gathers what waits, oldest hand-off first, while the connection has slots."""
        slots = self._slots.get(epoch)
        if slots is None or slots.is_suspect:
            return []
        actions: Actions = []
        for out in self._outgoing.values():
            while out.epoch == epoch and out.waiting and slots.free_slots:
                whole, after_step = out.waiting.popleft()
                part, rest = whole.cut(slots.capacity)
                out.waiting.extendleft((piece, after_step) for piece in reversed(rest))
                chunk = Chunk(out.key, epoch, out.num_chunks, slots.free_slots.pop(), part)
                out.num_chunks += 1
                out.chunks[chunk.index] = (chunk, ChunkStage.GATHERING)
                actions.append(Gather(chunk, after_step))
        return actions

    def _commit_if_offered(self, out: Outgoing) -> Actions:
        if out.first_tokens is None or not self._is_read(out) or not out.advance(SendEvent.COMMIT):
            return []
        commit = handoff_pb2.Commit(key=out.key.to_proto(), num_chunks=out.num_chunks, first_tokens=out.first_tokens)
        return [*self._release_pages(out), SendMessage(out.epoch, handoff_pb2.SenderMessage(commit=commit))]

    @staticmethod
    def _is_read(out: Outgoing) -> bool:
        return out.next_token >= out.num_tokens and not out.waiting and not out.is_gathering

    def _is_shared(self, out: Outgoing) -> bool:
        """Whether the receiver may yet read pages of the hand-off and count them as landed."""
        slots = self._slots.get(out.epoch)
        return out.epoch in self._closing or (slots is not None and slots.shares_pages and bool(out.chunks))

    def _release_pages(self, out: Outgoing) -> Actions:
        """Releases them as soon as nothing can read them, and forgets a hand-off of which nothing is left."""
        is_over = out.first_tokens is not None and self._is_read(out) if out.is_live else not out.is_gathering
        is_over = is_over and not self._is_shared(out)
        released: Actions = [ReleasePages(out.key)] if out.holds_pages and is_over else []
        out.holds_pages = out.holds_pages and not is_over
        if out.state is SendState.SETTLED and not out.holds_pages and not out.chunks:
            self._outgoing.pop(out.key, None)
        return released

    def _finish(self, out: Outgoing, chunk: Chunk) -> Actions:
        """Nothing touches the chunk's slot any more."""
        del out.chunks[chunk.index]
        self._free_slot(chunk)
        return self._release_pages(out) + self._pump(chunk.epoch)

    def _free_slot(self, chunk: Chunk) -> None:
        slots = self._slots.get(chunk.epoch)
        if slots is not None:
            slots.free_slots.append(chunk.slot)
