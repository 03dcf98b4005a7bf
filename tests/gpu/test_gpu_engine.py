"""On a GPU: the attention kernels against plain torch, and the runner on CUDA against the runner on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, run_in_chunks

from cluster.errors import ConfigError
from cluster.settings import WorkerSettings
from engine.attention.cpu import CpuAttention
from engine.attention.interface import Attention, AttentionBatch
from engine.attention.registry import choose_attention
from engine.model_runner import ModelRunner
from engine.step_input import SequenceSlice, build_step
from engine.tp import SingleGroup
from worker.loading import size_pool
from worker.resolved import resolve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 8, 2, 64, 128
LENGTHS = {
    "decode": [(1, 1), (1, 37), (1, 600), (1, 256)],
    "prefill": [(5, 5), (300, 300), (2, 2)],
    "mixed": [(1, 50), (9, 9), (40, 300), (1, 700), (17, 257)],
}


def _backend(name: str, dtype: torch.dtype) -> Attention:
    try:
        return choose_attention(name, torch.device("cuda"), dtype)[0]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [(-1, -1), (23, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("name", ["flash_attn", "varlen"])
def test_kernels_equal_plain_torch(
    name: str, lengths: list[tuple[int, int]], dtype: torch.dtype, window: tuple[int, int], block_size: int
) -> None:
    backend, device = _backend(name, dtype), torch.device("cuda")
    free = iter(np.random.default_rng(0).permutation(NUM_BLOCKS).tolist())
    slices = []
    for num_queries, num_keys in lengths:
        table = tuple(next(free) for _ in range(-(-num_keys // block_size)))
        slices.append(SequenceSlice((1,) * num_queries, num_keys - num_queries, table, wants_logits=True))
    step = build_step(slices, block_size)
    generator = torch.Generator(device).manual_seed(0)
    shape = (NUM_BLOCKS, block_size, KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in "kv")
    q = torch.randn((len(step.token_ids), HEADS, HEAD_DIM), generator=generator, device=device).to(dtype)

    out = backend(q, k, v, AttentionBatch(step, block_size, device), softmax_scale=0.125, window_size=window)

    exact = CpuAttention()(
        q.float(),
        k.float(),
        v.float(),
        AttentionBatch(step, block_size, device),
        softmax_scale=0.125,
        window_size=window,
    )
    assert (out.float() - exact).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["llama3-rope", "mistral", "qwen2", "qwen3"])
def test_float32_on_cuda_equals_float32_on_the_cpu(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(kind, tmp_path)
    ids, chunks = list(range(1, 101)), [64, 7, 19, *[1] * 10]
    expected = run_in_chunks(make_runner(folder), ids, chunks)

    runner = make_runner(folder, device="cuda")
    logits = run_in_chunks(runner, ids, chunks)

    assert runner.kv.is_cuda and logits.is_cuda
    assert (logits.cpu() - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("attention", "block_size"), [("triton", 16), *((a, n) for a in ("flash_attn", "varlen", "cpu") for n in (16, 256))]
)
@pytest.mark.parametrize("kind", ["llama3-rope", "mistral", "qwen3"])
def test_bfloat16_on_cuda_stays_near_float32_with_every_backend(
    tmp_path: Path, kind: str, attention: str, block_size: int
) -> None:
    _backend(attention, torch.bfloat16)
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16")
    ids, chunks = list(range(1, 101)), [64, 7, 19, *[1] * 10]
    expected = run_in_chunks(make_runner(folder), ids, chunks)

    runner = make_runner(folder, device="cuda", dtype="auto", attention=attention, block_size=block_size)
    logits = run_in_chunks(runner, ids, chunks).cpu()

    assert runner.attention_name == attention
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_pool_is_planned_from_what_the_device_has_left_and_then_fits(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    settings = WorkerSettings.from_values(
        worker_id="w",
        role="decode",
        model_path=str(folder),
        device="cuda",
        dtype="bfloat16",
        block_size=256,
        memory_utilization=0.1,  # other tests use the device, too
    )
    demand = resolve(settings).demand
    runner = ModelRunner(folder, tp=SingleGroup(), device="cuda", dtype="bfloat16", block_size=256)

    plan = size_pool(demand, runner, SingleGroup())
    runner.make_pool(plan.num_blocks)

    assert plan.activations_are_measured and plan.activation_bytes > 0
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else what other tests take meanwhile counts, too
        assert plan.activation_bytes < 1 << 30
    assert plan.decided_by == "memory" and plan.num_tokens >= 2048
    assert runner.kv.nbytes == plan.pool_bytes
