"""The attention backends against a definition written out query by query."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plain_kernels
import pytest
import torch

from cluster.kv_groups import TokenShare
from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention, VarlenAttention
from engine.attention.interface import AttentionBatch, merge
from engine.kv.pool import decode, encode
from engine.native import DTYPES, Native, native
from engine.step_input import SequenceSlice, build_step

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 6, 2, 8, 400
WINDOWS = [(-1, -1), (4, 0), (0, 0), (1000, 0)]

BATCHES = {
    "decode of one": [(1, 37)],
    "decode of equal lengths": [(1, 20), (1, 20), (1, 20)],
    "decode of very different lengths": [(1, 1), (1, 16), (1, 17), (1, 600), (1, 130), (1, 300), (1, 2)],
    "whole prompts": [(5, 5), (33, 33), (2, 2)],
    "later chunks": [(7, 40), (16, 48), (3, 4)],
    "everything at once": [(1, 50), (9, 9), (1, 1), (4, 90), (1, 700), (2, 17)],
}


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor  # pages
    v: torch.Tensor
    batch: AttentionBatch


def _problem(
    lengths: list[tuple[int, int]], block_size: int, dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM
) -> Problem:
    """Sequences of (new tokens, all tokens) over scattered blocks; what no sequence owns is large, to show."""
    generator = torch.Generator().manual_seed(3)
    free = iter(np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS)).tolist())
    slices = []
    pages = [torch.full((NUM_BLOCKS, block_size, KV_HEADS, head_dim), 50.0) for _ in "kv"]
    for num_queries, num_keys in lengths:
        table = tuple(next(free) for _ in range(-(-num_keys // block_size)))
        for position in range(num_keys):
            for page in pages:
                new = torch.randn((KV_HEADS, head_dim), generator=generator)
                page[table[position // block_size], position % block_size] = new
        slices.append(SequenceSlice((1,) * num_queries, num_keys - num_queries, table, wants_logits=True))
    step = build_step(slices, block_size)
    q = torch.randn((len(step.token_ids), HEADS, head_dim), generator=generator)
    return Problem(q.to(dtype), *(page.to(dtype) for page in pages), AttentionBatch(step, block_size, CPU))


def _by_definition(
    problem: Problem,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    step, block_size = problem.batch.step, problem.batch.block_size
    out = torch.empty_like(problem.q, dtype=torch.float32)
    for s, num_keys in enumerate(step.seqlens_k.tolist()):
        start, stop = step.cu_seqlens_q[s : s + 2].tolist()
        table = step.block_tables[s].tolist()
        keys, values = (
            torch.stack([pages[table[j // block_size], j % block_size] for j in range(num_keys)]).float()
            for pages in (problem.k, problem.v)
        )
        for row in range(start, stop):
            at = num_keys - (stop - row)
            right = 0 if causal else window[1]
            first = 0 if window[0] < 0 else max(0, at - window[0])
            last = num_keys - 1 if right < 0 else min(num_keys - 1, at + right)
            for head in range(HEADS):
                own = head // (HEADS // KV_HEADS)
                scores = keys[first : last + 1, own] @ problem.q[row, head].float() * scale
                if soft_cap:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                out[row, head] = scores.softmax(0)[: last + 1 - first] @ values[first : last + 1, own]
    return out


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Native | None:
    """Those of this machine, and none."""
    own, why_not = native()
    if request.param == "torch":
        return None
    if own is None:
        pytest.skip(f"no kernels here: {why_not}")
    return own


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_the_cpu_backend_computes_the_definition(
    kernels: Native | None, lengths: list[tuple[int, int]], window: tuple[int, int], block_size: int
) -> None:
    problem = _problem(lengths, block_size)

    out = CpuAttention(kernels)(problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.4, window_size=window)

    assert torch.allclose(out, _by_definition(problem, 0.4, True, window), atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (3, 2)])
def test_without_causality_a_window_reaches_to_the_right_too(kernels: Native | None, window: tuple[int, int]) -> None:
    problem = _problem(BATCHES["everything at once"], 16)

    out = CpuAttention(kernels)(
        problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.4, causal=False, window_size=window
    )

    assert torch.allclose(out, _by_definition(problem, 0.4, False, window), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cpu_backend_computes_in_sixteen_bits(kernels: Native | None, dtype: torch.dtype) -> None:
    problem = _problem(BATCHES["everything at once"], 16, dtype)

    out = CpuAttention(kernels if dtype in DTYPES else None)(
        problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.35
    )

    assert out.dtype == dtype
    assert torch.allclose(out.float(), _by_definition(problem, 0.35, True, (-1, -1)), atol=0.03)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (4, 0), (100, 0)])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(1.5, True), (0.0, True), (1.5, False)])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float32, 8), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.bfloat16, 80)],
)
def test_sinks_and_soft_caps_are_those_of_the_definition(
    kernels: Native | None,
    dtype: torch.dtype,
    head_dim: int,
    soft_cap: float,
    has_sinks: bool,
    window: tuple[int, int],
    is_fixed: bool,
) -> None:
    """Sinks of which one outweighs every key, and one nothing."""
    if is_fixed and kernels is None:
        pytest.skip("only kernels are fixed")
    problem = _problem(BATCHES["everything at once"], 16, dtype, head_dim)
    sinks = torch.tensor([0.5, -40.0, 40.0, 0.0, 2.0, -1.0]) if has_sinks else None

    backend = CpuAttention(kernels.fixed() if is_fixed and kernels is not None else kernels)
    out = backend(
        problem.q,
        problem.k,
        problem.v,
        problem.batch,
        softmax_scale=head_dim**-0.5,
        window_size=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )

    wanted = _by_definition(problem, head_dim**-0.5, True, window, soft_cap, sinks)
    assert torch.allclose(out.float(), wanted, atol=1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_the_logarithms_of_the_softmaxs_sums_are_those_of_the_definition(
    kernels: Native | None, lengths: list[tuple[int, int]], soft_cap: float
) -> None:
    problem = _problem(lengths, 16)
    log_sums = torch.full((len(problem.q), HEADS), 7e7)
    how = {"softmax_scale": 0.4, "soft_cap": soft_cap}

    out = CpuAttention(kernels)(problem.q, problem.k, problem.v, problem.batch, **how, log_sums=log_sums)

    assert torch.allclose(out, _by_definition(problem, 0.4, True, (-1, -1), soft_cap), atol=1e-5)
    # A sink whose score is the logarithm of the sum takes half of the softmax.
    row = len(out) - 1
    halved = _by_definition(problem, 0.4, True, (-1, -1), soft_cap, sinks=log_sums[row])
    assert torch.allclose(halved[row], out[row] / 2, atol=1e-5)
    assert log_sums.max() < 1e3, "a row was left out"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_rounded"),
    [
        (torch.float32, 8, False),
        (torch.float32, 8, True),
        (torch.bfloat16, 64, False),
        (torch.bfloat16, 72, False),
        (torch.bfloat16, 64, True),
    ],
)
@pytest.mark.parametrize("num_shares", [2, 4])
def test_parts_of_the_keys_are_merged_to_what_all_of_them_give(
    kernels: Native | None, num_shares: int, dtype: torch.dtype, head_dim: int, is_rounded: bool
) -> None:
    """Each part has an equal run of every block's tokens; of short sequences some have none."""
    block_size = 16
    size = block_size // num_shares
    problem = _problem([(1, n) for n in (1, 2, 3, 16, 17, 600, 130, 29)], block_size, dtype, head_dim)
    pages = [encode(page) if is_rounded else page for page in (problem.k, problem.v)]
    backend, step, scale = CpuAttention(kernels), problem.batch.step, head_dim**-0.5
    whole = backend(problem.q, *pages, problem.batch, softmax_scale=scale)
    parts, log_sums = torch.empty((num_shares, *problem.q.shape), dtype=dtype), torch.empty(num_shares, 8, HEADS)
    for place in range(num_shares):
        share = TokenShare(block_size, num_shares, place)
        lengths = np.array([share.num_before(int(length)) for length in step.seqlens_k], dtype=np.int32)
        own = AttentionBatch(replace(step, seqlens_k=lengths), size, CPU)
        held = [page[:, place * size : (place + 1) * size].contiguous() for page in pages]
        parts[place] = backend(problem.q, *held, own, softmax_scale=scale, log_sums=log_sums[place])
    assert parts[-1][0].eq(0).all() and log_sums[-1, 0].max() <= -1e30, "a part without keys"
    error = (merge(parts, log_sums).float() - whole.float()).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_decode_batch_that_exceeds_the_kept_memory_is_computed_in_parts(
    kernels: Native | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.cpu._MAX_GATHERED", 4)
    problem = _problem([(1, 30), (1, 20), (1, 31), (1, 25), (1, 9)], 16)
    backend = CpuAttention(kernels)

    out = backend(problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.4)

    assert torch.allclose(out, _by_definition(problem, 0.4, True, (-1, -1)), atol=1e-5)


def test_one_backend_serves_batches_and_layers_of_different_windows_in_turn(kernels: Native | None) -> None:
    """What is kept of one call must not leak into the next."""
    backend = CpuAttention(kernels)
    small, large = _problem(BATCHES["decode of one"], 16), _problem(BATCHES["everything at once"], 16)

    for problem, window in [(small, (-1, -1)), (large, (4, 0)), (small, (4, 0)), (large, (-1, -1))]:
        out = backend(problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.4, window_size=window)
        assert torch.allclose(out, _by_definition(problem, 0.4, True, window), atol=1e-5)


GPU_BACKENDS: dict[str, Callable[[], Any]] = {
    "flash_attn": lambda: FlashAttention(plain_kernels.flash_attn_varlen_func),
    "varlen with splits": lambda: VarlenAttention(plain_kernels.varlen_attn_with_splits, CPU),
    "varlen with pages": lambda: VarlenAttention(plain_kernels.varlen_attn_with_pages, CPU),
    "varlen that refuses pages": lambda: VarlenAttention(plain_kernels.varlen_attn_that_refuses_pages, CPU),
    "varlen with wrong pages": lambda: VarlenAttention(plain_kernels.varlen_attn_with_wrong_pages, CPU),
    "varlen without pages": lambda: VarlenAttention(plain_kernels.varlen_attn_without_pages, CPU),
    "varlen of torch 2.11": lambda: VarlenAttention(plain_kernels.varlen_attn_of_2_11, CPU),
    "varlen without groups": lambda: VarlenAttention(plain_kernels.varlen_attn_without_groups, CPU),
}


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [(-1, -1), (4, 0)])
@pytest.mark.parametrize("lengths", ["everything at once", "decode of very different lengths"])
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_gpu_backends_hand_their_kernels_the_right_keys(
    name: str, lengths: str, window: tuple[int, int], block_size: int
) -> None:
    """The kernels' place is taken by a plain computation of the same arguments; the kernels run in tests/gpu."""
    problem = _problem(BATCHES[lengths], block_size)

    out = GPU_BACKENDS[name]()(problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.4, window_size=window)

    assert torch.allclose(out, _by_definition(problem, 0.4, True, window), atol=1e-5)


class Listener:
    """A kernel of torch 2.11 that notes what it is called with."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.windows: list[tuple[int, int]] = []

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        self.heads.append(k.shape[1])
        self.windows.append(window_size)
        return plain_kernels.varlen_attn_of_2_11(
            q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size
        )


@pytest.mark.parametrize(
    ("lengths", "window", "told"),
    [
        ("decode of very different lengths", (-1, -1), (-1, -1)),
        ("decode of very different lengths", (4, 0), (4, 0)),
        ("everything at once", (-1, -1), (-1, 0)),
    ],
)
def test_a_kernel_that_takes_grouped_heads_gets_them_and_may_split_the_keys_of_decode_steps(
    lengths: str, window: tuple[int, int], told: tuple[int, int]
) -> None:
    """Without `enable_gqa` keys and values were copied for each query head, and (-1, 0) rules a split of keys out."""
    kernel = Listener()
    backend = VarlenAttention(kernel, CPU)
    kernel.heads.clear()
    kernel.windows.clear()
    problem = _problem(BATCHES[lengths], 16)

    out = backend(problem.q, problem.k, problem.v, problem.batch, softmax_scale=0.4, window_size=window)

    assert set(kernel.heads) == {KV_HEADS} and set(kernel.windows) == {told}
    assert torch.allclose(out, _by_definition(problem, 0.4, True, window), atol=1e-5)


@pytest.mark.parametrize("limit", [1, 60, 1 << 16])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
@pytest.mark.parametrize("lengths", ["everything at once", "decode of very different lengths"])
@pytest.mark.parametrize("name", ["flash_attn", "varlen with splits", "varlen without groups"])
def test_gpu_backends_unpack_rounded_pages_of_a_few_sequences_at_a_time(
    name: str, lengths: str, kv_dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.interface._MAX_GATHERED", limit)
    problem = _problem(BATCHES[lengths], 256)
    cells = [encode(pages, kv_dtype) for pages in (problem.k, problem.v)]
    stored = replace(problem, k=decode(cells[0], torch.float32), v=decode(cells[1], torch.float32))

    out = GPU_BACKENDS[name]()(problem.q, *cells, problem.batch, softmax_scale=0.4, window_size=(4, 0))

    assert (len(problem.batch.parts) > 1) == (limit < 1 << 16)
    assert torch.allclose(out, _by_definition(stored, 0.4, True, (4, 0)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("flash_attn", ""),
        ("varlen with splits", ""),
        ("varlen that refuses pages", "cannot read pages in place: block_table is not supported"),
        ("varlen with wrong pages", "cannot read pages in place: it is off by .* in a trial"),
        ("varlen without pages", "its varlen_attn takes no block_table"),
    ],
)
def test_a_backend_says_whether_it_reads_pages_in_place(name: str, why: str) -> None:
    backend = GPU_BACKENDS[name]()

    large, small = (backend.static_obstacle(size, torch.bfloat16) for size in (256, 16))
    assert re.search(why, large) and bool(large) == bool(why)
    assert why or small.endswith("set block_size to 256")


def test_the_slots_of_keys_are_computed_where_the_tables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were laid out by numpy in each step, and copied: 20 ms for 32 sequences of 8,192 keys."""
    copied: list[int] = []
    to_device = AttentionBatch.to_device
    monkeypatch.setattr(AttentionBatch, "to_device", lambda batch, a: (copied.append(a.size), to_device(batch, a))[1])
    tables = [tuple(range(50 * s, 50 * s + 50)) for s in range(3)]
    lengths = [800, 17, 1]
    slices = [SequenceSlice((1,), n - 1, t, True) for n, t in zip(lengths, tables, strict=True)]
    batch = AttentionBatch(build_step(slices, 16), 16, CPU)

    slots = batch.key_slots

    assert slots.dtype == torch.int64
    assert slots.tolist() == [t[i // 16] * 16 + i % 16 for n, t in zip(lengths, tables, strict=True) for i in range(n)]
    assert max(copied) == 3 * 50  # the tables themselves
