"""The sum of a rank's memory: what is left for the KV pool, how many blocks that is, and what is refused with the
number that would fit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from checkpoints import make_checkpoint

from cluster.errors import ConfigError
from engine.memory import Activations, MemoryDemand, MemoryPlan, estimate_activations, plan_memory
from engine.model_cost import WeightForm, choose_form, largest_matrix_elements
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.native import native
from engine.quantization.interface import TritonProducts

GIB = 1 << 30
KV_BYTES = 2 * 4 * 4 * 16 * 4  # keys and values, layers, KV heads, head_dim, float32
ACTIVATIONS = Activations(3_000_000, is_measured=True, why="measured by hand")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model(make_checkpoint("llama", tmp_path_factory.mktemp("plan")))


FORM = {"dtype": "float32", "device": "cpu", "quantization": "none", "is_tiled": False}


def demand_of(config: ModelConfig, **changes: Any) -> MemoryDemand:
    names = {field.name for field in fields(WeightForm)} & {*FORM, *changes}
    form = WeightForm(**{name: changes.pop(name, FORM.get(name)) for name in names})
    sizes: dict[str, Any] = {
        "tp_size": 1,
        "kv_dtype": form.dtype,
        "block_size": 16,
        "kv_cache_tokens": None,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "memory_utilization": 0.9,
    }
    return MemoryDemand(config=config, form=form, **{**sizes, **changes})


def plan_of(config: ModelConfig, free_bytes: int = GIB, **changes: Any) -> MemoryPlan:
    return plan_memory(demand_of(config, **changes), free_bytes=free_bytes, activations=ACTIVATIONS)


def num_blocks(config: ModelConfig, **changes: Any) -> int:
    return plan_of(config, **changes).num_blocks


def test_a_pool_of_given_size_has_that_many_whole_blocks(config: ModelConfig) -> None:
    assert num_blocks(config, kv_cache_tokens=4096) == 256
    assert num_blocks(config, kv_cache_tokens=4100, block_size=32) == 128
    assert plan_of(config, kv_cache_tokens=4096).decided_by == "kv_cache_tokens"


def test_a_cpu_pool_holds_four_long_requests_when_nothing_is_said(config: ModelConfig) -> None:
    assert num_blocks(config) == 4 * 2048 // 16
    assert num_blocks(config, max_model_len=100) == 4 * 7
    assert num_blocks(config, free_bytes=1000 * GIB) == 4 * 2048 // 16
    assert plan_of(config).decided_by == "requests"


def test_a_cpu_pool_shrinks_to_what_memory_allows(config: ModelConfig) -> None:
    plan = plan_of(config, free_bytes=16_000_000)

    assert 2048 // 16 <= plan.num_blocks < 4 * 2048 // 16
    assert plan.decided_by == "memory" and plan.num_tokens == plan.tokens_that_fit


@pytest.mark.parametrize(("device", "free_bytes"), [("cuda:1", 4 * GIB), ("cpu", 16_000_000)])
def test_the_parts_add_up_to_the_budget_but_for_less_than_a_block(
    device: str, free_bytes: int, config: ModelConfig
) -> None:
    plan = plan_of(config, device=device, free_bytes=free_bytes)

    parts = plan.weight_bytes + plan.activation_bytes + plan.reserved_bytes + plan.pool_bytes
    assert plan.budget_bytes == int(free_bytes * 0.9)
    assert 0 <= plan.budget_bytes - parts < 16 * KV_BYTES
    assert plan.kv_bytes_per_token == KV_BYTES and plan.activation_bytes == 3_000_000


def test_a_gpu_pool_takes_all_that_is_left_beside_a_reserve(config: ModelConfig) -> None:
    plan = plan_of(config, device="cuda", dtype="bfloat16", free_bytes=4 * GIB)

    assert plan.decided_by == "memory" and plan.reserved_bytes >= GIB + 16 * plan.kv_bytes_per_token
    assert 0.6 * 4 * GIB < plan.pool_bytes + plan.weight_bytes <= 0.9 * 4 * GIB - GIB


def test_a_gpu_reserves_the_logits_of_graphs_for_every_sequence(config: ModelConfig) -> None:
    few, many = (plan_of(config, device="cuda", max_num_seqs=n, free_bytes=8 * GIB) for n in (8, 256))

    assert many.reserved_bytes - few.reserved_bytes == 2 * (256 - 8) * config.vocab_size * 4


def test_each_byte_more_of_activations_is_one_less_for_the_pool(config: ModelConfig) -> None:
    demand = demand_of(config, device="cuda")

    def left(size: int) -> int:
        return plan_memory(demand, free_bytes=4 * GIB, activations=Activations(size, True, "")).left_bytes

    assert left(0) - left(123_456) == 123_456


def test_the_utilization_scales_the_budget(config: ModelConfig) -> None:
    assert plan_of(config, memory_utilization=0.5).budget_bytes == GIB // 2


def test_requests_take_whole_blocks(config: ModelConfig) -> None:
    plan = plan_of(config, kv_cache_tokens=4096)

    assert [plan.num_requests(n) for n in (1, 16, 17, 1024, 4096, 4097)] == [256, 256, 128, 4, 1, 0]


def test_a_pool_that_cannot_hold_one_request_is_refused_with_the_number_that_fits(config: ModelConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(config, kv_cache_tokens=1000)

    message = str(caught.value)
    assert "one request of 2048 tokens does not fit" in message and "kv_cache_tokens 1000" in message
    assert "max_model_len to at most 992" in message and "kv_cache_tokens to at least 2048" in message


@pytest.mark.parametrize("free_bytes", [9_000_000, 3_000_000])
def test_memory_that_cannot_hold_one_request_is_refused_with_the_number_that_fits(
    free_bytes: int, config: ModelConfig
) -> None:
    with pytest.raises(ConfigError, match=r"2048 tokens does not fit in the KV pool; memory .* holds \d+"):
        plan_of(config, free_bytes=free_bytes)


def test_a_pool_larger_than_memory_is_refused_with_the_number_that_fits(config: ModelConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(config, kv_cache_tokens=10_000_000)

    message = str(caught.value)
    fitting = int(message.split("weights; ")[1].split(" would")[0])
    assert "kv_cache_tokens: 10000000 do not fit" in message
    assert num_blocks(config, kv_cache_tokens=fitting) * 16 == fitting


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_seqs": 64},
        {"max_model_len": 4096},
        {"quantization": "int8"},
    ],
    ids=str,
)
def test_the_estimate_of_activations_grows_with_what_a_step_may_hold(more: dict[str, Any], config: ModelConfig) -> None:
    estimate = estimate_activations(demand_of(config), "not started")

    assert estimate_activations(demand_of(config, **more), "").size_bytes > estimate.size_bytes > 0
    assert not estimate.is_measured and estimate.why == "not started"


def test_ranks_share_the_activations_of_a_layer(config: ModelConfig) -> None:
    whole, half = (estimate_activations(demand_of(config, tp_size=n), "").size_bytes for n in (1, 2))
    assert 0.5 * whole < half < whole


def test_weights_in_fp8_are_unpacked_on_every_cpu_and_count_so(config: ModelConfig) -> None:
    kernels, _ = native()
    sizes = {"dtype": "bfloat16", "device": "cpu"}
    forms = {name: choose_form(config, **sizes, quantization=name, kernels=kernels) for name in ("none", "fp8")}
    plain, fp8 = (estimate_activations(demand_of(config, **vars(form)), "").size_bytes for form in forms.values())
    assert fp8 == plain + 6 * largest_matrix_elements(config, 1)
    assert not choose_form(config, **sizes, quantization="fp8", kernels=TritonProducts()).is_unpacked


def test_weights_that_kernels_multiply_as_they_are_take_nothing_more(config: ModelConfig) -> None:
    plain, tiled = (demand_of(config, quantization=name, is_tiled=True) for name in ("none", "int4"))
    assert estimate_activations(plain, "") == estimate_activations(tiled, "")


def needed(demand: MemoryDemand) -> int:
    return demand.weight_bytes + demand.reserved_bytes


def test_a_model_that_is_larger_than_a_gpu_is_refused_with_the_ranks_that_hold_it(config: ModelConfig) -> None:
    one, two = (demand_of(config, device="cuda", tp_size=size) for size in (1, 2))
    between = (needed(one) + needed(two)) // 2

    def refusal(free_bytes: int) -> str:
        with pytest.raises(ConfigError) as refused:
            plan_memory(one, free_bytes=int(free_bytes / 0.9), activations=estimate_activations(one, ""))
        return refused.value.message

    assert "model.path: weights of " in refusal(between)
    assert refusal(between).endswith("set tensor_parallel to at least 2, or model.quantization")
    assert "no tensor_parallel holds it on such GPUs" in refusal(GIB // 2)


def test_a_model_that_is_larger_than_a_machine_is_refused_with_what_is_missing(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"model.path: weights of .* do not fit in .*: free [\d.]+ \w+ more"):
        plan_of(config, free_bytes=1_000_000)
