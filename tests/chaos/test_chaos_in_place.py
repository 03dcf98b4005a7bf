"""Workers that are replaced in their places, since no device is free for another one beside them: one prefill and one
decode worker, each of which serves both while the other one is away. No request is lost or changed.

Ray's two GPUs are only numbers, and the workers run on the CPU. Long: `make chaos`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_fixture import BUNDLED_MODEL, token_spec
from ray_cluster import Cluster
from steady_load import SteadyOutputs

from cluster.pb import admin_pb2
from controller import local_ray
from controller.config_file import ConfigFile
from tools.client import AdminClient, BatonClient

pytestmark = [pytest.mark.timeout(300), pytest.mark.battery]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
NUM_STREAMS = 16
TOKENS = 48
_draw = random.Random(4)
PROMPTS = [_draw.choices(range(4, 1000), k=_draw.randint(8, 120)) for _ in range(NUM_STREAMS)]

FILE = f"""
metadata:
  serving:
    model: {{path: {BUNDLED_MODEL}, dtype: float32}}
    engine: {{device: cuda, threads: 1, block_size: 16, kv_cache_tokens: 8192}}
    router: {{port: 0, http_port: null, policy: least_loaded}}
    admin: {{port: 0}}
    log_dir: logs
"""


class Streams(SteadyOutputs):
    """One for each prompt."""

    def __init__(self, client: BatonClient) -> None:
        super().__init__(NUM_STREAMS)
        self._client = client

    def output(self, number: int) -> list[int]:
        tokens: list[int] = []
        spec = token_spec(PROMPTS[number], TOKENS, temperature=0.8, seed=number)
        with self._client.stream(spec, timeout_s=WAIT_S) as stream:
            for event in stream:
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(tokens), "a gap or a repeat"
                    tokens.extend(event.delta.token_ids)
        return tokens


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)]))
    patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
    with local_ray.started(num_cpus=1) as folder:
        yield folder
    patch.undo()


@pytest.fixture
def cluster(ray_folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    file = ConfigFile(path)
    cluster = Cluster(
        file.load(), tmp_path / "logs", file, worker="cpu_worker_program", router="router.program", num_gpus=2
    )
    try:
        yield cluster
    finally:
        cluster.close()


def pids(cluster: Cluster) -> dict[str, list[int]]:
    return {name: list(group["pids"]) for name, group in cluster.status().items()}


def test_the_only_workers_of_both_roles_are_replaced_in_their_places_under_streams(
    cluster: Cluster, tmp_path: Path
) -> None:
    address = cluster.until("serving", "router").text
    before = pids(cluster)
    with BatonClient(address) as client, AdminClient(cluster.admin_address) as admin, Streams(client) as load:
        for size in (32, 16):
            load.wait_for_more(2 * NUM_STREAMS)
            answer = admin.apply(
                FILE.replace("block_size: 16", f"block_size: {size}"), filename=str(tmp_path / "cluster.yaml")
            )
            assert sorted(answer.plan.steps) == [
                "drain decode-0 and start it with the new settings; prefill workers serve both meanwhile",
                "drain prefill-0 and start it with the new settings; decode workers serve both meanwhile",
            ]
            assert [event.text for event in admin.follow(answer)][-1].endswith("done: 1:1")
            load.wait_for_more(2 * NUM_STREAMS)
            after = pids(cluster)
            assert after["router"] == before["router"]
            assert all(after[name] != before[name] for name in ("prefill-0", "decode-0")), "a worker has stayed"
            before = after
        num_done, problems = load.num_done, load.problems
    assert problems == []
    assert num_done >= 8 * NUM_STREAMS


def test_a_worker_that_does_not_come_up_in_its_place_is_followed_by_one_like_the_old(
    cluster: Cluster, tmp_path: Path
) -> None:
    address = cluster.until("serving", "router").text
    with BatonClient(address) as client, AdminClient(cluster.admin_address) as admin, Streams(client) as load:
        load.wait_for_more(NUM_STREAMS)
        answer = admin.apply(
            FILE.replace("kv_cache_tokens: 8192", "kv_cache_tokens: 900000000000"),
            filename=str(tmp_path / "cluster.yaml"),
        )
        last = list(admin.follow(answer))[-1]
        assert last.kind == admin_pb2.ClusterEvent.KIND_FAILED
        assert "; it serves with its old settings again; 0 of 2 steps are done" in last.text
        load.wait_for_more(2 * NUM_STREAMS)
        problems = load.problems
    assert problems == []
