"""A rank of a worker other than its first, which carries out rank 0's command log; and what the programs of all ranks
share: an end that is reached once.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading

from cluster.errors import BatonError, InternalError, Unavailable
from cluster.pb import rank_pb2
from cluster.program import Report
from cluster.protocol import check_protocol
from cluster.tls import internal_tls_of
from engine.step_input import StepInput
from worker.disk_files import PUT_BY_S
from worker.loading import RENDEZVOUS_TIMEOUT_S, load_rank, rank_hello, ready_for_steps
from worker.rank import ErrorKind, RankExecutor
from worker.rank_socket import RankConnection, connect, read_frame, write_frame
from worker.resolved import Resolved

logger = logging.getLogger(__name__)


class RankProgram:
    """The end of a rank's program, reached once, with or without an error."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BatonError | None = None

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _end(self, error: BatonError | None = None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


class Follower(RankProgram):
    """Ranks 1..: carries out rank 0's command log until it stops or its socket closes."""

    def __init__(self, resolved: Resolved, report: Report) -> None:
        super().__init__()
        self._resolved = resolved
        self._report = report
        self._sock: RankConnection | None = None
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._executor: RankExecutor | None = None
        self._write_lock = threading.Lock()

    def prepare(self) -> str:
        return json.dumps({})

    def start(self) -> str:
        settings = self._resolved.settings
        if settings.leader is None:
            raise InternalError(f"tensor-parallel rank {settings.tp_rank} needs --leader, rank 0's rank address")
        sock = self._sock = connect(settings.leader, RENDEZVOUS_TIMEOUT_S, internal_tls_of(settings.internal_tls))
        write_frame(sock, rank_pb2.RankReply(hello=rank_hello(settings, self._resolved.device)))
        command = read_frame(sock, rank_pb2.RankCommand)
        own = f"its rank {settings.tp_rank}"
        check_protocol(f"rank 0 of worker {settings.worker_id}", command.start.protocol, own)
        loaded = load_rank(self._resolved, command.start, self._report)
        self._executor = RankExecutor(loaded.runner, loaded.transfer_engine, self._reply)
        threading.Thread(target=self._compute, name="engine", daemon=True).start()
        threading.Thread(target=self._listen, name="command-log", daemon=True).start()
        threading.Thread(
            target=self._heartbeat, args=(settings.transfer.heartbeat_s,), name="heartbeat", daemon=True
        ).start()
        card = {"worker_id": settings.worker_id, "address": "", "tp_rank": settings.tp_rank, "pid": os.getpid()}
        return json.dumps(card)

    def stop(self) -> None:
        """At once, or where KV may have to be put by first, when rank 0 ends."""
        engine = self._resolved.settings.engine
        if self._executor is None or not (engine.kv_disk_bytes or engine.kv_store_bytes):
            self._end()
            return
        timer = threading.Timer(PUT_BY_S, self._end)
        timer.daemon = True
        timer.start()

    def wait(self) -> None:
        try:
            super().wait()
        finally:
            self._steps.put(None)
            if self._executor is not None:
                self._executor.close()

    def _listen(self) -> None:
        assert self._sock is not None and self._executor is not None
        try:
            while True:
                command = read_frame(self._sock, rank_pb2.RankCommand)
                match command.WhichOneof("command"):
                    case "step":
                        self._steps.put(command.step)
                    case "stop":
                        self._end()
                        return
                    case _:
                        self._executor.execute(command)
        except (OSError, BatonError, ValueError) as error:
            self._end(Unavailable(f"rank 0 is gone: {error}"))

    def _compute(self) -> None:
        assert self._executor is not None
        ready_for_steps(self._resolved)
        try:
            while (step := self._steps.get()) is not None:
                self._executor.step(StepInput.from_bytes(step))
        except Exception as error:
            logger.exception("a step failed")
            self._end(InternalError(f"tensor-parallel rank {self._resolved.settings.tp_rank} failed: {error}"))

    def _heartbeat(self, heartbeat_s: float) -> None:
        while not self._ended.wait(heartbeat_s):
            self._write(rank_pb2.RankReply())

    def _reply(self, number: int, error: str, kind: ErrorKind, size_bytes: int) -> None:
        self._write(rank_pb2.RankReply(number=number, error=error, error_kind=kind, size_bytes=size_bytes))

    def _write(self, reply: rank_pb2.RankReply) -> None:
        assert self._sock is not None
        try:
            with self._write_lock:
                write_frame(self._sock, reply)
        except OSError as broken:
            self._end(Unavailable(f"rank 0 is gone: {broken}"))
