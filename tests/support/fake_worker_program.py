"""A program in place of `worker.program`: real processes that find each other and live, but load no model.

It obeys the protocol of `cluster.program`: rank 0 prepares first and the others are told where it is. A model path that
ends in `broken` fails to start like a bad checkpoint, and so does a worker whose KV blocks have 13 tokens. With a path
that ends in `later` the process says, once it serves, that it speaks the next version of the inside protocol alone.
"""

from __future__ import annotations

import json
import logging
import os
import threading

from cluster import protocol
from cluster.errors import CheckpointError
from cluster.program import Program, Report
from cluster.settings import WorkerSettings

RANK_ADDRESS = "127.0.0.1:1"


class FakeWorker:
    def __init__(self, settings: WorkerSettings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._ended = threading.Event()

    def prepare(self) -> str:
        self._report(f"rank {self._settings.tp_rank} of {self._settings.tp_size} prepares")
        return json.dumps({"rank_address": RANK_ADDRESS} if self._settings.tp_rank == 0 else {})

    def start(self) -> str:
        settings = self._settings
        assert settings.leader == (None if settings.tp_rank == 0 else RANK_ADDRESS)
        if settings.model.path.endswith("broken") or settings.engine.block_size == 13:
            raise CheckpointError(f"{settings.model.path}: model.safetensors is truncated")
        if settings.model.path.endswith("later"):
            protocol.VERSION = protocol.OLDEST = protocol.VERSION + 1
        logging.getLogger(__name__).warning("a warning of %s", settings.worker_id)
        card = {
            "worker_id": settings.worker_id,
            "address": f"{settings.host}:2",
            "tp_rank": settings.tp_rank,
            "role": settings.role,
        }
        return json.dumps({**card, "pid": os.getpid()})

    def wait(self) -> None:
        self._ended.wait()

    def stop(self) -> None:
        self._ended.set()


def create(settings_json: str, report: Report) -> Program:
    return FakeWorker(WorkerSettings.from_json(settings_json), report)
