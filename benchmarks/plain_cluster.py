"""Plain processes here, without Ray, for as long as they are measured: any program, or the cluster of a cluster.yaml.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.load import load_config
from cluster.settings import JsonSettings, RouterSettings
from controller.plan import WorkerPlan, plan_cluster

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
STOP_S = 20.0


class ProgramFailed(Exception):
    """A process ended, or was lost, before it did what it should; the text holds what it said."""


class Program:
    """One `python -m MODULE`: the lines of JSON that it prints, and those that it reads."""

    def __init__(
        self,
        module: str,
        settings: JsonSettings,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables beside this process's own."""
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--settings", settings.to_json()],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=pass_fds,
            text=True,
        )
        self.pid = self._process.pid

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `expect` tells better
            print(json.dumps(command), file=self._process.stdin, flush=True)

    def expect(self, event: str) -> dict[str, Any]:
        """The next line, which must be this event. Raises ProgramFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told: dict[str, Any] = json.loads(line) if line else {}
        if told.get("event") != event:
            raise self.failure(f"no {event!r} came")
        return told

    def failure(self, what: str) -> ProgramFailed:
        """What happened, with what the process said."""
        self._log.seek(0)
        return ProgramFailed(f"python -m {self._module}: {what}\n{self._log.read().decode(errors='replace')}")

    def kill(self, within_s: float = STOP_S) -> int:
        """SIGKILL; the exit code."""
        self._process.kill()
        return self._process.wait(within_s)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not enough; returns when the process has ended."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def running_cluster(config_file: Path, num_gpus: int = 0) -> Iterator[str]:
    """The router's address, once it serves. Raises ConfigError for a bad file, ProgramFailed for a bad start."""
    plan = plan_cluster(load_config(config_file), num_gpus=num_gpus, num_cores=len(os.sched_getaffinity(0)))
    with running_workers(plan.workers) as flags, running_router(replace(plan.router, workers=flags)) as address:
        yield address


@contextlib.contextmanager
def running_workers(workers: Sequence[WorkerPlan]) -> Iterator[tuple[str, ...]]:
    """All of them, ready, in the form of RouterSettings.workers. Raises ProgramFailed for a bad start."""
    with contextlib.ExitStack() as stack:
        leaders = [_start_group(worker, stack) for worker in workers]
        addresses = [leader.expect("ready")["address"] for leader in leaders]
        yield tuple(
            f"{worker.role}:{worker.worker_id}={address}" for worker, address in zip(workers, addresses, strict=True)
        )


@contextlib.contextmanager
def running_router(settings: RouterSettings) -> Iterator[str]:
    """Its address, once it serves, at a free port. Raises ProgramFailed for a bad start."""
    program = Program("router", beside_others(settings))
    try:
        address = str(program.expect("ready")["address"])
        wait_until_serving(address)
        yield address
    finally:
        program.stop()


def beside_others(settings: RouterSettings) -> RouterSettings:
    """With a free port, for gRPC alone, and without the files of another cluster: batches and journal are in memory."""
    return settings.with_values(port=0, http_port=None, batch_store=None, state=None)


def start_within(stack: contextlib.ExitStack, module: str, settings: JsonSettings) -> Program:
    """It is stopped with the stack."""
    program = Program(module, settings)
    stack.callback(program.stop)
    return program


def _start_group(worker: WorkerPlan, stack: contextlib.ExitStack) -> Program:
    """Starts every rank; rank 0 answers when the whole group is ready."""
    leader = start_within(stack, "worker", worker.ranks[0])
    card = leader.expect("prepared")
    for rank in worker.ranks[1:]:
        start_within(stack, "worker", replace(rank, leader=card["rank_address"]))
    return leader


def wait_until_serving(address: str) -> None:
    """Returns when the router there does."""
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
