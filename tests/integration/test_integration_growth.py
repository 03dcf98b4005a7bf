"""`mode: auto` wants a worker for which there is no room: Ray's own autoscaler brings a node."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from autoscaled_ray import ON_LOOPBACK, autoscaled_ray, occupied
from cluster_fixture import token_spec
from serve_process import ROOT, Serve
from steady_load import SteadyLoad

from cluster.pb import admin_pb2
from tools.client import AdminClient, BatonClient

pytestmark = [pytest.mark.timeout(240), pytest.mark.battery]

WAIT_S = 90.0
NUM_STREAMS = 4
EDITS = {
    "mode: fixed": "mode: auto",
    # One sequence takes as long as a token may, so that a little load is more than two workers serve in time.
    "tpot_ms: 50.0": "tpot_ms: 1.0",
    "confirm_s: 5.0": "confirm_s: 1.0",
    "cooldown_s: 10.0": "cooldown_s: 1.0",
    "max_devices: null": "max_devices: 3",
    "release_after_s: 300.0": "release_after_s: 2.0",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").symlink_to(ROOT / "models")
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    for old, new in EDITS.items():
        assert old in text, old
        text = text.replace(old, new)
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    return file


class Load(SteadyLoad):
    """So many streams at any time, until it is left."""

    def __init__(self, client: BatonClient) -> None:
        super().__init__(NUM_STREAMS)
        self._client = client
        self._draw = random.Random(1)

    def ask(self, number: int) -> str:
        prompt = self._draw.choices(range(4, 1000), k=self._draw.randint(16, 128))
        self._client.generate(token_spec(prompt, 32), timeout_s=WAIT_S)
        return ""


def until(events: Iterator[admin_pb2.ClusterEvent], text: str) -> admin_pb2.ClusterEvent:
    told = []
    for event in events:
        told.append(event.text)
        if text in event.text:
            return event
    raise AssertionError(f"nothing said {text!r}: {told}")


def num_workers(admin: AdminClient) -> int:
    cluster = admin.cluster()
    return cluster.num_prefill + cluster.num_decode


def test_a_node_comes_for_a_worker_that_is_wanted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ON_LOOPBACK.items():
        monkeypatch.setenv(name, value)
    # Two workers, a router and the controller take 0.04; what is left is not enough for a third.
    with autoscaled_ray() as address, occupied(address, 0.955):
        serve = Serve("--config", str(file), "--port", "0", "--ray-address", address)
        try:
            with AdminClient(serve.admin_address) as admin, BatonClient(serve.address) as client, Load(client) as load:
                events = admin.events(0, timeout_s=WAIT_S)
                until(events, "mode auto: stays until there is room for one more worker")
                assert num_workers(admin) == 2
                until(events, "mode auto: grows: ")
                until(events, "done: ")
                assert num_workers(admin) == 3
            assert not load.problems
            with AdminClient(serve.admin_address) as admin:
                until(admin.events(0, timeout_s=WAIT_S), "mode auto: shrinks: ")
        finally:
            serve.close()
