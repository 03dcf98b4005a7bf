"""What lies between products and attention, by kernels in Triton, interpreted (or on a GPU, if there is one): to the
bits of plain torch on the CPU but where sums are added in another order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, run_in_chunks
from interpreted_kernels import DEVICE

from engine.kv.pool import POOL_DTYPES, decode, encode
from engine.layers.ops import Ops, TorchOps, choose_ops
from engine.quantization.fp8 import round_to_fp8
from engine.quantization.interface import RoundedRows, Rows, TritonMatrix, TritonProducts, make_matrix
from engine.triton.fused import TritonOps
from engine.triton.rounding import MAX_COLUMNS, rounded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULPS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The distance of neighbouring numbers, at most, by their size; two roundings in float32's case."""
Result = list[torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(compute: Callable[[Ops, torch.device], Result]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(torch's on the CPU, the kernels') of each tensor that `compute` returns."""
    theirs, ours = compute(TorchOps(), torch.device("cpu")), compute(TritonOps(), DEVICE)
    return [(a, b.cpu()) for a, b in zip(theirs, ours, strict=True)]


def check(expected: torch.Tensor, found: torch.Tensor) -> None:
    """No number is further off than to its neighbour, and of 16 bits one in a hundred is so far at most."""
    assert expected.dtype == found.dtype and expected.shape == found.shape
    off = (expected.float() - found.float()).abs()
    assert bool((off <= ULPS[expected.dtype] * expected.float().abs().clamp(min=1e-2)).all()), off.max()
    assert expected.dtype == torch.float32 or (off > 0).sum() <= 0.01 * len(off.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 5000), (0, 64)])
@pytest.mark.parametrize("adds", [False, True])
def test_norms_add_to_the_residual_first(dtype: torch.dtype, num_tokens: int, width: int, adds: bool) -> None:
    """They round before they multiply by the weight, as transformers does; torch's own norm rounds once."""

    def compute(ops: Ops, device: torch.device) -> Result:
        x = randn(num_tokens, width, dtype=dtype).to(device)
        add = 3 * randn(num_tokens, width, dtype=dtype, seed=2).to(device)
        return [ops.rms_norm(x, randn(width, dtype=dtype, seed=1).to(device), 1e-5, add if adds else None), x]

    (_, found), (their_sum, our_sum) = both(compute)

    assert torch.equal(their_sum, our_sum)
    factor = (our_sum.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    check(randn(width, dtype=dtype, seed=1) * (our_sum.float() * factor).to(dtype), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 128), (3, 1500), (0, 64)])
def test_the_gate_is_rounded_before_the_product(dtype: torch.dtype, num_tokens: int, width: int) -> None:
    def compute(ops: Ops, device: torch.device) -> Result:
        return [ops.silu_mul(5 * randn(num_tokens, 2 * width, dtype=dtype).to(device))]

    check(*both(compute)[0])


WIDTHS = [(1, 64), (3, 5000), (0, 64), (2, MAX_COLUMNS + 16)]


def check_rounded(plain: Rows, found: Rows) -> None:
    """The codes and scales that plain torch on the CPU makes of the same rows."""
    assert isinstance(plain, torch.Tensor) and isinstance(found, RoundedRows) and found.dtype == plain.dtype
    codes, scales = round_to_fp8(plain.cpu())
    assert torch.equal(found.codes.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), scales)


def uneven(num_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all sizes, the last one of zeros."""
    rows = randn(num_tokens, width, dtype=dtype) * torch.logspace(-4, 2, num_tokens, dtype=torch.float64)[:, None]
    rows[-1:] = 0 if num_tokens > 1 else rows[-1:]
    return rows.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), WIDTHS)
def test_rows_for_a_product_in_fp8_are_rounded_to_the_bits_of_plain_torch(
    dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    """By themselves, behind a norm, and behind a gate."""
    ops, x, gate_up = TritonOps(), uneven(num_tokens, width, dtype), uneven(num_tokens, 2 * width, dtype)
    weight, add = (randn(*shape, dtype=dtype, seed=1).to(DEVICE) for shape in ((width,), (num_tokens, width)))

    check_rounded(x, rounded(x))
    check_rounded(ops.silu_mul(gate_up), ops.silu_mul(gate_up, rounds=True))
    for others in ((), (add,)):
        sums = [x.clone(), x.clone()]
        plain, found = (
            ops.rms_norm(s, weight, 1e-5, *others, rounds=r) for s, r in zip(sums, (False, True), strict=True)
        )
        check_rounded(plain, found)
        assert torch.equal(*sums)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, which interprets the kernel
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_does_not_become_so_by_rounding(wrong: float) -> None:
    x = randn(3, 64).to(DEVICE)
    x[1, 5] = wrong
    found = rounded(x)
    numbers = found.codes.cpu().float() * found.scales.cpu()
    assert numbers[[0, 2]].isfinite().all() and not numbers[1].isfinite().any()


def turn(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    has_norm: bool,
    num_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> Callable[[Ops, torch.device], Result]:
    """Queries, keys and values of `rotate_and_store`; what was in other slots stays."""
    num_heads, num_kv_heads, head_dim = heads
    slots = torch.randperm(4 * 20, generator=torch.Generator().manual_seed(4))[:num_tokens]
    norm = randn(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=3) if has_norm else None
    rows = [randn(num_tokens, 1, head_dim, dtype=dtype, seed=seed) for seed in (5, 6)]
    qkv = 3 * randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv[-1, num_heads:] = 0

    def compute(ops: Ops, device: torch.device) -> Result:
        width = head_dim if kv_dtype is None else head_dim + 4
        k, v = torch.full((2, 4, 20, num_kv_heads, width), 7, dtype=kv_dtype or dtype, device=device)
        there = None if norm is None else norm.to(device)
        rope = (rows[0].to(device), rows[1].to(device))
        q = ops.rotate_and_store(qkv.clone().to(device), there, 1e-6, rope, slots.to(device), (k, v), num_heads)
        untouched = sorted(set(range(80)) - set(slots.tolist()))
        assert all(bool((pages.flatten(0, 1)[untouched] == 7).all()) for pages in (k, v))
        return [q, *(pages.flatten(0, 1)[slots.to(device)] for pages in (k, v))]

    return compute


HEADS = [(6, 2, 64), (5, 1, 80), (2, 2, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_turned_and_stored(dtype: torch.dtype, heads: tuple[int, int, int], has_norm: bool) -> None:
    for theirs, ours in both(turn(dtype, heads, has_norm, num_tokens=5)):
        if has_norm or dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2 * ULPS[dtype], atol=10 * ULPS[dtype])
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
def test_rounded_heads_have_the_bits_that_the_cpu_gives_them(
    dtype: torch.dtype, heads: tuple[int, int, int], kv_dtype: torch.dtype
) -> None:
    """Codes and scales alike, a head of zeros included."""
    for theirs, ours in both(turn(dtype, heads, False, num_tokens=5, kv_dtype=kv_dtype)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
def test_every_code_and_every_tie_between_two_is_rounded_to_even(kv_dtype: torch.dtype) -> None:
    """Values beside the largest, so that the scale is 1: subnormal numbers of fp8, too."""
    if kv_dtype == torch.int8:
        codes = torch.arange(-127, 128).float()
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes[codes.isfinite()].sort().values
    numbers = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes * 0.999, torch.tensor([-0.0])])
    heads = torch.full((-(-len(numbers) // 60), 64), codes.max().item())
    padded = torch.zeros(len(heads) * 60)
    padded[: len(numbers)] = numbers
    heads[:, :60] = padded.view(-1, 60)
    qkv = heads[:, None, :].repeat(1, 3, 1).to(DEVICE)
    none = (torch.ones(len(heads), 1, 64, device=DEVICE), torch.zeros(len(heads), 1, 64, device=DEVICE))
    k, v = torch.zeros((2, 1, len(heads), 1, 68), dtype=kv_dtype, device=DEVICE)

    TritonOps().rotate_and_store(qkv, None, 0.0, none, torch.arange(len(heads), device=DEVICE), (k, v), 1)

    expected = encode(heads[:, None], kv_dtype)
    assert torch.equal(v.cpu()[0], expected)
    assert torch.equal(decode(k.cpu()[0], torch.float32), decode(expected, torch.float32))


def test_a_row_alone_and_among_others_is_the_same_to_the_bit() -> None:
    x, weight = randn(9, 896, dtype=torch.bfloat16).to(DEVICE), randn(896, dtype=torch.bfloat16, seed=1).to(DEVICE)
    ops = TritonOps()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5)[4:5], ops.rms_norm(x[4:5], weight, 1e-5))
    assert torch.equal(ops.silu_mul(x)[4:5], ops.silu_mul(x[4:5]))
    for all_rows, one in (
        (rounded(x), rounded(x[4:5])),
        (ops.rms_norm(x, weight, 1e-5, rounds=True), ops.rms_norm(x[4:5], weight, 1e-5, rounds=True)),
        (ops.silu_mul(x, rounds=True), ops.silu_mul(x[4:5], rounds=True)),
    ):
        assert torch.equal(all_rows.scales[4:5], one.scales)
        assert torch.equal(*(rows.codes.view(torch.uint8)[-1 if rows is one else 4] for rows in (all_rows, one)))


def _runner(folder: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch, **formats: Any) -> Any:
    monkeypatch.setattr("engine.model_runner.choose_ops", lambda *_: (ops, None, "a test's"))
    return make_runner(folder, device=str(DEVICE), **formats)


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_cache_dtype", "bound"),
    [
        ("qwen3", "float32", "auto", 1e-4),
        ("llama", "bfloat16", "auto", 0.05),
        ("llama", "bfloat16", "int8", 0.05),
        ("qwen3", "bfloat16", "fp8", 0.05),
    ],
)
def test_a_model_gives_the_logits_that_it_gives_in_plain_torch(
    tmp_path: Path, kind: str, dtype: str, kv_cache_dtype: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, a prompt in chunks and then decode steps; qwen3 has norms of its heads."""
    folder = make_checkpoint(kind, tmp_path, num_hidden_layers=1)
    ids = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    formats = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "attention": "cpu"}
    monkeypatch.setattr("engine.model_runner.resolve_kv_dtype", lambda wanted, *_: POOL_DTYPES.get(wanted, dtype))

    expected, found = (
        run_in_chunks(_runner(folder, ops, monkeypatch, **formats), ids, [6, 4, 1, 1]).float().cpu()
        for ops in (TorchOps(), TritonOps())
    )

    size = expected.pow(2).mean().sqrt()
    assert (found - expected).pow(2).mean().sqrt() <= bound * size


class UnfusedOps(TritonOps):
    """Leaves it to the product to round its rows."""

    def rms_norm(self, *arguments: Any) -> Rows:
        return super().rms_norm(*arguments[:4])

    def silu_mul(self, gate_up: torch.Tensor, rounds: bool = False) -> Rows:
        return super().silu_mul(gate_up)


@pytest.mark.parametrize("is_in_fp8", [True, False], ids=["rows rounded", "rows as they are"])
def test_a_model_with_weights_in_fp8_gives_the_logits_that_it_gives_in_plain_torch(
    tmp_path: Path, is_in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit where it multiplies rounded rows, whoever rounds them; else with weights that are unpacked whole."""
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    ids = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    monkeypatch.setattr("engine.quantization.fp8._multiplies_in_fp8", lambda weight: is_in_fp8)
    formats = {"dtype": "bfloat16", "quantization": "fp8", "attention": "cpu"}
    others = [(UnfusedOps() if is_in_fp8 else TorchOps(), None), (TritonOps(), TritonProducts())]

    logits = []
    for ops, kernels in others:
        monkeypatch.setattr("engine.model_runner.choose_ops", lambda *_, of=(ops, kernels, "a test's"): of)
        logits.append(run_in_chunks(make_runner(folder, device=str(DEVICE), **formats), ids, [6, 4, 1, 1]))

    expected, found = logits
    off = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert off == 0 if is_in_fp8 else off <= 0.02


def test_who_asks_for_torch_gets_no_product_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, device = torch.ones(32, 64), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for wanted, is_in_triton in (("auto", True), ("torch", False)):
        _, kernels, _ = choose_ops(wanted, device, torch.bfloat16, 128)
        for quantization in ("int8", "int4", "fp8"):
            assert isinstance(make_matrix(weight, kernels, quantization), TritonMatrix) == is_in_triton


@pytest.mark.parametrize(
    ("wanted", "device", "head_dim", "kind", "reason"),
    [
        ("auto", "cuda", 128, TritonOps, "in Triton"),
        ("auto", "cuda", 10, TorchOps, "multiple of 4 dimensions, not of 10"),
        ("torch", "cuda", 128, TorchOps, "not wanted"),
        ("torch", "cpu", 128, TorchOps, "not wanted"),
        ("auto", "mps", 128, TorchOps, "need a CUDA device, this is mps"),
    ],
)
def test_a_gpu_takes_them_unless_torch_is_wanted(
    wanted: str, device: str, head_dim: int, kind: type, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    ops, kernels, why = choose_ops(wanted, torch.device(device), torch.bfloat16, head_dim)

    assert type(ops) is kind and reason in why
    assert isinstance(kernels, TritonProducts) == (device == "cuda" and wanted == "auto")


def test_an_older_gpu_computes_in_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    ops, _, why = choose_ops("auto", torch.device("cuda"), torch.float16, 128)

    assert type(ops) is TorchOps and why == "Triton's kernels need compute capability 8.0 or newer"
