"""The receiving side of every hand-off of one worker: events in, actions out. No clock, socket or tensor.

Life of a hand-off, from the router's announcement and the prefill worker's Open, in either order:

    both heard -> Reserve -> Reserved told -> offers queue -> Land + Grant when a landing slot is free -> landed
    -> commit heard and all landed -> Ready, Committed told

A granted chunk is always landed, also after a cancel, and only then are the pages released: nothing that the transport
may still write to is ever free. An Abort is always answered with an Abort, after which no grant of it can follow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from kv_transfer.actions import Actions, Fail, Land, Ready, ReleasePages, Reserve, Tell


@dataclass
class Incoming:
    """One request's hand-off."""

    key: RequestKey
    num_tokens: int
    peer: str | None = None
    is_reserved: bool = False
    num_landed_tokens: int = 0
    """Tokens of the prompt here, those from the prefix cache included."""
    num_landed_chunks: int = 0
    landing: set[int] = field(default_factory=set)
    """Chunks granted and not landed."""
    commit: handoff_pb2.Commit | None = None
    is_closing: bool = False


@dataclass(frozen=True)
class QueuedOffer:
    key: RequestKey
    chunk_index: int
    token_start: int
    token_end: int


class Receiver:
    """All hand-offs into one decode worker, over its `num_slots` landing slots of `chunk_tokens` tokens each."""

    def __init__(self, num_slots: int, chunk_tokens: int) -> None:
        self._free_slots = list(range(num_slots))
        self._chunk_tokens = chunk_tokens
        self._incoming: dict[RequestKey, Incoming] = {}
        self._opened: dict[RequestKey, str] = {}
        """Peers whose Open arrived before the router's announcement."""
        self._offers: deque[QueuedOffer] = deque()
        self._slot_of: dict[tuple[RequestKey, int], int] = {}
        self._grant_number = 0
        self._ready_peers: set[str] = set()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._incoming

    def announce(self, key: RequestKey, num_tokens: int) -> Actions:
        """The router expects this request's KV to arrive from a prefill worker."""
        incoming = self._incoming[key] = Incoming(key, num_tokens)
        incoming.peer = self._opened.pop(key, None)
        return [Reserve(key)] if incoming.peer is not None else []

    def opened(self, peer: str, key: RequestKey) -> Actions:
        """A prefill worker asks for the request's reservation."""
        incoming = self._incoming.get(key)
        if incoming is None:
            self._opened[key] = peer
            return []
        if incoming.peer is not None or incoming.is_closing:
            return [self._tell_abort(peer, key, "this request is already being handed off")]
        incoming.peer = peer
        return [Reserve(key)]

    def peer_ready(self, peer: str) -> Actions:
        """The pair's communicators are up on every rank: receives may be posted on it."""
        self._ready_peers.add(peer)
        return self._pump()

    def reserved(self, key: RequestKey, num_cached_tokens: int) -> Actions:
        """Blocks are held for the whole prompt; its first `num_cached_tokens` tokens are here already."""
        incoming = self._incoming[key]
        assert incoming.peer is not None
        incoming.is_reserved = True
        incoming.num_landed_tokens = num_cached_tokens
        message = handoff_pb2.Reserved(key=key.to_proto(), num_cached_tokens=num_cached_tokens)
        return [Tell(incoming.peer, handoff_pb2.ReceiverMessage(reserved=message))]

    def offered(self, peer: str, offer: handoff_pb2.Offer) -> Actions:
        """A chunk waits in the sender's slot. Dropped by identity when the request is not this peer's."""
        incoming = self._incoming.get(key := RequestKey.of(offer.key))
        if incoming is None or incoming.is_closing or incoming.peer != peer:
            return []
        size = offer.token_end - offer.token_start
        if not incoming.is_reserved or not 0 < size <= self._chunk_tokens or offer.token_end > incoming.num_tokens:
            return self._fail(incoming, "the prefill worker offered a token range that was not reserved")
        self._offers.append(QueuedOffer(key, offer.chunk_index, offer.token_start, offer.token_end))
        return self._pump()

    def landed(self, key: RequestKey, chunk_index: int, num_tokens: int, error: str = "") -> Actions:
        """A granted chunk has been scattered into the pages on every rank, or its transfer failed."""
        self._free_slots.append(self._slot_of.pop((key, chunk_index)))
        incoming = self._incoming[key]
        incoming.landing.discard(chunk_index)
        incoming.num_landed_tokens += num_tokens
        incoming.num_landed_chunks += 1
        if incoming.is_closing:
            return self._close_if_drained(incoming) + self._pump()
        if error:
            return self._fail(incoming, error) + self._pump()
        return self._finish_if_complete(incoming) + self._pump()

    def committed(self, peer: str, commit: handoff_pb2.Commit) -> Actions:
        """The sender has offered everything."""
        incoming = self._incoming.get(RequestKey.of(commit.key))
        if incoming is None or incoming.is_closing or incoming.peer != peer:
            return []
        incoming.commit = commit
        return self._finish_if_complete(incoming)

    def cancel(self, key: RequestKey, reason: str) -> Actions:
        """The router does not want the request any more."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.is_closing:
            return []
        told: Actions = [] if incoming.peer is None else [self._tell_abort(incoming.peer, key, reason)]
        return told + self._close(incoming)

    def peer_aborted(self, peer: str, key: RequestKey) -> Actions:
        """The sender gave the request up; the router hears of it from the sender."""
        if self._opened.get(key) == peer:
            del self._opened[key]
        answer: Actions = [self._tell_abort(peer, key, "aborted")]
        incoming = self._incoming.get(key)
        if incoming is None or incoming.is_closing or incoming.peer != peer:
            return answer
        return answer + self._close(incoming)

    def peer_lost(self, peer: str) -> Actions:
        """The link from a prefill worker is gone, and what it had not handed over with it."""
        self._ready_peers.discard(peer)
        self._opened = {key: p for key, p in self._opened.items() if p != peer}
        actions: Actions = []
        for incoming in [i for i in self._incoming.values() if i.peer == peer and not i.is_closing]:
            reason = worker_pb2.Failed.REASON_PEER_LOST
            actions.append(Fail(incoming.key, reason, "the prefill worker was lost during the hand-off"))
            actions += self._close(incoming)
        return actions

    def check_idle(self, num_slots: int) -> None:
        """Raises AssertionError unless every hand-off is over and every slot is back."""
        assert not self._incoming and not self._offers and len(self._free_slots) == num_slots, (
            self._incoming,
            self._offers,
            self._free_slots,
        )

    def _pump(self) -> Actions:
        """Grants offers in their order while there are landing slots; those of a pair still opening wait."""
        actions: Actions = []
        waiting: deque[QueuedOffer] = deque()
        while self._offers and self._free_slots:
            offer = self._offers.popleft()
            incoming = self._incoming[offer.key]
            assert incoming.peer is not None
            if incoming.peer not in self._ready_peers:
                waiting.append(offer)
                continue
            slot = self._slot_of[(offer.key, offer.chunk_index)] = self._free_slots.pop()
            incoming.landing.add(offer.chunk_index)
            self._grant_number += 1
            grant = handoff_pb2.Grant(
                key=offer.key.to_proto(), chunk_index=offer.chunk_index, grant_number=self._grant_number
            )
            land = Land(offer.key, incoming.peer, offer.chunk_index, slot, offer.token_start, offer.token_end)
            actions += [land, Tell(incoming.peer, handoff_pb2.ReceiverMessage(grant=grant))]
        self._offers.extendleft(reversed(waiting))
        return actions

    def _finish_if_complete(self, incoming: Incoming) -> Actions:
        commit = incoming.commit
        if commit is None or incoming.num_landed_chunks < commit.num_chunks:
            return []
        if incoming.num_landed_tokens != incoming.num_tokens:
            covered = f"{incoming.num_landed_tokens} of {incoming.num_tokens} prompt tokens"
            return self._fail(incoming, f"the hand-off was committed with {covered}")
        assert incoming.peer is not None
        del self._incoming[incoming.key]
        answer = handoff_pb2.ReceiverMessage(committed=handoff_pb2.Committed(key=commit.key))
        return [Tell(incoming.peer, answer), Ready(incoming.key, tuple(commit.first_tokens))]

    def _fail(self, incoming: Incoming, message: str) -> Actions:
        reason = worker_pb2.Failed.REASON_TRANSFER_FAILED
        assert incoming.peer is not None
        told = self._tell_abort(incoming.peer, incoming.key, message)
        return [Fail(incoming.key, reason, message), told, *self._close(incoming)]

    def _close(self, incoming: Incoming) -> Actions:
        """Drops what was not granted; what was granted drains first."""
        incoming.is_closing = True
        self._offers = deque(offer for offer in self._offers if offer.key != incoming.key)
        return self._close_if_drained(incoming)

    def _close_if_drained(self, incoming: Incoming) -> Actions:
        if incoming.landing:
            return []
        del self._incoming[incoming.key]
        return [ReleasePages(incoming.key)]

    @staticmethod
    def _tell_abort(peer: str, key: RequestKey, reason: str) -> Tell:
        message = handoff_pb2.Abort(key=key.to_proto(), reason=reason)
        return Tell(peer, handoff_pb2.ReceiverMessage(abort=message))
