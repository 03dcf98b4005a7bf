"""A controller on a real Ray for tests: its programs are fakes, its processes, actors and deaths are real."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
from waiting import is_running, until

from cluster.config.schema import (
    AdminSection,
    EngineSection,
    ModelSection,
    RoleSection,
    RolesSection,
    RouterSection,
    ServingConfig,
)
from cluster.pb import admin_pb2, admin_pb2_grpc
from controller.config_file import ConfigFile
from controller.plan import plan_cluster
from tools.client import AdminClient

WAIT_S = 60.0


def config_of(model_path: str = "models/fake") -> ServingConfig:
    return ServingConfig(
        model=ModelSection(path=model_path),
        roles=RolesSection(RoleSection(), RoleSection(devices=2, tensor_parallel=2)),
        engine=EngineSection(device="cpu"),
        router=RouterSection(port=0),
        admin=AdminSection(port=0),
    )


class Cluster:
    """A controller and what it told."""

    def __init__(
        self,
        config: ServingConfig,
        log_dir: Path,
        file: ConfigFile | None = None,
        *,
        is_detached: bool = False,
        worker: str = "fake_worker_program",
        router: str = "fake_router_program",
        num_gpus: int = 0,
    ) -> None:
        import ray

        from controller.detached import start_controller
        from controller.ray_namespace import DETACHED, RayNamespace, new_name
        from controller.reconciler import Programs

        self.name = DETACHED if is_detached else new_name()
        self.namespace = RayNamespace(self.name)
        plan = plan_cluster(config, num_gpus=num_gpus, num_cores=2)
        programs = Programs(worker=worker, router=router)
        config = replace(config, log_dir=str(log_dir))
        self._others = {process.pid for process in self._controllers()}
        self.controller: Any = start_controller(config, plan, programs, file, self.name)
        self.log_dir = log_dir
        self.events: list[Any] = []
        self._last = 0
        self.admin_address = ""
        self._get: Callable[..., Any] = ray.get
        self._kill: Callable[..., Any] = ray.kill
        self._get(self.controller.run.remote(), timeout=WAIT_S)

    def until(self, kind: str, who: str) -> Any:
        """The next event of that kind."""
        return self._until(lambda event: (event.kind, event.who) == (kind, who))

    def until_text(self, kind: str, part: str) -> Any:
        """The next event of that kind which says so."""
        return self._until(lambda event: event.kind == kind and part in event.text)

    def _until(self, is_wanted: Callable[[Any], bool]) -> Any:
        while True:
            while self.events:
                event = self.events.pop(0)
                if event.kind == "admin":
                    self.admin_address = event.text
                if is_wanted(event):
                    return event
            news = self._news()
            self.events, self._last = list(news.events), news.last

    def _news(self) -> Any:
        """Also of a controller that is just being started again."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        def look() -> Any:
            try:
                return self._get(self.controller.progress.remote(self._last), timeout=WAIT_S)
            except (ActorUnavailableError, RayActorError):
                return None

        return until(look, "the controller answers", WAIT_S, 0.1)

    def status(self) -> dict[str, dict[str, Any]]:
        """Without why an earlier life ended, which is forgotten with the controller."""
        status: dict[str, dict[str, Any]] = self._get(self.controller.status.remote(), timeout=WAIT_S)
        return {name: {key: group[key] for key in group if key != "why"} for name, group in status.items()}

    def kill_controller(self, and_pid: int | None = None) -> str:
        """Kills it, and another process with it; returns what the next one says of its beginning."""
        self.end_controller_process(and_pid)
        text: str = self.until_text("change", "the controller was started again; it has adopted").text
        self.until("serving", "router")
        return text

    def end_controller_process(self, and_pid: int | None = None) -> None:
        """Kills it, and another process with it."""
        (controller,) = [process for process in self._controllers() if process.pid not in self._others]
        controller.kill()
        if and_pid is not None:
            os.kill(and_pid, signal.SIGKILL)
        psutil.wait_procs([controller], timeout=WAIT_S)

    @classmethod
    def _controllers(cls) -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if cls._is_controller(process)]

    @staticmethod
    def _is_controller(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return "HostedController" in process.name() + "".join(process.cmdline()[:1])
        return False

    def split(self) -> tuple[int, int]:
        with AdminClient(self.admin_address) as admin:
            seen = admin.cluster()
        return (-1, -1) if seen.HasField("changing") else (seen.num_prefill, seen.num_decode)

    def workers_of_router(self) -> dict[str, str]:
        with grpc.insecure_channel(self.status()["router"]["address"]) as channel:
            answer = admin_pb2_grpc.StatusServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        return {w.worker_id: w.address for w in answer.workers}

    def close(self) -> list[int]:
        """Shuts down; returns the pids there were."""
        pids = [pid for group in self.status().values() for pid in group.get("pids", [])]
        self._get(self.controller.shutdown.remote(), timeout=WAIT_S)
        self._kill(self.controller)
        return pids


def written(folder: Path) -> ConfigFile:
    """Two prefill workers and one decode worker, all of one rank."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    path = folder / "cluster.yaml"
    path.write_text(
        "metadata:\n  serving:\n    model: {path: model}\n    log_dir: logs\n    engine: {device: cpu}\n"
        "    router: {port: 0, max_queued_requests: 9, replicas: 1}\n    admin: {port: 0}\n    roles:\n"
        "      prefill: {devices: 2, tensor_parallel: 1}  # two\n"
        "      decode: {devices: 1, tensor_parallel: 1, block_size: 16}\n"
    )
    return ConfigFile(path)


class Watched(Cluster):
    """Two prefill workers and one decode worker, all of one rank, and the file that says so."""

    def __init__(self, folder: Path) -> None:
        file = written(folder)
        self.path = file.path
        super().__init__(file.load(), folder / "logs", file)
        self.until("serving", "router")

    def edit(self, old: str, new: str) -> None:
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new))

    def close(self) -> list[int]:
        pids = super().close()
        assert not [pid for pid in pids if is_running(pid)], "a process outlived the shutdown"
        return pids
