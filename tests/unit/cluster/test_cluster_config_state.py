"""`metadata.serving.state`: which URLs are taken, and that none is repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config.checks import check
from cluster.config.schema import ModelSection, PlacementSection, RouterSection, ServingConfig
from controller.plan import plan_cluster


def config_of(state: str | None) -> ServingConfig:
    return ServingConfig(ModelSection("m"), state=state, router=RouterSection(resume_window_s=7.0))


@pytest.mark.parametrize(
    "url", ["redis://localhost", "redis://127.0.0.1:6379", "rediss://u:p@h:1/3", "redis://[::1]:6379/0"]
)
def test_a_redis_url_is_taken_and_told_to_the_router(url: str) -> None:
    assert list(check(config_of(url))) == []
    plan = plan_cluster(config_of(url), num_gpus=0, num_cores=1)
    assert (plan.router.state, plan.router.router.resume_window_s, plan.journal) == (url, 7.0, None)


def test_routers_of_one_machine_share_a_file_unless_told_otherwise() -> None:
    plan = plan_cluster(config_of(None), num_gpus=0, num_cores=1)
    assert plan.router.state == plan.journal == "~/.local/state/baton/journal-50051.db"
    assert plan.router.router.batch_store == "~/.local/state/baton/batches-8000.db"
    two = replace(config_of(None), router=RouterSection(replicas=2))
    settings = [router for _, router in plan_cluster(two, num_gpus=0, num_cores=1).named_routers()]
    assert [each.state for each in settings] == [plan.journal] * 2
    free = replace(config_of(None), router=RouterSection(port=0))
    names = {plan_cluster(free, num_gpus=0, num_cores=1).journal for _ in range(2)}
    assert len(names) == 2, "two clusters at free ports share a journal"


def test_memory_and_routers_on_several_machines_have_no_file() -> None:
    assert list(check(config_of("memory"))) == []
    memory = plan_cluster(config_of("memory"), num_gpus=0, num_cores=1)
    assert (memory.router.state, memory.journal) == (None, None)
    assert memory.router.router.batch_store == "~/.local/state/baton/batches-8000.db", "batches are kept all the same"
    spread = replace(config_of(None), placement=PlacementSection(routers="spread"), router=RouterSection(replicas=2))
    assert plan_cluster(spread, num_gpus=0, num_cores=None).router.state is None


@pytest.mark.parametrize(
    "url",
    ["", "localhost:6379", "http://localhost", "redis://", "redis://h:port", "redis://h:70000", "redis://h:0",
     "redis://u:secret@h/x", "unix:///redis.sock"],
)  # fmt: skip
def test_another_url_is_refused_without_being_repeated(url: str) -> None:
    (finding,) = check(config_of(url))
    assert finding.key == "state" and "redis://HOST:PORT" in finding.what and "secret" not in finding.what
