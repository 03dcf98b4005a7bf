"""One connection between this worker and another: a gRPC stream for control, and a pair of rank groups for KV.

    opening -> both have said hello: the pair opens on every rank -> open -> (suspect: peer silent) -> retired

Its epoch names stream and pair for good; the sender makes one for each connection. Two threads use a connection. On the
speaking loop it is a stream: it numbers what this side sends, checks the numbers of what it receives, sends signs of
life, notices silence, and ends once. On the engine thread the roles send messages and move chunks through it. What the
loop receives is posted to the engine thread, in order.

A connection is retired as a whole, by the first of: its stream ended, an operation failed, an answer is overdue, it was
idle and another was wanted. What arrives for it later is dropped; operations still under way end by themselves once the
pair is closed, and until then its slots are quarantined.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from cluster.errors import BatonError
from cluster.failure_detector import FailureDetector, FailureTimeouts, Liveness
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from kv_transfer.actions import Chunk
from worker.handoff_metrics import HandoffMetrics

logger = logging.getLogger(__name__)

Failed = worker_pb2.Failed
ErrorKind = rank_pb2.RankReply.Kind
HandoffMessage = handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage
Post = Callable[..., None]
"""Has a function called with the arguments that follow it, on another thread; returns at once."""
Done = Callable[[str, ErrorKind, int], None]
"""Called on the engine thread when every rank has carried a command out: (error or "", its kind, bytes of all)."""
_WHOLE = -1
"""In place of a chunk's index: the answer to a commit or an abort."""


class StreamGap(BatonError):
    """A message of a stream was lost, and later ones may build on it: the connection must be retired."""

    grpc_code = "UNAVAILABLE"
    reason = "STREAM_GAP"


class ConnectionState(Enum):
    OPENING = "opening"
    OPEN = "open"
    SUSPECT = "suspect"
    CLOSING = "closing"
    """Retired; some rank has not closed its pair yet."""
    CLOSED = "closed"


class HandoffRole(Protocol):
    """Receives a connection's reports on the engine thread: the prefill role where this worker sends, else the decode
    role."""

    def on_message(self, connection: HandoffConnection, message: HandoffMessage) -> None: ...

    def connection_open(self, connection: HandoffConnection) -> None:
        """The pair is open on every rank."""

    def connection_suspected(self, connection: HandoffConnection, is_suspect: bool) -> None:
        """The peer is silent, or no longer silent."""

    def connection_retired(self, connection: HandoffConnection, reason: Failed.Reason, why: str) -> None: ...

    def connection_closed(self, connection: HandoffConnection) -> None:
        """The pair of a retired connection is closed on every rank."""


@dataclass
class HandoffContext:
    """Shared by all connections of one worker."""

    post: Post
    """To the engine thread."""
    on_loop: Post
    """To the speaking loop."""
    issue: Callable[[rank_pb2.RankCommand, Done], None]
    """Has a command carried out on every rank."""
    timing: FailureTimeouts
    metrics: HandoffMetrics
    stats: worker_pb2.WorkerStats = field(default_factory=worker_pb2.WorkerStats)
    """The worker's counters, to which connections add the bytes they move."""
    clock: Callable[[], float] = time.monotonic
    fresh_name: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    """A name for a connection that no other one has."""
    last_step: int = 0
    """Number of the newest step that has ended."""
    make_connection: Callable[..., HandoffConnection] = field(default_factory=lambda: HandoffConnection)


class HandoffConnection:
    """Made on either thread; `peer` names the life of the decode worker that this worker sends to, and is empty where
    it receives."""

    def __init__(
        self,
        epoch: str,
        role: HandoffRole,
        context: HandoffContext,
        *,
        peer: str = "",
        last: frozenset[str] = frozenset(),
    ) -> None:
        """`last`: transports to offer after all others."""
        self.epoch = epoch
        self.peer = peer
        self.last = last
        self._role = role
        self._context = context
        # Of the engine thread
        self.last_used = context.clock()
        self.agreed = handoff_pb2.ReceiverHello()
        """Transport, formats and sizes that both sides use, once they have agreed."""
        self._state = ConnectionState.OPENING
        self._has_pair = False
        self.unopened = ""
        """Why its pair did not open; empty where it did, and where this worker receives."""
        self._slot_bytes: dict[int, int] = {}
        """Bytes gathered in each send slot, over all ranks."""
        self._unanswered: dict[tuple[RequestKey, int], float] = {}
        """When each offer (by chunk), commit and abort (_WHOLE) was sent that the receiver has not answered."""
        # Of the speaking loop
        self.ended = ""
        """Why the stream has ended; empty while it has not."""
        self.is_suspect = False
        self.task: asyncio.Task[None] | None = None
        """Reads what the peer sends."""
        self.num_sent = self.num_received = 0
        self._is_greeted = False
        self._detector = FailureDetector(context.timing)
        self._queue: asyncio.Queue[HandoffMessage | None] = asyncio.Queue()
        self.enqueue: Callable[[HandoffMessage | None], None] = self._queue.put_nowait
        """Takes what this side sends, and None at the end; a simulation has something else carry it."""
        self._quiet_s = 0.0

    @property
    def is_sender(self) -> bool:
        return bool(self.peer)

    @property
    def state(self) -> ConnectionState:
        is_live = self._state in (ConnectionState.OPENING, ConnectionState.OPEN)
        return ConnectionState.SUSPECT if is_live and self.is_suspect else self._state

    @property
    def is_retired(self) -> bool:
        return self._state in (ConnectionState.CLOSING, ConnectionState.CLOSED)

    # On the speaking loop: the stream

    async def outbound(self) -> AsyncIterator[HandoffMessage]:
        """Messages to the peer, numbered, until the stream ends."""
        while (message := await self._queue.get()) is not None and not self.ended:
            yield self.stamp(message)

    def stamp(self, message: HandoffMessage) -> HandoffMessage:
        """Gives the next message to the peer its number."""
        self.num_sent += 1
        message.number = self.num_sent
        self._quiet_s = 0.0
        return message

    def accept(self, number: int) -> bool:
        """Notes a sign of life; returns False for a message that was received before. Raises StreamGap."""
        self._detector.heard()
        if number == self.num_received + 1:
            self.num_received = number
            return True
        if 0 < number <= self.num_received:
            return False
        raise StreamGap(f"message {self.num_received + 1} of the stream is missing: number {number} came instead")

    def greeted(self, hello: handoff_pb2.ReceiverHello | None = None) -> None:
        """Both sides have said hello; `hello` is the receiver's where this worker sends."""
        self._is_greeted = True
        if hello is not None:
            self._context.post(self.open_pair, hello, hello.layout)

    def receive(self, message: HandoffMessage) -> None:
        """Takes a message of the peer after its hello. Raises BatonError for what must end the stream."""
        if self.ended:
            return
        is_new = self.accept(message.number)
        if self.is_suspect:
            self.suspect(False)
        kind = message.WhichOneof("message")
        if kind is None or (kind == "hello" and is_new):
            raise BatonError(f"the peer sent a message that makes no sense here: {kind or 'an empty one'}")
        if is_new and kind != "alive":
            self._context.post(self.on_message, message)

    def tick(self, elapsed_s: float) -> None:
        """Every `timing.tick_s`: sends a sign of life when nothing else was sent, and looks at the peer's silence."""
        timing = self._context.timing
        self._quiet_s += elapsed_s
        # Not behind a hello that has no answer: who writes to a refused call may be told of an internal error instead.
        if self._is_greeted and self._quiet_s + timing.tick_s > timing.heartbeat_s:
            self._quiet_s = 0.0
            alive, kind = handoff_pb2.Alive(), handoff_pb2.SenderMessage if self.peer else handoff_pb2.ReceiverMessage
            self.enqueue(kind(alive=alive))
        liveness = self._detector.tick(elapsed_s)
        if liveness is Liveness.DEAD:
            self.end(f"the peer has been silent for {self._detector.silence_s:.1f} s")
        elif liveness is Liveness.SUSPECT and self._is_greeted and not self.is_suspect:
            self.suspect(True)

    def suspect(self, is_suspect: bool) -> None:
        self.is_suspect = is_suspect
        self._context.post(self._on_suspected, is_suspect)

    def end(self, why: str, *, is_final: bool = False, level: int = logging.WARNING) -> None:
        """Ends the stream, once; the first reason counts. `is_final`: the two workers can never hand KV over."""
        if self.ended:
            return
        self.ended = why
        self.enqueue(None)
        task, self.task = self.task, None  # a cancelled task holds its frames, and those its connection
        if task is not None:
            task.cancel()
        logger.log(level, "hand-off connection %s has ended: %s", self.epoch, why)
        self._context.post(self._on_ended, why, is_final)

    # On the engine thread: what the stream reports

    def on_message(self, message: HandoffMessage) -> None:
        if not self.is_retired:
            self._note_received(message)
            self._role.on_message(self, message)

    def _on_suspected(self, is_suspect: bool) -> None:
        if not self.is_retired:
            self._role.connection_suspected(self, is_suspect)

    def _on_ended(self, why: str, is_final: bool) -> None:
        self.retire(Failed.REASON_INCOMPATIBLE if is_final else Failed.REASON_PEER_LOST, why)

    # On the engine thread: messages and chunks

    def send(self, message: HandoffMessage) -> None:
        """Sends a message to the peer; dropped when the connection is retired, which the role knows."""
        if not self.is_retired:
            self._note_sent(message)
            self._context.on_loop(self.enqueue, message)

    def prompt_done(self, key: RequestKey) -> None:
        """The first tokens are sampled: from now on the client waits for the hand-off alone."""
        self._context.metrics.first_tokens(key, self._context.clock())

    def gather(self, chunk: Chunk, table: Sequence[int], after_step: int, done: Callable[[Chunk], None]) -> None:
        """Copies a chunk from pages to its send slot once `after_step` steps have run; `done` is always called."""

        def finish(error: str, kind: ErrorKind, size_bytes: int) -> None:
            self._context.stats.kv_bytes_sent += size_bytes
            self._slot_bytes[chunk.slot] = size_bytes
            self._retire_on(error, kind)
            done(chunk)

        self._context.metrics.gather_issued(chunk, self._context.clock())
        self._context.issue(self._command("gather", chunk, table, after_step), finish)

    def transmit(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Sends a gathered chunk that was granted; `done` is always called."""

        def finish(error: str, kind: ErrorKind, _: int) -> None:
            if not error:
                sent = self._slot_bytes.pop(chunk.slot, 0)
                self._context.metrics.moved("sent", self.agreed.transport, sent)
            self._retire_on(error, kind)
            done(chunk)

        self._context.issue(self._command("send", chunk), finish)

    def land(self, chunk: Chunk, table: Sequence[int], done: Callable[[Chunk, str, Failed.Reason], None]) -> None:
        """Receives a chunk into its slot and writes it to pages; `done` is always called, with the error, if any."""

        def finish(error: str, kind: ErrorKind, size_bytes: int) -> None:
            self._context.stats.kv_bytes_received += size_bytes
            self._context.metrics.moved("received", self.agreed.transport, size_bytes)
            reason = _reason_of(kind)
            if error:
                self._context.metrics.failed(chunk.key, Failed.Reason.Name(reason))
            done(chunk, error, reason)
            self._retire_on(error, kind)

        # A step that runs now does not touch the pages: they were reserved before it was planned.
        self._context.issue(self._command("receive", chunk, table, self._context.last_step), finish)

    def _command(self, kind: str, chunk: Chunk, table: Sequence[int] = (), after_step: int = 0) -> rank_pb2.RankCommand:
        """What ranks are told of a chunk."""
        if kind == "send":
            return rank_pb2.RankCommand(send=rank_pb2.Send(pair_epoch=self.epoch, slot=chunk.slot))
        where, at = chunk.to_proto(), chunk.epoch
        pages = rank_pb2.ChunkPages(pair_epoch=at, chunk=where, block_table=table, after_step=after_step)
        return rank_pb2.RankCommand(gather=pages) if kind == "gather" else rank_pb2.RankCommand(receive=pages)

    # On the engine thread: the pair, deadlines and the end

    def open_pair(self, agreed: handoff_pb2.ReceiverHello, remote: handoff_pb2.KvLayout) -> None:
        """Opens the pair on every rank, in the way that both sides agreed on."""
        if self.is_retired:
            return
        self.agreed, self._has_pair = agreed, True
        logger.info("pair %s uses %s: %s", self.epoch, agreed.transport, agreed.transport_reason)

        def opened(error: str, kind: ErrorKind, _: int) -> None:
            if error:
                self.retire(Failed.REASON_TRANSFER_FAILED, f"the pair did not open: {error}")
            elif not self.is_retired:
                self._state = ConnectionState.OPEN
                self._role.connection_open(self)

        spec = rank_pb2.OpenPair(pair_epoch=self.epoch, is_sender=self.is_sender, remote=remote, agreed=agreed)
        self._context.issue(rank_pb2.RankCommand(open_pair=spec), opened)

    def check_deadline(self, timeout_s: float) -> None:
        """Retires the connection when the receiver owes an answer for longer than that."""
        now = self._context.clock()
        overdue_s = now - min(self._unanswered.values(), default=now)
        if overdue_s > timeout_s:
            why = f"the decode worker has not answered for {overdue_s:.1f} s"
            self.retire(Failed.REASON_TRANSFER_FAILED, why, label="timeout")

    def retire(self, reason: Failed.Reason, why: str, label: str = "") -> None:
        """Ends the connection and all that is on it, once. `label`: the reason's name in the metrics, if another."""
        if self.is_retired:
            return
        if self._has_pair and self.is_sender and self._state is ConnectionState.OPENING:
            self.unopened = why
            self._context.metrics.unopened(self.agreed.transport)
        self._state = ConnectionState.CLOSING if self._has_pair else ConnectionState.CLOSED
        self._context.metrics.retired(self.epoch, label or Failed.Reason.Name(reason))
        self._context.on_loop(lambda: self.end("it is not needed any more", level=logging.INFO))
        if self._has_pair:
            command = rank_pb2.RankCommand(close_pair=rank_pb2.ClosePair(pair_epoch=self.epoch))
            self._context.issue(command, self._on_closed)
        self._role.connection_retired(self, reason, why)

    def _on_closed(self, error: str, *_: object) -> None:
        self._state = ConnectionState.CLOSED
        if not error:
            self._role.connection_closed(self)

    def _retire_on(self, error: str, kind: ErrorKind) -> None:
        if error:
            self.retire(_reason_of(kind), error)

    def _note_sent(self, message: HandoffMessage) -> None:
        metrics, now = self._context.metrics, self._context.clock()
        kind = str(message.WhichOneof("message"))
        body = getattr(message, kind)
        key = RequestKey.of(body.key)
        match kind:
            case "open":
                metrics.opened(key, self.epoch)
            case "offer":
                self._unanswered[key, body.index] = now
                metrics.offered(key, body.index, now)
            case "commit":
                self._unanswered[key, _WHOLE] = now
                metrics.commit_sent(key, now)
            case "abort" | "committed":
                if self.is_sender:
                    self._unanswered[key, _WHOLE] = now
                metrics.ended(key)

    def _note_received(self, message: HandoffMessage) -> None:
        metrics, now = self._context.metrics, self._context.clock()
        kind = str(message.WhichOneof("message"))
        body = getattr(message, kind)
        key = RequestKey.of(body.key)
        match kind:
            case "open":
                metrics.called(key, self.epoch)
            case "grant":
                self._unanswered.pop((key, body.chunk_index), None)
                metrics.granted(key, body.chunk_index, now)
            case "committed":
                self._unanswered.pop((key, _WHOLE), None)
                metrics.committed(key, now)
            case "abort" if self.is_sender:
                self._unanswered = {name: at for name, at in self._unanswered.items() if name[0] != key}
                metrics.failed(key, "aborted")
            case "abort":
                metrics.ended(key)


def _reason_of(kind: ErrorKind) -> Failed.Reason:
    is_corrupt = kind == rank_pb2.RankReply.KIND_CORRUPT
    return Failed.REASON_CORRUPT if is_corrupt else Failed.REASON_TRANSFER_FAILED
