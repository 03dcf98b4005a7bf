"""The receiving side of every hand-off of one worker: events in, actions out. No clock, socket or tensor.

A hand-off is (request, attempt, pair epoch); an event for one that is not here, or not in a state that TABLE lists for
it, is dropped. From the router's announcement and the prefill worker's Open, in either order:

    Reserve -> Reserved sent -> an offer waits for its landing slot -> Land + Grant -> landed
    -> commit received and all landed -> Ready, Committed sent

A granted chunk is always landed, also after a cancel, and only then are the pages released: nothing that the transport
may still write to is ever free. An Abort is always answered with an Abort, after which no grant of it can follow. A
hand-off that fails reports it once it has drained, with how many tokens of the prompt have landed whole.
A fetch is a hand-off of a prefix that the sender's cache has: its Open says of how many tokens, and nothing follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from cluster.kv_groups import KvGroup
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from kv_transfer.actions import Actions, Chunk, Fail, Land, Range, Ready, ReleasePages, Reserve, SendMessage

Reason = worker_pb2.Failed.Reason


class ReceiveState(Enum):
    ANNOUNCED = "announced"  # the router expects it
    WAITING = "waiting"  # the prefill worker too: blocks are wanted
    RECEIVING = "receiving"  # blocks are held; chunks land
    CLOSING = "closing"  # aborted; what was granted drains
    READY = "ready"  # handed over, and forgotten here
    CLOSED = "closed"  # over, and forgotten here


class ReceiveEvent(Enum):
    OPENED = "opened"
    RESERVED = "reserved"
    COMPLETED = "completed"
    CANCEL = "cancel"
    FAILED = "failed"
    PEER_ABORTED = "peer aborted"
    CONNECTION_LOST = "connection lost"
    DRAINED = "drained"


_ENDS = dict.fromkeys(
    (ReceiveEvent.CANCEL, ReceiveEvent.FAILED, ReceiveEvent.PEER_ABORTED, ReceiveEvent.CONNECTION_LOST),
    ReceiveState.CLOSING,
)
TABLE: Mapping[ReceiveState, Mapping[ReceiveEvent, ReceiveState]] = MappingProxyType(
    {
        ReceiveState.ANNOUNCED: {ReceiveEvent.OPENED: ReceiveState.WAITING, ReceiveEvent.CANCEL: ReceiveState.CLOSING},
        ReceiveState.WAITING: {ReceiveEvent.RESERVED: ReceiveState.RECEIVING, **_ENDS},
        ReceiveState.RECEIVING: {ReceiveEvent.COMPLETED: ReceiveState.READY, **_ENDS},
        ReceiveState.CLOSING: {ReceiveEvent.DRAINED: ReceiveState.CLOSED},
        ReceiveState.READY: {},
        ReceiveState.CLOSED: {},
    }
)
"""Every legal move. What is not here is dropped: it belongs to a moment that is over."""


@dataclass
class Incoming:
    """One hand-off. Its epoch is known once the prefill worker has opened it."""

    key: RequestKey
    num_tokens: int
    groups: Sequence[KvGroup]
    is_fetch: bool = False
    epoch: str | None = None
    state: ReceiveState = ReceiveState.ANNOUNCED
    num_cached_tokens: int = 0
    landing: dict[int, Chunk] = field(default_factory=dict)
    """Chunks granted and not landed."""
    landed: list[Range] = field(default_factory=list)
    commit: handoff_pb2.Commit | None = None
    failure: tuple[Reason, str] | None = None
    """The failure to report once drained; None when the router asked for the end, or learns of it from the sender."""

    def advance(self, event: ReceiveEvent) -> bool:
        """False, and nothing changed, when the table has no such move."""
        state = TABLE[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True

    @property
    def is_complete(self) -> bool:
        return self.commit is not None and len(self.landed) == self.commit.num_chunks

    def first_missing(self, place: int) -> int:
        """The first token of which a group's KV must land: of a window, those that the token behind the last sees."""
        return max(self.num_cached_tokens, self.groups[place].first_seen(self.num_tokens))

    @property
    def num_missing_cells(self) -> int:
        """Tokens times layers that must land."""
        groups = enumerate(self.groups)
        return sum((self.num_tokens - self.first_missing(place)) * len(group.layers) for place, group in groups)

    @property
    def num_whole_tokens(self) -> int:
        """Tokens from the prompt's beginning on that are here in every layer, as far as they are needed there."""
        ends = [[self.first_missing(place)] * len(group.layers) for place, group in enumerate(self.groups)]
        for where in sorted(self.landed, key=lambda r: r.token_start):
            for layer in range(where.layer_start, where.layer_end):
                if where.token_start <= ends[where.group][layer]:
                    ends[where.group][layer] = max(ends[where.group][layer], where.token_end)
        return min(map(min, ends))


@dataclass
class LandingSlots:
    """The landing slots of one connection, and offers that wait for theirs."""

    capacity: int
    """Tokens times layers that one slot holds."""
    free_slots: set[int]
    num_slots: int
    is_open: bool = False
    offers: deque[Chunk] = field(default_factory=deque)


class Receiver:
    """All hand-offs into one worker, whose model has these groups of layers."""

    def __init__(self, groups: Sequence[KvGroup]) -> None:
        self._groups = groups
        self._num_layers = sum(len(group.layers) for group in groups)
        self._incoming: dict[RequestKey, Incoming] = {}
        self._opened: dict[RequestKey, tuple[str, int]] = {}
        """Epochs whose Open arrived before the router's announcement, and the tokens that it named."""
        self._slots: dict[str, LandingSlots] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._incoming

    def count_stages(self) -> dict[str, int]:
        """Landing slots of all connections by what is in them."""
        posted = sum(len(incoming.landing) for incoming in self._incoming.values())
        return {"posted": posted, "free": sum(len(slots.free_slots) for slots in self._slots.values())}

    # Connections

    def connection_called(self, epoch: str, chunk_tokens: int, num_slots: int) -> Actions:
        """A prefill worker has called; a landing slot will hold `chunk_tokens` tokens of all layers."""
        self._slots[epoch] = LandingSlots(chunk_tokens * self._num_layers, set(range(num_slots)), num_slots)
        return []

    def connection_open(self, epoch: str) -> Actions:
        """The pair is open on every rank: receives may be posted on it."""
        slots = self._slots[epoch]
        slots.is_open = True
        return self._pump(slots)

    def connection_lost(
        self,
        epoch: str,
        reason: Reason = worker_pb2.Failed.REASON_PEER_LOST,
        why: str = "the prefill worker was lost during the hand-off",
    ) -> Actions:
        """The connection is retired, and what had not been handed over is lost with it."""
        self._slots.pop(epoch, None)
        self._opened = {key: opened for key, opened in self._opened.items() if opened[0] != epoch}
        actions: Actions = []
        for incoming in [i for i in self._incoming.values() if i.epoch == epoch]:
            actions += self._close(incoming, ReceiveEvent.CONNECTION_LOST, (reason, why))
        return actions

    # One hand-off

    def announce(self, key: RequestKey, num_tokens: int, *, is_fetch: bool = False) -> Actions:
        """The router expects this request's KV to arrive from a prefill worker; in a fetch, so many tokens at most."""
        incoming = self._incoming[key] = Incoming(key, num_tokens, self._groups, is_fetch)
        opened = self._opened.pop(key, None)
        return [] if opened is None else self._match(incoming, *opened)

    def opened(self, epoch: str, key: RequestKey, num_tokens: int) -> Actions:
        """A prefill worker asks for the request's reservation; in a fetch, for so many tokens."""
        incoming = self._incoming.get(key)
        if incoming is None:
            self._opened[key] = epoch, num_tokens
            return []
        if incoming.state is not ReceiveState.ANNOUNCED:
            return [self._abort_message(epoch, key, "this request is being handed off already")]
        return self._match(incoming, epoch, num_tokens)

    def num_tokens(self, key: RequestKey) -> int:
        """Tokens that are handed over: those that the router announced, or in a fetch what the sender has of them."""
        return self._incoming[key].num_tokens

    def reserved(self, key: RequestKey, num_cached_tokens: int) -> Actions:
        """Blocks are held for the whole prompt; its first `num_cached_tokens` tokens are here already."""
        incoming = self._incoming[key]
        if not incoming.advance(ReceiveEvent.RESERVED):
            return []
        assert incoming.epoch is not None
        incoming.num_cached_tokens = num_cached_tokens
        message = handoff_pb2.Reserved(key=key.to_proto(), num_cached_tokens=num_cached_tokens)
        return [SendMessage(incoming.epoch, handoff_pb2.ReceiverMessage(reserved=message))]

    def refused(self, key: RequestKey, why: str) -> Actions:
        """There are no blocks for it, and it is not to wait for any."""
        incoming = self._incoming[key]
        return self._fail(incoming, why, worker_pb2.Failed.REASON_CAPACITY)

    def offered(self, epoch: str, offer: handoff_pb2.Chunk) -> Actions:
        """A chunk waits in the sender's slot."""
        incoming = self._find(epoch, RequestKey.of(offer.key))
        slots = self._slots.get(epoch)
        if incoming is None or slots is None or incoming.state is not ReceiveState.RECEIVING:
            return []
        chunk = Chunk.from_proto(offer, epoch)
        problem = self._problem_of(chunk, incoming, slots)
        if problem:
            return self._fail(incoming, problem)
        slots.offers.append(chunk)
        return self._pump(slots)

    def landed(
        self, chunk: Chunk, error: str = "", reason: Reason = worker_pb2.Failed.REASON_TRANSFER_FAILED
    ) -> Actions:
        """A granted chunk has been scattered into the pages on every rank, or its transfer failed."""
        incoming = self._incoming[chunk.key]
        del incoming.landing[chunk.index]
        if not error:
            incoming.landed.append(chunk.range)
        slots = self._slots.get(chunk.epoch)
        if slots is not None:
            slots.free_slots.add(chunk.slot)
        if error and incoming.state is ReceiveState.RECEIVING:
            actions = self._fail(incoming, error, reason)
        elif incoming.state is ReceiveState.CLOSING:
            actions = self._close_if_drained(incoming)
        else:
            actions = self._finish_if_complete(incoming)
        return actions + (self._pump(slots) if slots is not None else [])

    def committed(self, epoch: str, commit: handoff_pb2.Commit) -> Actions:
        """The sender has offered everything."""
        incoming = self._find(epoch, RequestKey.of(commit.key))
        if incoming is None or incoming.state is not ReceiveState.RECEIVING or incoming.commit is not None:
            return []
        incoming.commit = commit
        return self._finish_if_complete(incoming)

    def cancel(self, key: RequestKey, reason: str) -> Actions:
        """The router does not want the request any more."""
        incoming = self._incoming.get(key)
        if incoming is None or ReceiveEvent.CANCEL not in TABLE[incoming.state]:
            return []
        abort: Actions = [] if incoming.epoch is None else [self._abort_message(incoming.epoch, key, reason)]
        return abort + self._close(incoming, ReceiveEvent.CANCEL, None)

    def peer_aborted(self, epoch: str, key: RequestKey) -> Actions:
        """The sender aborted the request; the router learns of it from the sender."""
        if key in self._opened and self._opened[key][0] == epoch:
            del self._opened[key]
        answer: Actions = [self._abort_message(epoch, key, "aborted")]
        incoming = self._find(epoch, key)
        return answer if incoming is None else answer + self._close(incoming, ReceiveEvent.PEER_ABORTED, None)

    def check_idle(self) -> None:
        """Raises AssertionError unless every hand-off is over and every slot of the open connections is back."""
        assert not self._incoming and not self._opened, (self._incoming, self._opened)
        for slots in self._slots.values():
            assert not slots.offers and len(slots.free_slots) == slots.num_slots, slots

    def _find(self, epoch: str, key: RequestKey) -> Incoming | None:
        incoming = self._incoming.get(key)
        return incoming if incoming is not None and incoming.epoch == epoch else None

    def _match(self, incoming: Incoming, epoch: str, num_tokens: int) -> Actions:
        incoming.advance(ReceiveEvent.OPENED)
        incoming.epoch = epoch
        if incoming.is_fetch:
            incoming.num_tokens = min(incoming.num_tokens, num_tokens)
        return [Reserve(incoming.key)]

    def _problem_of(self, chunk: Chunk, incoming: Incoming, slots: LandingSlots) -> str:
        """Why an offer breaks the protocol, or nothing."""
        where = chunk.range
        fits = 0 < where.num_cells <= slots.capacity and where.num_tokens > 0
        inside = where.group < len(self._groups) and where.layer_end <= len(self._groups[where.group].layers)
        inside = inside and incoming.first_missing(where.group) <= where.token_start
        if not fits or not inside or where.token_end > incoming.num_tokens or chunk.slot >= slots.num_slots:
            return f"the prefill worker offered {where}, which was not reserved"
        waiting = [c.index for c in slots.offers if c.key == chunk.key]
        if chunk.index in incoming.landing or chunk.index in waiting:
            return f"the prefill worker offered chunk {chunk.index} twice"
        return ""

    def _pump(self, slots: LandingSlots) -> Actions:
        """Grants offers whose slots are free, in their order."""
        actions: Actions = []
        for chunk in list(slots.offers) if slots.is_open else []:
            if chunk.slot not in slots.free_slots:
                continue
            slots.offers.remove(chunk)
            slots.free_slots.remove(chunk.slot)
            self._incoming[chunk.key].landing[chunk.index] = chunk
            grant = handoff_pb2.Grant(key=chunk.key.to_proto(), chunk_index=chunk.index)
            actions += [Land(chunk), SendMessage(chunk.epoch, handoff_pb2.ReceiverMessage(grant=grant))]
        return actions

    def _finish_if_complete(self, incoming: Incoming) -> Actions:
        if not incoming.is_complete:
            return []
        assert incoming.epoch is not None and incoming.commit is not None
        num_cells = sum(where.num_cells for where in incoming.landed)
        if num_cells != incoming.num_missing_cells or incoming.num_whole_tokens != incoming.num_tokens:
            covered = f"{incoming.num_whole_tokens} of {incoming.num_tokens} prompt tokens"
            return self._fail(incoming, f"the hand-off was committed with {covered}")
        incoming.advance(ReceiveEvent.COMPLETED)
        del self._incoming[incoming.key]
        answer = handoff_pb2.ReceiverMessage(committed=handoff_pb2.Committed(key=incoming.commit.key))
        return [SendMessage(incoming.epoch, answer), Ready(incoming.key, tuple(incoming.commit.first_tokens))]

    def _fail(
        self, incoming: Incoming, message: str, reason: Reason = worker_pb2.Failed.REASON_TRANSFER_FAILED
    ) -> Actions:
        assert incoming.epoch is not None
        abort = self._abort_message(incoming.epoch, incoming.key, message)
        return [abort, *self._close(incoming, ReceiveEvent.FAILED, (reason, message))]

    def _close(self, incoming: Incoming, event: ReceiveEvent, failure: tuple[Reason, str] | None) -> Actions:
        """Drops what was not granted; what was granted drains first."""
        if not incoming.advance(event):
            return []
        incoming.failure = failure
        slots = self._slots.get(incoming.epoch or "")
        if slots is not None:
            slots.offers = deque(chunk for chunk in slots.offers if chunk.key != incoming.key)
        return self._close_if_drained(incoming)

    def _close_if_drained(self, incoming: Incoming) -> Actions:
        if incoming.landing or not incoming.advance(ReceiveEvent.DRAINED):
            return []
        del self._incoming[incoming.key]
        num_kept = incoming.num_whole_tokens
        failed: Actions = [] if incoming.failure is None else [Fail(incoming.key, *incoming.failure, num_kept)]
        return [*failed, ReleasePages(incoming.key, num_kept)]

    @staticmethod
    def _abort_message(epoch: str, key: RequestKey, reason: str) -> SendMessage:
        message = handoff_pb2.Abort(key=key.to_proto(), reason=reason)
        return SendMessage(epoch, handoff_pb2.ReceiverMessage(abort=message))
