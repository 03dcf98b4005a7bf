"""The controller on a real Ray: real actors and placement groups, real deaths; its programs are fakes in `tests/`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray_cluster import WAIT_S, Cluster, Watched, config_of, written
from waiting import is_running, until

from cluster.config.schema import (
    AdminSection,
    ModelSection,
)
from cluster.errors import FailedPrecondition, IncompatibleProtocol
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.settings import WorkerSettings
from controller import local_ray
from tools.client import AdminClient

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]))
    patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')  # numbers, for workers that only say that they use one
    with local_ray.started(num_cpus=1) as folder:
        yield folder
    patch.undo()
    assert not folder.exists()


@pytest.fixture(scope="module")
def cluster(ray_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill worker of one rank and a decode worker of two, which each test leaves ready."""
    cluster = Cluster(config_of(), tmp_path_factory.mktemp("logs"))
    cluster.until("serving", "router")
    yield cluster
    pids = cluster.close()
    assert not [pid for pid in pids if is_running(pid)], "a process outlived the shutdown"


def test_every_group_comes_up_and_the_router_knows_the_workers(cluster: Cluster) -> None:
    status = cluster.status()
    assert {name: group["state"] for name, group in status.items()} == dict.fromkeys(
        ["router", "prefill-0", "decode-0"], "ready"
    )
    assert [len(group["pids"]) for group in status.values()] == [1, 1, 2]
    assert set(cluster.workers_of_router()) == {"prefill-0", "decode-0"}
    assert "a warning of prefill-0" in (cluster.log_dir / "prefill-0.log").read_text()


def test_a_killed_rank_takes_its_whole_group_with_it_and_the_group_comes_back(cluster: Cluster) -> None:
    before = cluster.status()
    os.kill(before["decode-0"]["pids"][1], signal.SIGKILL)
    assert "decode-0 rank 1 died" in cluster.until("lost", "decode-0").text
    cluster.until("ready", "decode-0")
    after = cluster.status()
    assert after["decode-0"]["num_starts"] == before["decode-0"]["num_starts"] + 1
    assert not set(after["decode-0"]["pids"]) & set(before["decode-0"]["pids"])
    assert not is_running(before["decode-0"]["pids"][0]), "rank 0 lives on without its group"
    assert after["prefill-0"] == before["prefill-0"], "another worker was touched"


def test_a_frozen_process_is_killed_with_its_group(cluster: Cluster) -> None:
    frozen, killed = cluster.status()["decode-0"]["pids"]
    os.kill(frozen, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    cluster.until("lost", "decode-0")
    cluster.until("ready", "decode-0")
    assert not is_running(frozen)


def test_a_killed_router_comes_back_on_its_port_and_hears_of_the_workers(cluster: Cluster) -> None:
    before = cluster.status()["router"]
    os.kill(before["pids"][0], signal.SIGKILL)
    cluster.until("lost", "router")
    cluster.until("ready", "router")
    after = cluster.status()["router"]
    assert (after["address"], after["num_starts"]) == (before["address"], before["num_starts"] + 1)
    known: dict[str, Any] = {}
    while len(known) < 2:
        known = cluster.workers_of_router()
    assert set(known) == {"prefill-0", "decode-0"}


def test_a_broken_checkpoint_is_reported_at_once_and_not_tried_again(ray_folder: Path, tmp_path: Path) -> None:
    cluster = Cluster(config_of("models/broken"), tmp_path)
    event = cluster.until("failed", "decode-0")
    assert (event.text, event.is_mistake) == ("models/broken: model.safetensors is truncated", True)
    assert cluster.status()["decode-0"]["num_starts"] == 1
    cluster.close()


def change(cluster: Cluster, ask: Callable[[AdminClient], admin_pb2.ChangeResponse]) -> list[str]:
    """Asks for a change, and returns what was told of it until it was done or failed."""
    with AdminClient(cluster.admin_address) as admin:
        return [event.text for event in admin.follow(ask(admin))]


@pytest.fixture
def watched_alone(ray_folder: Path, tmp_path: Path) -> Iterator[Watched]:
    cluster = Watched(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def watched(ray_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Each test leaves two and one."""
    cluster = Watched(tmp_path_factory.mktemp("watched"))
    yield cluster
    cluster.close()


def test_a_mistake_in_the_file_is_refused_with_its_place(watched: Watched) -> None:
    watched.edit("devices: 2", "devices: two")
    text = watched.until_text("change", "refused").text
    assert f"{watched.path}:9:26: metadata.serving.roles.prefill.devices: must be a whole number" in text
    with AdminClient(watched.admin_address) as admin:
        with pytest.raises(FailedPrecondition, match="would not agree with the cluster"):
            admin.set_roles(1, 2)
        assert admin.cluster().version == 1
    watched.edit("devices: two", "devices: 2")


def test_a_worker_that_does_not_start_fails_the_change_and_the_cluster_serves_on(watched: Watched) -> None:
    watched.edit("block_size: 16", "block_size: 13")
    assert "decode-1 did not start" in watched.until_text("change", "steps are done").text
    assert {name: group["state"] for name, group in watched.status().items()} == dict.fromkeys(
        ["router", "prefill-0", "prefill-1", "decode-0"], "ready"
    )
    watched.edit("block_size: 13", "block_size: 16")
    with AdminClient(watched.admin_address) as admin:
        assert not admin.cluster().HasField("changing")
        assert not admin.set_roles(2, 1, dry_run=True).plan.steps


def test_a_flipped_worker_that_is_killed_comes_back_in_its_new_role(watched: Watched) -> None:
    told = change(watched, lambda admin: admin.set_roles(1, 2))
    assert told[-1] == "rebalance 1:2: done: 2:1 to 1:2"
    assert "prefill: {devices: 1, tensor_parallel: 1}  # two" in watched.path.read_text()
    before = watched.status()["prefill-1"]
    assert (before["num_starts"], before["role"]) == (1, "prefill"), "a flip starts nothing"
    os.kill(before["pids"][0], signal.SIGKILL)
    watched.until("lost", "prefill-1")
    watched.until("ready", "prefill-1")
    after = watched.status()["prefill-1"]
    assert (after["num_starts"], after["role"]) == (2, "decode")
    assert "rebalance 1:2: done" in (watched.log_dir / "controller.log").read_text()
    assert change(watched, lambda admin: admin.set_roles(2, 1))[-1] == "rebalance 2:1: done: 1:2 to 2:1"


@pytest.mark.battery
def test_another_tensor_parallel_size_starts_new_workers_and_stops_the_old(watched_alone: Watched) -> None:
    watched = watched_alone
    before = watched.status()
    with AdminClient(watched.admin_address) as admin:
        (name,) = (process.name for process in admin.cluster().processes if process.role == worker_pb2.ROLE_DECODE)
    watched.edit("decode: {devices: 1, tensor_parallel: 1", "decode: {devices: 2, tensor_parallel: 2")
    watched.until_text("change", "done: 2:1")
    status = watched.status()
    (new,) = set(status) - set(before)
    assert set(status) == {*before, new} - {name}
    assert (status[new]["role"], len(status[new]["pids"])) == ("decode", 2)
    assert not [pid for pid in before[name]["pids"] if is_running(pid)]
    assert set(watched.workers_of_router()) == {*before, new} - {"router", name}


def test_routers_are_replaced_at_their_ports_and_become_more_and_fewer(watched: Watched) -> None:
    before = watched.status()
    watched.edit("max_queued_requests: 9", "max_queued_requests: 13")
    text = watched.until_text("change", "steps are done").text
    assert "router did not start: 13 requests cannot be queued; 0 of 1 steps are done" in text
    assert watched.status() == before, "the old one serves on"
    watched.edit("max_queued_requests: 13", "max_queued_requests: 10")
    watched.until_text("change", "beside the old one, and drain and stop that: done")
    watched.until_text("change", "done: 2:1")
    after = watched.status()
    assert (after["router"]["address"], after["router"]["num_starts"]) == (before["router"]["address"], 2)
    assert not [pid for pid in before["router"]["pids"] if is_running(pid)]
    assert {name: group for name, group in after.items() if name != "router"} == {
        name: group for name, group in before.items() if name != "router"
    }
    assert set(watched.workers_of_router()) == set(after) - {"router"}
    watched.edit("replicas: 1", "replicas: 2")
    watched.until_text("change", "done: 2:1")
    assert watched.status()["router-1"]["state"] == "ready"
    watched.kill_controller()
    assert set(watched.status()) == {*before, "router-1"}, "the next controller knows both"
    with AdminClient(watched.admin_address) as admin:
        assert not admin.set_roles(2, 1, dry_run=True).plan.steps
    watched.edit("replicas: 2", "replicas: 1")
    watched.until_text("change", "done: 2:1")
    assert watched.status() == after


def test_a_killed_controller_comes_back_adopts_what_serves_and_starts_what_has_ended(watched: Watched) -> None:
    """The last test of this cluster, which it leaves otherwise."""
    before = watched.status()
    address = watched.admin_address
    os.kill(before["decode-0"]["pids"][0], signal.SIGKILL)
    watched.until("lost", "decode-0")
    watched.until("ready", "decode-0")
    before = watched.status()
    watched.kill_controller()
    assert watched.status() == before, "what serves is neither stopped nor started"
    assert watched.admin_address == address, "operators find it where it was"
    # Now something ends while nobody is there, and something is left over that nobody wants.
    stray = stray_process(watched)
    watched.edit("decode: {devices: 1", "decode: {devices: 2")
    watched.kill_controller(and_pid=before["decode-0"]["pids"][0])
    watched.until("ready", "decode-0")
    until(lambda: watched.status().get("decode-1", {}).get("state") == "ready", "decode-1 is ready", WAIT_S)
    until(lambda: watched.split() == (2, 2), "the change is done", WAIT_S)
    after = watched.status()
    assert {name: after[name]["pids"] == before[name]["pids"] for name in before} == {
        "router": True,
        "prefill-0": True,
        "prefill-1": True,
        "decode-0": False,
    }
    assert after["decode-1"]["state"] == "ready"
    assert set(watched.workers_of_router()) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert not is_running(stray)
    # And once a change has been accepted, which is then carried out to its end.
    with AdminClient(watched.admin_address) as admin:
        admin.set_roles(1, 3)
    watched.kill_controller()
    until(lambda: watched.split() == (1, 3), "the change is done", WAIT_S)
    assert {name: group["pids"] for name, group in watched.status().items()} == {
        name: group["pids"] for name, group in after.items()
    }, "a flip is a label, and nothing was started"


def stray_process(cluster: Cluster) -> int:
    """The pid of a process of this cluster that serves and that no configuration names."""
    import ray

    from controller.adoption import ProcessIdentity
    from controller.ray_actors import Process

    identity = ProcessIdentity("prefill-7")
    options = cluster.namespace.actor_options(identity)
    actor: Any = ray.remote(Process).options(num_cpus=0, **options).remote("fake_worker_program", identity, None)
    settings = WorkerSettings("prefill-7", "prefill", ModelSection("models/fake")).to_json()
    cluster._get([actor.prepare.remote(settings), actor.start.remote()], timeout=WAIT_S)
    pid: int = cluster._get(actor.locate.remote(), timeout=WAIT_S).pid
    return pid


def test_without_a_free_device_a_worker_is_replaced_in_its_place(ray_folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path)
    file.path.write_text(file.read().replace("device: cpu", "device: cuda").replace("devices: 2", "devices: 1"))
    cluster = Cluster(file.load(), tmp_path / "logs", file, num_gpus=2)
    cluster.until("serving", "router")
    before = cluster.status()
    found = asyncio.run(cluster.namespace.found())
    gpus = [json.loads(process.settings)["gpu"] for process in found if "tp_rank" in process.settings]
    assert sorted(gpus) == [0, 1], "each sees both GPUs, and knows its own"

    def told(block_size: int) -> list[str]:
        text = file.read().replace("block_size: 16", f"block_size: {block_size}")
        return change(cluster, lambda admin: admin.apply(text, filename=str(file.path)))

    step = "drain decode-0 and start it with the new settings; prefill workers serve both meanwhile"
    failed = told(13)[-1]
    assert "decode-0 did not start: " in failed and "; it serves with its old settings again; 0 of 1 steps" in failed
    again = cluster.status()
    file.path.write_text(file.read().replace("block_size: 13", "block_size: 16"))
    assert f"{step}: done" in told(32)
    after = cluster.status()
    assert set(after) == set(before) and after["router"] == before["router"]
    assert len({tuple(status["decode-0"]["pids"]) for status in (before, again, after)}) == 3
    assert after["prefill-0"] == before["prefill-0"]
    cluster.close()


def test_an_admin_port_that_is_taken_is_reported_at_once(ray_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = Cluster(replace(config_of(), admin=AdminSection(port=port)), tmp_path)
        event = cluster.until("failed", "admin")
        cluster.close()
    assert event.is_mistake and f"cannot listen on 127.0.0.1:{port}" in event.text


def test_a_detached_controller_is_found_by_its_name_once_and_does_what_a_file_says(
    ray_folder: Path, tmp_path: Path
) -> None:
    from controller.detached import end_abandoned, end_controller, find_controller

    assert find_controller() is None
    file = written(tmp_path)
    text = file.read()
    cluster = Cluster(file.load(), tmp_path / "logs", file, is_detached=True)
    cluster.until("serving", "router")
    with pytest.raises(ValueError, match="already"):
        Cluster(file.load(), tmp_path, is_detached=True)
    cluster.controller = find_controller()
    cluster._last = 0
    cluster.until("serving", "router")  # told to whoever comes later, too
    cluster._get(cluster.controller.run.remote(), timeout=WAIT_S)
    assert set(cluster.status()) == {"router", "prefill-0", "prefill-1", "decode-0"}
    fewer, wrong = text.replace("devices: 2", "devices: 1"), text.replace("model}", "other}")
    done, failed = cluster._get(cluster.controller.apply.remote(fewer, str(file.path)), timeout=WAIT_S)
    assert not failed and done[-1].endswith("done: 2:1 to 1:1")
    done, failed = cluster._get(cluster.controller.apply.remote(wrong, str(file.path)), timeout=WAIT_S)
    assert not done and "metadata.serving.model.path" in failed
    before = cluster.status()
    text = cluster.kill_controller()
    assert text.endswith("it has adopted decode-0, prefill-0, router")
    assert cluster.status() == before, "what serves is neither stopped nor started"
    with AdminClient(cluster.admin_address) as admin:
        assert admin.cluster().version == 2
    # One that Ray has given up is followed by the next `baton serve --detach`.
    cluster._kill(cluster.controller)
    until(lambda: find_controller() is None, "Ray has given up the name of the controller", WAIT_S, 0.05)
    cluster = Cluster(file.load(), tmp_path / "logs", file, is_detached=True)
    assert cluster.until_text("change", "it has adopted").text.endswith("it has adopted decode-0, prefill-0, router")
    assert cluster.status() == before
    pids = [pid for group in before.values() for pid in group["pids"]]
    cluster._kill(cluster.controller)
    until(lambda: find_controller() is None, "Ray has given up the name of the controller", WAIT_S, 0.05)
    assert end_abandoned(), "what is left can be ended without a controller, too"
    until(lambda: not [pid for pid in pids if is_running(pid)], "the processes have ended", WAIT_S)
    assert not end_abandoned()
    cluster = Cluster(file.load(), tmp_path / "logs", file, is_detached=True)
    cluster.until("serving", "router")
    end_controller(cluster.controller, cluster.name, WAIT_S)
    assert find_controller() is None


def test_a_controller_touches_nothing_of_another_protocol_and_makes_room_for_one_that_understands_it(
    ray_folder: Path, tmp_path: Path
) -> None:
    """The workers say another version once they serve, as if what they were started from had been older than this."""
    from cli.serve import _Session
    from controller.detached import end_abandoned, find_controller

    file = written(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / "later")
    file.path.write_text(file.path.read_text().replace("path: model", "path: later"))
    cluster = Cluster(file.load(), tmp_path / "logs", file, is_detached=True)
    cluster.until("serving", "router")
    before = cluster.status()
    pids = [pid for group in before.values() for pid in group["pids"]]
    cluster.end_controller_process()
    refused = cluster.until("refused", "controller").text
    why = "speaks protocol 2; this controller speaks 1: upgrade this controller first; what runs serves on without"
    assert why in refused and re.match("(decode|prefill)-[01] speaks", refused)
    assert find_controller() is not None
    session = _Session(file, file.load(), "auto", is_detached=True)
    with session._signals, pytest.raises(IncompatibleProtocol, match=why):
        session._serve()
    assert find_controller() is None, "the one that Ray had started again and ours both manage nothing"
    assert all(map(is_running, pids))
    with grpc.insecure_channel(before["router"]["address"]) as channel:
        stub = admin_pb2_grpc.StatusServiceStub(channel)  # type: ignore[no-untyped-call]
        assert len(stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S).workers) == 3
    saved = cluster.namespace.load()
    assert saved is not None and (saved.has_served, len(saved.workers)) == (True, 3)
    assert end_abandoned()
    until(lambda: not [pid for pid in pids if is_running(pid)], "the processes have ended", WAIT_S)
