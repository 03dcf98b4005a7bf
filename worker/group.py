"""Rank 0's view of its tensor-parallel group: one numbered command log that every rank follows.

A command is done when every rank has replied; steps need no reply, their collectives keep the ranks together. A rank
whose connection closes ends the whole worker: a tensor-parallel group lives and dies as one. A rank that is only silent
(stopped, say) makes the worker look dead until it is heard again: whoever speaks for the worker asks `tick`.

Long steps run on a compute thread, so that the engine thread goes on hearing; short ones where they are launched, since
handing them over would cost more than it frees. One step runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from cluster.errors import BatonError
from cluster.failure_detector import FailureDetector, FailureTimeouts, Liveness
from cluster.pb import rank_pb2
from engine.model_runner import StepOutput
from engine.step_input import StepInput
from engine.threads import give_back
from worker.frames import read_frame, write_frame
from worker.rank import OVERLAP_TOKENS, ErrorKind, RankExecutor
from worker.sockets import RankConnection

CORRUPT = rank_pb2.RankReply.KIND_CORRUPT

Done = Callable[[int, str, ErrorKind, int], None]
"""Called once for each command that is not a step, from any thread: (number, error or "", its kind, bytes over all
ranks)."""


class LaunchedStep:
    """A step on its way, or done: `worker.ranks.Launched`."""

    def __init__(self, step: StepInput) -> None:
        self._step = step
        self._future: Future[StepOutput] = Future()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def result(self) -> StepOutput:
        return self._future.result()

    def run(self, compute: Callable[[StepInput], StepOutput]) -> None:
        try:
            output = compute(self._step)
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(output)


class RankGroup:
    """The real `worker.ranks.Ranks`: the local executor, and a socket for each rank from 1 on."""

    def __init__(
        self,
        followers: list[RankConnection],
        done: Done,
        lost: Callable[[str], None],
        wake: Callable[[], None],
        timing: FailureTimeouts,
        prepare: Callable[[], None],
    ) -> None:
        """`lost` is told why the group is over; `wake` is called, on the compute thread, when a long step has ended.
        `prepare` is called once by the compute thread, before its first step."""
        self._followers = followers
        self._pulses = [FailureDetector(timing) for _ in followers]
        self._done = done
        self._lost = lost
        self._wake = wake
        self._prepare = prepare
        self._number = 0
        self._num_steps = 0
        self._newest: LaunchedStep | None = None
        self._long_steps: SimpleQueue[LaunchedStep | None] = SimpleQueue()
        self._pending: dict[int, rank_pb2.RankReply] = {}
        """What is known of each command: the ranks' replies so far, as one."""
        self._num_missing: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._local: RankExecutor | None = None

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def attach(self, local: RankExecutor) -> None:
        """Sets rank 0's executor, and starts to compute and to listen to the others."""
        self._local = local
        threading.Thread(target=self._compute, args=(local,), name="compute", daemon=True).start()
        for rank, sock in enumerate(self._followers, start=1):
            threading.Thread(target=self._listen, args=(rank, sock), name=f"rank-{rank}", daemon=True).start()

    def tick(self, elapsed_s: float) -> str:
        """From the speaking thread, every `timing.tick_s`: why the worker cannot go on now, or nothing."""
        verdicts = [pulse.tick(elapsed_s) for pulse in self._pulses]
        silent = [str(rank) for rank, verdict in enumerate(verdicts, start=1) if verdict is Liveness.DEAD]
        return f"tensor-parallel rank {', '.join(silent)} of this worker is silent" if silent else ""

    def launch(self, step: StepInput) -> LaunchedStep:
        assert self._local is not None
        assert self._newest is None or self._newest.is_done, "a step was launched before the one before it was done"
        self._number += 1
        self._num_steps += 1
        if self._followers:
            self._broadcast(rank_pb2.RankCommand(number=self._number, step=step.to_bytes()))
        launched = self._newest = LaunchedStep(step)
        if len(step.token_ids) >= OVERLAP_TOKENS:
            give_back()
            self._long_steps.put(launched)
        else:
            launched.run(self._local.step)
        return launched

    def issue(self, command: rank_pb2.RankCommand) -> int:
        assert self._local is not None
        self._number += 1
        command.number = self._number
        with self._lock:
            self._pending[self._number] = rank_pb2.RankReply(number=self._number)
            self._num_missing[self._number] = 1 + len(self._followers)
        self._broadcast(command)
        self._local.execute(command)
        return self._number

    def reply(self, number: int, error: str, kind: ErrorKind, size_bytes: int) -> None:
        """One rank is done with a command. Of several errors the first counts, and damage counts before others."""
        with self._lock:
            whole = self._pending[number]
            whole.size_bytes += size_bytes
            if error and (not whole.error or (kind == CORRUPT and whole.error_kind != CORRUPT)):
                whole.error, whole.error_kind = error, kind
            self._num_missing[number] -= 1
            if self._num_missing[number]:
                return
            del self._pending[number], self._num_missing[number]
        self._done(number, whole.error, whole.error_kind, whole.size_bytes)

    def _compute(self, local: RankExecutor) -> None:
        self._prepare()

        def compute(step: StepInput) -> StepOutput:
            try:
                return local.step(step)
            finally:
                give_back()

        while (launched := self._long_steps.get()) is not None:
            launched.run(compute)
            self._wake()

    def close(self) -> None:
        """Stops every rank."""
        self._is_closing = True
        for sock in self._followers:
            try:
                write_frame(sock, rank_pb2.RankCommand(stop=rank_pb2.Stop()))
            except OSError:
                continue
        self._long_steps.put(None)
        if self._local is not None:
            self._local.close()

    def _broadcast(self, command: rank_pb2.RankCommand) -> None:
        for sock in self._followers:
            write_frame(sock, command)

    def _listen(self, rank: int, sock: RankConnection) -> None:
        try:
            while True:
                reply = read_frame(sock, rank_pb2.RankReply)
                self._pulses[rank - 1].heard()
                if not reply.number:
                    continue
                self.reply(reply.number, reply.error, reply.error_kind, reply.size_bytes)
        except (OSError, BatonError, ValueError, KeyError) as error:
            if not self._is_closing:
                self._lost(f"tensor-parallel rank {rank} is gone: {error}")
