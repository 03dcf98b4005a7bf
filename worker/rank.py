"""Carries out rank commands on one tensor-parallel rank, the leader's and the followers' alike.

Steps run on the caller's thread. KV operations run beside them, on threads that never wait for one another's peers:

    kv-gather       copies pages to send slots, each as soon as the steps and layers that it names are written; on a
                    GPU it launches the copy, AHEAD_LAYERS before, so that the slot is granted when it is filled
    kv-issue        posts sends and receives in the order of the command log, and waits for nothing
    kv-wait EPOCH   one for each pair: opens it, then waits for its sends and landings in their order
    kv-tier         copies blocks between the pool and host memory, once the step that a command names has ended
    kv-disk         the same between host memory and the disk, and from the disk to the pool
    kv-close EPOCH  closes a pair at once, which wakes its kv-wait thread; both end with the pair

So a peer that stalls holds up its own pair only. Every command is answered exactly once, whatever happens to its pair.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from cluster.errors import Cancelled, Corrupted, TransferFailed
from cluster.pb import rank_pb2
from cluster.step_cost import OVERLAP_TOKENS as OVERLAP_TOKENS
from engine.cpu_runtime import compute_alone
from engine.model_runner import StepOutput
from engine.models.experts import ExpertLoad
from engine.sampling.params import SampleRow
from engine.step_input import StepInput, is_decode
from kv_transfer.actions import Chunk
from kv_transfer.rank_pair import RankPair
from kv_transfer.transfer_engine import TransferEngine

logger = logging.getLogger(__name__)

T = TypeVar("T")

AHEAD_LAYERS = 2
"""A gather out of a long step on a GPU is launched, and its slot offered, when this many of its layers are still to be
computed there. Earlier, and a receive would wait on the decode worker's GPU, where NCCL's kernels take room; later, and
the message to and fro would not be hidden."""
_KINDS = rank_pb2.BlockMove
_ON_DISK = (_KINDS.KIND_SPILL, _KINDS.KIND_READ, _KINDS.KIND_FLUSH, _KINDS.KIND_TAKE_OVER)
_TO_STORE = (_KINDS.KIND_PUSH, _KINDS.KIND_FLUSH_STORE)
_THREADS = dict.fromkeys(_ON_DISK, "kv-disk") | dict.fromkeys(_TO_STORE, "kv-push") | {_KINDS.KIND_FETCH: "kv-fetch"}
_KEPT_STEPS = 4
"""Steps whose events are kept: more than a GPU may be behind."""

ErrorKind = rank_pb2.RankReply.Kind
Reply = Callable[[int, str, ErrorKind, int], None]
"""Called once for each command with (number, error or "", kind of the error, bytes moved), from any thread."""
Operation = Callable[[], int]
"""Returns the bytes that it moved."""


class StepProgress:
    """The progress of a rank's steps, down to the layer: compute notes what it has written, KV threads wait for it.

    Steps are counted from 1 in the order in which they run. Layers are noted of long steps with prompts only: any other
    ends about as soon as its first layers do. On a GPU "written" means queued on the compute stream: each layer and
    each step then leaves an event there, and who waited here makes its own stream wait for that event.
    """

    def __init__(self, leave_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        """`leave_event` leaves an event on the stream of the calling thread; None where a note is made after the
        work."""
        self._leave_event = leave_event
        self._changed = threading.Condition()
        self._num_steps_done = 0
        self._num_layers_done = 0
        self._layer_events: list[torch.cuda.Event] = []
        self._layered_step = 0  # the step that the layer events are of
        self._step_events: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_KEPT_STEPS)
        self._is_closed = False

    def layer_done(self, num_layers: int) -> None:
        """The step under way has written the KV of its first `num_layers` layers."""
        event = self._leave_event() if self._leave_event is not None else None
        with self._changed:
            if num_layers == 1:
                self._layer_events.clear()
                self._layered_step = self._num_steps_done + 1
            if event is not None:
                self._layer_events.append(event)
            self._num_layers_done = num_layers
            self._changed.notify_all()

    def step_done(self) -> None:
        event = self._leave_event() if self._leave_event is not None else None
        with self._changed:
            self._num_steps_done += 1
            if event is not None:
                self._step_events.append((self._num_steps_done, event))
            self._num_layers_done = 0
            self._changed.notify_all()

    def has_written(self, num_steps: int, num_layers: int) -> bool:
        """Whether `num_steps` steps are done, or all but the last, which has written `num_layers` layers."""
        ahead = num_steps - self._num_steps_done
        return ahead <= 0 or (ahead == 1 and num_layers <= self._num_layers_done)

    def event_of(self, num_steps: int, num_layers: int) -> torch.cuda.Event | None:
        """The event that a GPU stream waits for before it reads what `has_written`; None on the CPU."""
        with self._changed:
            if num_steps == self._layered_step and self._layer_events:
                return self._layer_events[num_layers - 1]
        return self.event_of_step(num_steps)

    def event_of_step(self, num_steps: int) -> torch.cuda.Event | None:
        """The event of the end of so many steps, which are done; of a step that is long over, that of a later one."""
        with self._changed:
            return next((event for step, event in self._step_events if step >= num_steps), None)

    def event_ahead(self, num_steps: int, num_layers: int) -> torch.cuda.Event | None:
        """The event AHEAD_LAYERS before that of `event_of`; None where there is none, or it is long over."""
        with self._changed:
            is_layered = num_steps == self._layered_step and num_layers > AHEAD_LAYERS
            return self._layer_events[num_layers - AHEAD_LAYERS - 1] if is_layered and self._layer_events else None

    def wait_for_steps(self, num_steps: int) -> None:
        """Until so many steps are done. Raises Cancelled when the rank ends."""
        self.wait_for(lambda: num_steps <= self._num_steps_done or None)

    def wait_for(self, condition: Callable[[], T | None]) -> T:
        """Until `condition` gives something; it is asked again at every change. Raises Cancelled when the rank ends."""
        with self._changed:
            while (found := condition()) is None:
                if self._is_closed:
                    raise Cancelled("this rank is stopping")
                self._changed.wait()
            return found

    def notify(self, change: Callable[[], None]) -> None:
        """Makes a change that a waiting condition looks at."""
        with self._changed:
            change()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every wait, also those to come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Runner(Protocol):
    """The steps of one rank: `engine.model_runner.ModelRunner` computes, `engine.timed_runner.TimedRunner` waits."""

    @property
    def device(self) -> torch.device: ...

    def prepare(self, step: StepInput, sampled: torch.Tensor | None, rows: Callable[[], Sequence[SampleRow]]) -> None:
        """Has the next `run` choose its tokens, if it can."""
        ...

    def run(
        self, step: StepInput, on_layer: Callable[[int], None] | None = None, sampled: torch.Tensor | None = None
    ) -> StepOutput:
        """One step; `on_layer(n)` is called when its first n layers are written, with `sampled` as of `step` below."""
        ...

    def expert_load(self) -> ExpertLoad:
        """Returns the tokens that the model's experts have got."""
        ...


class RankExecutor:
    """The compute and transfer sides of one rank."""

    def __init__(self, runner: Runner, transfer_engine: TransferEngine, reply: Reply) -> None:
        self._runner = runner
        self._engine = transfer_engine
        self._reply = reply
        self._progress = StepProgress(_leave_cuda_event if runner.device.type == "cuda" else None)
        self._gathers: list[tuple[int, int, int, Chunk, list[int]]] = []
        """A heap of (step, layers, command number, chunk, block table): the one whose pages are written first leads."""
        self._issues: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._moves: dict[str, SimpleQueue[Callable[[], None] | None]] = {
            name: SimpleQueue() for name in ("kv-tier", *_THREADS.values())
        }
        _start("kv-gather", self._run_gathers)
        _start("kv-issue", lambda: _run(self._issues))
        if transfer_engine.tier is not None:
            for name, moves in self._moves.items():
                _start(name, partial(_run, moves))

    def step(self, step: StepInput, sampled: torch.Tensor | None = None) -> StepOutput:
        """Runs one forward pass. Steps are counted from 1 in the order of these calls.

        `sampled`: the tokens that the step before led to, on the device, for a step that was launched before they are
        read. Nobody waits for the layers of a decode step, and only a step that tells of none can be replayed as a
        whole.
        """
        notes_layers = len(step.token_ids) >= OVERLAP_TOKENS and not is_decode(step)
        with self._on_device():
            self._engine.before_step()
            output = self._runner.run(step, self._progress.layer_done if notes_layers else None, sampled)
            self._progress.step_done()
        return output

    def prepare(self, step: StepInput, sampled: torch.Tensor | None, rows: Callable[[], Sequence[SampleRow]]) -> None:
        """Has the next `step` choose its tokens, if it can (`ModelRunner.prepare`)."""
        with self._on_device():
            self._runner.prepare(step, sampled, rows)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the rank's GPU the current one: which one that is differs from thread to thread."""
        device = self._runner.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def execute(self, command: rank_pb2.RankCommand) -> None:
        """Sets any command but a step off; its reply comes when it is done."""
        number = command.number
        match command.WhichOneof("command"):
            case "open_pair":
                self._open_pair(number, command.open_pair)
            case "close_pair":
                epoch = command.close_pair.pair_epoch
                _start(f"kv-close {epoch}", lambda: self._answer(number, lambda: self._close_pair(epoch)))
            case "gather":
                chunk, pages = _chunk_of(command.gather), command.gather
                num_layers = self._engine.num_layers_of(chunk.range)
                entry = (pages.after_step, num_layers, number, chunk, list(pages.block_table))
                self._progress.notify(lambda: heapq.heappush(self._gathers, entry))
            case "send":
                self._issues.put(lambda: self._send(number, command.send.pair_epoch, command.send.slot))
            case "receive":
                self._issues.put(lambda: self._receive(number, command.receive))
            case "move_blocks":
                self._moves[_THREADS.get(command.move_blocks.kind, "kv-tier")].put(
                    lambda: self._answer(number, lambda: self._move_blocks(command.move_blocks))
                )
            case other:
                raise ValueError(f"rank command {number} is a {other}, which does not run here")

    def close(self) -> None:
        """Ends the threads and closes every pair; what has not begun is answered with an error."""
        self._progress.close()
        self._issues.put(None)
        for moves in self._moves.values():
            moves.put(None)
        self._engine.close()

    # Pairs

    def _open_pair(self, number: int, spec: rank_pb2.OpenPair) -> None:
        try:
            pair = self._engine.add_pair(spec)
        except Exception as error:
            self._fail(number, error)
        else:
            self._enqueue(pair, number, lambda: self._meet(pair))
            _start(f"kv-wait {pair.epoch}", pair.run_queue)

    def _meet(self, pair: RankPair) -> int:
        self._engine.open_pair(pair)
        return 0

    def _close_pair(self, epoch: str) -> int:
        self._engine.close_pair(epoch)
        return 0

    def _enqueue(self, pair: RankPair, number: int, operation: Operation) -> None:
        if not pair.enqueue(lambda: self._answer(number, operation)):
            self._fail(number, TransferFailed(f"pair {pair.epoch} was closed"))

    # Operations

    def _run_gathers(self) -> None:
        try:
            while True:
                step, _, number, chunk, table = self._progress.wait_for(self._next_gather)
                self._answer(number, partial(self._gather, step, chunk, table))
        except Cancelled as error:
            while self._gathers:
                self._fail(heapq.heappop(self._gathers)[2], error)

    def _next_gather(self) -> tuple[int, int, int, Chunk, list[int]] | None:
        """The waiting gather whose pages are written first, once they are."""
        if self._gathers and self._progress.has_written(*self._gathers[0][:2]):
            return heapq.heappop(self._gathers)
        return None

    def _gather(self, after_step: int, chunk: Chunk, block_table: list[int]) -> int:
        num_layers = self._engine.num_layers_of(chunk.range)
        ahead = self._progress.event_ahead(after_step, num_layers)
        if ahead is not None:
            ahead.synchronize()
        ready = self._progress.event_of(after_step, num_layers)
        return self._engine.gather(chunk, block_table, ready=ready)

    def _send(self, number: int, epoch: str, slot: int) -> None:
        def complete() -> int:
            self._engine.complete_send(sending)
            return 0

        try:
            sending = self._engine.send(epoch, slot)
        except Exception as error:
            self._fail(number, error)
        else:
            self._enqueue(sending.pair, number, complete)

    def _receive(self, number: int, pages: rank_pb2.ChunkPages) -> None:
        def complete() -> int:
            self._progress.wait_for_steps(pages.after_step)
            return self._engine.complete_receive(landing, self._progress.event_of_step(pages.after_step))

        try:
            landing = self._engine.post_receive(_chunk_of(pages), list(pages.block_table))
        except Exception as error:
            self._fail(number, error)
        else:
            self._enqueue(landing.pair, number, complete)

    def _move_blocks(self, move: rank_pb2.BlockMove) -> int:
        tier, kinds = self._engine.tier, _KINDS
        assert tier is not None, "blocks are moved to a tier that this rank has not"
        sources, targets = list(move.sources), list(move.targets)
        keys = list(zip(move.groups, move.digests, strict=True))
        self._progress.wait_for_steps(move.after_step)
        ready = self._progress.event_of_step(move.after_step)
        match move.kind:
            case kinds.KIND_SAVE:
                return tier.save(sources, targets, ready)
            case kinds.KIND_LOAD:
                return tier.load(targets, sources, ready)
            case kinds.KIND_SPILL:
                return tier.spill(sources, targets, keys)
            case kinds.KIND_READ:
                return tier.read(targets, sources, keys, ready)
            case kinds.KIND_PUSH:
                return tier.push(sources, keys)
            case kinds.KIND_FETCH:
                return tier.fetch(targets, keys, ready)
            case kinds.KIND_FLUSH | kinds.KIND_FLUSH_STORE:
                return tier.flush(is_disk=move.kind == kinds.KIND_FLUSH)
            case kinds.KIND_TAKE_OVER:
                tier.take_over(move.disk_number)
                return 0
        raise ValueError(f"blocks are to be moved in a way that this rank does not know: {move.kind}")

    def _answer(self, number: int, operation: Operation) -> None:
        try:
            size_bytes = operation()
        except Exception as error:
            self._fail(number, error)
        else:
            self._reply(number, "", rank_pb2.RankReply.KIND_UNSPECIFIED, size_bytes)

    def _fail(self, number: int, error: Exception) -> None:
        is_told = isinstance(error, OSError) and not isinstance(error, ConnectionError)  # by who asked, of files
        logger.log(logging.DEBUG if is_told else logging.WARNING, "rank command %d failed: %s", number, error)
        self._reply(number, str(error) or type(error).__name__, _kind_of(error), 0)


def _run(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Makes the calls one after another, until there is None."""
    while (call := calls.get()) is not None:
        call()


def _chunk_of(pages: rank_pb2.ChunkPages) -> Chunk:
    return Chunk.from_proto(pages.chunk, pages.pair_epoch)


def _kind_of(error: Exception) -> ErrorKind:
    if isinstance(error, Corrupted):
        return rank_pb2.RankReply.KIND_CORRUPT
    if isinstance(error, TransferFailed):
        return rank_pb2.RankReply.KIND_TRANSFER
    return rank_pb2.RankReply.KIND_UNSPECIFIED


def _start(name: str, target: Callable[[], Any]) -> None:
    """A thread that moves KV, without helpers: those are for steps."""

    def run() -> None:
        compute_alone()
        target()

    threading.Thread(target=run, name=name, daemon=True).start()


def _leave_cuda_event() -> torch.cuda.Event:
    """On the current stream of the current device."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
