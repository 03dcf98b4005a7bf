"""Rank 0's view of its tensor-parallel group: one numbered command log that every rank follows.

A command is done when every rank has replied; steps need no reply, their collectives keep the ranks together. A rank
whose connection closes ends the whole worker: a tensor-parallel group lives and dies as one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import torch

from cluster.errors import BatonError
from cluster.pb import rank_pb2
from engine.step import StepInput
from worker.frames import read_frame, write_frame
from worker.rank import RankExecutor

Done = Callable[[int, str, int], None]
"""Called once for each command that is not a step, from any thread: (number, error or "", bytes over all ranks)."""


class RankGroup:
    """The real `worker.ranks.Ranks`: the local executor, and a socket for each rank from 1 on."""

    def __init__(self, followers: list[socket.socket], done: Done, lost: Callable[[str], None]) -> None:
        self._followers = followers
        self._done = done
        self._lost = lost
        self._number = 0
        self._last_step = 0
        self._pending: dict[int, tuple[int, str, int]] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._local: RankExecutor | None = None

    @property
    def last_step(self) -> int:
        return self._last_step

    def attach(self, local: RankExecutor) -> None:
        """Sets rank 0's executor, and starts to listen to the others."""
        self._local = local
        for rank, sock in enumerate(self._followers, start=1):
            threading.Thread(target=self._listen, args=(rank, sock), name=f"rank-{rank}", daemon=True).start()

    def step(self, step: StepInput) -> torch.Tensor:
        assert self._local is not None
        self._number += 1
        self._last_step = self._number
        if self._followers:
            self._broadcast(rank_pb2.RankCommand(number=self._number, step=step.to_bytes()))
        return self._local.step(self._number, step)

    def issue(self, command: rank_pb2.RankCommand) -> int:
        assert self._local is not None
        self._number += 1
        command.number = self._number
        with self._lock:
            self._pending[self._number] = (1 + len(self._followers), "", 0)
        self._broadcast(command)
        self._local.execute(command)
        return self._number

    def reply(self, number: int, error: str, size_bytes: int) -> None:
        """One rank is done with a command."""
        with self._lock:
            missing, first_error, total = self._pending[number]
            missing, first_error, total = missing - 1, first_error or error, total + size_bytes
            if missing:
                self._pending[number] = (missing, first_error, total)
                return
            del self._pending[number]
        self._done(number, first_error, total)

    def close(self) -> None:
        """Stops every rank."""
        self._is_closing = True
        for sock in self._followers:
            try:
                write_frame(sock, rank_pb2.RankCommand(stop=rank_pb2.Stop()))
            except OSError:
                continue
        if self._local is not None:
            self._local.close()

    def _broadcast(self, command: rank_pb2.RankCommand) -> None:
        for sock in self._followers:
            write_frame(sock, command)

    def _listen(self, rank: int, sock: socket.socket) -> None:
        try:
            while True:
                reply = read_frame(sock, rank_pb2.RankReply)
                self.reply(reply.number, reply.error, reply.size_bytes)
        except (OSError, BatonError, ValueError, KeyError) as error:
            if not self._is_closing:
                self._lost(f"tensor-parallel rank {rank} is gone: {error}")
