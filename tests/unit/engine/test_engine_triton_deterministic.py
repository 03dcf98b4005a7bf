"""Whole steps with `deterministic`: a token's logits to the same bits, alone and among others, generated and as a part
of a prompt. By Baton's kernels for the CPU, and by those in Triton, interpreted (or on a GPU, if there is one)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, on_each_rank, on_joined_ranks, run_in_chunks
from interpreted_kernels import DEVICE
from packed_checkpoints import Format, make_packed

from cluster.errors import ConfigError
from engine.attention.registry import ATTENTION_BACKENDS, choose_attention
from engine.attention.triton import FixedTritonAttention
from engine.layers.ops import choose_kernels
from engine.model_runner import ModelRunner
from engine.native import native
from engine.quantization.interface import TritonProducts
from engine.step_input import SequenceSlice, StepInput, build_step
from engine.tp import OrderedSums, SingleGroup, TPGroup
from engine.triton.fused import TritonOps

MakeRunner = Callable[..., ModelRunner]
KERNELS, WHY_NOT = native()
MOST = 128
TABLE = (21, 20)
"""A sequence's blocks."""
FORMATS = [
    ("float32", "none", "auto"),
    ("bfloat16", "none", "auto"),
    ("bfloat16", "int8", "int8"),
    ("bfloat16", "int4", "auto"),
]
ON_DEVICE = FORMATS if DEVICE.type == "cuda" else FORMATS[:2]
"""An interpreted step takes seconds; one in float32 shows each sum that is added in another order."""


STEPS = [("cpu", formats) for formats in FORMATS] + [("triton", formats) for formats in ON_DEVICE]
ALONE = STEPS[: len(FORMATS) + 1] if DEVICE.type == "cpu" else STEPS
LONG = pytest.mark.battery
"""Half a minute of two cores, interpreted: `make smoke`."""


def make_fixed(folder: Path, **formats: Any) -> ModelRunner:
    """By Baton's kernels for the CPU; skips where this processor lacks those that the weights need."""
    is_plain = formats.get("dtype") == "float32" and formats.get("quantization", "none") == "none"
    if KERNELS is None or not (KERNELS.has_products or is_plain):
        pytest.skip(f"no kernels for these weights on this processor {WHY_NOT}")
    return make_runner(folder, deterministic=True, **formats)


@pytest.fixture
def make(where: str, monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    """Runners whose decode steps are graphs, as far as they can be without a GPU: they run again what was captured."""
    if where == "triton" and DEVICE.type == "cuda":
        return lambda folder, **formats: make_runner(
            folder, device="cuda", deterministic=True, graphs_up_to=MOST, **formats
        )
    if where == "cpu":
        if KERNELS is None:
            pytest.skip(f"no kernels for the CPU here: {WHY_NOT}")
        return make_fixed
    kernels = TritonProducts(is_fixed=True)
    monkeypatch.setattr("engine.model_runner.choose_ops", lambda *_: (TritonOps(), kernels, "a test's"))
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (FixedTritonAttention(), "a test's"))

    def make_interpreted(folder: Path, **formats: Any) -> ModelRunner:
        monkeypatch.setattr("engine.triton.paged_fixed._PROGRAMS", 1)
        # Keys are to be split, short as they are here; a split has whole tiles.
        monkeypatch.setattr("engine.triton.paged_fixed.SPLIT_TOKENS", 16 if formats["dtype"] == "float32" else 64)
        return make_runner(folder, graphs_up_to=MOST, capture=lambda work: work, **formats)

    return make_interpreted


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_step(lengths: list[int], own: list[int]) -> StepInput:
    """One new token of each sequence; sequence n has two blocks of its own."""
    slices = [
        SequenceSlice((tokens(60, seed)[length - 1],), length - 1, (2 * seed, 2 * seed + 1), True)
        for seed, length in zip(own, lengths, strict=True)
    ]
    return build_step(slices, 16)


def prefill(runner: ModelRunner, seed: int, length: int) -> None:
    if length > 1:
        run_in_chunks(runner, tokens(60, seed)[: length - 1], [length - 1], (2 * seed, 2 * seed + 1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "formats"),
    [pytest.param(*step, marks=LONG if step[0] == "triton" and DEVICE.type == "cpu" else ()) for step in ALONE],
    ids=str,
)
def test_a_generated_token_has_the_same_logits_alone_and_among_127_others(
    make: MakeRunner, formats: tuple[str, str, str], tmp_path: Path
) -> None:
    dtype, quantization, kv_cache_dtype = formats
    runner = make(
        make_checkpoint("llama", tmp_path, num_hidden_layers=1),
        num_blocks=2 * MOST,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    lengths = [1] * MOST
    for seed, length in ((0, 31), (70, 20), (127, 9)):
        lengths[seed] = length
        prefill(runner, seed, length)

    together = runner.forward(decode_step(lengths, list(range(MOST)))).clone()

    for seed in (0, 70, 127):
        alone = runner.forward(decode_step([lengths[seed]], [seed])).clone()
        assert torch.equal(together[seed], alone[0]), seed
    few = runner.forward(decode_step([1, 9, 1], [1, 127, 2]))
    assert torch.equal(together[[1, 127, 2]], few)


@pytest.mark.parametrize(
    ("kind", "where", "formats"),
    [
        *(pytest.param("llama", *step, marks=LONG if step == ("triton", FORMATS[1]) else ()) for step in STEPS),
        ("mistral", "cpu", FORMATS[0]),
        pytest.param("qwen3", "triton", FORMATS[1], marks=LONG),
    ],
    ids=str,
)
def test_a_replayed_request_goes_on_with_the_same_bits(
    make: MakeRunner, kind: str, where: str, formats: tuple[str, str, str], tmp_path: Path
) -> None:
    """A prompt and what was generated from it, computed again: at once, and in chunks that begin elsewhere."""
    dtype, quantization, kv_cache_dtype = formats
    runner = make(
        make_checkpoint(kind, tmp_path, num_hidden_layers=1 if where == "triton" else 2),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    ids = tokens(13)
    logits = run_in_chunks(runner, ids, [9, 4], TABLE)
    for _ in range(5):
        ids.append(int(logits[-1].argmax()))
        step = build_step([SequenceSlice((ids[-1],), len(ids) - 1, TABLE, True)], 16)
        logits = torch.cat([logits, runner.forward(step)])

    for chunks in ([18], [3, 14, 1]):
        assert torch.equal(run_in_chunks(runner, ids, chunks, (9, 2)), logits)


@pytest.mark.parametrize("where", ["cpu", *(["triton"] if DEVICE.type == "cuda" else [])])
@pytest.mark.parametrize("fmt", [Format("awq", 64), Format("gptq", 32, is_shuffled=True)], ids=str)
def test_codes_of_a_checkpoint_are_multiplied_alike(make: MakeRunner, fmt: Format, tmp_path: Path) -> None:
    runner = make(make_packed(fmt, tmp_path)[0], dtype="bfloat16")
    assert torch.equal(run_in_chunks(runner, tokens(20), [20]), run_in_chunks(runner, tokens(20), [11, 1, 6, 1, 1]))


class Ranks:
    """A group that has gathered what is given, whatever is gathered."""

    rank, size = 1, 3

    def __init__(self, terms: torch.Tensor) -> None:
        self._terms = terms

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        assert dim == 0 and tensor.shape == (1, *self._terms.shape[1:])
        return self._terms

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raise AssertionError("nobody knows in which order")


def test_sums_over_ranks_are_made_in_their_order_and_rounded_once() -> None:
    terms = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    total = terms[1].clone()

    OrderedSums(Ranks(terms)).all_reduce(total)

    assert torch.equal(total, ((terms[0].float() + terms[1].float()) + terms[2].float()).bfloat16())


def test_two_ranks_give_a_token_the_same_bits_in_any_step(tmp_path: Path) -> None:
    if KERNELS is None:
        pytest.skip(f"no kernels for the CPU here: {WHY_NOT}")
    folder, ids = make_checkpoint("llama", tmp_path, num_hidden_layers=2), tokens(20)

    def logits(tp: TPGroup) -> list[torch.Tensor]:
        runner = make_runner(folder, tp=tp, deterministic=True)
        assert isinstance(runner._tp, OrderedSums)
        return [run_in_chunks(runner, ids, chunks) for chunks in ([20], [11, 1, 6, 1, 1])]

    for whole, parts in on_each_rank(2, logits):
        assert torch.equal(whole, parts)


def test_ranks_that_share_memory_give_a_token_the_same_bits_as_they_are(tmp_path: Path) -> None:
    if KERNELS is None:
        pytest.skip(f"no kernels for the CPU here: {WHY_NOT}")
    folder, ids = make_checkpoint("llama", tmp_path, num_hidden_layers=2), tokens(20)

    def logits(tp: TPGroup) -> list[torch.Tensor]:
        runner = make_runner(folder, tp=tp, deterministic=True)
        assert runner._tp is tp
        return [run_in_chunks(runner, ids, chunks) for chunks in ([20], [11, 1, 6, 1, 1])]

    for whole, parts in on_joined_ranks("memory", 2, logits):
        assert torch.equal(whole, parts)


def test_one_rank_sums_nothing(tmp_path: Path) -> None:
    if KERNELS is None:
        pytest.skip(f"no kernels for the CPU here: {WHY_NOT}")
    runner = make_runner(make_checkpoint("llama", tmp_path), deterministic=True)
    assert isinstance(runner._tp, SingleGroup)


@pytest.mark.parametrize(
    ("device", "dtype", "options", "problem"),
    [
        ("cpu", "float32", {"kernels": "torch"}, "engine.deterministic needs Baton's own kernels, .*: not wanted; set"),
        ("cpu", "float16", {}, "they compute in float32 and bfloat16, this is float16"),
        (
            "cpu",
            "bfloat16",
            {"quantization": "fp8"},
            "no kernel that multiplies weights in fp8: set model.quantization",
        ),
        ("cuda", "float32", {"kernels": "torch"}, "not wanted"),
    ],
    ids=str,
)
def test_what_cannot_be_promised_is_refused(
    device: str, dtype: str, options: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if KERNELS is None:
        pytest.skip(f"no kernels for the CPU here: {WHY_NOT}")
    monkeypatch.setattr("engine.model_runner.resolve_device", lambda _: device)
    with pytest.raises(ConfigError, match=problem):
        make_runner(make_checkpoint("llama", tmp_path), device=device, dtype=dtype, deterministic=True, **options)


@pytest.mark.parametrize("name", [name for name in ATTENTION_BACKENDS if name != "triton"])
def test_attention_whose_bits_depend_on_the_step_is_not_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device, fixed = torch.device("cuda"), TritonProducts(is_fixed=True)
    with pytest.raises(ConfigError, match=f"{name} cannot run: a row's bits depend on the rest of the step"):
        choose_attention(name, device, torch.bfloat16, fixed, 256)
    assert choose_attention("auto", device, torch.bfloat16, fixed, 256)[0].name == "triton"


def test_kernels_are_fixed_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for device in ("cuda", *(["cpu"] if KERNELS is not None else [])):
        for asked in (False, True):
            kernels, _ = choose_kernels("auto", torch.device(device), torch.bfloat16, 128, asked)
            assert kernels is not None and kernels.is_fixed == asked
    assert KERNELS is None or not KERNELS.is_fixed
    with pytest.raises(ConfigError, match="not of 10"):
        choose_kernels("auto", torch.device("cuda"), torch.bfloat16, 10, True)
