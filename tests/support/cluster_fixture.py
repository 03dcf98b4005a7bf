"""A whole cluster without Ray for tests: one prefill worker, one decode worker and a router, each a process of its own.

Ends with two checks: every worker holds nothing any more (free + cached = total), and every process exits with 0 on
SIGTERM. What a worker did in each step is read from its step log.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpc_health.v1 import health_pb2, health_pb2_grpc
from reference_engine import Completion, Engine
from workers import ROOT, START_TIMEOUT_S, Process

from cluster.errors import BatonError
from cluster.pb import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, worker_pb2
from cluster.rpc import create_blocking_channel
from cluster.settings import RouterSettings, WorkerSettings
from cluster.tls import ClientTls
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.tp import SingleGroup
from tools.client import BatonClient, make_spec

BUNDLED_MODEL = ROOT / "models" / "tiny-shakespeare"
PREFILL, DECODE = "prefill-0", "decode-0"
WAIT_S = 60.0
_LOOK_EVERY_S = 0.01

Event = generation_pb2.GenerateStreamResponse
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One line of a step log, with the sequences (`generation-id/index`) that ran in it."""

    number: int
    time: float
    num_tokens: int
    running: frozenset[str]
    joined: frozenset[str]
    left: frozenset[str]
    preempted: tuple[str, ...]
    cancelled: frozenset[str]
    """Requests that their router cancelled since the step before."""
    failed: frozenset[str]
    """Requests that could not go on since the step before; a cancelled one too, when the other worker's abort of the
    hand-off came before the router's cancel."""
    blocks: Mapping[str, int]


HAND_OVER = {"policy": "least_loaded"}
PATIENT = {"dead_after_s": 30.0}
"""Who stalls on an overloaded machine is not what most tests are about."""
"""Of a router that has every prompt handed over, however short."""


class PlainCluster:
    """Use it as a context manager. `prefill`, `decode` and `router` are settings of one process, the rest of both
    workers; `tls` is what clients use; logs go to `folder`; `start` makes a process of a program and its settings."""

    def __init__(
        self,
        model_path: Path,
        folder: Path,
        *,
        prefill: Settings | None = None,
        decode: Settings | None = None,
        router: Settings | None = None,
        tls: ClientTls | None = None,
        worker_program: str = "worker",
        start: Callable[[str, str], Process] = Process,
        **workers: Any,
    ) -> None:
        self._model_path = str(model_path)
        self._folder = folder
        self._overrides = {PREFILL: dict(prefill or {}), DECODE: dict(decode or {})}
        self._router_settings = dict(router or {})
        self._tls = tls
        self.worker_program = worker_program
        self._start = start
        self._common = {"threads": 1, "device": "cpu", "dtype": "float32", **workers}
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        try:
            for worker_id, role in ((PREFILL, "prefill"), (DECODE, "decode")):
                self.processes[worker_id] = self._start(self.worker_program, self.settings_of(worker_id, role))
            self.addresses = {worker_id: str(self.ready(worker_id)["address"]) for worker_id in (PREFILL, DECODE)}
            flags = [f"{worker_id.split('-')[0]}:{worker_id}={at}" for worker_id, at in self.addresses.items()]
            given = {"port": 0, "model_path": self._model_path, **HAND_OVER, **PATIENT, **self._router_settings}
            given["workers"] = tuple(flags)
            self._router = RouterSettings.from_values(**given)
            self._hear(self.add_router("router"))
            self._connect()
        except BaseException:
            self._end_processes()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait_idle()
        finally:
            self.client.close()
            self.channel.close()
            codes = self._end_processes()
        assert set(codes.values()) == {0}, f"exit codes after SIGTERM: {codes}"

    def add_router(self, name: str, **settings: Any) -> dict[str, Any]:
        """Beside the one that is there, unless it has the same name; its card. `settings`: that differ."""
        self.processes[name] = self._start("router", self._router.with_values(**settings).to_json())
        return self.processes[name].expect("ready")

    def kill_router(self) -> None:
        """kill -9. Its clients are closed before: gRPC would give the next ones the connection that has just died."""
        self.channel.close()
        self.client.close()
        killed = self.processes.pop("router")
        killed.popen.send_signal(signal.SIGKILL)
        killed.popen.wait(WAIT_S)
        assert killed.stop() == -signal.SIGKILL

    def start_router(self) -> None:
        """Another one in its place, with the same settings at the same addresses."""
        ports = {"port": self.address, "http_port": self.http_address}
        self._hear(self.add_router("router", **{name: int(a.rpartition(":")[2]) for name, a in ports.items() if a}))
        self._connect()

    def replace_worker(self, worker_id: str, role: str) -> None:
        """kill -9, and another one at its address with the same settings."""
        killed = self.processes.pop(worker_id)
        killed.popen.send_signal(signal.SIGKILL)
        killed.popen.wait(WAIT_S)
        assert killed.stop() == -signal.SIGKILL
        self.step_log(worker_id).unlink()
        port = int(self.addresses[worker_id].rpartition(":")[2])
        self.processes[worker_id] = self._start(self.worker_program, self.settings_of(worker_id, role, port=port))
        self.ready(worker_id)

    def _hear(self, card: dict[str, Any]) -> None:
        self.address, self.control_address = str(card["address"]), str(card["control_address"])
        self.http_address = str(card["http_address"])

    def status(self) -> admin_pb2.GetStatusResponse:
        status: admin_pb2.GetStatusResponse = self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        return status

    def stats(self, worker_id: str) -> worker_pb2.WorkerStats:
        return next(w.stats for w in self.status().workers if w.worker_id == worker_id)

    def wait_for(self, condition: Callable[[admin_pb2.GetStatusResponse], bool]) -> admin_pb2.GetStatusResponse:
        """The first status for which `condition` holds; fails when there is none within WAIT_S."""
        until = time.monotonic() + WAIT_S
        never = threading.Event()
        while not condition(status := self.status()):
            assert time.monotonic() < until, f"this did not come about within {WAIT_S} s; the last status: {status}"
            never.wait(_LOOK_EVERY_S)
        return status

    def wait_idle(self) -> None:
        """Until nothing is held: free + cached = total on every worker.

        A last small request goes the whole way first, so that every command before it has been heard by the workers,
        and the numbers looked at are newer than every step that a worker has written down.
        """
        spec = token_spec([1, 2, 3], 2)
        spec.cache.bypass_prefix_cache = True
        self.client.generate(spec, timeout_s=WAIT_S)
        last_steps = {worker_id: self.steps(worker_id)[-1].number for worker_id in (PREFILL, DECODE)}

        def is_idle(status: admin_pb2.GetStatusResponse) -> bool:
            return not (status.router.num_running or status.router.num_queued) and all(
                w.stats.num_steps >= last_steps[w.worker_id]
                and w.stats.num_requests == w.stats.blocks_held == 0
                and w.stats.num_running_seqs == w.stats.num_waiting_requests == 0
                for w in status.workers
            )

        for worker in self.wait_for(is_idle).workers:
            stats = worker.stats
            assert stats.blocks_total > 0
            assert stats.blocks_free + stats.blocks_cached == stats.blocks_total, worker

    def step_log(self, worker_id: str) -> Path:
        return self._folder / f"{worker_id}.steps.jsonl"

    def steps(self, worker_id: str) -> list[Step]:
        """What the worker has run so far, oldest first."""
        steps: list[Step] = []
        running: frozenset[str] = frozenset()
        text = self.step_log(worker_id).read_text(encoding="utf-8")
        for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            joined, left = frozenset(line["joined"]), frozenset(line["left"])
            assert left <= running and not joined & running, f"step {line['step']} contradicts the one before"
            running = (running - left) | joined
            assert len(running) == line["running"]
            step = Step(
                line["step"],
                line["time"],
                line["tokens"],
                running,
                joined,
                left,
                tuple(line["preempted"]),
                frozenset(line["cancelled"]),
                frozenset(line["failed"]),
                line["blocks"],
            )
            steps.append(step)
        return steps

    def settings_of(self, worker_id: str, role: str, **more: Any) -> str:
        return WorkerSettings.from_values(
            worker_id=worker_id,
            role=role,
            model_path=self._model_path,
            step_log=str(self.step_log(worker_id)),
            **{**self._common, **self._overrides[worker_id], **more},
        ).to_json()

    def ready(self, worker_id: str) -> dict[str, Any]:
        self.processes[worker_id].expect("prepared")
        return self.processes[worker_id].expect("ready")

    def _connect(self) -> None:
        self.client = BatonClient(self.address, tls=self._tls)
        self.channel = create_blocking_channel(self.address, tls=self._tls)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.StatusServiceStub(self.channel)
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(), timeout=START_TIMEOUT_S)
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()

    def _end_processes(self) -> dict[str, int]:
        """The router first, so that it drains; each one's exit code."""
        names = sorted(self.processes, key=lambda name: name in (PREFILL, DECODE))
        return {name: self.processes.pop(name).stop() for name in names}


def token_spec(prompt: Sequence[int], max_output_tokens: int, **fields: Any) -> generation_pb2.GenerationSpec:
    """Greedy, never ended by an end-of-sequence token, with token ids in the output; `fields` are make_spec's."""
    given = {"temperature": 0.0, "ignore_eos": True, "token_ids": True, **fields}
    return make_spec(prompt, max_output_tokens=max_output_tokens, **given)


class Stream:
    """A generation read on a thread of its own, told apart by `name`; others wait for what has come of it."""

    def __init__(
        self,
        cluster: PlainCluster,
        spec: generation_pb2.GenerationSpec,
        *,
        timeout_s: float | None = None,
        client: BatonClient | None = None,
        journal: list[tuple[str, str]] | None = None,
        name: str = "",
    ) -> None:
        """`client`: None for the cluster's own. `journal` gets (name, kind) of each event; streams may share one."""
        self.name = name
        self.events: list[Event] = []
        self.error: BatonError | None = None
        self.is_over = False
        self.num_tokens = 0
        """Of every sequence, so far."""
        self._journal = [] if journal is None else journal
        self._changed = threading.Condition()
        self._call = (client or cluster.client).stream(spec, timeout_s=timeout_s)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """`condition` is looked at after every event, and the stream must still go on while it does not hold."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or condition(), WAIT_S)
            assert condition(), f"stream {self.name!r} ended or stalled first: {self.error!r} {self.events[-3:]}"

    def wait_for_tokens(self, count: int) -> None:
        self.wait_for(lambda: self.num_tokens >= count)

    def wait_for_phase(self, phase: generation_pb2.Heartbeat.Phase) -> None:
        self.wait_for(lambda: any(e.HasField("heartbeat") and e.heartbeat.phase == phase for e in self.events))

    def result(self) -> list[Event]:
        """Every event, once the stream has ended well; raises what ended it otherwise."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.events

    def wait_for_events(self, count: int) -> None:
        """Until so many have come or the stream has ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_over or len(self.events) >= count, WAIT_S), self.events

    def ends_within(self, bound_s: float) -> bool:
        """Whether it has ended, well or not, before the bound."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over, bound_s)

    def join(self) -> None:
        """Until the stream has ended, well or not."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"stream {self.name!r} has not ended"

    def cancel(self) -> None:
        """What a client does that leaves."""
        self._call.cancel()

    def timing(self) -> generation_pb2.Timing:
        """Of one that has completed, if it was asked for."""
        return next(event.completed.timing for event in self.events if event.HasField("completed"))

    @property
    def generation_id(self) -> str:
        return next(e.started.generation_id for e in self.events if e.HasField("started"))

    def token_ids(self, index: int = 0) -> list[int]:
        """What has come so far; each token must come exactly once and in order."""
        tokens: list[int] = []
        for event in list(self.events):
            if event.HasField("delta") and event.delta.index == index:
                assert event.delta.first_token_index == len(tokens)
                tokens.extend(event.delta.token_ids)
        return tokens

    def logprobs(self, index: int = 0) -> list[float]:
        deltas = [e.delta for e in self.events if e.HasField("delta") and e.delta.index == index]
        return [entry.logprob for delta in deltas for entry in delta.logprobs]

    def _read(self) -> None:
        try:
            for event in self._call:
                self._note(event)
        except BatonError as error:
            self.error = error
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self.num_tokens += event.delta.token_count
            self._journal.append((self.name, str(event.WhichOneof("event"))))
            self._changed.notify_all()


def single_process(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], model_path: Path = BUNDLED_MODEL
) -> list[list[Completion]]:
    """What the engine generates for these prompts alone in one process, in float32: the reference."""
    longest = max(len(prompt) + p.max_output_tokens for prompt, p in zip(prompts, params, strict=True))
    num_blocks = sum(p.n for p in params) * (longest // 16 + 2)
    runner = ModelRunner(
        model_path, tp=SingleGroup(), device="cpu", dtype="float32", num_blocks=num_blocks, block_size=16
    )
    return Engine(runner, BlockManager(num_blocks, 16), runner.config.vocab_size).generate(prompts, params)
