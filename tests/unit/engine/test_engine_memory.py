"""How many KV blocks fit, and what is refused with the number that would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner
from safetensors.torch import load_file

from cluster.errors import ConfigError
from engine.config import ModelConfig
from engine.memory import (
    available_bytes,
    kv_bytes_per_token,
    plan_num_blocks,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
    weight_bytes,
)

GIB = 1 << 30
KV_BYTES = 2 * 4 * 4 * 16 * 4  # keys and values, layers, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)


def _plan(config: ModelConfig, **changes: Any) -> int:
    sizes: dict[str, Any] = {
        "tp_size": 1,
        "dtype": "float32",
        "device": "cpu",
        "block_size": 16,
        "kv_cache_tokens": None,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "free_bytes": GIB,
    }
    return plan_num_blocks(config, **{**sizes, **changes})


def test_a_pool_of_given_size_has_that_many_whole_blocks(config: ModelConfig) -> None:
    assert _plan(config, kv_cache_tokens=4096) == 256
    assert _plan(config, kv_cache_tokens=4100, block_size=32) == 128


def test_a_cpu_pool_holds_four_long_requests_when_nothing_is_said(config: ModelConfig) -> None:
    assert _plan(config) == 4 * 2048 // 16
    assert _plan(config, max_model_len=100) == 25


def test_a_cpu_pool_shrinks_to_what_memory_allows(config: ModelConfig) -> None:
    free = 12_000_000
    weights = weight_bytes(config, 1, "float32")

    blocks = _plan(config, free_bytes=free)

    assert 2048 // 16 <= blocks < 4 * 2048 // 16
    assert blocks * 16 * KV_BYTES + weights <= free


def test_a_gpu_pool_takes_what_is_left_beside_weights_and_workspace(config: ModelConfig) -> None:
    blocks = _plan(config, device="cuda", dtype="bfloat16", free_bytes=4 * GIB)

    used = blocks * 16 * KV_BYTES // 2 + weight_bytes(config, 1, "bfloat16")
    assert 0.6 * 4 * GIB < used <= 4 * GIB - GIB


def test_a_pool_that_cannot_hold_one_request_is_refused_with_the_number_that_fits(config: ModelConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(config, kv_cache_tokens=1000)

    message = str(caught.value)
    assert "one request of 2048 tokens does not fit" in message and "kv_cache_tokens 1000" in message
    assert "max_model_len to at most 992" in message and "kv_cache_tokens to at least 2048" in message


def test_memory_that_cannot_hold_one_request_is_refused_with_the_number_that_fits(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"2048 tokens does not fit in the KV pool; memory .* holds \d+"):
        _plan(config, free_bytes=2_500_000)


def test_a_pool_larger_than_memory_is_refused_with_the_number_that_fits(config: ModelConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(config, kv_cache_tokens=10_000_000)

    message = str(caught.value)
    fitting = int(message.split("weights; ")[1].split(" would")[0])
    assert "kv_cache_tokens: 10000000 do not fit" in message
    assert _plan(config, kv_cache_tokens=fitting) * 16 == fitting


def test_estimated_bytes_are_those_of_the_real_thing(folder: Path, config: ModelConfig) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    runner = make_runner(folder, num_blocks=8)

    assert weight_bytes(config, 1, "float32") == pytest.approx(weights, rel=0.02)
    assert kv_bytes_per_token(config, 1, "float32") == runner.kv.nbytes // (8 * 16) == KV_BYTES


def test_ranks_divide_the_bytes_until_kv_heads_replicate(config: ModelConfig) -> None:
    assert [kv_bytes_per_token(config, n, "bfloat16") * n for n in (1, 2, 4, 8)] == [KV_BYTES // 2] * 3 + [KV_BYTES]
    assert weight_bytes(config, 4, "float32") * 4 == weight_bytes(config, 1, "float32")


def test_the_context_is_the_checkpoints_unless_a_shorter_one_is_asked_for(config: ModelConfig) -> None:
    assert resolve_max_model_len(config, None) == 2048
    assert resolve_max_model_len(config, 512) == 512
    for wrong in (0, 2049):
        with pytest.raises(ConfigError, match=f"max_model_len: {wrong} .*max_position_embeddings 2048"):
            resolve_max_model_len(config, wrong)


def test_types_and_devices_are_resolved_or_refused_by_name(config: ModelConfig) -> None:
    assert resolve_dtype(config, "auto", "cpu") == "float32"
    assert resolve_dtype(config, "bfloat16", "cpu") == "bfloat16"
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="dtype: 'int4' is unknown"):
        resolve_dtype(config, "int4", "cpu")
    with pytest.raises(ConfigError, match="device: 'tpu' is unknown; use auto, cpu or cuda"):
        resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="device: cuda is not available here"):
        resolve_device("cuda")


def test_this_machine_has_some_memory() -> None:
    assert available_bytes("cpu") > 1 << 20


def test_fp8_holds_as_much_as_int8_and_is_for_gpus() -> None:
    assert resolve_kv_dtype("fp8", "bfloat16", "cuda:1") == "uint8"
    assert resolve_kv_dtype("int8", "bfloat16", "cuda") == resolve_kv_dtype("int8", "float32", "cpu") == "int8"
    assert resolve_kv_dtype("auto", "bfloat16", "cuda") == "bfloat16"
    with pytest.raises(ConfigError, match="kv_cache_dtype: fp8 is for GPUs; use int8 on a CPU"):
        resolve_kv_dtype("fp8", "bfloat16", "cpu")
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'fp4' is unknown; use auto, int8, fp8"):
        resolve_kv_dtype("fp4", "bfloat16", "cuda")
