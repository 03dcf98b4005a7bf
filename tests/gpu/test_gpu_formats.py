"""On a GPU: weights and KV in fewer bits, and long decode batches, against plain torch and transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, run_in_chunks

from cluster.errors import ConfigError
from engine.attention.cpu import CpuAttention
from engine.attention.interface import Attention, AttentionBatch
from engine.attention.registry import choose_attention
from engine.kv.pool import decode, encode
from engine.quantization.fp8 import ScaledFp8Matrix, round_to_fp8
from engine.quantization.integers import quantize
from engine.quantization.interface import TritonProducts, make_matrix
from engine.step_input import SequenceSlice, build_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DEVICE = "cuda"
BACKENDS = ["flash_attn", "varlen"]


def _has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("kernels", [None, TritonProducts()], ids=["torch", "triton"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 33, 257, 2048])
@pytest.mark.parametrize("shape", [(1536, 4096), (4096, 14336), (144, 512)], ids=str)
def test_products_in_fp8_are_those_of_rounded_rows(
    shape: tuple[int, int], num_rows: int, with_bias: bool, kernels: TritonProducts | None
) -> None:
    if not _has_fp8():
        pytest.skip("this GPU does not multiply in fp8")
    generator = torch.Generator(DEVICE).manual_seed(3)
    sizes = (shape, (num_rows, shape[1]), shape[:1])
    weight, x, bias = (torch.randn(s, generator=generator, device=DEVICE).bfloat16() for s in sizes)
    x *= torch.logspace(-3, 3, num_rows, device=DEVICE)[:, None].bfloat16()
    weight *= torch.logspace(-3, 3, shape[0], device=DEVICE)[:, None].bfloat16()
    matrix = make_matrix(weight.clone(), kernels, "fp8")
    rows, stored = ((codes.double() * scales) for codes, scales in map(round_to_fp8, (x, weight)))
    exact = rows @ stored.T + (bias.double() if with_bias else 0)
    sizes_of_terms = rows.abs() @ stored.abs().T

    product = matrix(x, bias if with_bias else None)

    assert isinstance(matrix, ScaledFp8Matrix) and product.dtype == torch.bfloat16
    assert bool(((product.double() - exact).abs() <= 0.01 * (sizes_of_terms + exact.abs())).all())
    assert matrix(x, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("kernels", [None, TritonProducts()], ids=["torch", "triton"])
@pytest.mark.parametrize("wanted", ["int8", "int4"])
@pytest.mark.parametrize("num_rows", [0, 1, 33, 257])
def test_weights_in_fewer_bits_are_unpacked_as_on_the_cpu(
    wanted: str, num_rows: int, kernels: TritonProducts | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(size, generator=generator).bfloat16() for size in ((130, 2048), (num_rows, 2048)))
    stored = quantize(weight, wanted).dequantize(torch.float64)

    product = make_matrix(weight.to(DEVICE), kernels, wanted)(x.to(DEVICE))

    exact = x.double() @ stored.T
    torch.testing.assert_close(product.cpu().double(), exact, atol=0.5, rtol=0.01)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.06), ("int4", 0.6), ("fp8", 0.3)])
def test_models_in_fewer_bits_stay_near(tmp_path: Path, quantization: str, bound: float) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype="bfloat16")
    ids = list(range(1, 41))
    exact = run_in_chunks(make_runner(folder), ids, [40])
    runner = make_runner(folder, device=DEVICE, dtype="auto", quantization=quantization)
    logits = run_in_chunks(runner, ids, [30] + [1] * 10).cpu()
    assert 0 < (logits - exact).pow(2).mean().sqrt() < bound * exact.pow(2).mean().sqrt()


@pytest.mark.parametrize("attention", [*BACKENDS, "cpu"])
@pytest.mark.parametrize(("kv_cache_dtype", "bound"), [("int8", 0.06), ("fp8", 0.12)])
def test_rounded_pools_stay_near(tmp_path: Path, kv_cache_dtype: str, bound: float, attention: str) -> None:
    _skip_unless_there(attention)
    folder = make_checkpoint("mistral", tmp_path, dtype="bfloat16")
    ids = list(range(1, 61))
    exact = run_in_chunks(make_runner(folder), ids, [60])
    runner = make_runner(folder, device=DEVICE, dtype="auto", kv_cache_dtype=kv_cache_dtype, attention=attention)
    logits = run_in_chunks(runner, ids, [30, 20] + [1] * 10).cpu()
    assert runner.kv.dtype == {"int8": torch.int8, "fp8": torch.uint8}[kv_cache_dtype]
    assert 0 < (logits - exact).pow(2).mean().sqrt() < bound * exact.pow(2).mean().sqrt()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
def test_heads_are_rounded_as_on_the_cpu(kv_dtype: torch.dtype) -> None:
    heads = torch.randn(500, 4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    here, there = (decode(encode(heads.to(device), kv_dtype), torch.float32).cpu() for device in (DEVICE, "cpu"))
    largest = heads.float().abs().amax(-1, keepdim=True)
    assert bool(((here - there).abs() <= largest / 14).all()) and (here - there).abs().mean() < 1e-4


@pytest.mark.parametrize("window", [(-1, -1), (1000, 0)])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("lengths", [[9000], [7000, 5, 4097], [300] * 64, [9000, 1, *[2] * 20]], ids=len)
@pytest.mark.parametrize("name", BACKENDS)
def test_long_keys_that_are_split_over_the_gpu_are_all_seen(
    name: str, lengths: list[int], num_kv_heads: int, window: tuple[int, int]
) -> None:
    """Decode, where kernels split the keys of each sequence; some lost all rows but the first sequence's."""
    backend, block_size = _skip_unless_there(name), 256
    num_blocks = sum(-(-length // block_size) for length in lengths) + 1
    free = iter(np.random.default_rng(0).permutation(num_blocks).tolist())
    slices = [
        SequenceSlice((1,), length - 1, tuple(next(free) for _ in range(-(-length // block_size))), True)
        for length in lengths
    ]
    batch = AttentionBatch(build_step(slices, block_size), block_size, torch.device(DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (num_blocks, block_size, num_kv_heads, 128)
    k, v = (torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for _ in "kv")
    q = 3 * torch.randn((len(lengths), 8, 128), generator=generator, device=DEVICE).bfloat16()

    out = backend(q, k, v, batch, softmax_scale=0.088, window_size=window)

    exact = CpuAttention()(q.float(), k.float(), v.float(), batch, softmax_scale=0.088, window_size=window)
    assert (out.float() - exact).abs().max() < 0.05


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("attention", [*BACKENDS, "cpu"])
@pytest.mark.parametrize("kind", ["llama3-rope", "mistral", "qwen2", "qwen3"])
def test_every_backend_is_as_near_to_float32_as_transformers_is(
    tmp_path: Path, kind: str, attention: str, block_size: int
) -> None:
    from transformers import AutoModelForCausalLM

    _skip_unless_there(attention)
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16")
    ids = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        with torch.inference_mode():
            logits.append(model.to(DEVICE)(torch.tensor([ids], device=DEVICE)).logits[0].float())
    exact, theirs = logits

    runner = make_runner(folder, device=DEVICE, dtype="auto", attention=attention, block_size=block_size)
    ours = run_in_chunks(runner, ids, [90] + [1] * 10)

    for part in (slice(0, 90), slice(90, None)):
        error, allowed = ((found - exact)[part].abs() for found in (ours, theirs))
        assert error.mean() <= 1.25 * allowed.mean() and error.max() <= 2 * allowed.max()


def _skip_unless_there(name: str) -> Attention:
    try:
        return choose_attention(name, torch.device(DEVICE), torch.bfloat16)[0]
    except ConfigError as error:
        pytest.skip(str(error))
