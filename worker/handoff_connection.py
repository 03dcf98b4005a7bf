"""What the roles ask for beyond this process's memory: links to other workers, pairs of ranks, and KV operations.

Turns a role's wish into a message on a link or a command in the rank log, and what comes back into the role's events.

    link opened -> greeted (or called) -> pair opening on every rank -> up -> (suspected, heard again) -> retired

A link is retired as a whole, by the first of: its stream broke, the peer was silent, an operation failed, an answer is
overdue, it was idle and another was wanted. Its epoch is then unknown here, so that whatever comes late is dropped; its
operations still under way end by themselves once the pair is closed. Runs on the engine thread.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from cluster.request_key import RequestKey
from decode_worker.role import DecodeRole
from kv_transfer.actions import Chunk
from prefill_worker.role import PrefillRole
from worker.metrics import HandoffMetrics
from worker.ranks import Ranks

logger = logging.getLogger(__name__)

Failed = worker_pb2.Failed
Kind = rank_pb2.RankReply.Kind
_REASONS = {rank_pb2.RankReply.KIND_CORRUPT: Failed.REASON_CORRUPT}
Done = Callable[[str, Kind, int], None]
"""(error or "", kind of the error, bytes moved over all ranks)."""


class PeerLinks(Protocol):
    """The speaking side of hand-offs; every method returns at once."""

    def open_link(self, epoch: str, address: str, incarnation: str) -> None: ...

    def tell(self, epoch: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None: ...

    def close_link(self, epoch: str) -> None: ...


class LinkState(Enum):
    OPENING = "opening"
    OPEN = "open"
    SUSPECT = "suspect"
    CLOSING = "closing"


@dataclass
class PeerLink:
    """One link that is not retired. `peer` is set on the sending side, where links are chosen by it."""

    epoch: str
    peer: str
    last_used: float
    transport: str = ""
    num_slots: int = 0
    slot_bytes: dict[int, int] = field(default_factory=dict)
    """What lies gathered in each send slot, over all ranks."""
    has_pair: bool = False
    is_up: bool = False
    is_suspect: bool = False
    unanswered: dict[tuple[RequestKey, int], float] = field(default_factory=dict)
    """When each offer (by chunk) and commit or abort (-1) was told that the receiver has not answered."""

    @property
    def state(self) -> LinkState:
        if self.is_suspect:
            return LinkState.SUSPECT
        return LinkState.OPEN if self.is_up else LinkState.OPENING


class Carrier:
    """Of one worker. `links`, `ranks` and the roles are set before the first event."""

    links: PeerLinks
    ranks: Ranks
    prefill: PrefillRole
    decode: DecodeRole

    def __init__(
        self,
        worker_id: str,
        stats: worker_pb2.WorkerStats,
        metrics: HandoffMetrics,
        *,
        max_pairs: int,
        answer_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_id = worker_id
        self._stats = stats
        self._metrics = metrics
        self._max_pairs = max_pairs
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock
        self._links: dict[str, PeerLink] = {}
        self._on_done: dict[int, Done] = {}
        self._closing: dict[str, PeerLink] = {}
        """Retired links whose pair some rank has not closed yet."""
        self.last_step = 0
        """Number of the newest step that has ended."""

    # Links

    def link_to(self, peer: worker_pb2.Peer) -> str:
        """The epoch of the link to a decode worker; opens one when there is none."""
        name = f"{peer.worker_id}@{peer.incarnation}"
        for link in self._links.values():
            if link.peer == name:
                link.last_used = self._clock()
                return link.epoch
        epoch = f"{self._worker_id}-{peer.worker_id}-{uuid.uuid4().hex[:12]}"
        self._links[epoch] = PeerLink(epoch, name, self._clock())
        self._close_spare()
        self.links.open_link(epoch, peer.address, peer.incarnation)
        return epoch

    def link_greeted(self, epoch: str, hello: handoff_pb2.ReceiverHello) -> None:
        """A decode worker has answered: this worker sends."""
        self._open_pair(epoch, hello, hello.layout, is_sender=True)

    def link_called(self, epoch: str, hello: handoff_pb2.SenderHello, agreed: handoff_pb2.ReceiverHello) -> None:
        """A prefill worker has called: this worker receives."""
        self._links[epoch] = PeerLink(epoch, "", self._clock())
        self.decode.link_called(epoch, agreed.chunk_tokens, agreed.num_slots)
        self._open_pair(epoch, agreed, hello.layout, is_sender=False)

    def link_heard(self, epoch: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None:
        link = self._links.get(epoch)
        if link is None:
            return
        if isinstance(message, handoff_pb2.SenderMessage):
            self._note_asked(link, message)
            self.decode.hear(epoch, message)
        else:
            self._note_answer(link, message)
            self.prefill.hear(epoch, message)

    def link_suspected(self, epoch: str, is_suspect: bool) -> None:
        """The peer was silent, or is heard again."""
        link = self._links.get(epoch)
        if link is not None:
            link.is_suspect = is_suspect
            self.prefill.link_suspected(epoch, is_suspect)

    def link_down(self, epoch: str, why: str, is_final: bool = False) -> None:
        """The stream has ended. `is_final`: the two workers can never hand KV to one another."""
        self._retire(epoch, Failed.REASON_INCOMPATIBLE if is_final else Failed.REASON_PEER_LOST, why)

    def tick(self) -> None:
        """Now and then: retires links whose peer owes an answer for too long, and idle ones beyond the limit."""
        now = self._clock()
        for link in list(self._links.values()):
            oldest = min(link.unanswered.values(), default=now)
            if now - oldest > self._answer_timeout_s:
                why = f"the decode worker has not answered for {now - oldest:.1f} s"
                self._retire(link.epoch, Failed.REASON_TRANSFER_FAILED, why, label="timeout")
        self._close_spare()

    def command_done(self, number: int, error: str, kind: Kind, size_bytes: int) -> None:
        """Every rank has carried out a command of the log."""
        self._on_done.pop(number)(error, kind, size_bytes)

    def count_links(self) -> dict[str, int]:
        """Links by state."""
        counts = {state.value: 0 for state in LinkState} | {LinkState.CLOSING.value: len(self._closing)}
        for link in self._links.values():
            counts[link.state.value] += 1
        return counts

    def count_quarantined(self, *, is_sender: bool) -> int:
        """Slots of retired links that an operation may still touch."""
        return sum(link.num_slots for link in self._closing.values() if bool(link.peer) == is_sender)

    # Wishes of the roles

    def tell(self, epoch: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None:
        link = self._links.get(epoch)
        if link is None:
            return
        if isinstance(message, handoff_pb2.SenderMessage):
            self._note_told(link, message)
        else:
            self._note_answered(message)
        self.links.tell(epoch, message)

    def prompt_done(self, key: RequestKey) -> None:
        """The first tokens are sampled: from now on the client waits for the hand-off alone."""
        self._metrics.first_tokens(key, self._clock())

    def gather(self, chunk: Chunk, block_table: list[int], after_step: int) -> None:
        self._metrics.gather_issued(chunk, self._clock())
        link = self._links.get(chunk.epoch)

        def done(error: str, kind: Kind, size_bytes: int) -> None:
            self._stats.kv_bytes_sent += size_bytes
            if link is not None:
                link.slot_bytes[chunk.slot] = size_bytes
            self._retire_on(chunk.epoch, error, kind)
            self.prefill.gathered(chunk)

        self._issue(rank_pb2.RankCommand(gather=_pages_of(chunk, block_table, after_step)), done)

    def transmit(self, chunk: Chunk) -> None:
        link = self._links.get(chunk.epoch)

        def done(error: str, kind: Kind, _: int) -> None:
            if link is not None and not error:
                self._metrics.moved("sent", link.transport, link.slot_bytes.pop(chunk.slot, 0))
            self._retire_on(chunk.epoch, error, kind)
            self.prefill.sent(chunk)

        self._issue(rank_pb2.RankCommand(send=rank_pb2.Send(pair_epoch=chunk.epoch, slot=chunk.slot)), done)

    def land(self, chunk: Chunk, block_table: list[int]) -> None:
        link = self._links.get(chunk.epoch)

        def done(error: str, kind: Kind, size_bytes: int) -> None:
            self._stats.kv_bytes_received += size_bytes
            self._metrics.moved("received", link.transport if link is not None else "", size_bytes)
            reason = _REASONS.get(kind, Failed.REASON_TRANSFER_FAILED)
            if error:
                self._metrics.failed(chunk.key, Failed.Reason.Name(reason))
            self.decode.landed(chunk, error, reason)
            self._retire_on(chunk.epoch, error, kind)

        # A step that runs now does not touch the pages: they were reserved before it was planned.
        self._issue(rank_pb2.RankCommand(receive=_pages_of(chunk, block_table, self.last_step)), done)

    def _open_pair(
        self,
        epoch: str,
        agreed: handoff_pb2.ReceiverHello,
        remote: handoff_pb2.KvLayout,
        *,
        is_sender: bool,
    ) -> None:
        link = self._links.get(epoch)
        if link is None:
            return
        link.transport, link.num_slots, link.has_pair = agreed.transport, agreed.num_slots, True
        logger.info("pair %s uses %s: %s", epoch, agreed.transport, agreed.transport_reason)

        def opened(error: str, kind: Kind, _: int) -> None:
            if error:
                self._retire(epoch, Failed.REASON_TRANSFER_FAILED, f"the pair did not open: {error}")
            elif epoch in self._links:
                link.is_up = True
                if is_sender:
                    self.prefill.link_up(epoch, agreed.chunk_tokens, agreed.num_slots)
                else:
                    self.decode.link_up(epoch)

        pair = rank_pb2.OpenPair(pair_epoch=epoch, is_sender=is_sender, remote=remote, agreed=agreed)
        self._issue(rank_pb2.RankCommand(open_pair=pair), opened)

    def _retire_on(self, epoch: str, error: str, kind: Kind) -> None:
        if error:
            self._retire(epoch, _REASONS.get(kind, Failed.REASON_TRANSFER_FAILED), error)

    def _retire(self, epoch: str, reason: worker_pb2.Failed.Reason, why: str, label: str = "") -> None:
        """Ends a link and all that is on it; the first reason counts. `label`: its name in the metrics, if another."""
        link = self._links.pop(epoch, None)
        if link is None:
            return
        self._metrics.retired(epoch, label or Failed.Reason.Name(reason))
        self.links.close_link(epoch)
        if link.has_pair:
            self._closing[epoch] = link
            command = rank_pb2.RankCommand(close_pair=rank_pb2.ClosePair(pair_epoch=epoch))
            self._issue(command, lambda error, kind, _: self._closed(epoch))
        if link.peer:
            self.prefill.link_down(epoch, reason, why)
        else:
            self.decode.link_down(epoch, reason, why)

    def _closed(self, epoch: str) -> None:
        del self._closing[epoch]

    def _close_spare(self) -> None:
        """Closes links to decode workers that nothing is on, least recently used first, down to the limit."""
        outgoing = sorted((link for link in self._links.values() if link.peer), key=lambda link: link.last_used)
        idle = [link for link in outgoing[:-1] if not self.prefill.num_on(link.epoch)]
        for link in idle[: max(0, len(outgoing) - self._max_pairs)]:
            self._retire(link.epoch, Failed.REASON_UNSPECIFIED, "it is idle, and more than max_pairs are open")

    def _note_told(self, link: PeerLink, message: handoff_pb2.SenderMessage) -> None:
        now = self._clock()
        match message.WhichOneof("message"):
            case "open":
                self._metrics.opened(RequestKey.of(message.open.key), link.epoch)
            case "offer":
                key = RequestKey.of(message.offer.key)
                link.unanswered[key, message.offer.index] = now
                self._metrics.offered(key, message.offer.index, now)
            case "commit":
                key = RequestKey.of(message.commit.key)
                link.unanswered[key, -1] = now
                self._metrics.commit_told(key, now)
            case "abort":
                key = RequestKey.of(message.abort.key)
                link.unanswered[key, -1] = now
                self._metrics.ended(key)

    def _note_answer(self, link: PeerLink, message: handoff_pb2.ReceiverMessage) -> None:
        now = self._clock()
        match message.WhichOneof("message"):
            case "grant":
                key = RequestKey.of(message.grant.key)
                link.unanswered.pop((key, message.grant.chunk_index), None)
                self._metrics.granted(key, message.grant.chunk_index, now)
            case "committed":
                key = RequestKey.of(message.committed.key)
                link.unanswered.pop((key, -1), None)
                self._metrics.committed(key, now)
            case "abort":
                key = RequestKey.of(message.abort.key)
                link.unanswered = {name: told for name, told in link.unanswered.items() if name[0] != key}
                self._metrics.failed(key, "aborted")

    def _note_asked(self, link: PeerLink, message: handoff_pb2.SenderMessage) -> None:
        match message.WhichOneof("message"):
            case "open":
                self._metrics.called(RequestKey.of(message.open.key), link.epoch)
            case "abort":
                self._metrics.ended(RequestKey.of(message.abort.key))

    def _note_answered(self, message: handoff_pb2.ReceiverMessage) -> None:
        match message.WhichOneof("message"):
            case "committed":
                self._metrics.ended(RequestKey.of(message.committed.key))
            case "abort":
                self._metrics.ended(RequestKey.of(message.abort.key))

    def _issue(self, command: rank_pb2.RankCommand, done: Done) -> None:
        self._on_done[self.ranks.issue(command)] = done


def _pages_of(chunk: Chunk, block_table: list[int], after_step: int) -> rank_pb2.ChunkPages:
    return rank_pb2.ChunkPages(
        pair_epoch=chunk.epoch, chunk=chunk.to_proto(), block_table=block_table, after_step=after_step
    )
