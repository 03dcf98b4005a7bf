"""Decode steps in one call of Baton's kernels: bit by bit what the layers compute one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import KINDS, VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, on_each_rank, step_of
from packed_checkpoints import Format, make_packed

from engine.model_runner import ModelRunner
from engine.models.config import ModelConfig
from engine.native import native
from engine.native.decode_step import FEATURES
from engine.step_input import SequenceSlice, StepInput, build_step

KERNELS, WHY_NOT = native()
pytestmark = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_bf16_products, reason=f"no products in bfloat16 here: {WHY_NOT}"
)
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 200]
NUM_BLOCKS = 8 * len(LENGTHS) * 2


@pytest.fixture(scope="module", params=[*KINDS, "llama with biases", "mixtral", "qwen2-moe", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64 dimensions, which kernels read where they lie; qwen3's of 16, which they do not."""
    sizes = {"head_dim": 64, "hidden_size": 512 if "qwen2" in request.param else 64}
    sizes = {} if "qwen3" in request.param else sizes
    kind, _, has_biases = request.param.partition(" ")
    biases = {"attention_bias": True, "mlp_bias": True} if has_biases else {}
    folder = tmp_path_factory.mktemp(kind)
    return make_checkpoint(kind, folder, dtype="bfloat16", num_hidden_layers=3, **sizes, **biases)


def prepared(folder: Path, **options: str) -> ModelRunner:
    """With random keys and values in its pool."""
    runner = make_runner(folder, dtype="bfloat16", num_blocks=NUM_BLOCKS, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    if runner.kv.dtype == torch.int8:
        values = runner.kv[..., :-4]
        values.copy_(torch.randint(-127, 128, values.shape, generator=generator))
        runner.kv[..., -4:] = torch.tensor([0.01]).view(torch.int8)
    else:
        runner.kv.copy_(torch.randn(runner.kv.shape, generator=generator))
    return runner


def decode_step(lengths: Sequence[int], seed: int = 0) -> StepInput:
    """One new token of each sequence, which then is so long, over blocks in no order."""
    random = np.random.default_rng(seed)
    blocks = iter(random.permutation(NUM_BLOCKS).tolist())
    return build_step(
        [
            SequenceSlice(
                (int(random.integers(VOCAB_SIZE)),), n - 1, tuple(next(blocks) for _ in range(-(-n // 16))), True
            )
            for n in lengths
        ],
        16,
    )


def layer_by_layer(runner: ModelRunner, step: StepInput) -> torch.Tensor:
    """A callback for each layer is what a step in one call does not offer."""
    return runner.run(step, on_layer=lambda count: None).logits


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_logits_and_pages_are_those_of_the_layers_one_by_one(
    folder: Path, quantization: str, kv_cache_dtype: str
) -> None:
    whole, parts = (prepared(folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    assert whole.decode_reason == "decode steps are one call"
    for lengths in ([n] for n in LENGTHS):
        step = decode_step(lengths, seed=lengths[0])
        assert torch.equal(whole.forward(step), layer_by_layer(parts, step)), lengths
    for count in (2, 7, 10, 13, 20):  # six tokens are multiplied at a time
        step = decode_step((LENGTHS * 2)[:count], seed=count)
        logits = whole.forward(step)
        assert logits.shape == (count, VOCAB_SIZE) and logits.dtype == torch.float32
        assert torch.equal(logits, layer_by_layer(parts, step)), count
        assert torch.equal(whole.kv, parts.kv)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
        ("gemma2", {"final_logit_softcapping": 4.0, "head_dim": 128}),
        ("gemma3", {"head_dim": 256, "num_key_value_heads": 1}),
        ("gpt-oss", {"head_dim": 64}),
        ("gpt-oss", {"num_key_value_heads": 1, "swiglu_limit": 0.5, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_layers_with_a_window_and_those_without_have_blocks_of_their_own(
    kind: str, fields: dict[str, Any], kv_cache_dtype: str, tmp_path: Path
) -> None:
    """In models whose layers have norms around, ropes of their own, soft caps, sinks and other gates, too."""
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", **fields)
    whole, parts = (prepared(folder, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    assert whole.decode_reason == "decode steps are one call" and len(whole.config.kv_groups) > 1
    blocks = iter(np.random.default_rng(0).permutation(NUM_BLOCKS).tolist())
    slices = [SequenceSlice((n,), n - 1, tuple(next(blocks) for _ in range(-(-n // 16))), True) for n in LENGTHS]
    step = step_of(whole, slices)

    assert torch.equal(whole.forward(step), layer_by_layer(parts, step))
    assert torch.equal(whole.kv, parts.kv)
    last = len(step.slot_mapping) - 1
    for array, place in (("slot_mapping", last), ("block_tables", (-1, -1))):
        wrong = getattr(step, array).copy()
        wrong[place] = whole.kv.shape[2] * 16
        with pytest.raises(IndexError, match="there are"):
            whole.forward(replace(step, **{array: wrong}))


def test_inputs_in_an_order_of_their_own_are_taken_in_the_same_call(tmp_path: Path) -> None:
    """As a GPTQ of `desc_act` has them, each product another one."""
    folder, _ = make_packed(Format("gptq", 32, is_shuffled=True), tmp_path)
    whole, parts = (prepared(folder) for _ in range(2))
    assert whole.decode_reason == "decode steps are one call"
    for count in (1, 7):
        step = decode_step(LENGTHS[:count], seed=count)
        assert torch.equal(whole.forward(step), layer_by_layer(parts, step)), count
        assert torch.equal(whole.kv, parts.kv)


def test_a_step_that_came_as_bytes_gives_the_same(folder: Path) -> None:
    runner = prepared(folder)
    step = decode_step(LENGTHS)
    assert torch.equal(runner.forward(StepInput.from_bytes(step.to_bytes())), runner.forward(step))


def test_tokens_that_are_not_read_yet_give_the_same_as_those_that_are(folder: Path) -> None:
    """In one call and layer by layer."""
    runner, step = prepared(folder), decode_step(LENGTHS)
    sampled = torch.tensor([*step.token_ids[::-1], 3])
    ahead = replace(step, token_ids=np.arange(-len(LENGTHS), 0, dtype=np.int32))
    ahead.token_ids[0] = step.token_ids[0]  # this one is known
    expected = runner.forward(step)
    assert torch.equal(runner.run(ahead, sampled=sampled).logits, expected)
    assert torch.equal(runner.run(ahead, lambda count: None, sampled).logits, expected)


def test_the_number_of_threads_changes_nothing(folder: Path) -> None:
    runner, step = prepared(folder), decode_step(LENGTHS)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(runner.forward(step))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", VOCAB_SIZE, f"token 1 to {VOCAB_SIZE}; there are {VOCAB_SIZE}"),
        ("token_ids", -1, "token -1 to 1;"),
        ("positions", 1 << 20, "position 1 to 1048576;"),
        ("slot_mapping", NUM_BLOCKS * 16, f"slot 1 to {NUM_BLOCKS * 16}; there are {NUM_BLOCKS * 16}"),
        ("slot_mapping", -1, "slot -1 to 1;"),
        ("block_tables", NUM_BLOCKS, f"block 0 to {NUM_BLOCKS}; there are {NUM_BLOCKS}"),
        ("block_tables", -1, "block -1 to 0;"),
        ("seqlens_k", 17, "length less one 0 to 16; there are 16"),
        ("seqlens_k", 0, "length less one -1 to 0; there are 16"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(
    folder: Path, name: str, value: int, message: str
) -> None:
    runner = prepared(folder)
    before = runner.kv.clone()
    step = decode_step([3, 5])
    array = np.ones_like(getattr(step, name))
    if name == "block_tables":
        array[:] = 0
    array.reshape(-1)[-1] = value
    with pytest.raises(IndexError, match=message):
        runner.forward(replace(step, **{name: array}))
    assert torch.equal(runner.kv, before)


def test_a_model_with_a_feature_that_the_kernels_do_not_know_is_left_to_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3", tmp_path, dtype="bfloat16")
    assert {field.name for field in fields(ModelConfig)} >= FEATURES
    monkeypatch.setattr("engine.native.decode_step.FEATURES", FEATURES - {"qk_norm"})

    runner = prepared(folder)

    assert runner.decode_step is None
    assert runner.decode_reason == "Baton's kernels do not compute qk_norm"
    step = decode_step(LENGTHS)
    assert torch.equal(runner.forward(step), layer_by_layer(runner, step))


def test_where_it_cannot_be_used_it_says_why(folder: Path) -> None:
    assert make_runner(folder, dtype="float32").decode_reason == "the model or its KV is not in bfloat16"
    reason = make_runner(folder, dtype="bfloat16", kernels="torch").decode_reason
    assert reason == "Baton's kernels for products are not used"
    reasons = on_each_rank(2, lambda tp: make_runner(folder, dtype="bfloat16", tp=tp).decode_reason)
    assert reasons == ["tensor-parallel ranks meet between products"] * 2
