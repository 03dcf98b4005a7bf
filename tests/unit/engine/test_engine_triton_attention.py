"""Paged attention in Triton, interpreted (or on a GPU, if there is one), against the CPU's and against a definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_kernels import DEVICE

from engine.attention.cpu import CpuAttention
from engine.attention.interface import AttentionBatch, PagedBatch
from engine.attention.triton import FixedTritonAttention, TritonAttention
from engine.kv.pool import decode, encode
from engine.step_input import SequenceSlice, build_step
from engine.triton.target import compiling_for

DECODES = [(1, 1), (1, 17), (1, 600), (1, 130)]
MIXED = [(1, 50), (9, 9), (1, 300), (2, 17), (40, 190)]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.004}


def on_device(paged: PagedBatch | None) -> PagedBatch | None:
    if paged is None:
        return None
    tensors = {name: value.to(DEVICE) for name, value in vars(paged).items() if isinstance(value, torch.Tensor)}
    return replace(paged, **tensors)


class Problem:
    """Sequences of (new tokens, all tokens) over scattered blocks; what no sequence owns is large, to show."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        heads: int = 2,
        group: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        num_blocks: int = 200,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        free = iter(np.random.default_rng(3).permutation(np.arange(1, num_blocks)).tolist())
        slices, pages = [], [torch.full((num_blocks, block_size, heads, head_dim), 50.0) for _ in "kv"]
        for num_queries, num_keys in lengths:
            table = tuple(next(free) for _ in range(-(-num_keys // block_size)))
            at = torch.arange(num_keys)
            blocks = torch.tensor(table)[at // block_size]
            for page in pages:
                page[blocks, at % block_size] = torch.randn((num_keys, heads, head_dim), generator=generator)
            slices.append(SequenceSlice((1,) * num_queries, num_keys - num_queries, table, wants_logits=True))
        step = build_step(slices, block_size)
        # Queries are a part of a wider row, as the projection leaves them.
        self.wide = torch.randn((len(step.token_ids), heads * group + 3, head_dim), generator=generator).to(dtype)
        self.q = self.wide[:, : heads * group]
        self.batch, self.dtype = AttentionBatch(step, block_size, torch.device("cpu")), dtype
        if kv_dtype is None:
            self.pages = [page.to(dtype) for page in pages]
            self.exact = [page.float() for page in self.pages]
        else:
            self.pages = [encode(page, kv_dtype) for page in pages]
            self.exact = [decode(page, torch.float32) for page in self.pages]

    def by_triton(self, *, is_fixed: bool = False, **options: Any) -> torch.Tensor:
        q = self.wide.to(DEVICE)[:, : self.q.shape[1]]
        batch = replace(self.batch, device=DEVICE, fixed=on_device(self.batch.fixed), _derived={})
        pages = [page.to(DEVICE) for page in self.pages]
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].to(DEVICE)
        attention = FixedTritonAttention() if is_fixed else TritonAttention()
        out = attention(q, *pages, batch, softmax_scale=0.3, **options).cpu()
        assert out.dtype == self.dtype and out.is_contiguous()
        return out

    def by_cpu(self, **options: Any) -> torch.Tensor:
        return CpuAttention()(self.q.float(), *self.exact, self.batch, softmax_scale=0.3, **options)

    def by_definition(self, soft_cap: float, sinks: torch.Tensor | None, left: int) -> torch.Tensor:
        step, block_size = self.batch.step, self.batch.block_size
        group, out = self.q.shape[1] // self.exact[0].shape[2], torch.empty(self.q.shape)
        for s, length in enumerate(step.seqlens_k.tolist()):
            at = torch.arange(length)
            blocks = torch.from_numpy(step.block_tables[s])[at // block_size]
            k, v = (page[blocks, at % block_size].repeat_interleave(group, dim=1) for page in self.exact)
            begin, end = step.cu_seqlens_q[s : s + 2].tolist()
            for row in range(begin, end):
                position = length - (end - row)
                first = 0 if left < 0 else max(0, position - left)
                scores = torch.einsum("hd,khd->hk", self.q[row].float(), k[first : position + 1]) * 0.3
                if soft_cap:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[:, None]], dim=1)
                weights = scores.softmax(-1)[:, : position + 1 - first]
                out[row] = torch.einsum("hk,khd->hd", weights, v[first : position + 1])
        return out

    def take(self, sequence: int, other: Problem, first_row: int = 0) -> None:
        """Makes a sequence equal to the first one of another problem, its rows from `first_row` on."""
        step, there = self.batch.step, other.batch.step
        begin, end = step.cu_seqlens_q[sequence : sequence + 2].tolist()
        self.wide[begin:end] = other.wide[first_row : first_row + end - begin]
        for page, source in zip(self.pages, other.pages, strict=True):
            for at in range(-(-int(step.seqlens_k[sequence]) // self.batch.block_size)):
                page[step.block_tables[sequence, at]] = source[there.block_tables[0, at]]

    def difference(self, *, is_fixed: bool = False, **options: Any) -> float:
        return (self.by_triton(is_fixed=is_fixed, **options).float() - self.by_cpu(**options)).abs().max().item()


@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("block_size", [16, 20, 256])
def test_pages_of_any_block_size_are_read_in_place(lengths: list[tuple[int, int]], block_size: int) -> None:
    assert Problem(lengths, block_size=block_size).difference() < TOLERANCES[torch.float32]


@pytest.mark.parametrize("window", [(0, 0), (40, 0), (1000, 0)])
def test_a_window_hides_what_is_further_back(window: tuple[int, int]) -> None:
    assert Problem(MIXED, heads=1).difference(window_size=window) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("window", [(-1, -1), (3, 2), (-1, 40)])
def test_without_causality_a_window_reaches_to_the_right_too(window: tuple[int, int]) -> None:
    assert Problem(MIXED, heads=1).difference(window_size=window, causal=False) < TOLERANCES[torch.float32]


@pytest.mark.parametrize(("heads", "group", "head_dim"), [(3, 1, 8), (1, 7, 80), (2, 3, 96), (1, 16, 128), (1, 2, 256)])
def test_heads_of_any_size_and_number_share_their_keys(heads: int, group: int, head_dim: int) -> None:
    problem = Problem([(1, 300), (5, 40), (1, 9)], heads=heads, group=group, head_dim=head_dim)

    assert problem.difference() < 5e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_to_their_own_precision(dtype: torch.dtype) -> None:
    assert Problem(MIXED, dtype=dtype).difference() < TOLERANCES[dtype]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
def test_rounded_pages_become_numbers_in_the_kernel(dtype: torch.dtype, kv_dtype: torch.dtype, arch: int) -> None:
    """An A100 takes fp8 apart by its bits, an H100 has an instruction for it."""
    problem = Problem([(1, 300), (5, 40), (1, 9)], dtype=dtype, kv_dtype=kv_dtype)

    with compiling_for(arch):
        assert problem.difference() < TOLERANCES[dtype]


def test_a_row_alone_and_among_128_is_the_same_to_the_bit() -> None:
    alone = Problem([(1, 700)], heads=1)
    crowd = Problem([(1, 700), *((1, 1 + 7 * i % 40) for i in range(127))], heads=1, num_blocks=500)
    crowd.take(0, alone)

    assert torch.equal(crowd.by_triton()[:1], alone.by_triton())


def test_a_row_is_the_same_to_the_bit_beside_prompts_and_within_any_bounds() -> None:
    """The bounds of a recorded step are those of the longest sequence there may be."""
    alone, mixed = Problem([(1, 700)], heads=1), Problem([(1, 700), (30, 30), (1, 5)], heads=1)
    mixed.take(0, alone)
    paged = alone.batch.paged
    wide = torch.cat([paged.block_table, torch.full((1, 500), 7, dtype=torch.int32)], dim=1)
    bounded = replace(paged, block_table=wide, max_seqlen_k=1 << 17)
    expected = alone.by_triton()

    assert torch.equal(mixed.by_triton()[:1], expected)
    alone.batch = replace(alone.batch, fixed=bounded, _derived={})
    assert torch.equal(alone.by_triton(), expected)


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)])
@pytest.mark.parametrize("chunks", [[40, 20], [7, 30, 23]])
def test_a_prompt_is_the_same_to_the_bit_in_whatever_chunks(chunks: list[int], window: tuple[int, int]) -> None:
    whole = Problem([(60, 60)], heads=1)
    expected, done = whole.by_triton(window_size=window), 0

    for chunk in chunks:
        part = Problem([(chunk, done + chunk), (9, 20)], heads=1)
        part.take(0, whole, first_row=done)
        assert torch.equal(part.by_triton(window_size=window)[:chunk], expected[done : done + chunk])
        done += chunk


@pytest.mark.parametrize(
    ("soft_cap", "has_sinks", "window"), [(1.5, True, (-1, -1)), (0.0, True, (30, 0)), (1.5, False, (30, 0))]
)
def test_sinks_and_soft_caps_are_those_of_the_definition(
    soft_cap: float, has_sinks: bool, window: tuple[int, int]
) -> None:
    """A sink takes its share of the softmax and adds no value; a cap bends scores before the mask."""
    problem = Problem([(1, 5), (1, 600), (20, 50)], heads=1)
    sinks = torch.linspace(-2, 6, problem.q.shape[1]) if has_sinks else None

    out = problem.by_triton(soft_cap=soft_cap, sinks=sinks, window_size=window)

    assert (out - problem.by_definition(soft_cap, sinks, window[0])).abs().max() < TOLERANCES[torch.float32]


def test_what_lies_beyond_a_sequence_is_not_read() -> None:
    """NaN in the rest of its last block, in blocks that are not its own, and beyond its table."""
    problem = Problem([(1, 300), (20, 37), (1, 1)])
    expected = problem.by_triton()
    step, block_size = problem.batch.step, problem.batch.block_size
    own = torch.zeros(problem.pages[0].shape[:2], dtype=torch.bool)
    for table, length in zip(step.block_tables, step.seqlens_k.tolist(), strict=True):
        at = np.arange(length)
        own[table[at // block_size], at % block_size] = True
    for pages in problem.pages:
        pages[~own] = torch.nan

    assert torch.equal(problem.by_triton(), expected)


def test_a_sequence_without_keys_gives_zeros() -> None:
    """Rows of padding may have none."""
    problem = Problem([(1, 20)])
    paged = replace(problem.batch.paged, seqlens_k=torch.zeros(1, dtype=torch.int32))
    problem.batch = replace(problem.batch, fixed=paged, _derived={})

    assert not problem.by_triton().any()


# Of kernels that are fixed: a token generated has the bits that it has as a part of a prompt.


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many keys as the largest tile has."""
    monkeypatch.setattr("engine.triton.paged_fixed.SPLIT_TOKENS", 64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 1, "group": 7, "head_dim": 80},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
        {"kv_dtype": torch.uint8},
        {"window_size": (40, 0)},
        {"window_size": (0, 0)},
    ],
    ids=str,
)
def test_fixed_attention_computes_prompts_and_generated_tokens(short_splits: None, options: dict[str, Any]) -> None:
    how = {name: options[name] for name in ("window_size",) if name in options}
    problem = Problem([(1, 300), *MIXED], **{"heads": 1} | {name: options[name] for name in options if name not in how})

    assert problem.difference(is_fixed=True, **how) < 2 * TOLERANCES[problem.dtype]


@pytest.mark.parametrize(("soft_cap", "has_sinks", "window"), [(1.5, True, (-1, -1)), (0.0, True, (30, 0))])
def test_fixed_attention_has_sinks_and_soft_caps(
    short_splits: None, soft_cap: float, has_sinks: bool, window: tuple[int, int]
) -> None:
    problem = Problem([(1, 5), (1, 300), (20, 150)], heads=1)
    sinks = torch.linspace(-2, 6, problem.q.shape[1]) if has_sinks else None

    out = problem.by_triton(is_fixed=True, soft_cap=soft_cap, sinks=sinks, window_size=window)

    assert (out - problem.by_definition(soft_cap, sinks, window[0])).abs().max() < TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    ("window", "has_sinks", "kv_dtype"),
    [
        ((100, 0), True, None),
        pytest.param((-1, -1), False, None, marks=pytest.mark.battery),
        pytest.param((-1, -1), False, torch.int8, marks=pytest.mark.battery),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_generated_and_as_a_part_of_a_prompt(
    short_splits: None, window: tuple[int, int], has_sinks: bool, kv_dtype: torch.dtype | None
) -> None:
    """Positions at the edges of tiles and splits, beside others, and within other bounds."""
    whole = Problem([(150, 150)], heads=1, kv_dtype=kv_dtype)
    how = {"window_size": window, "sinks": torch.linspace(-2, 2, 2) if has_sinks else None}
    expected = whole.by_triton(is_fixed=True, **how)

    for length in (1, 16, 64, 65, 128, 129, 150):
        alone = Problem([(1, length)], heads=1, kv_dtype=kv_dtype)
        beside = Problem([(1, length), (3, 70), (1, 200)], heads=1, kv_dtype=kv_dtype)
        for problem in (alone, beside):
            problem.take(0, whole, first_row=length - 1)
            assert torch.equal(problem.by_triton(is_fixed=True, **how)[0], expected[length - 1]), length
    part = Problem([(50, 100), (1, 90)], heads=1, kv_dtype=kv_dtype)
    part.take(0, whole, first_row=50)
    assert torch.equal(part.by_triton(is_fixed=True, **how)[:50], expected[50:100])


def test_the_kernels_for_speed_do_add_in_another_order() -> None:
    """Else the tests above would show nothing."""
    whole, alone = Problem([(600, 600)], heads=1, group=1), Problem([(1, 600)], heads=1, group=1)
    alone.take(0, whole, first_row=599)
    assert not torch.equal(alone.by_triton()[0], whole.by_triton()[599])


def test_fixed_attention_reads_nothing_beyond_a_sequence_and_gives_zeros_for_none(short_splits: None) -> None:
    problem = Problem([(1, 20)])
    paged = replace(problem.batch.paged, seqlens_k=torch.zeros(1, dtype=torch.int32))
    problem.batch = replace(problem.batch, fixed=paged, _derived={})

    assert not problem.by_triton(is_fixed=True).any()
