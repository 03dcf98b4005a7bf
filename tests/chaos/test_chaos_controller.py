"""The controller is killed again and again under streams: no stream is lost or changed, and nothing is started again.

Long: `make chaos`.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from autoscaled_ray import ON_LOOPBACK, autoscaled_ray
from chaos_fleet import Measured
from serve_process import ROOT, Serve
from steady_load import SteadyStreams, draw_prompts
from waiting import until

from cluster.errors import BatonError
from cluster.pb import admin_pb2
from tools.client import AdminClient, BatonClient

pytestmark = [pytest.mark.timeout(600), pytest.mark.battery]

NUM_STREAMS = 64
NUM_KILLS = 10
TOKENS = 64
WAIT_S = 120.0


def hosted(kind: str = "ray::") -> list[psutil.Process]:
    """Processes of Ray below this one that host an actor of that kind."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(kind):
                found.append(process)
    return found


@pytest.fixture(params=["foreground", "detached"])
def serving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Serve]:
    """A cluster of its own that has come up, with a copy of the shipped file."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    shutil.copy(ROOT / "cluster.yaml", tmp_path)
    config = ("--config", str(tmp_path / "cluster.yaml"))
    if request.param == "foreground":
        serve = Serve(*config, "--port", "0")
        try:
            yield serve
        finally:
            serve.close()
        return
    for name, value in ON_LOOPBACK.items():
        monkeypatch.setenv(name, value)
    with autoscaled_ray() as address:
        serve = Serve(*config, "--port", "0", "--address", address, "--detach")
        try:
            assert serve.address and serve.wait() == 0
            yield serve
        finally:
            serve.close()


def test_a_controller_killed_ten_times_under_streams_costs_nobody_anything(serving: Serve, measured: Measured) -> None:
    with BatonClient(serving.address) as client:
        before = client.status()
        with SteadyStreams([client], draw_prompts(NUM_STREAMS), TOKENS) as load:
            load.wait_for_more(NUM_STREAMS)
            for _ in range(NUM_KILLS):
                (controller,) = hosted("ray::HostedController")
                began = time.monotonic()
                controller.kill()
                until(lambda old=controller.pid: answers(serving, old), "another controller answers", WAIT_S)  # type: ignore[misc]
                measured("controller killed to controller back", time.monotonic() - began)
                load.wait_for_more(NUM_STREAMS)
            num_done, problems = load.num_done, load.problems
        after = client.status()
    assert problems == []
    assert num_done >= NUM_STREAMS * (NUM_KILLS + 1)
    assert pids(after) == pids(before), "something was started again"
    with AdminClient(serving.admin_address) as admin:
        assert {process.num_starts for process in admin.cluster().processes} == {1}
        told = [event.text for event in admin.follow(admin.set_roles(1, 2))]
        assert told[-1] == "rebalance 1:2: done: 1:1 to 1:2"


def pids(status: admin_pb2.GetStatusResponse) -> dict[str, list[int]]:
    ranks = {worker.worker_id: [rank.pid for rank in worker.info.ranks] for worker in status.workers}
    return {"router": [status.router.pid], **ranks}


def answers(serving: Serve, old_pid: int) -> bool:
    if [process.pid for process in hosted("ray::HostedController")] in ([], [old_pid]):
        return False
    try:
        with AdminClient(serving.admin_address, call_s=2.0) as admin:
            return admin.cluster().num_decode > 0
    except BatonError:
        return False


def test_a_command_that_is_killed_leaves_nothing_in_a_ray_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ON_LOOPBACK.items():
        monkeypatch.setenv(name, value)
    with autoscaled_ray() as address:
        serve = Serve("--config", str(ROOT / "cluster.yaml"), "--port", "0", "--address", address)
        try:
            assert serve.address
            (controller,) = hosted("ray::HostedController")
            controller.kill()
            serve.until("the controller was started again; it has adopted decode-0, prefill-0, router")
            mine = [*hosted("ray::HostedController"), *hosted("ray::Process")]
            assert len(mine) == 4
            serve.process.kill()
            serve.wait()
            assert not psutil.wait_procs(mine, timeout=10.0)[1], "a process outlived the command"
        finally:
            serve.close()
