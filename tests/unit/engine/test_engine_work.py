"""What a step computes and moves, against torch's own count of the same model's forward pass and tensors' bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from engine.memory import resolve_kv_dtype
from engine.model_cost import ModelFlops, StepFlops, WeightForm
from engine.model_runner import ModelRunner
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.step_input import ScoredSpan, SequenceSlice, StepInput, build_step

CLOSE = 0.02
"""What norms and biases may make of it, in bytes; products are exact."""


def work_of(config: ModelConfig, tp_size: int = 1, form: WeightForm | None = None, kv: str = "auto") -> ModelFlops:
    form = form or WeightForm("float32")
    return ModelFlops.of(config, tp_size, form, resolve_kv_dtype(kv, form.dtype, form.device))


def prompt(num_tokens: int, num_before: int = 0, wants_logits: bool = True) -> SequenceSlice:
    table = tuple(range(-(-(num_before + num_tokens) // 16)))
    return SequenceSlice(tuple(range(1, num_tokens + 1)), num_before, table, wants_logits)


def counted_by_transformers(folder: Path, num_tokens: int) -> int:
    """Of a whole prompt, logits of its last token; attention as a product of all with all."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(1, num_tokens + 1)[None], logits_to_keep=1)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_operations_of_a_prompt_are_those_that_torch_counts_but_for_what_no_token_sees(
    kind: str, tmp_path: Path
) -> None:
    folder, num_tokens = make_checkpoint(kind, tmp_path), 96
    config = read_model(folder)
    work = work_of(config)
    counted = work.of_step(build_step([prompt(num_tokens)], 16))
    unseen = num_tokens * (num_tokens - 1) // 2 * config.num_hidden_layers * work.pair_flops
    assert counted.flops + unseen == counted_by_transformers(folder, num_tokens)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_decode_step_are_those_of_the_loaded_weights_and_of_the_keys_and_values(
    dtype: str, quantization: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=512)
    runner = make_runner(folder, dtype=dtype, quantization=quantization)
    work = ModelFlops.of(runner.config, 1, runner.weight_form, resolve_kv_dtype("auto", dtype, "cpu"))
    lengths = [17, 40, 3]
    step = build_step([prompt(1, length - 1) for length in lengths], 16)
    of_token = runner.kv[:, :, 0, 0].nbytes
    expected = matrices_bytes(runner) + (sum(lengths) + len(lengths)) * of_token
    assert work.of_step(step).size_bytes == pytest.approx(expected, rel=CLOSE)


def matrices_bytes(runner: ModelRunner) -> int:
    """Of what is multiplied with, read off the loaded model; a matrix that is kept twice is read once."""
    model = runner._model
    parts = [(layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down) for layer in model.layers]
    matrices = [linear.matrix for of_layer in parts for linear in of_layer] + [model.head.matrix]
    both = [m for m in matrices if getattr(m, "_packed", None) is not None and getattr(m, "_plain", None) is not None]
    return sum(matrix.nbytes for matrix in matrices) - sum(matrix.nbytes // 2 for matrix in both)


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_ranks_share_the_work_but_for_heads_that_several_hold(tp_size: int, tmp_path: Path) -> None:
    config = read_model(make_checkpoint("llama", tmp_path))
    step = build_step([prompt(64)], 16)
    whole, share = work_of(config).of_step(step), work_of(config, tp_size).of_step(step)
    kv_heads = len(config.kv_head_range(0, tp_size)) * tp_size
    doubled = 2 * 2 * (kv_heads - config.num_key_value_heads) * config.head_dim * config.hidden_size
    extra = 64 * config.num_hidden_layers * doubled
    assert share.flops * tp_size == whole.flops + extra


def test_chunks_of_a_prompt_compute_what_the_whole_does_and_read_the_weights_each_time(tmp_path: Path) -> None:
    work = work_of(read_model(make_checkpoint("llama", tmp_path)))
    whole = work.of_step(build_step([prompt(90)], 16))
    chunks = [prompt(40, 0, wants_logits=False), prompt(50, 40)]
    parts = [work.of_step(build_step([chunk], 16)) for chunk in chunks]
    assert sum(part.flops for part in parts) == whole.flops
    assert sum(p.size_bytes for p in parts) == whole.size_bytes + work.layers_bytes + 40 * 4 * work.kv_layer_bytes


def test_a_prompt_that_is_scored_pays_the_head_for_each_row(tmp_path: Path) -> None:
    work = work_of(read_model(make_checkpoint("llama", tmp_path)))
    scored = SequenceSlice(tuple(range(1, 33)), 0, (0, 1), True, ScoredSpan(0, tuple(range(2, 33)), 0))
    more = work.of_step(build_step([scored], 16)).flops - work.of_step(build_step([prompt(32)], 16)).flops
    assert more == 31 * work.head_flops


def by_hand(work: ModelFlops, slices: list[SequenceSlice]) -> tuple[int, int]:
    """Pairs and keys over all layers, one token at a time."""
    pairs = keys = 0
    for window, num_layers in work.windows:
        for piece in slices:
            ends = [piece.start + i + 1 for i in range(len(piece.token_ids))]
            seen = [(max(0, end - window) if window else 0, end) for end in ends]
            pairs += num_layers * sum(end - begin for begin, end in seen)
            keys += num_layers * len(set().union(*(range(*each) for each in seen)))
    return pairs, keys


WINDOWED = ModelFlops(0, 0, 0, 0, pair_flops=1, generated_pair_flops=1, kv_layer_bytes=1, windows=((None, 2), (7, 3)))


@given(shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=5))
def test_attention_counts_what_each_token_sees_through_its_window(shapes: list[tuple[int, int]]) -> None:
    slices = [prompt(num_tokens, num_before) for num_tokens, num_before in shapes]
    counted, (pairs, keys) = WINDOWED.of_step(build_step(slices, 16)), by_hand(WINDOWED, slices)
    num_tokens = sum(len(piece.token_ids) for piece in slices)
    assert counted.flops == pairs
    assert counted.size_bytes == keys + 5 * num_tokens
    assert counted.has_prompt == any(new > 1 for new, _ in shapes)
    assert counted.has_decode == any(new == 1 for new, _ in shapes)


def test_long_contexts_do_not_overflow() -> None:
    million = np.array([2**20] * 8, dtype=np.int32)
    arrays = {name: np.zeros(0, dtype=np.int32) for name in ("positions", "slot_mapping", "block_copies", "scored")}
    step = StepInput(
        token_ids=np.zeros(8 * 4096, dtype=np.int32),
        cu_seqlens_q=np.arange(9, dtype=np.int32) * 4096,
        seqlens_k=million,
        block_tables=np.zeros((8, 1), dtype=np.int32),
        logits_indices=np.zeros(8, dtype=np.int32),
        **arrays,
    )
    assert WINDOWED.of_step(step).flops > 8 * 4096 * (2**20 - 4096) * 2


def test_a_step_without_tokens_is_no_work() -> None:
    assert WINDOWED.of_step(build_step([], 16, [(0, 1)])) == StepFlops(0, 0.0, 0.0, has_prompt=False, has_decode=False)
