"""Baton's own kernels compute what plain torch computes, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from engine.kv.pool import decode, encode
from engine.layers.ops import Ops, TorchOps, choose_native
from engine.native import DTYPES, native
from engine.native.build import COMPILE_FLAGS, BuildFailed, build

KERNELS, WHY_NOT = native()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason=f"no kernels here: {WHY_NOT}")
needs_products = pytest.mark.skipif(KERNELS is None or not KERNELS.has_products, reason="no products in bfloat16 here")
CPU = torch.device("cpu")


def both() -> tuple[Ops, Ops]:
    assert KERNELS is not None
    return TorchOps(), KERNELS


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[a.dtype]
    torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64])
@pytest.mark.parametrize("adds", [False, True])
def test_norms(dtype: torch.dtype, num_tokens: int, adds: bool) -> None:
    results = []
    for ops in both():
        x, weight = randn(num_tokens, 1030, dtype=dtype), randn(1030, dtype=dtype, seed=1)
        add = randn(num_tokens, 1030, dtype=dtype, seed=2) if adds else None
        results.append((ops.rms_norm(x, weight, 1e-5, add), x))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
def test_the_middle_of_an_mlp(dtype: torch.dtype, num_tokens: int) -> None:
    for name in ("silu_mul", "gelu_mul"):
        ours, theirs = (getattr(ops, name)(5 * randn(num_tokens, 2 * 901, dtype=dtype)) for ops in both())
        close(ours, theirs)
        extreme = randn(num_tokens, 2 * 901, dtype=dtype)
        extreme[:, :901] *= 90  # whose exponentials no float32 holds
        ours, theirs = (getattr(ops, name)(extreme.clone()) for ops in both())
        close(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 10), (8, 1, 128)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_heads_are_turned_and_stored(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, num_tokens: int
) -> None:
    slots = torch.randperm(4 * 16, generator=torch.Generator().manual_seed(4))[:num_tokens]
    norm = randn(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=3) if has_norm else None
    rows = (randn(num_tokens, 1, head_dim, dtype=dtype, seed=5), randn(num_tokens, 1, head_dim, dtype=dtype, seed=6))
    results = []
    for ops in both():
        pages = tuple(torch.full((4, 16, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in "kv")
        qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        q = ops.rotate_and_store(qkv, norm, 1e-6, rows, slots, (pages[0], pages[1]), num_heads)
        results.append((q, *pages))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    untouched = sorted(set(range(64)) - set(slots.tolist()))
    assert all(bool((pages.flatten(0, 1)[untouched] == 7).all()) for pages in results[1][1:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 10])
def test_heads_that_are_stored_in_int8_are_read_as_they_are_decoded(dtype: torch.dtype, head_dim: int) -> None:
    """Both ways store the same to within one step, and attention sees what `decode` gives."""
    assert KERNELS is not None
    rows = (torch.ones(33, 1, head_dim, dtype=dtype), torch.zeros(33, 1, head_dim, dtype=dtype))
    slots, stored = torch.arange(33), []
    for ops in both():
        pages = tuple(torch.zeros(3, 16, 2, head_dim + 4, dtype=torch.int8) for _ in "kv")
        qkv = randn(33, 8, head_dim, dtype=dtype)
        qkv[5, 4:] = 0
        ops.rotate_and_store(qkv, None, 0.0, rows, slots, (pages[0], pages[1]), 4)
        stored.append(pages)
    plain = randn(33, 8, head_dim, dtype=dtype)
    plain[5, 4:] = 0
    for pages in stored:
        for page, heads in zip(pages, (plain[:, 4:6], plain[:, 6:]), strict=True):
            error = (decode(page.flatten(0, 1)[:33], torch.float32) - heads.float()).abs()
            assert bool((error <= 0.51 / 127 * heads.float().abs().amax(-1, keepdim=True)).all())
    pages = stored[1]
    exact = tuple(decode(page, torch.float32) for page in pages)
    tables, lengths = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([33], dtype=torch.int32)
    q, out, expected = (
        randn(1, 4, head_dim, dtype=dtype),
        torch.zeros(1, 4, head_dim, dtype=dtype),
        torch.zeros(1, 4, head_dim),
    )
    KERNELS.paged_attention(q, (pages[0], pages[1]), tables, lengths, torch.tensor([0]), out, 0.3, -1)
    KERNELS.paged_attention(q.float(), (exact[0], exact[1]), tables, lengths, torch.tensor([0]), expected, 0.3, -1)
    close(out.float() if dtype == torch.float32 else out, expected.to(dtype))


@needs_kernels
@pytest.mark.parametrize(
    ("num_keys", "num_queries"),
    [(2, 2), (63, 7), (64, 64), (65, 2), (65, 64), (200, 2), (200, 7), (200, 64), (200, 200)],
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (5, 1, 128), (3, 3, 16), (2, 1, 80)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [-1, 0, 5, 70])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_prompts_see_what_the_definition_says(
    num_keys: int,
    num_queries: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    is_rounded: bool,
) -> None:
    """And nothing that lies behind the sequence's end, or in other blocks."""
    assert KERNELS is not None
    if not KERNELS.computes_prompts(dtype, head_dim):
        pytest.skip(f"this processor has no kernel for prompts in {dtype}")
    table = torch.randperm(20, generator=torch.Generator().manual_seed(2))[: -(-num_keys // 16)]
    heads = [randn(num_keys, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    stored = [encode(head) if is_rounded else head for head in heads]
    poison = 127 if is_rounded else float("nan")
    pages = [torch.full((20, 16, num_kv_heads, one.shape[2]), poison, dtype=one.dtype) for one in stored]
    at = torch.arange(num_keys)
    for page, one in zip(pages, stored, strict=True):
        page[table[at // 16], at % 16] = one
    q = randn(num_queries, num_heads, head_dim, dtype=dtype)
    out = torch.zeros(num_queries, num_heads, head_dim, dtype=dtype)
    KERNELS.prompt_attention(q, (pages[0], pages[1]), table.to(torch.int32), num_keys, out, 0.2, window)
    k, v = (decode(one, dtype) if is_rounded else one for one in stored)
    k, v = (one.float().repeat_interleave(num_heads // num_kv_heads, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * 0.2
    position = torch.arange(num_keys - num_queries, num_keys)[:, None]
    hidden = (at > position) | ((at < position - window) if window >= 0 else torch.zeros(1, dtype=torch.bool))
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    atol, rtol = (0.03, 0.02) if dtype == torch.bfloat16 else (2e-6, 2e-6)
    torch.testing.assert_close(out.float(), expected, atol=atol, rtol=rtol)


@needs_kernels
def test_attention_reads_nothing_but_the_keys_it_is_asked_for() -> None:
    """What lies behind a sequence's end in its last block, and in other blocks, may be anything."""
    assert KERNELS is not None
    pages = [torch.full((5, 16, 2, 64), float("nan")) for _ in "kv"]
    tables, lengths = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32), torch.tensor([21, 1], dtype=torch.int32)
    for s, length in enumerate(lengths.tolist()):
        for at in range(length):
            for page in pages:
                page[tables[s, at // 16], at % 16] = at + s
    q, out = torch.ones(2, 4, 64), torch.zeros(2, 4, 64)
    KERNELS.paged_attention(q, (pages[0], pages[1]), tables, lengths, torch.tensor([0, 1]), out, 0.1, -1)
    assert bool(out.isfinite().all())
    assert bool((out[1] == 1).all())


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "why"),
    [("cuda", torch.float32, 64, "cuda"), ("cpu", torch.float16, 64, "float16"), ("cpu", torch.float32, 2048, "2048")],
)
def test_where_they_do_not_fit_they_say_so(device: str, dtype: torch.dtype, head_dim: int, why: str) -> None:
    kernels, reason = choose_native("auto", torch.device(device), dtype, head_dim)
    assert kernels is None and why in reason
    with pytest.raises(ConfigError, match=f"native cannot be used: .*{why}.*auto"):
        choose_native("native", torch.device(device), dtype, head_dim)


@needs_kernels
def test_torch_can_be_asked_for_and_nonsense_cannot() -> None:
    assert choose_native("torch", CPU, torch.float32, 64)[0] is None
    assert choose_native("native", CPU, torch.float32, 64)[0] is KERNELS
    with pytest.raises(ConfigError, match="'numpy' is unknown; use auto, native, torch"):
        choose_native("numpy", CPU, torch.float32, 64)


def test_without_a_compiler_there_are_none_and_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="install g\\+\\+"):
        build()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: out of ideas" >&2\nexit 3\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildFailed, match="failed with 3: fatal error: out of ideas"):
        build()
    assert list((tmp_path / "baton").iterdir()) == []


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(BuildFailed, match="set XDG_CACHE_HOME"):
        build()


@needs_kernels
def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without optimization: that the shipped flags compile is shown by the kernels, which all other tests here use."""
    monkeypatch.setattr(sys.modules[build.__module__], "COMPILE_FLAGS", [f for f in COMPILE_FLAGS if f != "-O3"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = build()
    before = first.stat().st_mtime_ns
    assert build() == first and first.stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "baton").iterdir()] == [first.name]


@needs_kernels
def test_loading_does_not_change_how_the_process_rounds() -> None:
    """A library linked for fast arithmetic would make denormals zeros everywhere."""
    code = "import torch; from engine.native import native; native(); assert (torch.tensor([1e-40]) * 1).item() > 0"
    subprocess.run([sys.executable, "-c", code], check=True)
