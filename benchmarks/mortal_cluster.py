"""A cluster of plain processes whose worker ranks are killed and stopped, and which is whole again after each time.

A worker that lost a rank is started again at once, whole and at its old address, as the controller does it; the router
is told nothing and finds it there. A fault is counted only when it is proven: the system says that the process was
ended by SIGKILL, or that it stands still.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from benchmarks.plain_cluster import Program, ProgramFailed, beside_others, wait_until_serving
from cluster.config.schema import ServingConfig
from controller.plan import WorkerPlan, plan_cluster

FAULT_S = 20.0
"""In which a signal must have done what it does."""


@dataclass(frozen=True)
class Fault:
    """What was done to a rank, and when, in seconds of `time.perf_counter`."""

    worker_id: str
    rank: int
    at: float


class Group:
    """One worker: its ranks, in one life after another."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.ranks: list[Program] = []
        self.address = ""
        self.is_whole = False

    def start(self) -> None:
        """Returns when it is ready. Raises ProgramFailed."""
        leader_settings, *others = self.plan.ranks
        port = int(self.address.rpartition(":")[2]) if self.address else 0
        leader = Program("worker", replace(leader_settings, port=port))
        self.ranks = [leader]
        rank_address = leader.expect("prepared")["rank_address"]
        self.ranks += [Program("worker", replace(rank, leader=rank_address)) for rank in others]
        self.address = str(leader.expect("ready")["address"])
        self.is_whole = True

    def end(self) -> None:
        """Whatever state it is in."""
        self.is_whole = False
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.stop()
        self.ranks = []


class MortalCluster:
    """`config`'s workers and a router. Faults come one at a time, from one thread."""

    def __init__(self, config: ServingConfig, seed: int) -> None:
        plan = plan_cluster(config, num_gpus=0, num_cores=len(os.sched_getaffinity(0)))
        self._router_settings = beside_others(plan.router)
        self._groups = [Group(worker) for worker in plan.workers]
        self._random = random.Random(seed)
        self._restarts: list[threading.Thread] = []
        self._failure: ProgramFailed | None = None
        self.address = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[MortalCluster]:
        """Raises ProgramFailed for a bad start."""
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                stack.callback(group.end)
            with ThreadPoolExecutor(len(self._groups)) as pool:
                for start in [pool.submit(group.start) for group in self._groups]:
                    start.result()
            stack.callback(self._await_restarts)
            flags = tuple(f"{g.plan.role}:{g.plan.worker_id}={g.address}" for g in self._groups)
            router = Program("router", replace(self._router_settings, workers=flags))
            stack.callback(router.stop)
            self.address = str(router.expect("ready")["address"])
            wait_until_serving(self.address)
            yield self

    def kill_one(self) -> Fault | None:
        """SIGKILL to a rank of a worker that is whole, which is then started again; None when none is."""
        self._check()
        group = self._choose()
        if group is None:
            return None
        rank = self._random.randrange(len(group.ranks))
        group.is_whole = False
        fault = Fault(group.plan.worker_id, rank, time.perf_counter())
        code = group.ranks[rank].kill(FAULT_S)
        assert code == -signal.SIGKILL, f"{fault} ended with {code}"
        thread = threading.Thread(target=self._restart, args=(group,), daemon=True)
        self._restarts.append(thread)
        thread.start()
        return fault

    def stop_one(self, seconds: float, is_over: threading.Event) -> Fault | None:
        """SIGSTOP to a rank, SIGCONT so much later, or as soon as it is over; None when no worker is whole."""
        self._check()
        group = self._choose()
        if group is None:
            return None
        rank = self._random.randrange(len(group.ranks))
        pid, fault = group.ranks[rank].pid, Fault(group.plan.worker_id, rank, time.perf_counter())
        os.kill(pid, signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert stopped is not None and stopped.si_code == os.CLD_STOPPED, f"{fault}: {stopped}"
        is_over.wait(seconds)
        os.kill(pid, signal.SIGCONT)
        return fault

    def _choose(self) -> Group | None:
        whole = [group for group in self._groups if group.is_whole]
        return self._random.choice(whole) if whole else None

    def _restart(self, group: Group) -> None:
        try:
            group.end()
            group.start()
        except ProgramFailed as error:
            self._failure = error

    def _await_restarts(self) -> None:
        for thread in self._restarts:
            thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
