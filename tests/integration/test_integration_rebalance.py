"""Roles that change under streams, in a cluster as `baton serve` starts it: nothing is reloaded, no request is lost."""

from __future__ import annotations

import random
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from checkpoints import make_revision
from cluster_fixture import BUNDLED_MODEL, single_process, token_spec
from prometheus_client.parser import text_string_to_metric_families
from serve_process import ROOT, Serve
from steady_load import SteadyLoad
from waiting import is_running

from cli.status import SILENT_S
from cluster.errors import FailedPrecondition
from cluster.pb import admin_pb2, generation_pb2
from engine.sampling.params import SamplingParams
from tools.client import AdminClient, BatonClient

WAIT_S = 60.0
NUM_PROMPTS = 6
TOKENS = 64
pytestmark = pytest.mark.timeout(300)

_draw = random.Random(1)
SHARED = _draw.choices(range(4, 1000), k=96)
PROMPTS = [[*SHARED, *_draw.choices(range(4, 1000), k=16)] for _ in range(NUM_PROMPTS)]


class Cluster:
    """One prefill and three decode workers at first; `file` is the one that is watched."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.yaml"
        (folder / "models").symlink_to(ROOT / "models")
        shutil.copy(ROOT / "cluster.yaml", self.file)
        self.split(1, 3)
        # Every prompt is handed over, however short.
        self.edit("policy: predicted", "policy: least_loaded")
        self.edit("kv_cache_tokens: 16384", "kv_cache_tokens: 8192")
        self.serve = Serve("--config", str(self.file), "--port", "0")
        self.client = BatonClient(self.serve.address)
        self.admin = AdminClient(self.serve.admin_address)

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text(encoding="utf-8")
        assert old in text, f"{old!r} is not in {self.file}"
        self.file.write_text(text.replace(old, new, 1), encoding="utf-8")

    def split(self, prefill: int, decode: int) -> None:
        """Edits the two numbers."""
        before, first, between, second, after = self._parts()
        assert first and second
        text = f"{before}devices: {prefill}{between}devices: {decode}{after}"
        self.file.write_text(text, encoding="utf-8")

    def _parts(self) -> tuple[str, str, str, str, str]:
        text = self.file.read_text(encoding="utf-8")
        before, mark, rest = text.partition("devices: ")
        digit, rest = rest[:1], rest[1:]
        between, mark_two, after = rest.partition("devices: ")
        assert mark and mark_two
        return before, digit, between, after[:1], after[1:]

    def status(self) -> dict[str, admin_pb2.WorkerStatus]:
        return {worker.worker_id: worker for worker in self.client.status().workers}

    def roles(self) -> tuple[int, int]:
        roles = [worker.role for worker in self.status().values()]
        return roles.count(1), roles.count(2)

    def until_event(self, after: int, kind: int) -> admin_pb2.ClusterEvent:
        for event in self.admin.events(after):
            if event.kind == kind:
                return event
        raise AssertionError("the events ended")

    def last_sequence(self) -> int:
        return int(self.admin.cluster().last_sequence)

    def close(self) -> None:
        self.client.close()
        self.admin.close()
        self.serve.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("rebalance"))
    try:
        yield made
    finally:
        made.close()


@cache
def outputs_of(folder: Path) -> list[list[int]]:
    """What one process generates for each prompt."""
    params = [SamplingParams(temperature=0.0, max_output_tokens=TOKENS)] * NUM_PROMPTS
    return [list(completion.token_ids) for (completion,) in single_process(PROMPTS, params, folder)]


class Load(SteadyLoad):
    """Each prompt over and over, one thread for each, until it is left; what came of every request is held against
    the outputs of each revision of the weights, those of the bundled model by default. Half of the threads rest at any
    time, so that what starts and changes beside them has processors, too."""

    def __init__(self, cluster: Cluster, *outputs: Sequence[list[int]]) -> None:
        super().__init__(NUM_PROMPTS, rest=1.0)
        self._client = cluster.client
        self._outputs = outputs or (outputs_of(BUNDLED_MODEL),)
        self.revisions_seen: set[int] = set()

    def ask(self, number: int) -> str:
        output = self._run(PROMPTS[number])
        of = [revision for revision, outputs in enumerate(self._outputs) if outputs[number] == output]
        self.revisions_seen.update(of)
        return "" if of else "the output changed"

    def _run(self, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        with self._client.stream(token_spec(prompt, TOKENS), timeout_s=WAIT_S) as stream:
            for event in stream:
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(tokens), "a gap or a repeat"
                    tokens.extend(event.delta.token_ids)
        return tokens


def usage(cluster: Cluster, prompt: list[int]) -> generation_pb2.Usage:
    return cluster.client.generate(token_spec(prompt, 4), timeout_s=WAIT_S).usage


def test_workers_change_their_roles_under_streams_and_nothing_is_reloaded_or_lost(cluster: Cluster) -> None:
    changed, refused = admin_pb2.ClusterEvent.KIND_CHANGED, admin_pb2.ClusterEvent.KIND_REFUSED
    with Load(cluster) as load:
        while not all(worker.stats.blocks_cached and worker.stats.num_steps for worker in cluster.status().values()):
            load.wait_for_more(1)
        before = cluster.status()
        for prefill, decode in ((3, 1), (2, 2)):
            since = cluster.last_sequence()
            cluster.split(prefill, decode)
            cluster.until_event(since, changed)
            assert cluster.roles() == (prefill, decode)
            load.wait_for_more(NUM_PROMPTS)
            if prefill == 3:
                since = cluster.last_sequence()
                good = cluster.file.read_text(encoding="utf-8")
                cluster.edit("devices: 3", "devices: three")
                event = cluster.until_event(since, refused)
                assert f"{cluster.file}:" in event.text
                assert "roles.prefill.devices: must be a whole number (got three)" in event.text
                assert cluster.roles() == (3, 1)
                cluster.file.write_text(good, encoding="utf-8")
        after = cluster.status()
    assert load.problems == []
    for worker_id, worker in after.items():
        old = before[worker_id]
        assert (worker.info.incarnation, worker.address) == (old.info.incarnation, old.address)
        assert [rank.pid for rank in worker.info.ranks] == [rank.pid for rank in old.info.ranks]
        assert worker.stats.num_steps > old.stats.num_steps > 0, "it was reloaded, or never used"
        assert worker.stats.blocks_total == old.stats.blocks_total
        assert old.stats.blocks_cached > 0
    assert {name: process.num_starts for name, process in processes(cluster).items()} == dict.fromkeys(
        ["router", *after], 1
    )
    for _ in range(4):
        assert usage(cluster, PROMPTS[0]).cached_tokens >= len(SHARED) // 16 * 16, "the prefix cache was lost"


def processes(cluster: Cluster) -> dict[str, admin_pb2.ProcessStatus]:
    return {process.name: process for process in cluster.admin.cluster().processes}


def test_flushed_prefix_caches_serve_nothing_that_was_computed_before(cluster: Cluster) -> None:
    prompt = _draw.choices(range(4, 1000), k=64)
    usage(cluster, prompt)
    workers = [name for name, process in processes(cluster).items() if process.role]
    for _ in range(8 * len(workers)):
        if usage(cluster, prompt).cached_tokens >= 48:
            break
    else:
        raise AssertionError("the prompt was never found in a prefix cache")
    flushed = [
        cluster.admin.on_worker("FlushPrefixCache", admin_pb2.FlushPrefixCacheRequest(worker_id=worker_id)).num_blocks
        for worker_id in workers
    ]
    assert sum(flushed) > 0
    assert usage(cluster, prompt).cached_tokens == 0


def test_a_change_that_is_tried_stale_or_impossible_changes_nothing(cluster: Cluster) -> None:
    list(cluster.admin.follow(cluster.admin.set_roles(2, 2)))
    text, roles = cluster.file.read_text(encoding="utf-8"), cluster.roles()
    version = cluster.admin.cluster().version
    assert version > 1
    plan = cluster.admin.set_roles(1, 3, dry_run=True)
    assert (plan.is_change, len(plan.plan.steps)) == (False, 1)
    with pytest.raises(FailedPrecondition, match=f"version {version - 1} is not current: {version} is"):
        cluster.admin.set_roles(1, 3, expected_version=version - 1)
    with pytest.raises(FailedPrecondition, match="0 decode workers cannot be"):
        cluster.admin.set_roles(4, 0)
    assert cluster.client.status().config_version == cluster.admin.cluster().version == version
    assert (cluster.file.read_text(encoding="utf-8"), cluster.roles()) == (text, roles)


def test_the_page_plans_and_sets_the_split_through_the_controller(cluster: Cluster) -> None:
    http = cluster.serve.until(r"OpenAI +(http://\S+)/v1").group(1)
    prefill, decode = cluster.roles()
    body = {"prefill": prefill - 1, "decode": decode + 1}
    with httpx.Client(base_url=http, timeout=WAIT_S) as page:
        told = page.get("/api/cluster").json()
        assert told["change"] == {"may": True, "why": ""}
        assert (told["controller"]["num_prefill"], told["controller"]["num_decode"]) == (prefill, decode)
        plan = page.post("/api/roles", json=body | {"dry_run": True}).json()
        assert len(plan["plan"]["steps"]) == 1 and cluster.roles() == (prefill, decode)
        since = cluster.last_sequence()
        wanted = body | {"dry_run": False, "expected_version": plan["version"]}
        assert page.post("/api/roles", json=wanted).json()["is_change"] is True
        cluster.until_event(since, admin_pb2.ClusterEvent.KIND_CHANGED)
        assert cluster.roles() == (prefill - 1, decode + 1)
        stale = page.post("/api/roles", json=wanted)
        assert (stale.status_code, stale.json()["error"]["type"]) == (400, "invalid_request_error")
    list(cluster.admin.follow(cluster.admin.set_roles(prefill, decode)))


def test_a_drained_worker_ends_without_losing_a_request_and_its_device_serves_again(cluster: Cluster) -> None:
    list(cluster.admin.follow(cluster.admin.set_roles(1, 3)))
    assert cluster.roles() == (1, 3)
    assert list(cluster.admin.follow(cluster.admin.set_roles(1, 3))) == [], "nothing differs"
    drained = next(name for name, worker in cluster.status().items() if worker.role == 2)
    pids = list(processes(cluster)[drained].pids)
    with Load(cluster) as load:
        load.wait_for_more(NUM_PROMPTS)
        list(cluster.admin.follow(cluster.admin.drain(drained)))
        assert drained not in cluster.status()
        assert not [pid for pid in pids if is_running(pid)]
        assert "devices: 2" in cluster.file.read_text(encoding="utf-8")
        load.wait_for_more(NUM_PROMPTS)
        followed = list(cluster.admin.follow(cluster.admin.set_roles(1, 3)))
        assert [event.text for event in followed if event.kind == admin_pb2.ClusterEvent.KIND_STEP_DONE]
        assert (cluster.roles(), drained in cluster.status()) == ((1, 3), True)
        load.wait_for_more(NUM_PROMPTS)
    assert load.problems == []


def test_the_last_decode_worker_is_not_drained(cluster: Cluster) -> None:
    list(cluster.admin.follow(cluster.admin.set_roles(3, 1)))
    last = next(name for name, worker in cluster.status().items() if worker.role == 2)
    with pytest.raises(FailedPrecondition, match=r"0 decode workers cannot be: roles\.decode\.min_workers is 1"):
        cluster.admin.drain(last)
    assert cluster.roles() == (3, 1)


def controller_of(cluster: Cluster) -> psutil.Process:
    """The actor's process; waits until there is one."""
    found: list[psutil.Process] = []
    while not found:
        found = [p for p in cluster.serve.descendants() if p.is_running() and p.name().startswith("ray::Hosted")]
    return found[0]


def test_the_page_of_the_controller_tells_the_roles_and_the_changes(cluster: Cluster) -> None:
    told = cluster.admin.cluster()
    with urllib.request.urlopen(f"http://{told.metrics_address}/metrics", timeout=WAIT_S) as answer:
        page = answer.read().decode()
    samples = {
        (s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(page) for s in family.samples
    }
    assert samples["baton_workers", "prefill", "ready"] == told.num_prefill
    assert samples["baton_workers", "decode", "ready"] == told.num_decode
    assert samples["baton_config_version",] == told.version
    assert samples["baton_changes_total", "done"] == told.version - 1


def test_a_controller_killed_under_streams_is_followed_by_one_that_adopts_what_runs(cluster: Cluster) -> None:
    list(cluster.admin.follow(cluster.admin.set_roles(1, 3)))
    before, router = cluster.status(), cluster.client.status().router.pid
    version = cluster.admin.cluster().version
    with Load(cluster) as load:
        load.wait_for_more(NUM_PROMPTS)
        printed = len(cluster.serve.output)
        controller_of(cluster).kill()
        load.wait_for_more(NUM_PROMPTS)
        told = cluster.serve.until("the controller was started again; it has adopted (.+)", printed).group(1)
        assert set(told.split(", ")) == {"router", *before}
        assert (cluster.roles(), cluster.admin.cluster().version) == ((1, 3), version)
        list(cluster.admin.follow(cluster.admin.set_roles(2, 2)))
        assert cluster.roles() == (2, 2)
        load.wait_for_more(NUM_PROMPTS)
    assert load.problems == []
    after = cluster.client.status()
    assert after.router.pid == router
    assert {w.worker_id: [rank.pid for rank in w.info.ranks] for w in after.workers} == {
        name: [rank.pid for rank in worker.info.ranks] for name, worker in before.items()
    }
    assert after.router.controller_silent_s < SILENT_S


@pytest.mark.battery
def test_workers_are_replaced_one_at_a_time_under_streams_for_steps_that_they_have_no_memory_for(
    cluster: Cluster,
) -> None:
    list(cluster.admin.follow(cluster.admin.set_roles(1, 1)))
    before = cluster.status()
    with Load(cluster) as load:
        load.wait_for_more(NUM_PROMPTS)
        since = cluster.last_sequence()
        cluster.edit("max_num_batched_tokens: 2048", "max_num_batched_tokens: 4096")
        planned = cluster.until_event(since, admin_pb2.ClusterEvent.KIND_PLANNED)
        assert planned.text.count("start ") == planned.text.count("drain and stop ") == 2
        cluster.until_event(since, admin_pb2.ClusterEvent.KIND_CHANGED)
        load.wait_for_more(NUM_PROMPTS)
        after = cluster.status()
        assert cluster.roles() == (1, 1)
        assert not set(before) & set(after), "a worker has stayed"
        since = cluster.last_sequence()
        cluster.edit("kv_cache_tokens: 8192", "kv_cache_tokens: 900000000000")
        failed = cluster.until_event(since, admin_pb2.ClusterEvent.KIND_FAILED)
        assert "did not start: " in failed.text and "0 of 4 steps are done" in failed.text
        load.wait_for_more(NUM_PROMPTS)
    assert load.problems == []
    assert incarnations(cluster.status()) == incarnations(after)
    cluster.edit("kv_cache_tokens: 900000000000", "kv_cache_tokens: 8192")


def incarnations(workers: dict[str, admin_pb2.WorkerStatus]) -> dict[str, str]:
    """One for each life of a worker."""
    return {worker_id: worker.info.incarnation for worker_id, worker in workers.items()}


def test_a_router_is_replaced_at_its_ports_under_streams(cluster: Cluster) -> None:
    before = cluster.client.status()
    http = cluster.serve.until(r"OpenAI +(http://\S+)/v1").group(1)
    body = {"model": before.model, "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
    with Load(cluster) as load, httpx.Client(base_url=http, timeout=WAIT_S) as page:
        load.wait_for_more(NUM_PROMPTS)
        text = page.post("/v1/completions", json=body).json()["choices"][0]["text"]
        since = cluster.last_sequence()
        cluster.edit("max_queued_requests: 1024", "max_queued_requests: 1000")
        planned = cluster.until_event(since, admin_pb2.ClusterEvent.KIND_PLANNED)
        assert "start router with the new settings beside the old one" in planned.text
        cluster.until_event(since, admin_pb2.ClusterEvent.KIND_CHANGED)
        load.wait_for_more(2 * NUM_PROMPTS)
        assert page.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    assert load.problems == []
    after = cluster.client.status()
    assert after.router.pid != before.router.pid
    assert (after.router.max_queued, before.router.max_queued) == (1000, 1024)
    assert [worker.info.incarnation for worker in after.workers] == [
        worker.info.incarnation for worker in before.workers
    ]


def test_weights_change_worker_by_worker_under_streams_and_each_output_has_one_revision(
    cluster: Cluster, tmp_path: Path
) -> None:
    revised = make_revision(BUNDLED_MODEL, tmp_path / "tiny-shakespeare")
    outputs = [outputs_of(folder) for folder in (BUNDLED_MODEL, revised)]
    assert all(one != other for one, other in zip(*outputs, strict=True))
    list(cluster.admin.follow(cluster.admin.set_roles(1, 1)))
    (before,) = {worker.info.weights_revision for worker in cluster.status().values()}
    with Load(cluster, *outputs) as load:
        load.wait_for_more(NUM_PROMPTS)
        since = cluster.last_sequence()
        cluster.edit("path: models/tiny-shakespeare", f"path: {revised}")
        planned = cluster.until_event(since, admin_pb2.ClusterEvent.KIND_PLANNED)
        assert f"model.path: {revised}; outputs end with the weights that they began with" in planned.text
        assert planned.text.count("start ") == planned.text.count("drain and stop ") == 2
        cluster.until_event(since, admin_pb2.ClusterEvent.KIND_CHANGED)
        load.wait_for_more(NUM_PROMPTS)
        workers = cluster.status()
        (after,) = {worker.info.weights_revision for worker in workers.values()}
        broken = shutil.copytree(revised, tmp_path / "broken" / "tiny-shakespeare")
        (broken / "model.safetensors").write_bytes(b"no weights")
        since = cluster.last_sequence()
        cluster.edit(f"path: {revised}", f"path: {broken}")
        failed = cluster.until_event(since, admin_pb2.ClusterEvent.KIND_FAILED)
        assert "did not start: " in failed.text and "0 of 4 steps are done" in failed.text
        load.wait_for_more(NUM_PROMPTS)
    assert load.problems == []
    assert load.revisions_seen == {0, 1} and before != after
    assert incarnations(cluster.status()) == incarnations(workers)
