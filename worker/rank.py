"""Carries out rank commands on one tensor-parallel rank, the leader's and the followers' alike.

Steps run on the caller's thread. KV operations are issued by one transfer thread in the order of the command log;
landings are waited for on a thread of their own, so that a slow sender never delays the next receive from being posted.
Pairs open on short-lived threads: two workers that open several pairs in different orders never wait in a circle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import torch

from cluster.pb import rank_pb2
from engine.runner import ModelRunner
from engine.step import StepInput
from kv_transfer.layout import KvLayout
from kv_transfer.mover import KvMover, Landing

logger = logging.getLogger(__name__)

Reply = Callable[[int, str, int], None]
"""Called once for each command with (number, error or "", bytes moved), from any thread."""
Job = Callable[[], None]
T = TypeVar("T")


class RankExecutor:
    """The compute and transfer sides of one rank."""

    def __init__(self, runner: ModelRunner, mover: KvMover, reply: Reply) -> None:
        self._runner = runner
        self._mover = mover
        self._reply = reply
        self._last_step = 0
        self._step_done = threading.Condition()
        self._transfers: SimpleQueue[Job | None] = SimpleQueue()
        self._landings: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("kv-transfer", self._transfers), ("kv-landing", self._landings))
        ]
        for thread in self._threads:
            thread.start()

    def step(self, number: int, step: StepInput) -> torch.Tensor:
        """Runs one forward pass; logits [R, V]."""
        logits = self._runner.forward(step)
        with self._step_done:
            self._last_step = number
            self._step_done.notify_all()
        return logits

    def execute(self, command: rank_pb2.RankCommand) -> None:
        """Queues any command but a step; its reply comes when it is done."""
        number = command.number
        match command.WhichOneof("command"):
            case "open_pair":
                opening = threading.Thread(
                    target=self._answer, args=(number, self._open_pair, command.open_pair), name="kv-open", daemon=True
                )
                opening.start()
            case "close_pair":
                self._transfers.put(lambda: self._answer(number, self._close_pair, command.close_pair))
            case "gather":
                self._transfers.put(lambda: self._answer(number, self._gather, command.gather))
            case "send":
                self._transfers.put(lambda: self._answer(number, self._send, command.send))
            case "receive":
                self._transfers.put(lambda: self._post(number, command.receive))
            case other:
                raise ValueError(f"rank command {number} is a {other}, which does not run here")

    def close(self) -> None:
        """Ends the threads and closes every pair."""
        self._mover.close()
        self._transfers.put(None)
        self._landings.put(None)

    def _work(self, jobs: SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            job()

    def _answer(self, number: int, operation: Callable[[T], int], argument: T) -> None:
        try:
            size_bytes = operation(argument)
        except Exception as error:
            self._fail(number, error)
        else:
            self._reply(number, "", size_bytes)

    def _open_pair(self, command: rank_pb2.OpenPair) -> int:
        remote = KvLayout.from_proto(command.remote)
        self._mover.open_pair(command.pair_epoch, command.store_address, command.is_sender, remote)
        return 0

    def _close_pair(self, command: rank_pb2.ClosePair) -> int:
        self._mover.close_pair(command.pair_epoch)
        return 0

    def _gather(self, command: rank_pb2.PageRange) -> int:
        self._await_step(command.after_step)
        table = list(command.block_table)
        return self._mover.gather(command.pair_epoch, command.slot, command.token_start, command.token_end, table)

    def _send(self, command: rank_pb2.Send) -> int:
        self._mover.send(command.pair_epoch, command.slot, command.num_tokens)
        return 0

    def _post(self, number: int, command: rank_pb2.PageRange) -> None:
        table = list(command.block_table)
        try:
            landing = self._mover.post_receive(
                command.pair_epoch, command.slot, command.token_start, command.token_end, table
            )
        except Exception as error:
            self._fail(number, error)
            return
        self._landings.put(lambda: self._answer(number, self._land, (landing, command.after_step)))

    def _land(self, posted: tuple[Landing, int]) -> int:
        landing, after_step = posted
        self._await_step(after_step)
        return self._mover.complete_receive(landing)

    def _fail(self, number: int, error: Exception) -> None:
        logger.warning("rank command %d failed: %s", number, error)
        self._reply(number, str(error) or type(error).__name__, 0)

    def _await_step(self, number: int) -> None:
        with self._step_done:
            self._step_done.wait_for(lambda: self._last_step >= number)
