"""The cluster that a cluster.yaml names, as plain processes here, without Ray, for as long as it is measured.

Settings are those that `baton serve` would give each process; only ports are free ones. What the processes say goes to
a log file, which is shown when one of them does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import load_config
from cluster.plan import WorkerPlan, plan_cluster
from cluster.settings import JsonSettings

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
STOP_S = 20.0


class StartFailed(Exception):
    """A process ended before it served; the text holds what it said."""


class _Program:
    """One `python -m MODULE`, and the lines of JSON that it prints."""

    def __init__(self, module: str, settings: JsonSettings) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--settings", settings.to_json()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.pid = self._process.pid

    def expect(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told: dict[str, Any] = json.loads(line) if line else {}
        if told.get("event") != event:
            self._log.seek(0)
            raise StartFailed(f"python -m {self._module} did not start:\n{self._log.read().decode()}")
        return told

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def running_cluster(config_file: Path, num_gpus: int = 0) -> Iterator[str]:
    """The router's address, once it serves. Raises ConfigError for a bad file, StartFailed for a bad start."""
    plan = plan_cluster(load_config(config_file), num_gpus=num_gpus, num_cores=len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:

        def start(module: str, settings: JsonSettings) -> _Program:
            program = _Program(module, settings)
            stack.callback(program.stop)
            return program

        leaders = [_start_group(worker, start) for worker in plan.workers]
        addresses = [leader.expect("ready")["address"] for leader in leaders]
        flags = tuple(
            f"{worker.role}:{worker.worker_id}={address}"
            for worker, address in zip(plan.workers, addresses, strict=True)
        )
        router = start("router", replace(plan.router, port=0, workers=flags))
        address = str(router.expect("ready")["address"])
        _wait_until_serving(address)
        yield address


def _start_group(worker: WorkerPlan, start: Any) -> _Program:
    """Starts every rank; rank 0 answers when the whole group is ready."""
    leader: _Program = start("worker", worker.ranks[0])
    card = leader.expect("prepared")
    for rank in worker.ranks[1:]:
        start("worker", replace(rank, leader=card["rank_address"]))
    return leader


def _wait_until_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
