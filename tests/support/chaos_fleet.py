"""A cluster of processes for chaos tests: two prefill and two decode workers, a router, and what is done to them.

Workers keep their address over restarts. A fault is an act with a proof: a killed process is dead, a stopped one is in
state T. `settle` is what must hold after every scenario: each worker, asked anew, holds nothing (free + cached = total,
no request, every slot back), within 5 s. Knows no scenario.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from cluster_fixture import HAND_OVER, Stream, token_spec
from prometheus_client.parser import text_string_to_metric_families
from workers import ROOT, Process, Worker

from cluster import rpc
from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from cluster.settings import RouterSettings
from tools.client import BatonClient

MODEL = ROOT / "models" / "tiny-shakespeare"
BASELINE_S = 5.0
"""From quiet to nothing held."""
WAIT_S = 30.0
LOOK_EVERY_S = 0.01

FAST = {"heartbeat_s": 0.2, "suspect_after_s": 0.5, "dead_after_s": 1.0, "transfer_timeout_s": 1.0}
"""Silence is noticed after 1 s instead of 3, so that a battery of scenarios stays short."""


def await_true(condition: Callable[[], object], what: Callable[[], object], bound_s: float = WAIT_S) -> float:
    """Seconds until `condition` held; fails with `what()` when it does not in time."""
    begin, never = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() < begin + bound_s, f"not within {bound_s:g} s: {what()}"
        never.wait(LOOK_EVERY_S)
    return time.monotonic() - begin


def process_state(pid: int) -> str:
    """One letter as in ps: R, S, T (stopped), Z."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def metrics_of(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a page of metrics by its name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


class ChaosWorker(Worker):
    """A worker whose ranks can be killed, stopped and set going again."""

    def __init__(self, namespace: str = "", **settings: Any) -> None:
        self.namespace = namespace
        self.failed_at: dict[RequestKey, float] = {}
        """When the worker said that a request cannot go on."""
        super().__init__(**{"model_path": str(MODEL), "metrics_port": 0, **settings})

    def start_rank(self, settings_json: str) -> Process:
        return Process("worker", settings_json, self.namespace)

    def again(self) -> ChaosWorker:
        """Another life at the same address."""
        return ChaosWorker(self.namespace, **{**vars(self.settings), "port": self.port})

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_dead(self) -> bool:
        return any(rank.popen.poll() is not None for rank in self.ranks)

    def is_stopped(self) -> bool:
        """Whether any of its ranks, which are alive, stands still."""
        return any(process_state(rank.popen.pid) == "T" for rank in self.ranks)

    def kill(self, rank: int = 0) -> float:
        """SIGKILL; returns the moment before it. The rest of the group ends by itself."""
        popen = self.ranks[rank].popen
        at = time.monotonic()
        os.kill(popen.pid, signal.SIGKILL)
        assert popen.wait(WAIT_S) == -signal.SIGKILL
        return at

    def stop(self, rank: int = 0) -> float:
        """SIGSTOP; returns when the process stands still."""
        pid = self.ranks[rank].popen.pid
        at = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        await_true(lambda: process_state(pid) == "T", lambda: process_state(pid))
        return at

    def cont(self, rank: int = 0) -> None:
        pid = self.ranks[rank].popen.pid
        assert process_state(pid) == "T", f"{self.settings.worker_id} was not stopped"
        os.kill(pid, signal.SIGCONT)

    def await_end(self) -> None:
        """Until every rank has ended: a group lives and dies as one."""
        codes = [rank.popen.wait(WAIT_S) for rank in self.ranks]
        assert all(code in (1, -signal.SIGKILL) for code in codes), codes

    def abandon(self) -> None:
        """Ends what is left of the group, in whatever state it is."""
        for rank in self.ranks:
            rank.popen.kill()
            rank.popen.wait(WAIT_S)
        if hasattr(self, "_events"):
            self.hang_up()
        for rank in self.ranks:
            rank.stop()

    def ask(self) -> worker_pb2.WorkerStats:
        """What the worker holds now: a session of its own is told at its beginning."""
        with rpc.create_blocking_channel(self.address) as channel:
            session = worker_pb2_grpc.WorkerServiceStub(channel).Session(iter([]), timeout=WAIT_S)
            events = (event for batch in session for event in batch.events)
            stats = next(event.stats for event in events if event.HasField("stats"))
            session.cancel()
        return stats

    def rejoin(self) -> None:
        """Opens this side's session anew if the worker has ended it."""
        if self.is_lost:
            self.hang_up()
            self.connect_again()

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return metrics_of(self.info.metrics_address)

    def count(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name that carry these labels."""
        wanted = set(labels.items())
        return sum(value for (sample, has), value in self.metrics().items() if sample == name and wanted <= has)

    def slots(self, side: str, state: str) -> int:
        """Of every pair: `side` is send or receive."""
        return int(self.count("baton_kv_slots", side=side, state=state))

    def held(self) -> str:
        """What is not at baseline, or nothing."""
        try:
            stats = self.ask()
        except grpc.RpcError as error:  # it takes no session while one of its ranks is silent
            return f"{self.settings.worker_id}: {error.details()}"  # type: ignore[attr-defined]
        is_whole = stats.blocks_free + stats.blocks_cached == stats.blocks_total > 0
        busy = stats.num_requests + stats.num_running_seqs + stats.num_waiting_requests + stats.blocks_held
        page = self.metrics()
        gauges = {
            f"{name} {dict(labels)}": value
            for (name, labels), value in page.items()
            if (name == "baton_kv_slots" and dict(labels)["state"] != "free")
            or (name == "baton_kv_pairs" and dict(labels)["state"] in ("suspect", "closing"))
            or name == "baton_kv_handoffs"
        }
        away = {name: value for name, value in gauges.items() if value}
        is_idle = is_whole and not busy and len(gauges) > 2 and not away  # all of them: the engine has answered
        return "" if is_idle else f"{self.settings.worker_id}: {stats} {away or gauges}"

    def _note(self, event: worker_pb2.Event) -> None:
        if event.HasField("failed"):
            self.failed_at[RequestKey.of(event.failed.key)] = time.monotonic()
        super()._note(event)

    def story(self) -> str:
        """The end of what its processes have said, for a test that fails."""
        return "\n".join(f"--- {self.settings.worker_id}/{i}\n{r.stderr()[-2000:]}" for i, r in enumerate(self.ranks))


class Measured:
    """The longest of each kind of time."""

    def __init__(self, times: dict[str, float]) -> None:
        self._times = times

    def __call__(self, what: str, time_s: float) -> None:
        self._times[what] = max(time_s, self._times.get(what, 0.0))


def settle(workers: Iterable[ChaosWorker]) -> float:
    """Seconds until each is at baseline; fails when that takes more than 5 in all."""
    begin = time.monotonic()
    for worker in workers:
        left_s = begin + BASELINE_S - time.monotonic()
        await_true(lambda w=worker: not w.held(), lambda w=worker: w.held() + w.story(), left_s)  # type: ignore[misc]
        worker.rejoin()
    return time.monotonic() - begin


@dataclass
class Fleet:
    """`workers`: settings of each by name, `common` those of all; names begin with their role."""

    workers_given: Mapping[str, Mapping[str, Any]]
    common: Mapping[str, Any]
    measured: Measured
    router_given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the router."""
    workers: dict[str, ChaosWorker] = field(default_factory=dict)

    def __enter__(self) -> Self:
        try:
            for name, given in self.workers_given.items():
                values = {"worker_id": name, "role": name.partition("-")[0], **self.common, **given}
                namespace = values.pop("namespace", "")
                self.workers[name] = ChaosWorker(namespace, **values)
            for worker in self.workers.values():
                worker.connect()
            flags = [f"{w.settings.role}:{name}={w.address}" for name, w in self.workers.items()]
            given = {"port": 0, "model_path": str(MODEL), "workers": tuple(flags), **HAND_OVER, **self.router_given}
            if "dead_after_s" in self.common:
                given["dead_after_s"] = self.common["dead_after_s"]
            self.router = Process("router", RouterSettings.from_values(**given).to_json())
            card = self.router.expect("ready")
            self.control_address = str(card["control_address"])
            self.client = BatonClient(str(card["address"]))
            self.await_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __getitem__(self, name: str) -> ChaosWorker:
        return self.workers[name]

    def await_ready(self) -> None:
        """Until the router may send to every worker, in its present life."""

        def are_ready() -> bool:
            seen = {w.worker_id: w for w in self.client.status().workers}
            return all(
                seen[name].state == admin_pb2.WorkerStatus.STATE_READY
                and seen[name].info.incarnation == worker.info.incarnation
                for name, worker in self.workers.items()
            )

        await_true(are_ready, self.client.status)

    def restart(self, *names: str) -> None:
        """Other lives of these workers at their addresses; nothing else is restarted or told."""
        for name in names:
            self.workers[name].abandon()
        for name in names:
            self.workers[name] = self.workers[name].again()
        for name in names:
            self.workers[name].connect()

    def repair(self) -> None:
        """Makes whole what a scenario that failed has left: whatever is dead, stopped or busy is restarted."""
        broken = [n for n, w in self.workers.items() if w.is_dead or w.is_stopped() or w.held()]
        self.restart(*broken)
        for worker in self.workers.values():
            worker.rejoin()
        self.await_ready()

    def set_workers(self, names: Iterable[str], at: Mapping[str, str] | None = None) -> None:
        """The router knows these alone, as if a controller had said so. `at`: where it is to reach them, if not at
        their own addresses."""
        found = {name: self[name].address for name in names} | dict(at or {})
        workers = [admin_pb2.WorkerAddress(worker_id=n, address=a, role=self[n].info.role) for n, a in found.items()]
        with rpc.create_blocking_channel(self.control_address) as channel:
            control = admin_pb2_grpc.ControlServiceStub(channel)
            control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers), timeout=WAIT_S)

    def submit(
        self,
        prompt: list[int],
        max_output_tokens: int,
        name: str = "",
        bypass_prefix_cache: bool = False,
        **fields: Any,
    ) -> Stream:
        """A client's request, through the router."""
        spec = token_spec(prompt, max_output_tokens, **fields)
        spec.cache.bypass_prefix_cache = bypass_prefix_cache
        return Stream(self, spec, name=name)  # type: ignore[arg-type]

    def settle(self, *, but: Iterable[str] = ()) -> float:
        """Seconds until every worker (but those named) is at baseline; fails after 5."""
        took_s = settle(worker for name, worker in self.workers.items() if name not in but)
        self.measured("from quiet to baseline", took_s)
        return took_s

    def _end(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "router"):
            self.router.stop()
        for worker in self.workers.values():
            worker.abandon()
