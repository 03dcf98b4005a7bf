"""The decoder against transformers, in float32, and against itself in other ways of cutting the same work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import plain_kernels
import pytest
import torch
from _pytest.mark import ParameterSet
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, run_in_chunks, scattered_table, step_of

from engine.attention.flash import FlashAttention
from engine.memory import resolve_kv_dtype
from engine.model_runner import ModelRunner
from engine.step_input import SequenceSlice, build_step

NUM_TOKENS = 100
_SCALED = {"rope_theta": 10000.0, "factor": 4.0}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    **_SCALED,
}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3-rope": ("llama3-rope", {}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", **_SCALED}}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", **_SCALED}}),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 512, **_SCALED}},
    ),
    "llama-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "original_max_position_embeddings": 512,
                "mscale": 0.8,
                "mscale_all_dim": 0.4,
                "truncate": False,
                **_SCALED,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"tie_word_embeddings": False, **_QWEN_WINDOWS}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "mixtral-one-kv-head-windows": ("mixtral", {"num_key_value_heads": 1, "sliding_window": 24}),
    "qwen2-moe": ("qwen2-moe", {}),
    "qwen2-moe-normalized": ("qwen2-moe", {"norm_topk_prob": True, "decoder_sparse_step": 1}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe-all-experts": ("qwen3-moe", {"num_experts_per_tok": 8, "norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3-next": ("qwen3-next", {}),
    "qwen3-next-one-key-head": (
        "qwen3-next",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "num_key_value_heads": 1},
    ),
    "qwen3-next-dense-biased": (
        "qwen3-next",
        {
            "attention_bias": True,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "linear_attention"] * 2 + ["linear_attention"],
            "mlp_only_layers": [0, 3],
            "linear_conv_kernel_dim": 2,
            "linear_value_head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v2-greedy-yarn": (
        "deepseek-v2",
        {"topk_method": "greedy", "q_lora_rank": 24, "rope_parameters": _DEEPSEEK_YARN, "first_k_dense_replace": 0},
    ),
    "deepseek-v3": ("deepseek-v3", {}),
    "deepseek-v3-yarn": ("deepseek-v3", {"rope_parameters": _DEEPSEEK_YARN, "norm_topk_prob": False}),
    "deepseek-v3-halves-wide-values": (
        "deepseek-v3",
        {"rope_interleave": False, "q_lora_rank": None, "v_head_dim": 40, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v3-biased-dense": ("deepseek-v3", {"attention_bias": True, "first_k_dense_replace": 4}),
    "glm4-moe": ("glm4-moe", {}),
    "glm4-moe-groups-one-kv-head": (
        "glm4-moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "num_key_value_heads": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-untied-short-window": ("gemma2", {"sliding_window": 5, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", {}),
    "gemma3-biased-capped": ("gemma3", {"attention_bias": True, "final_logit_softcapping": 4.0}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss-one-kv-head-short-window-tied": (
        "gpt-oss",
        {
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 5,
            "num_local_experts": 5,
            "num_experts_per_tok": 5,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss-unbiased-plain-rope-clamped": (
        "gpt-oss",
        {
            "attention_bias": False,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.3,
        },
    ),
    "qwen3-biased-tied-windows": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, **_QWEN_WINDOWS}),
}


@dataclass(frozen=True)
class Case:
    runner: ModelRunner
    token_ids: list[int]
    expected: torch.Tensor  # [NUM_TOKENS, VOCAB_SIZE], of transformers


def every_case() -> list[ParameterSet]:
    """`make test` has each case once, by kernels or in plain torch in turn; `make families` all."""
    return [
        pytest.param(
            (name, kernels), id=f"{name} {kernels}", marks=[pytest.mark.battery] if number % 4 in (1, 2) else []
        )
        for number, (name, kernels) in enumerate(product(CASES, ("auto", "torch")))
    ]


@pytest.fixture(scope="module", params=every_case())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Computed by Baton's own kernels where they can be had, and by torch."""
    name, kernels = request.param
    kind, overrides = CASES[name]
    folder = make_checkpoint(kind, tmp_path_factory.mktemp(name), **overrides)
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    return Case(make_runner(folder, kernels=kernels), token_ids, _reference_logits(folder, token_ids))


def _reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float()


def test_logits_equal_those_of_transformers_at_every_position(case: Case) -> None:
    logits = run_in_chunks(case.runner, case.token_ids, [NUM_TOKENS])

    assert logits.dtype == torch.float32
    assert (logits - case.expected).abs().max() < 1e-4


def test_chunks_of_seven_and_then_single_tokens_equal_one_prefill(case: Case) -> None:
    logits = run_in_chunks(case.runner, case.token_ids, [7] * 10 + [1] * 30)

    assert (logits - case.expected).abs().max() < 1e-4


def test_sequences_at_different_stages_in_one_step_equal_each_alone(case: Case) -> None:
    """One prefills from nothing, one continues a prefill, two decode, of quite different lengths."""
    ids = case.token_ids
    starts_and_stops = [(0, 33), (40, 61), (4, 5), (99, 100)]
    blocks = scattered_table(case.runner, case.runner.block_size * 20)
    tables = [blocks[:3], blocks[3:7], blocks[7:8], blocks[8:15]]
    slices = []
    for (start, stop), table in zip(starts_and_stops, tables, strict=True):
        if start:
            run_in_chunks(case.runner, ids[:start], [start], table)
        slices.append(SequenceSlice(tuple(ids[start:stop]), start, table, wants_logits=True))

    logits = case.runner.forward(step_of(case.runner, slices))

    expected = case.expected[[stop - 1 for _, stop in starts_and_stops]]
    assert (logits - expected).abs().max() < 1e-4


def test_only_the_rows_that_are_wanted_have_logits(case: Case) -> None:
    table = scattered_table(case.runner, 20)
    wants = SequenceSlice(tuple(case.token_ids[:5]), 0, table[:1], wants_logits=True)
    silent = SequenceSlice(tuple(case.token_ids[:7]), 0, table[1:], wants_logits=False)

    logits = case.runner.forward(step_of(case.runner, [silent, wants]))
    none = case.runner.forward(step_of(case.runner, [silent]))

    assert (logits - case.expected[4:5]).abs().max() < 1e-4
    assert none.shape == (0, VOCAB_SIZE)


def test_copied_blocks_carry_a_sequence_on_without_touching_the_original(case: Case) -> None:
    """Two continuations share a full block; the partial one is copied before either writes to it."""
    runner, ids = case.runner, case.token_ids
    first, partial, copy = scattered_table(runner, 3 * runner.block_size)
    run_in_chunks(runner, ids[:20], [20], (first, partial))
    other = (ids[20] + 1) % VOCAB_SIZE
    slices = [
        SequenceSlice((other,), 20, (first, copy), wants_logits=True),
        SequenceSlice((ids[20],), 20, (first, partial), wants_logits=True),
    ]

    logits = runner.forward(step_of(runner, slices, [(partial, copy)]))

    assert (logits[1] - case.expected[20]).abs().max() < 1e-4
    alone = run_in_chunks(runner, [*ids[:20], other], [21])[-1]
    assert (logits[0] - alone).abs().max() < 1e-4


def test_a_step_of_copies_alone_runs(case: Case) -> None:
    case.runner.kv[:, :, 3] = 7.0

    logits = case.runner.forward(build_step([], case.runner.block_size, [(3, 4)]))

    assert logits.shape == (0, VOCAB_SIZE)
    assert (case.runner.kv[:, :, 4] == 7.0).all()


def test_a_step_that_came_as_bytes_runs(case: Case) -> None:
    """Arrays over bytes are read-only, and torch warns when it shares memory with such."""
    piece = SequenceSlice(tuple(case.token_ids[:9]), 0, (2,), wants_logits=True)
    step = step_of(case.runner, [piece], [(5, 6)])

    logits = case.runner.forward(type(step).from_bytes(step.to_bytes()))

    assert (logits - case.expected[8:9]).abs().max() < 1e-4


@pytest.mark.parametrize("block", [None, 2**31 - 1, -1])
def test_a_block_that_is_not_there_is_refused(case: Case, block: int | None) -> None:
    num_blocks = case.runner.kv.shape[2]
    block, slot = num_blocks if block is None else block, num_blocks * case.runner.block_size
    decode = SequenceSlice((3,), 20, (0, 1), wants_logits=True)
    step = step_of(case.runner, [decode])
    for wrong in (
        {"block_tables": step.block_tables * 0 + block},
        {"slot_mapping": step.slot_mapping * 0 + slot},
    ):
        with pytest.raises(IndexError, match="there are"):
            case.runner.forward(replace(step, **wrong))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types_stay_near_float32(tmp_path: Path, dtype: str) -> None:
    folder = make_checkpoint("qwen3", tmp_path, dtype=dtype)
    ids = list(range(1, 41))
    exact = run_in_chunks(make_runner(folder), ids, [40])

    runner = make_runner(folder, dtype="auto")
    logits = run_in_chunks(runner, ids, [30] + [1] * 10)

    assert runner.dtype == dtype and runner.kv.dtype == getattr(torch, dtype)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path, kind: str, kernels: str) -> None:
    """However the same work is cut: 90 tokens at once, and ten alone."""
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16")
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    exact, theirs = (_reference_logits(folder, ids, dtype) for dtype in (torch.float32, torch.bfloat16))

    ours = run_in_chunks(make_runner(folder, dtype="auto", kernels=kernels), ids, [NUM_TOKENS - 10] + [1] * 10)

    for part in (slice(0, NUM_TOKENS - 10), slice(NUM_TOKENS - 10, None)):
        error, allowed = ((logits - exact)[part].abs() for logits in (ours, theirs))
        assert error.mean() <= 1.15 * allowed.mean()
        assert error.max() <= 1.5 * allowed.max()


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.battery)])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_bfloat16_with_experts_is_as_near_to_float32_as_transformers_is(
    tmp_path: Path, kind: str, kernels: str
) -> None:
    """In the median of three models: where rounding has one token choose another expert, here or there, much moves."""
    ratios = []
    for seed in range(3):
        folder = make_checkpoint(kind, tmp_path / str(seed), dtype="bfloat16", seed=seed)
        ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
        exact, theirs = (_reference_logits(folder, ids, dtype) for dtype in (torch.float32, torch.bfloat16))
        ours = run_in_chunks(make_runner(folder, dtype="auto", kernels=kernels), ids, [NUM_TOKENS - 10] + [1] * 10)
        error, allowed = ((logits - exact).abs().mean(dim=1).quantile(0.25) for logits in (ours, theirs))
        ratios.append(float(error / allowed))
    assert sorted(ratios)[1] <= 1.15


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.08), ("int4", 0.6), ("fp8", 0.25)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_fewer_bits_stay_near(tmp_path: Path, quantization: str, bound: float, dtype: str) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype="bfloat16")
    ids = list(range(1, 41))
    exact = run_in_chunks(make_runner(folder), ids, [40])
    logits = run_in_chunks(make_runner(folder, dtype=dtype, quantization=quantization), ids, [30] + [1] * 10)
    assert 0 < (logits - exact).pow(2).mean().sqrt() < bound * exact.pow(2).mean().sqrt()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_pool_of_int8_stays_near(tmp_path: Path, kind: str, kernels: str) -> None:
    folder = make_checkpoint(kind, tmp_path)
    ids = list(range(1, 61))
    exact = run_in_chunks(make_runner(folder), ids, [60])
    runner = make_runner(folder, kv_cache_dtype="int8", kernels=kernels)
    logits = run_in_chunks(runner, ids, [30, 20] + [1] * 10)
    assert runner.kv.dtype == torch.int8
    assert 0 < (logits - exact).pow(2).mean().sqrt() < 0.02 * exact.pow(2).mean().sqrt()


@pytest.mark.parametrize(("name", "held", "bound"), [("int8", "int8", 0.02), ("fp8", "uint8", 0.1)])
def test_a_rounded_pool_stays_near_when_a_gpu_backend_unpacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, held: str, bound: float
) -> None:
    """On a CPU, with plain torch in the kernel's place; there fp8 is refused, and here let through."""
    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    folder = make_checkpoint("mistral", tmp_path)
    ids = list(range(1, 61))
    exact = run_in_chunks(make_runner(folder), ids, [60])
    monkeypatch.setattr("engine.model_runner.resolve_kv_dtype", lambda *_: resolve_kv_dtype(name, "float32", "cuda"))
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    runner = make_runner(folder, kernels="torch")
    logits = run_in_chunks(runner, ids, [30, 20] + [1] * 10)
    assert runner.kv.dtype == getattr(torch, held)
    assert 0 < (logits - exact).pow(2).mean().sqrt() < bound * exact.pow(2).mean().sqrt()
