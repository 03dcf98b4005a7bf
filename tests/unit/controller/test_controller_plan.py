"""Which processes a configuration asks for, and what each is told."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from cluster.config.schema import (
    EngineSection,
    MetricsSection,
    ModelSection,
    PlacementSection,
    RoleSection,
    RolesSection,
    RouterSection,
    ServingConfig,
    TransferSection,
)
from cluster.errors import ConfigError
from cluster.settings import WorkerSettings
from controller.plan import plan_cluster


def config_of(
    prefill: RoleSection | None = None, decode: RoleSection | None = None, device: str = "cpu"
) -> ServingConfig:
    return ServingConfig(
        model=ModelSection(path="models/m", name="m", dtype="float32", max_model_len=100),
        roles=RolesSection(prefill or RoleSection(), decode or RoleSection()),
        engine=EngineSection(device=device),  # type: ignore[arg-type]
    )


def test_each_role_has_devices_divided_by_tensor_parallel_workers() -> None:
    config = config_of(RoleSection(devices=4, tensor_parallel=2), RoleSection(devices=3))
    plan = plan_cluster(config, num_gpus=0, num_cores=7)
    ids = [(w.worker_id, w.role, len(w.ranks)) for w in plan.workers]
    assert ids == [
        ("prefill-0", "prefill", 2),
        ("prefill-1", "prefill", 2),
        ("decode-0", "decode", 1),
        ("decode-1", "decode", 1),
        ("decode-2", "decode", 1),
    ]


def test_the_ranks_of_a_worker_differ_in_nothing_but_their_number_and_the_step_log() -> None:
    config = replace(config_of(decode=RoleSection(devices=4, tensor_parallel=4)), log_dir="logs")
    ranks = plan_cluster(config, num_gpus=0, num_cores=8).workers[1].ranks
    assert [rank.tp_rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.step_log for rank in ranks] == ["logs/decode-0.steps.jsonl", None, None, None]
    assert {replace(rank, tp_rank=0, step_log=None) for rank in ranks} == {replace(ranks[0], step_log=None)}


@pytest.mark.parametrize(("num_cores", "threads"), [(16, 4), (4, 1), (2, 1), (None, None)])
def test_the_cores_are_divided_among_all_ranks_and_each_has_at_least_one(
    num_cores: int | None, threads: int | None
) -> None:
    config = config_of(RoleSection(devices=2), RoleSection(devices=2, tensor_parallel=2))
    plan = plan_cluster(config, num_gpus=0, num_cores=num_cores)
    assert {rank.engine.threads for worker in plan.workers for rank in worker.ranks} == {threads}


def test_threads_that_the_operator_chose_are_kept() -> None:
    config = config_of()
    config = replace(config, engine=replace(config.engine, threads=5))
    plan = plan_cluster(config, num_gpus=0, num_cores=2)
    assert plan.workers[0].ranks[0].engine.threads == 5


def test_a_role_may_override_the_block_size_and_the_size_of_the_pool() -> None:
    config = config_of(RoleSection(block_size=32, kv_cache_tokens=640), RoleSection())
    prefill, decode = (w.ranks[0] for w in plan_cluster(config, num_gpus=0, num_cores=2).workers)
    assert (prefill.engine.block_size, prefill.engine.kv_cache_tokens) == (32, 640)
    assert (decode.engine.block_size, decode.engine.kv_cache_tokens) == ("auto", None)


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "device"), [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cuda", 2, "cuda"), ("cpu", 2, "cpu")]
)
def test_auto_takes_gpus_where_there_are_any(wanted: str, num_gpus: int, device: str) -> None:
    worker = plan_cluster(config_of(device=wanted), num_gpus=num_gpus, num_cores=2).workers[0]
    assert worker.ranks[0].engine.device == device
    assert worker.bundle.get("GPU", 0.0) == (1.0 if device == "cuda" else 0.0)


@pytest.mark.parametrize(("wanted", "num_gpus"), [("auto", 1), ("cuda", 1), ("cuda", 0)])
def test_more_devices_than_gpus_are_refused_with_both_numbers(wanted: str, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match=rf"2 devices \(1 prefill \+ 1 decode\), and Ray sees {num_gpus} GPUs"):
        plan_cluster(config_of(device=wanted), num_gpus=num_gpus, num_cores=2)


def test_many_processes_fit_into_one_ray_cpu() -> None:
    config = config_of(RoleSection(devices=8, tensor_parallel=4), RoleSection(devices=8))
    plan = plan_cluster(config, num_gpus=0, num_cores=1)
    assert sum(worker.bundle["CPU"] for worker in plan.workers for _ in worker.ranks) < 1


def test_what_the_operator_wrote_reaches_worker_and_router_unchanged() -> None:
    config = replace(config_of(), router=RouterSection(port=1234, queue_timeout_s=7.5, max_queued_requests=3))
    plan = plan_cluster(config, num_gpus=0, num_cores=2)
    rank, router = plan.workers[0].ranks[0], plan.router
    for model in (rank.model, router.model):
        assert (model.path, model.name, model.dtype, model.max_model_len) == ("models/m", "m", "float32", 100)
    section = router.router
    assert (section.port, section.queue_timeout_s, section.max_queued_requests) == (1234, 7.5, 3)
    assert (router.engine.max_num_seqs, router.engine.num_seqs) == ("auto", 64)


def test_every_key_of_the_transfer_reaches_each_rank() -> None:
    wanted = TransferSection(
        transport="gloo",
        wire_format="int8",
        digest="sampled",
        chunk_tokens=32,
        num_slots=1,
        max_pairs=3,
        timeout_s=4.5,
        heartbeat_s=0.1,
        suspect_after_s=0.2,
        dead_after_s=0.3,
    )
    default = TransferSection()
    plan = plan_cluster(replace(config_of(), transfer=wanted), num_gpus=0, num_cores=2)
    rank = plan.workers[1].ranks[0]
    assert plan.router.transfer.dead_after_s == wanted.dead_after_s
    for field in dataclasses.fields(TransferSection):
        value = getattr(wanted, field.name)
        assert value != getattr(default, field.name), f"{field.name} is not told apart from its default"
        assert getattr(rank.transfer, field.name) == value, field.name


def test_what_the_schema_says_by_default_is_what_a_worker_does_by_default() -> None:
    rank = plan_cluster(config_of(), num_gpus=0, num_cores=2).workers[0].ranks[0]
    alone = WorkerSettings(worker_id="a", role="prefill", model=ModelSection("m"))
    for field in dataclasses.fields(TransferSection):
        assert getattr(rank.transfer, field.name) == getattr(alone.transfer, field.name), field.name
    assert rank.transfer_faults == 0.0


@pytest.mark.parametrize(("is_wanted", "port"), [(True, 0), (False, None)])
def test_processes_serve_their_metrics_unless_told_not_to(is_wanted: bool, port: int | None) -> None:
    config = replace(config_of(), metrics=MetricsSection(workers=is_wanted, router=not is_wanted))
    plan = plan_cluster(config, num_gpus=0, num_cores=2)
    assert {rank.metrics_port for worker in plan.workers for rank in worker.ranks} == {port}
    assert (plan.router.metrics_port is None) is is_wanted


def test_settings_survive_the_way_to_a_process() -> None:
    rank = plan_cluster(config_of(), num_gpus=0, num_cores=2).workers[0].ranks[0]
    assert WorkerSettings.from_json(rank.to_json()) == rank


def test_several_routers_have_names_of_their_own_and_the_same_ports() -> None:
    config = config_of()
    three = replace(config, router=replace(config.router, replicas=3, port=6000))
    spread = replace(three, placement=replace(three.placement, routers="spread"))
    for wanted, num_cores in ((three, 2), (spread, None)):
        named = plan_cluster(wanted, num_gpus=0, num_cores=num_cores).named_routers()
        assert [(name, settings.router.port) for name, settings in named] == [
            ("router", 6000),
            ("router-1", 6000),
            ("router-2", 6000),
        ]
    with pytest.raises(ConfigError, match=r"placement\.routers is spread, and this is one machine for 3 routers"):
        plan_cluster(spread, num_gpus=0, num_cores=2)


def test_workers_wait_for_gpus_where_nodes_may_still_come() -> None:
    worker = plan_cluster(config_of(device="cuda"), num_gpus=0, num_cores=None, may_grow=True).workers[0]
    assert worker.bundle["GPU"] == 1.0
    with pytest.raises(ConfigError, match="Ray sees 0 GPUs"):
        plan_cluster(config_of(device="cuda"), num_gpus=0, num_cores=None)


def test_every_worker_has_the_labels_of_the_nodes_it_may_be_on() -> None:
    labels = PlacementSection(labels=("ray.io/accelerator-type=H100", "zone=in(a,b)"))
    plan = plan_cluster(replace(config_of(), placement=labels), num_gpus=0, num_cores=2)
    assert {w.labels for w in plan.workers} == {(("ray.io/accelerator-type", "H100"), ("zone", "in(a,b)"))}
