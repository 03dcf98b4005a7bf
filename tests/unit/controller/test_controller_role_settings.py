"""Roles whose workers run the model with different settings: what is planned, started, and never flipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from admin_world import ReconfigurerStage, config_of

from cluster.config.roles import EngineOverrides, ModelOverrides, PlacementOverrides
from cluster.config.schema import EngineSection, ServingConfig
from cluster.errors import ConfigError
from controller.adoption import SavedCluster
from controller.change_plan import Member, Wanted, plan_ratio
from controller.plan import plan_cluster
from controller.worker_pool import StepRunner, WorkerPool


def of_roles(config: ServingConfig, **by_role: dict[str, Any]) -> ServingConfig:
    roles = {role: replace(config.role(role), **values) for role, values in by_role.items()}  # type: ignore[arg-type]
    return replace(config, roles=replace(config.roles, **roles))


MIXED = of_roles(config_of(1, 2), decode={"model": ModelOverrides(quantization="int8")})


def test_a_worker_does_not_take_a_role_with_other_settings() -> None:
    members = [Member("prefill-0", "prefill", 1), Member("decode-0", "decode", 1), Member("decode-1", "decode", 1)]
    wanted = {"prefill": Wanted(2, min_workers=1), "decode": Wanted(1, min_workers=1)}
    flips = plan_ratio(members, wanted)  # type: ignore[arg-type]
    assert [str(step) for step in flips] == ["flip decode-1 to prefill"]
    steps = plan_ratio(members, wanted, may_flip=False)  # type: ignore[arg-type]
    assert [str(step) for step in steps] == ["start prefill-1 on 1 device", "drain and stop decode-1"]
    steps = plan_ratio(members, wanted, may_flip=False, max_devices=3)  # type: ignore[arg-type]
    assert [str(step) for step in steps] == ["drain and stop decode-1", "start prefill-1 on 1 device"]


async def test_another_split_of_such_roles_starts_one_worker_and_stops_another() -> None:
    stage = ReconfigurerStage()
    stage.reconfigurer.config = of_roles(stage.reconfigurer.config, decode={"engine": EngineOverrides(max_num_seqs=9)})
    answer = stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "a test")
    assert [str(step) for step in answer.plan.steps] == ["start prefill-1 on 1 device", "drain and stop decode-2"]
    await stage.reconfigurer.settled()
    assert stage.split() == (2, 2)


async def test_other_pools_keep_no_worker_from_the_other_role() -> None:
    stage = ReconfigurerStage()
    pools = {"engine": EngineOverrides(block_size=32), "kv_cache_tokens": 640}
    stage.reconfigurer.config = of_roles(stage.reconfigurer.config, decode=pools)
    answer = stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "a test", dry_run=True)
    assert [str(step) for step in answer.plan.steps] == ["flip decode-2 to prefill"]


def test_each_role_runs_on_its_own_kind_of_device() -> None:
    config = of_roles(config_of(1, 2), prefill={"engine": EngineOverrides(device="cuda")}, decode={})
    plan = plan_cluster(replace(config, engine=EngineSection(device="cpu")), num_gpus=1, num_cores=6)
    assert [(w.role, w.uses_gpu, w.ranks[0].engine.threads) for w in plan.workers] == [
        ("prefill", True, None),
        ("decode", False, 3),
        ("decode", False, 3),
    ]
    with pytest.raises(ConfigError, match=r"roles name 1 devices \(1 prefill\), and Ray sees 0 GPUs"):
        plan_cluster(replace(config, engine=EngineSection(device="cpu")), num_gpus=0, num_cores=6)


def test_a_change_of_one_roles_weights_replaces_workers_of_both_since_each_names_the_form_of_both() -> None:
    pool = WorkerPool(lambda plan: Launched(plan), lambda supervisor: None)
    pool.add(plan_cluster(config_of(1, 2), num_gpus=0, num_cores=4).workers)
    links: Any = None
    steps = StepRunner(pool, links, EngineSection(device="cpu", threads=1))
    assert {m.worker_id for m in steps.members(MIXED) if m.is_stale} == {"prefill-0", "decode-0", "decode-1"}
    larger = of_roles(config_of(1, 2), decode={"engine": EngineOverrides(max_num_batched_tokens=4096)})
    assert {m.worker_id for m in steps.members(larger) if m.is_stale} == {"decode-0", "decode-1"}


def test_what_a_role_says_of_its_threads_and_device_is_not_taken_for_what_was_found() -> None:
    overrides = EngineOverrides(threads=5, device="cpu")
    config = replace(of_roles(config_of(1, 2), prefill={"engine": overrides}), engine=EngineSection(device="auto"))
    plan = plan_cluster(config, num_gpus=0, num_cores=6)
    assert [worker.ranks[0].engine.threads for worker in plan.workers] == [5, 2, 2]
    found = SavedCluster.first(config, plan, now=0.0).engine
    assert (found.device, found.threads) == ("cpu", 2)


def test_a_saved_cluster_comes_back_with_what_its_roles_set() -> None:
    labels = PlacementOverrides(labels=("gpu=h100",))
    config = of_roles(MIXED, prefill={"engine": EngineOverrides(max_num_seqs=3), "placement": labels})
    saved = SavedCluster.first(config, plan_cluster(config, num_gpus=0, num_cores=4), now=0.0)
    assert SavedCluster.from_json(saved.to_json()).config == config


def test_steps_of_a_role_that_says_their_size_reserve_memory_for_no_larger_ones() -> None:
    pool = WorkerPool(lambda plan: Launched(plan), lambda supervisor: None)
    links: Any = None
    steps = StepRunner(pool, links, EngineSection(device="cpu", max_num_batched_tokens=2048))
    config = of_roles(config_of(1, 2), decode={"engine": EngineOverrides(max_num_batched_tokens=256)})
    assert steps.next_worker(config).ranks[0].engine.max_num_batched_tokens == 256


class Launched:
    """A launcher whose workers are never started."""

    placing_limit_s: float | None = None

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    async def launch(self) -> Any:
        raise AssertionError("nothing is started here")

    adopt: Any = None

    def close(self) -> None:
        pass
