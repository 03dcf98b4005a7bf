"""What a role sets for its own workers, and what must agree between the two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.config.diff import role_differences
from cluster.config.load import parse_config
from cluster.config.schema import EngineSection, ServingConfig
from cluster.errors import ConfigError
from cluster.settings import run_time_json, run_time_json_of
from controller.plan import plan_worker
from worker.resolved import resolve

ROOT = Path(__file__).parents[3]


def parse(**sections: object) -> ServingConfig:
    text = yaml.safe_dump({"metadata": {"serving": {"model": {"path": "models/tiny-shakespeare"}, **sections}}})
    return parse_config(text, str(ROOT / "cluster.yaml"))


def problem(**sections: object) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(**sections)
    return refused.value.message


def test_a_role_has_devices_divided_by_tensor_parallel_workers() -> None:
    assert parse(roles={"prefill": {"devices": 4, "tensor_parallel": 2}}).roles.prefill.num_workers == 2


def test_a_role_sets_the_size_of_its_blocks_and_pool_by_either_name() -> None:
    config = parse(
        roles={"prefill": {"block_size": 32}, "decode": {"engine": {"kv_cache_tokens": 640}}},
        engine={"kv_cache_tokens": 320},
    )
    prefill, decode = config.engine_of("prefill"), config.engine_of("decode")
    assert (prefill.block_size, decode.block_size) == (32, "auto")
    assert (prefill.kv_cache_tokens, decode.kv_cache_tokens) == (320, 640)
    why = problem(roles={"decode": {"block_size": 16, "engine": {"block_size": 32}}})
    assert "roles.decode.block_size: 16, and roles.decode.engine.block_size is 32: they are one setting" in why


def test_what_a_role_leaves_out_is_as_the_common_section_says() -> None:
    config = parse(
        roles={"decode": {"engine": {"max_num_seqs": 7, "attention": None}, "placement": {"labels": ["a=b"]}}},
        engine={"attention": "cpu", "max_num_batched_tokens": 99, "max_num_seqs": 9},
    )
    common = EngineSection(attention="cpu", max_num_batched_tokens=99, max_num_seqs=9)
    assert config.engine_of("prefill") == common
    assert config.engine_of("decode") == replace(common, max_num_seqs=7)
    assert (config.labels_of("prefill"), config.labels_of("decode")) == ((), ("a=b",))
    worker = plan_worker(config, "decode")
    assert worker.labels == (("a", "b"),)
    assert worker.ranks[0].engine == config.engine_of("decode")


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ({"engine": {"deterministic": True}}, "engine.deterministic: cannot differ between the roles: both compute"),
        ({"model": {"path": "x"}}, "model.path: cannot differ between the roles: "),
        ({"model": {"max_model_len": 5}}, "set model.max_model_len for both"),
        ({"engine": {"timed_steps": {"fixed_s": 1}}}, "set engine.timed_steps for both"),
        ({"placement": {"routers": "spread"}}, "routers serve both; set placement.routers for both"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs: must be at least 1 (got 0)"),
        ({"engine": {"atention": "cpu"}}, 'did you mean "attention"?'),
        ({"placement": {"labels": ["a"]}}, "decode.placement.labels: a is not KEY=VALUE"),
    ],
)
def test_what_no_role_may_set_is_refused_by_name_and_place(role: object, why: str) -> None:
    told = problem(roles={"decode": role})
    assert why in told
    assert "cluster.yaml:" in told.splitlines()[0]
    assert "metadata.serving.roles.decode." in told.splitlines()[0]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"roles": {"decode": {"engine": {"kv_cache_dtype": "int8"}}}},
            "roles.decode.engine.kv_cache_dtype: int8, where prefill workers have auto (engine.kv_cache_dtype): KV is "
            "handed over as it lies in the pool; use auto",
        ),
        (
            {"roles": {"prefill": {"engine": {"kv_cache_dtype": "int8"}}}},
            "roles.prefill.engine.kv_cache_dtype: int8, where decode workers have auto (engine.kv_cache_dtype): KV is "
            "handed over as it lies in the pool; use auto",
        ),
        (
            {"roles": {"prefill": {"model": {"dtype": "float32"}}}, "model": {"dtype": "float16"}},
            "roles.prefill.model.dtype: float32, where decode workers have float16 (model.dtype): KV of float32 "
            "reaches beyond the range of float16; use float16",
        ),
        (
            {"roles": {"prefill": {"engine": {"device": "cuda"}}}, "engine": {"deterministic": True, "device": "cpu"}},
            "they do not give a token the same bits; use cpu",
        ),
        (
            {"roles": {"decode": {"engine": {"expert_rebalance_tokens": 9}}}, "engine": {"deterministic": True}},
            "roles.decode.engine.expert_rebalance_tokens: 9: experts that change places are added up in another order, "
            "and engine.deterministic is true; use 0",
        ),
        (
            {"roles": {"decode": {"model": {"quantization": "int8"}}}, "engine": {"deterministic": True}},
            "roles.decode.model.quantization: int8, where prefill workers have none (model.quantization): "
            "engine.deterministic is true",
        ),
        (
            {"roles": {"decode": {"engine": {"max_num_seqs": 100}}}, "engine": {"max_num_batched_tokens": 64}},
            "must be at least max_num_seqs (100)",
        ),
        (
            {"roles": {"prefill": {"engine": {"device": "cuda"}}}, "engine": {"device": "cpu"}}
            | {"transfer": {"transport": "shm"}},
            "shm moves CPU memory, and roles.prefill.engine.device is cuda; use auto or gloo",
        ),
        (
            {"roles": {"decode": {"engine": {"attention": "varlen"}}}, "engine": {"device": "cpu"}},
            "roles.decode.engine.attention: varlen runs on a GPU only, and engine.device is cpu",
        ),
    ],
)
def test_what_must_agree_between_the_roles_is_refused_with_both_values(sections: dict[str, object], why: str) -> None:
    model = {"path": "models/tiny-shakespeare"} | sections.get("model", {})  # type: ignore[operator]
    assert why in problem(**{**sections, "model": model})


def test_groups_of_experts_divide_the_devices_of_a_worker() -> None:
    why = problem(roles={"decode": {"devices": 4, "tensor_parallel": 4, "expert_parallel": 3}})
    assert "roles.decode.expert_parallel: 3 does not divide tensor_parallel 4; use 1 or 2 or 4" in why
    sizes = {"devices": 4, "tensor_parallel": 4}
    roles = {"prefill": sizes, "decode": {**sizes, "expert_parallel": 2}}
    why = problem(roles=roles, engine={"deterministic": True})
    assert "roles.prefill.expert_parallel: 1 groups of ranks add other sums than decode's 2" in why
    config = parse(roles=roles)
    assert {rank.expert_parallel for rank in plan_worker(config, "decode").ranks} == {2}
    assert role_differences(config) == {"expert_parallel": (1, 2)}


def test_latents_are_split_in_blocks_that_the_devices_divide() -> None:
    sizes = {"devices": 4, "tensor_parallel": 4, "split_latents": True}
    why = problem(roles={"decode": {**sizes, "block_size": 18}})
    assert (
        "roles.decode.split_latents: each of 4 devices (tensor_parallel) keeps an equal part of a block, which" in why
    )
    config = parse(roles={"prefill": {"block_size": 18}, "decode": {**sizes, "block_size": 20}})
    assert [rank.split_latents for rank in plan_worker(config, "decode").ranks] == [True] * 4
    assert not plan_worker(config, "prefill").ranks[0].split_latents
    assert role_differences(config) == {"tensor_parallel": (1, 4), "split_latents": (False, True)}


def test_prefill_without_workers_has_nothing_to_agree_on() -> None:
    parse(roles={"prefill": {"devices": 0, "min_workers": 0}, "decode": {"engine": {"kv_cache_dtype": "int8"}}})


def test_a_mistake_in_what_both_roles_share_is_reported_once() -> None:
    assert problem(engine={"device": "cpu", "attention": "varlen"}).count("runs on a GPU only") == 1


def test_pools_may_differ_where_a_worker_changes_its_role_and_nothing_else() -> None:
    assert not role_differences(parse(roles={"decode": {"block_size": 32, "engine": {"kv_cache_tokens": 640}}}))
    labels = {"placement": {"labels": ["a=b"]}}
    differing = parse(roles={"decode": labels | {"engine": {"enforce_eager": True}, "model": {"quantization": "int8"}}})
    assert role_differences(differing) == {
        "placement.labels": ((), ("a=b",)),
        "model.quantization": ("none", "int8"),
        "engine.enforce_eager": (False, True),
    }


def test_each_role_gets_its_own_run_time_values() -> None:
    config = parse(
        roles={"decode": {"engine": {"max_num_batched_tokens": 128}}}, engine={"max_num_batched_tokens": 512}
    )
    sent = run_time_json(config)
    workers = {role: plan_worker(config, role).ranks[0] for role in ("prefill", "decode")}  # type: ignore[arg-type]
    for role, tokens in (("prefill", 512), ("decode", 128)):
        taken = workers[role].with_run_time(run_time_json_of(role, sent))
        assert taken.engine.max_num_batched_tokens == tokens
    assert "roles" not in json.loads(run_time_json(parse()))


def test_workers_name_both_forms_of_the_weights_where_roles_differ_and_only_then() -> None:
    alike = [resolve(plan_worker(parse(), role).ranks[0]).weights_revision for role in ("prefill", "decode")]
    assert alike[0] == alike[1]
    assert alike[0].endswith("+bfloat16")
    config = parse(roles={"decode": {"model": {"quantization": "int8"}}})
    mixed = [resolve(plan_worker(config, role).ranks[0]).weights_revision for role in ("prefill", "decode")]
    assert mixed[0] == mixed[1] != alike[0]
    assert "decode auto int8" in mixed[0]
