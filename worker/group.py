"""Rank 0's view of its tensor-parallel group: one numbered command log that every rank follows.

A command is done when every rank has replied; steps need no reply, their collectives keep the ranks together. A rank
whose connection closes ends the whole worker: a tensor-parallel group lives and dies as one. A rank that is only silent
(stopped, say) makes the worker look dead until it answers again: the speaking loop asks `tick`.

One step runs at a time, a short one where it is launched. During a long one events are taken in as well: on a CPU the
engine thread computes it and another one takes its turns (`StandIn`), so that one thread alone has OpenMP's helpers;
for a GPU a compute thread queues it. There a step that samples nothing is done before the device has begun it, and at
most one waits behind the one that runs. A step may take the tokens of the one before it from the device, once their
choice is set off and before they are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from cluster.errors import BatonError
from cluster.failure_detector import FailureDetector, FailureTimeouts, Liveness
from cluster.pb import rank_pb2
from engine.copies import upload
from engine.cpu_runtime import compute_alone
from engine.model_runner import StepOutput
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.samples import Samples
from engine.step_input import StepInput
from worker.handoff_connection import Done, Post
from worker.rank import OVERLAP_TOKENS, ErrorKind, RankExecutor, Reply
from worker.rank_socket import RankConnection, frame_of, read_frame, write_frame
from worker.step_meter import StepMeter
from worker.steps import DeviceSpan

Compute = Callable[[StepInput, torch.Tensor | None], StepOutput]
"""A forward pass of a step, and of the tokens that the one before it led to if it needs them."""


class TokenChooser(Protocol):
    """Implemented by `engine.sampling.sampler.Sampler`, `engine.timed_runner.HashChooser` and
    `engine.script.ScriptChooser`."""

    def launch(self, logits: torch.Tensor, rows: Seq[SampleRow]) -> Samples:
        """Sets the choice of a token for each row of logits off."""
        ...


CORRUPT = rank_pb2.RankReply.KIND_CORRUPT


class CudaSpan:
    """A step between two events of a GPU's compute stream (`worker.steps.DeviceSpan`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begun.record(torch.cuda.current_stream(device))

    def end(self) -> None:
        self._ended.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float | None:
        return self._seconds_to(self._ended)

    def seconds_until(self, following: DeviceSpan) -> float | None:
        assert isinstance(following, CudaSpan), "spans of two kinds of devices cannot be compared"
        return self._seconds_to(following._begun)

    def _seconds_to(self, event: torch.cuda.Event) -> float | None:
        is_reached: bool = event.query()  # type: ignore[no-untyped-call]
        return self._begun.elapsed_time(event) / 1000 if is_reached else None


class LaunchedStep:
    """A step on its way, or done (`worker.step_pipeline.Launched`)."""

    def __init__(
        self,
        step: StepInput,
        sampler: TokenChooser,
        meter: StepMeter | None,
        begin: Callable[[], DeviceSpan] | None,
        sampled: torch.Tensor | None,
    ) -> None:
        self.span: DeviceSpan | None = None
        self._step = step
        self._sampled_before = sampled
        self._sampler = sampler
        self._meter = meter
        self._begin = begin
        self._future: Future[StepOutput] = Future()
        self._samples: Samples | None = None
        if meter is not None:
            meter.launched(step, time.monotonic())

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def sample(self, rows: Seq[Seq[SampleRow]]) -> None:
        logits, _, self._samples = self._future.result()
        if self._samples is None:
            self._choose(logits, rows)
        if self._meter is not None:
            self._meter.ended(time.monotonic(), self.span)

    def _choose(self, logits: torch.Tensor, rows: Seq[Seq[SampleRow]]) -> None:
        flat = [row for of_one in rows for row in of_one]
        if flat and len(flat) != len(rows):
            copied = [i for i, of_one in enumerate(rows) for _ in of_one]
            logits = logits.index_select(0, upload(copied, logits.device, np.int64))
        self._samples = self._sampler.launch(logits, flat) if flat else None
        if self.span is not None and flat:
            self.span.end()

    def tokens(self) -> list[SampledToken]:
        return [] if self._samples is None else self._samples.read()

    def scores(self) -> list[SampledToken]:
        scores = self._future.result().scores
        return [] if scores is None else scores.tokens()

    @property
    def sampled(self) -> torch.Tensor:
        """The tokens that it leads to, integers [R] on the device, once `sample` has set their choice off."""
        assert self._samples is not None, "a step needs tokens of the one before it, which was not sampled"
        return self._samples.token_ids

    def run(self, compute: Compute) -> None:
        try:
            if self._begin is not None:
                self.span = self._begin()
            output = compute(self._step, self._sampled_before)
            if self.span is not None:
                self.span.end()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(output)


class StandIn:
    """A thread that takes the engine thread's turns while that computes a long step."""

    def __init__(self, turn: Callable[[], object], post: Post) -> None:
        """`turn` waits for a call to the engine thread, which `post` makes, and carries it out."""
        self._turn = turn
        self._post = post
        self._begun = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._is_over = self._is_closed = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="engine's stand-in", daemon=True).start()

    def during(self, compute: Compute, step: StepInput, sampled: torch.Tensor | None) -> StepOutput:
        """On the engine thread: computes a step; when this returns the other thread takes no more turns. Raises what
        one of its turns has raised."""
        self._is_over = False
        self._begun.release()
        try:
            return compute(step, sampled)
        finally:
            self._is_over = True
            self._post(_nothing)
            self._ended.acquire()
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        self._is_closed = True
        self._begun.release()

    def _run(self) -> None:
        compute_alone()
        while self._begun.acquire() and not self._is_closed:
            try:
                while not self._is_over:
                    self._turn()
            except BaseException as error:
                self._error = error
            self._ended.release()


@dataclass
class _Pending:
    """A command that some rank has not replied to."""

    done: Done
    reply: rank_pb2.RankReply
    """The replies so far, as one."""
    num_missing: int


class RankGroup:
    """The ranks of a worker (`worker.step_pipeline.Ranks`): rank 0's executor, and a socket for each rank from 1 on."""

    def __init__(
        self,
        make_executor: Callable[[Reply], RankExecutor],
        followers: list[RankConnection],
        sampler: TokenChooser,
        *,
        post: Post,
        lost: Callable[[str], None],
        timing: FailureTimeouts,
        prepare: Callable[[], None] = lambda: None,
        stand_in: StandIn | None = None,
        meter: StepMeter | None = None,
        begin_span: Callable[[], DeviceSpan] | None = None,
        long_tokens: int = OVERLAP_TOKENS,
    ) -> None:
        """Starts to compute, and to listen to the followers.

        `make_executor` makes rank 0's, which replies to what it is given. `post` has a call made on the engine thread.
        `lost` gets the reason when the group is over. `stand_in`: the engine thread computes long steps itself; without
        one a compute thread does, which calls `prepare` before its first step.
        `begin_span` begins a step on a device that runs behind; None where a step is over when it is computed.
        A step of `long_tokens` is long.
        """
        self._followers = followers
        self._sampler = sampler
        self._meter = meter
        self._detectors = [FailureDetector(timing) for _ in followers]
        self._post = post
        self._lost = lost
        self._prepare = prepare
        self._stand_in = stand_in
        self._number = 0
        self._num_steps = 0
        self._begin_span = begin_span
        self._long_tokens = long_tokens
        self._newest: LaunchedStep | None = None
        self._long_steps: SimpleQueue[LaunchedStep | None] = SimpleQueue()
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._local = make_executor(self.reply)
        if stand_in is None:
            threading.Thread(target=self._compute, name="compute", daemon=True).start()
        for rank, sock in enumerate(followers, start=1):
            threading.Thread(target=self._listen, args=(rank, sock), name=f"rank-{rank}", daemon=True).start()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def tick(self, elapsed_s: float) -> str:
        """From the speaking loop, every `timing.tick_s`: why the worker cannot go on now, or nothing."""
        states = [detector.tick(elapsed_s) for detector in self._detectors]
        silent = [str(rank) for rank, state in enumerate(states, start=1) if state is Liveness.DEAD]
        return f"tensor-parallel rank {', '.join(silent)} of this worker is silent" if silent else ""

    def launch(self, step: StepInput, rows: Callable[[], Seq[SampleRow]] | None = None) -> LaunchedStep:
        before = self._newest
        assert before is None or before.is_done, "a step was launched before the one before it was done"
        sampled = before.sampled if before is not None and step.has_unread_tokens else None
        self._number += 1
        self._num_steps += 1
        launched = self._newest = LaunchedStep(step, self._sampler, self._meter, self._begin_span, sampled)
        if self._followers:
            self._broadcast(rank_pb2.RankCommand(number=self._number, step=step.to_bytes()))
        if rows is not None:
            self._local.prepare(step, sampled, rows)  # on this thread, which changes rows when it reads tokens
        if len(step.token_ids) < self._long_tokens:
            launched.run(self._local.step)
        elif self._stand_in is not None:
            self._post(launched.run, partial(self._stand_in.during, self._local.step))
        else:
            self._long_steps.put(launched)
        return launched

    def issue(self, command: rank_pb2.RankCommand, done: Done) -> None:
        """Appends a command to the log; `done` is called on the engine thread once every rank has replied."""
        self._number += 1
        command.number = self._number
        with self._lock:
            reply = rank_pb2.RankReply(number=self._number)
            self._pending[self._number] = _Pending(done, reply, 1 + len(self._followers))
        self._broadcast(command)
        self._local.execute(command)

    def reply(self, number: int, error: str, kind: ErrorKind, size_bytes: int) -> None:
        """One rank is done with a command. Of several errors the first counts, and damage counts before others."""
        with self._lock:
            pending = self._pending[number]
            whole = pending.reply
            whole.size_bytes += size_bytes
            if error and (not whole.error or (kind == CORRUPT and whole.error_kind != CORRUPT)):
                whole.error, whole.error_kind = error, kind
            pending.num_missing -= 1
            if pending.num_missing:
                return
            del self._pending[number]
        self._post(pending.done, whole.error, whole.error_kind, whole.size_bytes)

    def _compute(self) -> None:
        self._prepare()

        ahead: DeviceSpan | None = None

        def compute(step: StepInput, sampled: torch.Tensor | None) -> StepOutput:
            output = self._local.step(step, sampled)
            if ahead is not None:
                ahead.wait()
            return output

        while (launched := self._long_steps.get()) is not None:
            launched.run(compute)
            ahead = launched.span
            self._post(_nothing)  # the engine thread looks at the step

    def close(self) -> None:
        """Stops every rank."""
        self._is_closing = True
        for sock in self._followers:
            try:
                write_frame(sock, rank_pb2.RankCommand(stop=rank_pb2.Stop()))
            except OSError:
                continue
        self._long_steps.put(None)
        if self._stand_in is not None:
            self._stand_in.close()
        self._local.close()

    def _broadcast(self, command: rank_pb2.RankCommand) -> None:
        frame = frame_of(command) if self._followers else b""
        for sock in self._followers:
            sock.sendall(frame)

    def _listen(self, rank: int, sock: RankConnection) -> None:
        try:
            while True:
                reply = read_frame(sock, rank_pb2.RankReply)
                self._detectors[rank - 1].heard()
                if not reply.number:
                    continue
                self.reply(reply.number, reply.error, reply.error_kind, reply.size_bytes)
        except (OSError, BatonError, ValueError, KeyError) as error:
            if not self._is_closing:
                self._lost(f"tensor-parallel rank {rank} is gone: {error}")


def _nothing() -> None:
    pass
