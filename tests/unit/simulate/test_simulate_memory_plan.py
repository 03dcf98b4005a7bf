"""The memory of models on devices that are not here: the known models' sizes, what `engine.memory` computes where both
apply, and refusals that name the remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from scripted_router import baton

from cluster.errors import CheckpointError, ConfigError
from engine.kv.pool import POOL_DTYPES
from engine.memory import MemoryDemand, estimate_activations, plan_memory
from engine.model_cost import WeightForm, kv_bytes_per_token, weight_bytes
from engine.models.folder import read_model
from simulate.devices import DEVICES, find_device
from simulate.memory_plan import MemoryQuestion, memory_of, usual_layouts
from simulate.model_files import find_shape, read_shape
from simulate.shapes import DeviceLayout

GB = 1e9


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-3.1-8b", 8.03, 8.03),
        ("llama-3.1-70b", 70.55, 70.55),
        ("llama-3.1-405b", 405.85, 405.85),
        ("qwen3-235b-a22b", 235.09, 22.19),
        ("deepseek-v3", 671.03, 37.55),
        ("mixtral-8x7b", 46.70, 12.88),
        ("qwen3-32b", 32.76, 32.76),
        ("opt-13b", 12.84, 12.84),
        ("bloom-176b", 176.2, 176.2),
    ],
)
def test_a_known_model_has_as_many_parameters_as_its_makers_say(name: str, billions: float, active: float) -> None:
    shape = find_shape(name)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert shape.num_active_parameters / 1e9 == pytest.approx(active, rel=0.005)


def test_kv_of_a_token_with_grouped_heads_and_with_a_latent_vector() -> None:
    assert find_shape("llama-3.1-8b").kv_bytes_per_token(1, "bfloat16") == 2 * 32 * 8 * 128 * 2
    assert find_shape("llama-3.1-70b").kv_bytes_per_token(16, "bfloat16") == 2 * 80 * 128 * 2  # replicated beyond 8
    latent = find_shape("deepseek-v3")
    assert latent.kv_bytes_per_token(1, "bfloat16") == latent.kv_bytes_per_token(8, "bfloat16") == 61 * 576 * 2


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3"]
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_kv_and_reserve_are_those_of_the_engine_for_families_that_it_serves(
    tmp_path: Path, family: str, tp_size: int
) -> None:
    config = read_model(make_checkpoint(family, tmp_path))
    shape, layout = find_shape(str(tmp_path)), DeviceLayout(tp_size)
    for quantization in ("none", "int8", "fp8", "int4"):
        form = WeightForm(config.dtype, "cuda", quantization, are_in_triton=True)
        assert shape.weight_bytes(layout, quantization) == weight_bytes(config, tp_size, form)
    for kv_dtype in (shape.dtype, "int8", "fp8"):
        wanted = kv_bytes_per_token(config, tp_size, POOL_DTYPES.get(kv_dtype, kv_dtype))
        assert shape.kv_bytes_per_token(tp_size, kv_dtype) == wanted
    question = MemoryQuestion(shape, find_device("h100"), "none", shape.dtype, context=256)
    form = WeightForm(config.dtype, "cuda", are_in_triton=True)
    length = config.max_position_embeddings
    demand = MemoryDemand(config, form, tp_size, config.dtype, 16, None, length, 256, 2048, 0.9)
    plan = plan_memory(demand, free_bytes=int(80 * GB), activations=estimate_activations(demand, ""))
    found = memory_of(question, layout)
    assert (found.reserved_bytes, found.left_bytes) == (plan.activation_bytes + plan.reserved_bytes, plan.left_bytes)
    if config.latent is None:
        with pytest.raises(ConfigError, match=r"--split-latents: .* keeps no latents; leave it out"):
            memory_of(replace(question, split_latents=True), layout)
        return
    demand = replace(demand, config=config.with_split_latents(tp_size))
    plan = plan_memory(demand, free_bytes=int(80 * GB), activations=estimate_activations(demand, ""))
    split = memory_of(replace(question, split_latents=True), layout)
    assert (split.reserved_bytes, split.left_bytes) == (plan.activation_bytes + plan.reserved_bytes, plan.left_bytes)
    assert split.kv_bytes_per_token == plan.kv_bytes_per_token == found.kv_bytes_per_token // tp_size


def test_experts_are_sliced_with_tp_and_whole_with_ep() -> None:
    shape = find_shape("qwen3-235b-a22b")
    sliced, whole = (shape.weight_bytes(layout, "none") for layout in (DeviceLayout(8), DeviceLayout(8, 8)))
    assert sliced == pytest.approx(whole, rel=0.001) == pytest.approx(shape.num_parameters * 2 / 8, rel=0.02)
    alone = shape.weight_bytes(DeviceLayout(1, 8), "none")  # attention and vocabulary on every device
    assert alone - whole == pytest.approx(7 / 8 * 2 * 7.9e9, rel=0.02)


def test_repeated_attention_holds_more_latent_vectors() -> None:
    question = MemoryQuestion(find_shape("deepseek-v3"), find_device("h200"), "fp8", "bfloat16", context=4096)
    sliced, repeated = memory_of(question, DeviceLayout(8, 8)), memory_of(question, DeviceLayout(1, 8))
    assert repeated.weight_bytes > sliced.weight_bytes
    assert repeated.num_tokens > 4.5 * sliced.num_tokens
    assert repeated.layout.num_groups == 8


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_has_a_source_and_plausible_peaks(name: str) -> None:
    device = find_device(name.upper())
    assert device.source
    assert device.peak_flops("bfloat16") <= device.peak_flops("int8") <= 2.05 * device.peak_flops("bfloat16")
    balance = device.peak_flops("bfloat16") / device.memory_bytes_per_s
    assert 100 < balance < 500


def test_a_model_over_one_node_is_offered_each_layout_that_divides_it() -> None:
    layouts = [str(one) for one in usual_layouts(find_shape("deepseek-v3"), 8)]
    ep = ["TP 1 EP 8", "TP 1 EP 16", "TP 4 EP 16", "TP 1 EP 32", "TP 4 EP 32"]
    assert layouts == ["TP 1", "TP 2", "TP 4", "TP 8", "TP 8 EP 8", *ep]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--model llama-3.1-80b", "'llama-3.1-80b' is no folder, no config.json and no known name; did you mean llama"),
        ("--model llama-3.1-8b --device h10", "'h10' is not in the table; did you mean h100?"),
        ("--model llama-3.1-8b --tp 3", "3 does not divide 32 attention heads, 8 KV heads"),
        ("--model llama-3.1-8b --ep 8", "8, and llama-3.1-8b has no experts"),
        ("--model deepseek-v3 --ep 7", "7 does not divide 256 experts"),
        ("--model llama-3.1-70b --tp 1", "GB larger than 0.9 of h100's memory; use --tp 4"),
        ("--model llama-3.1-8b --context 200000", "200000 is more than llama-3.1-8b's 131072"),
        ("--model llama-3.1-405b --device l40s", "no usual layout does (TP 8 comes nearest): use --quantization int4"),
        ("--model llama-3.1-8b --quantization int2", "'int2' is unknown; use auto, none, fp8, int8, int4"),
        ("--model llama-3.1-8b --kv-dtype int2", "'int2' is unknown; use auto, int8, fp8"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(options: str, says: str) -> None:
    done = baton("plan", "--memory", *options.split())
    assert done.exit_code == 3
    assert says in done.stderr


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true; plans are for decoder-only models"),
        ({"num_attention_heads": None}, "num_attention_heads must be a positive integer (got None)"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({"layer_types": ["linear_attention"]}, "layers of type 'linear_attention' keep a state of their own"),
        ({"full_attention_interval": 4}, "layers of type 'linear_attention' keep a state of their own"),
        ({"quantization_config": {"quant_method": "x"}}, "quant_method 'x' is not known here"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"layers_block_type": 3}, "layer_types and layers_block_type must be lists (one is 3)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000"),
        ({"num_experts": 8, "mlp_only_layers": 1}, "mlp_only_layers must be a list of layers (got 1)"),
        ({"num_experts": 8, "first_k_dense_replace": 0.5}, "first_k_dense_replace must be an integer from 0 on"),
        ({"num_experts": 8, "n_shared_experts": "x"}, "n_shared_experts must be an integer from 0 on (got 'x')"),
    ],
)
def test_a_config_that_cannot_be_planned_for_is_refused_by_its_field(fields: dict[str, Any], says: str) -> None:
    values = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    values |= {"vocab_size": 1000, "max_position_embeddings": 4096, **fields}
    with pytest.raises(CheckpointError) as caught:
        read_shape(values, "config.json", "a model")
    assert says in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_architectures_that_are_no_list_are_those_of_an_unknown_model() -> None:
    values = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"vocab_size": 100, "max_position_embeddings": 128}
    assert not read_shape({**values, "architectures": 3}, "config.json", "m").is_served


def test_the_document_of_a_config_file_of_a_family_that_is_not_served(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "hidden_size": 2048,
                "intermediate_size": 10944,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "num_experts_per_tok": 6,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 1408,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "vocab_size": 102400,
                "torch_dtype": "bfloat16",
                "max_position_embeddings": 163840,
            }
        )
    )
    done = baton("plan", "--memory", "--json", "--model", str(file), "--device", "l40s", "--tp", "1")
    told = json.loads(done.stdout)
    assert told["parameters"] / 1e9 == pytest.approx(15.71, rel=0.002)  # DeepSeek-V2-Lite: 15.7 B
    assert told["layouts"][0]["kv_bytes_per_token"] == 27 * 576 * 2
    split = baton("plan", "--memory", "--split-latents", "--json", "--model", str(file), "--tp", "8", "--ep", "8")
    assert json.loads(split.stdout)["layouts"][0]["kv_bytes_per_token"] == 27 * 576 * 2 / 8
    refused = baton("plan", "--split-latents", "--model", str(file))
    assert "--split-latents: what a step exchanges then is not planned for" in refused.stderr
    text = baton("plan", "--memory", "--model", str(file)).stdout
    assert "15.7 billion parameters, 2." in text
    assert "TP 1 EP 8" in text


def test_what_is_reserved_can_be_said() -> None:
    done = baton("plan", "--memory", "--json", "--model", "llama-3.1-8b", "--tp", "1", "--reserve-gb", "4")
    found = json.loads(done.stdout)["layouts"][0]
    left = int(72e9) - int(4e9) - found["weight_bytes"]
    assert (found["left_bytes"], found["tokens"]) == (left, left // 131072)


def test_no_layout_is_checked_before_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="use 1, 2, 4, 8, 16, 32"):
        find_shape("llama-3.1-8b").check_layout(DeviceLayout(7))
