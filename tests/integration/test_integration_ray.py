"""The controller on a real Ray: real actors and placement groups, real deaths; its programs are fakes in `tests/`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from cluster import local_ray
from cluster.config import (
    AdminSection,
    EngineSection,
    ModelSection,
    RoleSection,
    RolesSection,
    RouterSection,
    ServingConfig,
)
from cluster.config_file import ConfigFile
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.plan import plan_cluster

TESTS = Path(__file__).resolve().parents[1]
WAIT_S = 60.0


def config_of(model_path: str = "models/fake") -> ServingConfig:
    return ServingConfig(
        model=ModelSection(path=model_path),
        roles=RolesSection(RoleSection(), RoleSection(devices=2, tensor_parallel=2)),
        engine=EngineSection(device="cpu"),
        router=RouterSection(port=0),
        admin=AdminSection(port=0),
    )


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    with local_ray.started(num_cpus=1) as folder:
        yield folder
    patch.undo()
    assert not folder.exists()


class Cluster:
    """A controller and what it told."""

    def __init__(self, config: ServingConfig, log_dir: Path, file: ConfigFile | None = None) -> None:
        import ray

        from cluster.controller import Programs, start_controller

        plan = plan_cluster(config, num_gpus=0, num_cores=2)
        programs = Programs(worker="fake_worker_program", router="fake_router_program")
        config = replace(config, log_dir=str(log_dir))
        self.controller: Any = start_controller(config, plan, programs, file)
        self.notices: list[Any] = []
        self._get: Callable[..., Any] = ray.get
        self._kill: Callable[..., Any] = ray.kill
        self._get(self.controller.run.remote(), timeout=WAIT_S)

    def until(self, kind: str, who: str) -> Any:
        """The next notice of that kind."""
        while True:
            while self.notices:
                notice = self.notices.pop(0)
                if (notice.kind, notice.who) == (kind, who):
                    return notice
            self.notices = self._get(self.controller.notices.remote(), timeout=WAIT_S)

    def status(self) -> dict[str, dict[str, Any]]:
        status: dict[str, dict[str, Any]] = self._get(self.controller.status.remote(), timeout=WAIT_S)
        return status

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


@pytest.fixture
def cluster(ray_folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(config_of(), tmp_path)
    yield cluster
    pids = cluster.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "a process outlived the shutdown"


def test_every_group_comes_up_and_the_router_knows_the_workers(cluster: Cluster, tmp_path: Path) -> None:
    cluster.until("serving", "router")
    status = cluster.status()
    assert {name: group["state"] for name, group in status.items()} == dict.fromkeys(
        ["router", "prefill-0", "decode-0"], "ready"
    )
    assert [len(group["pids"]) for group in status.values()] == [1, 1, 2]
    assert set(cluster.workers_of_router()) == {"prefill-0", "decode-0"}
    assert "a warning of prefill-0" in (tmp_path / "prefill-0.log").read_text()


def test_a_killed_rank_takes_its_whole_group_with_it_and_the_group_comes_back(cluster: Cluster) -> None:
    cluster.until("serving", "router")
    before = cluster.status()
    os.kill(before["decode-0"]["pids"][1], signal.SIGKILL)
    assert "decode-0 rank 1 died" in cluster.until("lost", "decode-0").text
    cluster.until("ready", "decode-0")
    after = cluster.status()
    assert after["decode-0"]["num_starts"] == 2
    assert not set(after["decode-0"]["pids"]) & set(before["decode-0"]["pids"])
    assert not psutil.pid_exists(before["decode-0"]["pids"][0]), "rank 0 lives on without its group"
    assert after["prefill-0"] == before["prefill-0"], "another worker was touched"


def test_a_frozen_process_is_killed_with_its_group(cluster: Cluster) -> None:
    cluster.until("serving", "router")
    frozen, killed = cluster.status()["decode-0"]["pids"]
    os.kill(frozen, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    cluster.until("ready", "decode-0")
    assert not psutil.pid_exists(frozen)


def test_a_killed_router_comes_back_on_its_port_and_hears_of_the_workers(cluster: Cluster) -> None:
    cluster.until("serving", "router")
    before = cluster.status()["router"]
    os.kill(before["pids"][0], signal.SIGKILL)
    cluster.until("lost", "router")
    cluster.until("ready", "router")
    after = cluster.status()["router"]
    assert (after["address"], after["num_starts"]) == (before["address"], 2)
    known: dict[str, Any] = {}
    while len(known) < 2:
        known = cluster.workers_of_router()
    assert set(known) == {"prefill-0", "decode-0"}


def test_a_broken_checkpoint_is_reported_at_once_and_not_tried_again(ray_folder: Path, tmp_path: Path) -> None:
    cluster = Cluster(config_of("models/broken"), tmp_path)
    notice = cluster.until("failed", "decode-0")
    assert (notice.text, notice.is_mistake) == ("models/broken: model.safetensors is truncated", True)
    assert cluster.status()["decode-0"]["num_starts"] == 1
    cluster.close()
