"""Whole steps with attention in Triton, interpreted: prompts, mixed steps, and decode steps that are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, run_in_chunks, step_of
from interpreted_kernels import DEVICE
from recorder import record

from engine.attention.interface import AttentionBatch, PagedBatch
from engine.attention.triton import TritonAttention
from engine.step_input import SequenceSlice

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="with a GPU, tests/gpu compares the backends")


@torch.library.custom_op("baton_tests::paged_decode", mutates_args=("out",))
def _paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    most: int,
    scale: float,
    left: int,
    soft_cap: float,
) -> None:
    """A kernel as the recorder knows them: what it looks up in tensors, it looks up each time it runs."""
    paged = PagedBatch(cu_q, lengths, lengths, table, 1, most)
    TritonAttention()._decode(q, k, v, paged, out, scale=scale, left=left, soft_cap=soft_cap)


class Recordable(TritonAttention):
    """Its decode step is one operation."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        *,
        softmax_scale: float,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        paged = batch.paged
        if batch.fixed is None:
            options = {"causal": causal, "window_size": window_size, "soft_cap": soft_cap}
            return super().__call__(q, k, v, batch, softmax_scale=softmax_scale, **options)
        out = torch.empty_like(q)
        sizes = (paged.cu_seqlens_q, paged.seqlens_k, paged.block_table)
        _paged_decode(q, k, v, *sizes, out, paged.max_seqlen_k, softmax_scale, window_size[0], soft_cap)
        return out


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "most_off"),
    [
        ("qwen3", "int8", 0.01),
        ("gemma3", "auto", 2e-4),
        pytest.param("mistral", "auto", 2e-4, marks=pytest.mark.battery),
        pytest.param("gemma2", "auto", 2e-4, marks=pytest.mark.battery),
    ],
)
def test_prompts_and_replayed_decode_steps_have_the_logits_of_the_cpu(
    name: str, kv_cache_dtype: str, most_off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 16 tokens, windows, rounded heads (of which some are rounded the other way, so little differs): no step
    needs flash-attn, a larger block or a gather."""
    folder = make_checkpoint(name, tmp_path)
    options = {"kernels": "torch", "kv_cache_dtype": kv_cache_dtype, "num_blocks": 12}
    expected_by = make_runner(folder, **options)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (Recordable(), "for this test"))
    runner = make_runner(folder, **options, graphs_up_to=1, capture=record)
    replays: list[int] = []
    assert runner._graphs is not None
    run, ids, table = runner._graphs.run, list(range(5, 42)), (7, 2, 9)
    monkeypatch.setattr(runner._graphs, "run", lambda *args: (replays.append(1), run(*args))[1])

    expected = run_in_chunks(expected_by, ids, [37], table)
    logits = run_in_chunks(runner, ids, [20, 14, 1, 1, 1], table)
    mixed = [SequenceSlice((ids[36],), 36, table, True), SequenceSlice(tuple(ids[:9]), 0, (4,), True)]
    together = runner.forward(step_of(runner, mixed))

    assert len(replays) == 3
    assert (logits - expected).abs().max() < most_off
    assert (together - expected[[36, 8]]).abs().max() < most_off
