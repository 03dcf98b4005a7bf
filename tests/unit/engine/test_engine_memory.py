"""Bytes that are told before a model is read are those of the loaded one; types and devices are resolved or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import GEMMA_KINDS, KINDS, LATENT_KINDS, make_checkpoint
from engine_steps import held_bytes, make_runner, on_each_rank

from cluster.errors import ConfigError
from engine.memory import available_bytes, resolve_device, resolve_dtype, resolve_kv_dtype, resolve_max_model_len
from engine.model_cost import WeightForm, kv_bytes_per_token, weight_bytes
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.native import native
from engine.quantization.interface import weight_formats

PLAIN = WeightForm("float32")
KV_BYTES = 2 * 4 * 4 * 16 * 4  # keys and values, layers, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return read_model(folder)


@pytest.mark.parametrize("quantization", weight_formats())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_bytes_of_weights_are_those_of_the_loaded_model(
    kernels: str, tied: bool, dtype: str, quantization: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3", tmp_path, tie_word_embeddings=tied, attention_bias=True)

    runner = make_runner(folder, dtype=dtype, quantization=quantization, kernels=kernels)

    assert weight_bytes(read_model(folder), 1, runner.weight_form) == held_bytes(runner)


def test_what_kernels_multiply_is_counted_with_what_pads_it(tmp_path: Path) -> None:
    """This model's 64 inputs to 128; the test before holds that to the byte where there are such kernels."""
    config = read_model(make_checkpoint("llama", tmp_path))
    plain, tiled = (WeightForm("bfloat16", quantization="int8", is_tiled=is_tiled) for is_tiled in (False, True))
    kernels, _ = native()

    assert weight_bytes(config, 1, tiled) > weight_bytes(config, 1, plain)
    runner = make_runner(tmp_path, dtype="bfloat16", quantization="int8")
    tiled = replace(tiled, is_plain_tiled=kernels is not None and kernels.has_bf16_products)
    assert runner.weight_form == (tiled if kernels is not None and kernels.has_products else plain)


@pytest.mark.parametrize("kind", [*KINDS, *GEMMA_KINDS, *LATENT_KINDS, "qwen3-next"])
def test_so_are_those_of_each_architecture_and_rank(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, **({"mlp_bias": True} if kind == "llama" else {}))
    config = read_model(folder)

    for size in filter(config.allows_tp_size, (1, 2, 4, 8)):
        held = on_each_rank(size, lambda tp: held_bytes(make_runner(folder, tp=tp)))
        assert held == [weight_bytes(config, size, PLAIN)] * size


def test_a_tied_head_is_counted_where_it_is_packed_beside_the_embedding(config: ModelConfig) -> None:
    tied = replace(config, tie_word_embeddings=True)
    embedding = config.vocab_size * config.hidden_size

    def saved(dtype: str, device: str = "cpu", quantization: str = "none") -> int:
        both = [weight_bytes(c, 1, WeightForm(dtype, device, quantization)) for c in (config, tied)]
        return both[0] - both[1]

    assert saved("bfloat16", "cuda") == saved("float16") == 2 * embedding
    assert saved("float32", "cpu", "int8") == saved("bfloat16", "cuda", "int4") == 0
    packs = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert saved("bfloat16") == (0 if packs else 2 * embedding)


def test_the_bytes_of_a_token_are_those_of_the_pool(folder: Path, config: ModelConfig) -> None:
    runner = make_runner(folder, num_blocks=8)

    assert kv_bytes_per_token(config, 1, "float32") == runner.kv.nbytes // (8 * 16) == KV_BYTES


def test_ranks_divide_the_bytes_until_kv_heads_replicate(config: ModelConfig) -> None:
    assert [kv_bytes_per_token(config, n, "bfloat16") * n for n in (1, 2, 4, 8)] == [KV_BYTES // 2] * 3 + [KV_BYTES]


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


def test_memory_that_was_freed_is_there_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator kept after loading counted as taken, and the KV pool was smaller by that."""
    total, held, kept = 80 << 30, 16 << 30, [5 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - held - sum(kept), total))

    assert available_bytes("cuda:1") == total - held


def test_fp8_holds_as_much_as_int8_and_is_for_gpus() -> None:
    assert resolve_kv_dtype("fp8", "bfloat16", "cuda:1") == "uint8"
    assert resolve_kv_dtype("int8", "bfloat16", "cuda") == resolve_kv_dtype("int8", "float32", "cpu") == "int8"
    assert resolve_kv_dtype("auto", "bfloat16", "cuda") == "bfloat16"
    with pytest.raises(ConfigError, match="kv_cache_dtype: fp8 is for GPUs; use int8 on a CPU"):
        resolve_kv_dtype("fp8", "bfloat16", "cpu")
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'fp4' is unknown; use auto, int8, fp8"):
        resolve_kv_dtype("fp4", "bfloat16", "cuda")
