"""Carries out rank commands on one tensor-parallel rank, the leader's and the followers' alike.

Steps run on the caller's thread. KV operations run beside them, on threads that never wait for one another's peers:

    kv-gather       copies pages to send slots, each as soon as the steps and layers that it names are written
    kv-issue        posts sends and receives in the order of the command log, and waits for nothing
    kv-wait EPOCH   one for each pair: opens it, then waits for its sends and landings in their order
    kv-close EPOCH  closes a pair at once, which wakes its kv-wait thread; both end with the pair

So a peer that stalls holds up its own pair only. Every command is answered exactly once, whatever happens to its pair.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from cluster.errors import Cancelled
from cluster.pb import rank_pb2
from engine.model_runner import ModelRunner, StepOutput
from engine.step_input import StepInput
from engine.threads import compute_alone
from kv_transfer.actions import Range
from kv_transfer.failures import Corrupted, TransferFailed
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_engine import PairSpec, SlotRange, TransferEngine
from worker.progress import StepProgress, leave_cuda_event

logger = logging.getLogger(__name__)

OVERLAP_TOKENS = 64
"""A step of so many tokens is long: it tells of its layers, and the leader's engine thread does not wait for it."""

ErrorKind = rank_pb2.RankReply.Kind
Reply = Callable[[int, str, ErrorKind, int], None]
"""Called once for each command with (number, error or "", kind of the error, bytes moved), from any thread."""
Job = Callable[[], int]
"""An operation; returns the bytes that it moved."""


class RankExecutor:
    """The compute and transfer sides of one rank."""

    def __init__(self, runner: ModelRunner, mover: TransferEngine, reply: Reply) -> None:
        self._runner = runner
        self._mover = mover
        self._reply = reply
        self._progress = StepProgress(leave_cuda_event if runner.device.type == "cuda" else None)
        self._gathers: list[tuple[int, int, int, rank_pb2.PageRange]] = []  # heap: (step, layer, command number, what)
        self._issues: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pairs: dict[str, _PairThread] = {}
        self._lock = threading.Lock()  # of _pairs
        _start("kv-gather", self._run_gathers)
        _start("kv-issue", self._run_issues)

    def step(self, step: StepInput) -> StepOutput:
        """Runs one forward pass. Steps are counted from 1 in the order of these calls."""
        is_long = len(step.token_ids) >= OVERLAP_TOKENS
        with self._on_device():
            output = self._runner.run(step, on_layer=self._progress.layer_done if is_long else None)
            self._progress.step_done()
        return output

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
                what = command.gather
                entry = (what.after_step, what.layer_end, number, what)
                self._progress.notify(lambda: heapq.heappush(self._gathers, entry))
            case "send":
                self._issues.put(lambda: self._send(number, command.send))
            case "receive":
                self._issues.put(lambda: self._receive(number, command.receive))
            case other:
                raise ValueError(f"rank command {number} is a {other}, which does not run here")

    def close(self) -> None:
        """Ends the threads and closes every pair; what has not begun is answered with an error."""
        self._progress.close()
        self._issues.put(None)
        with self._lock:
            pairs, self._pairs = self._pairs, {}
        for pair in pairs.values():
            pair.end()
        self._mover.close()

    # Pairs

    def _open_pair(self, number: int, command: rank_pb2.OpenPair) -> None:
        epoch = command.pair_epoch
        with self._lock:
            is_new = epoch not in self._pairs
            if is_new:
                self._pairs[epoch] = pair = _PairThread(epoch, self._answer)
        if is_new:
            pair.put(number, lambda: self._meet(pair, command))
        else:
            self._fail(number, ValueError(f"pair {epoch} is open already; every pair needs an epoch of its own"))

    def _meet(self, pair: _PairThread, command: rank_pb2.OpenPair) -> int:
        spec = PairSpec(
            pair_epoch=command.pair_epoch,
            store_address=command.store_address,
            is_sender=command.is_sender,
            remote=KvLayout.from_proto(command.remote),
            transport=command.transport,
            wire_format=command.wire_format,
            chunk_tokens=command.chunk_tokens,
            num_slots=command.num_slots,
        )
        if not pair.has_ended:
            self._mover.open_pair(spec)
        if pair.has_ended:  # closed before it was known to the mover, or since
            self._mover.close_pair(spec.pair_epoch)
            raise TransferFailed(f"pair {spec.pair_epoch} was closed while it opened")
        return 0

    def _close_pair(self, epoch: str) -> int:
        with self._lock:
            pair = self._pairs.pop(epoch, None)
        if pair is not None:
            pair.end()
        self._mover.close_pair(epoch)
        return 0

    def _put(self, epoch: str, number: int, job: Job) -> None:
        """Has a pair's thread wait for something that was posted on it."""
        with self._lock:
            pair = self._pairs.get(epoch)
        if pair is None or not pair.put(number, job):
            self._fail(number, TransferFailed(f"pair {epoch} was closed"))

    # Operations

    def _run_gathers(self) -> None:
        try:
            while True:
                _, _, number, what = self._progress.wait_for(self._next_gather)
                self._answer(number, lambda what=what: self._gather(what))  # type: ignore[misc]
        except Cancelled as error:
            while self._gathers:
                self._fail(heapq.heappop(self._gathers)[2], error)

    def _next_gather(self) -> tuple[int, int, int, rank_pb2.PageRange] | None:
        """Of those that wait, the one whose pages are written first, once they are."""
        if self._gathers and self._progress.has_written(*self._gathers[0][:2]):
            return heapq.heappop(self._gathers)
        return None

    def _gather(self, what: rank_pb2.PageRange) -> int:
        ready = self._progress.event_of(what.after_step, what.layer_end)
        return self._mover.gather(_slot_range(what), list(what.block_table), ready=ready)

    def _run_issues(self) -> None:
        while (issue := self._issues.get()) is not None:
            issue()

    def _send(self, number: int, command: rank_pb2.Send) -> None:
        def complete() -> int:
            self._mover.complete_send(sending)
            return 0

        try:
            sending = self._mover.send(command.pair_epoch, command.slot)
        except Exception as error:
            self._fail(number, error)
        else:
            self._put(command.pair_epoch, number, complete)

    def _receive(self, number: int, command: rank_pb2.PageRange) -> None:
        def complete() -> int:
            self._progress.wait_for_steps(command.after_step)
            return self._mover.complete_receive(landing)

        try:
            landing = self._mover.post_receive(_slot_range(command), list(command.block_table))
        except Exception as error:
            self._fail(number, error)
        else:
            self._put(command.pair_epoch, number, complete)

    def _answer(self, number: int, job: Job) -> None:
        try:
            size_bytes = job()
        except Exception as error:
            self._fail(number, error)
        else:
            self._reply(number, "", rank_pb2.RankReply.KIND_UNSPECIFIED, size_bytes)

    def _fail(self, number: int, error: Exception) -> None:
        logger.warning("rank command %d failed: %s", number, error)
        self._reply(number, str(error) or type(error).__name__, _kind_of(error), 0)


class _PairThread:
    """One pair's waiting: jobs in their order, until `end`."""

    def __init__(self, epoch: str, answer: Callable[[int, Job], None]) -> None:
        self._answer = answer
        self._jobs: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.has_ended = False
        _start(f"kv-wait {epoch}", self._run)

    def put(self, number: int, job: Job) -> bool:
        """False: it has ended, and nobody would answer."""
        with self._lock:
            if not self.has_ended:
                self._jobs.put((number, job))
            return not self.has_ended

    def end(self) -> None:
        """What is queued is still done, or fails, since its pair is being closed; nothing is queued after it."""
        with self._lock:
            self.has_ended = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            self._answer(*entry)


def _slot_range(what: rank_pb2.PageRange) -> SlotRange:
    where = Range(what.token_start, what.token_end, what.layer_start, what.layer_end)
    return SlotRange(pair_epoch=what.pair_epoch, slot=what.slot, tag=what.tag, range=where)


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
