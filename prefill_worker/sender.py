"""The sending side of every hand-off of one worker: events in, actions out. No clock, socket or tensor.

Life of a hand-off: Open told -> Reserved heard -> BeginPrefill -> each computed range becomes chunks:

    GATHERING (pages -> send slot) -> OFFERED (told) -> SENDING (granted) -> DONE (slot free again)

-> Commit told once every chunk is offered and the first tokens are known -> Committed heard.
A granted chunk is always sent, also after an abort: the receiver has posted for it. An offered chunk keeps its slot
until it is granted or the receiver has answered the abort, so that a grant on its way finds what it was given for.
Pages are released once no gather can touch them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from kv_transfer.actions import Actions, BeginPrefill, Fail, Gather, ReleasePages, Tell, Transmit


class ChunkState(Enum):
    GATHERING = "gathering"
    OFFERED = "offered"
    SENDING = "sending"
    DONE = "done"


@dataclass
class Chunk:
    index: int
    slot: int
    token_start: int
    token_end: int
    state: ChunkState = ChunkState.GATHERING


@dataclass
class Outgoing:
    """One request's hand-off. `next_token` is where the next chunk starts; None until the receiver has reserved."""

    key: RequestKey
    peer: str
    num_tokens: int
    next_token: int | None = None
    num_computed: int = 0
    chunks: dict[int, Chunk] = field(default_factory=dict)
    first_tokens: list[handoff_pb2.FirstToken] | None = None
    is_committing: bool = False
    is_closing: bool = False
    """Aborted, or its peer is lost: nothing new is offered."""
    is_settled: bool = False
    """The receiver has answered the commit or the abort, or is gone: no grant can arrive any more."""
    holds_pages: bool = True

    def has_state(self, *states: ChunkState) -> bool:
        return any(chunk.state in states for chunk in self.chunks.values())


class Sender:
    """All hand-offs of one prefill worker, over its `num_slots` send slots of `chunk_tokens` tokens each."""

    def __init__(self, num_slots: int, chunk_tokens: int) -> None:
        self._free_slots = list(range(num_slots))
        self._chunk_tokens = chunk_tokens
        self._outgoing: dict[RequestKey, Outgoing] = {}
        self._chunk_tokens_of: dict[str, int] = {}
        """Peers whose pair is up, and the most tokens of a chunk that both sides have slots for."""

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._outgoing

    def open(self, key: RequestKey, peer: str, num_tokens: int) -> Actions:
        """The router named a decode worker for a prompt of `num_tokens` tokens."""
        self._outgoing[key] = Outgoing(key, peer, num_tokens)
        message = handoff_pb2.Open(key=key.to_proto(), num_prompt_tokens=num_tokens)
        return [Tell(peer, handoff_pb2.SenderMessage(open=message))]

    def peer_ready(self, peer: str, chunk_tokens: int) -> Actions:
        """The pair's communicators are up on every rank; the receiver's slots hold `chunk_tokens` tokens."""
        self._chunk_tokens_of[peer] = min(self._chunk_tokens, chunk_tokens)
        return self._pump()

    def reserved(self, key: RequestKey, num_cached_tokens: int) -> Actions:
        """The receiver holds blocks for the prompt and already has its first `num_cached_tokens` tokens."""
        out = self._outgoing.get(key)
        if out is None or out.is_closing:
            return []
        out.next_token = num_cached_tokens
        return [BeginPrefill(key)]

    def computed(self, key: RequestKey, num_computed: int) -> Actions:
        """The KV of tokens [0, num_computed) lies in this worker's pages."""
        out = self._outgoing.get(key)
        if out is None or out.is_closing:
            return []
        out.num_computed = num_computed
        return self._pump()

    def commit(self, key: RequestKey, first_tokens: list[handoff_pb2.FirstToken]) -> Actions:
        """The prompt is computed and its first tokens are sampled."""
        out = self._outgoing.get(key)
        if out is None or out.is_closing:
            return []
        out.first_tokens = first_tokens
        return self._pump() + self._commit_if_offered(out)

    def gathered(self, key: RequestKey, chunk_index: int) -> Actions:
        """A chunk lies in its send slot on every rank."""
        out = self._outgoing[key]
        chunk = out.chunks[chunk_index]
        if out.is_closing:
            self._finish_chunk(chunk)
            return self._release_pages(out) + self._forget_if_done(out) + self._pump()
        chunk.state = ChunkState.OFFERED
        offer = handoff_pb2.Offer(
            key=key.to_proto(), chunk_index=chunk_index, token_start=chunk.token_start, token_end=chunk.token_end
        )
        told: Actions = [Tell(out.peer, handoff_pb2.SenderMessage(offer=offer))]
        return told + self._release_pages(out) + self._commit_if_offered(out)

    def granted(self, key: RequestKey, chunk_index: int) -> Actions:
        """The receiver has posted a receive for the chunk. A grant for what is unknown is dropped by identity."""
        out = self._outgoing.get(key)
        chunk = out.chunks.get(chunk_index) if out else None
        if out is None or chunk is None or chunk.state is not ChunkState.OFFERED:
            return []
        chunk.state = ChunkState.SENDING
        return [Transmit(key, out.peer, chunk_index, chunk.slot, chunk.token_end - chunk.token_start)]

    def sent(self, key: RequestKey, chunk_index: int) -> Actions:
        """The transport is done with a chunk's slot, whether or not it arrived."""
        out = self._outgoing[key]
        self._finish_chunk(out.chunks[chunk_index])
        return self._forget_if_done(out) + self._pump()

    def committed(self, key: RequestKey) -> Actions:
        """The receiver has everything."""
        out = self._outgoing.get(key)
        if out is None or not out.is_committing:
            return []
        out.is_settled = True
        return self._forget_if_done(out)

    def abort(self, key: RequestKey, reason: str) -> Actions:
        """The router cancelled, or this worker cannot go on. The receiver will answer with its own Abort."""
        out = self._outgoing.get(key)
        if out is None or out.is_closing:
            return []
        out.is_closing = True
        message = handoff_pb2.Abort(key=key.to_proto(), reason=reason)
        return [Tell(out.peer, handoff_pb2.SenderMessage(abort=message)), *self._release_pages(out)]

    def peer_aborted(self, key: RequestKey) -> Actions:
        """The receiver gave the request up, or answers an abort: every grant it made has been heard by now."""
        out = self._outgoing.get(key)
        if out is None:
            return []
        failed: Actions = []
        if not out.is_closing:
            reason = worker_pb2.Failed.REASON_TRANSFER_FAILED
            failed.append(Fail(key, reason, "the decode worker gave the hand-off up"))
        return failed + self._settle(out)

    def peer_lost(self, peer: str) -> Actions:
        """The link to a decode worker is gone; its requests cannot be handed off there."""
        self._chunk_tokens_of.pop(peer, None)
        actions: Actions = []
        for out in [o for o in self._outgoing.values() if o.peer == peer]:
            if not out.is_closing:
                reason = worker_pb2.Failed.REASON_PEER_LOST
                actions.append(Fail(out.key, reason, "the decode worker was lost during the hand-off"))
            actions += self._settle(out)
        return actions

    def check_idle(self, num_slots: int) -> None:
        """Raises AssertionError unless every hand-off is over and every slot is back."""
        assert not self._outgoing and len(self._free_slots) == num_slots, (self._outgoing, self._free_slots)

    def _settle(self, out: Outgoing) -> Actions:
        out.is_closing = out.is_settled = True
        for chunk in out.chunks.values():
            if chunk.state is ChunkState.OFFERED:
                self._finish_chunk(chunk)
        return self._release_pages(out) + self._forget_if_done(out) + self._pump()

    def _pump(self) -> Actions:
        """Gathers what is computed and not yet offered, oldest request first, while there are slots."""
        actions: Actions = []
        for out in self._outgoing.values():
            chunk_tokens = self._chunk_tokens_of.get(out.peer)
            if out.is_closing or out.next_token is None or chunk_tokens is None:
                continue
            while self._free_slots and out.next_token < out.num_computed:
                end = min(out.next_token + chunk_tokens, out.num_computed)
                chunk = Chunk(len(out.chunks), self._free_slots.pop(), out.next_token, end)
                out.chunks[chunk.index] = chunk
                out.next_token = end
                actions.append(Gather(out.key, out.peer, chunk.index, chunk.slot, chunk.token_start, end))
        return actions

    def _commit_if_offered(self, out: Outgoing) -> Actions:
        is_offered = out.next_token == out.num_tokens and not out.has_state(ChunkState.GATHERING)
        if out.is_closing or out.is_committing or out.first_tokens is None or not is_offered:
            return []
        out.is_committing = True
        commit = handoff_pb2.Commit(key=out.key.to_proto(), num_chunks=len(out.chunks), first_tokens=out.first_tokens)
        return [*self._release_pages(out), Tell(out.peer, handoff_pb2.SenderMessage(commit=commit))]

    def _release_pages(self, out: Outgoing) -> Actions:
        is_read = out.is_closing or (out.next_token == out.num_tokens and out.first_tokens is not None)
        if not out.holds_pages or not is_read or out.has_state(ChunkState.GATHERING):
            return []
        out.holds_pages = False
        return [ReleasePages(out.key)]

    def _finish_chunk(self, chunk: Chunk) -> None:
        chunk.state = ChunkState.DONE
        self._free_slots.append(chunk.slot)

    def _forget_if_done(self, out: Outgoing) -> Actions:
        busy = (ChunkState.GATHERING, ChunkState.OFFERED, ChunkState.SENDING)
        if out.is_settled and not out.holds_pages and not out.has_state(*busy):
            self._outgoing.pop(out.key, None)
        return []
