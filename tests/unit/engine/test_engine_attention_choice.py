"""Which attention backend is taken, and what is said about it."""

from __future__ import annotations

import sys
from typing import Any

import plain_kernels
import pytest
import torch

from cluster.errors import ConfigError
from engine.attention import registry
from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention, VarlenAttention, varlen_backend
from engine.attention.interface import AttentionBatch
from engine.attention.registry import ATTENTION_BACKENDS, Heads, choose_attention

CPU = torch.device("cpu")


def test_the_cpu_is_chosen_where_there_is_no_gpu_and_says_why() -> None:
    backend, reason = choose_attention("auto", CPU, torch.float32)

    assert backend.name == "cpu"
    assert reason == "FlashAttention needs a CUDA device, this is cpu; Triton's kernels need a CUDA device, this is cpu"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, as far as the choice of a backend asks, with triton and this torch's varlen_attn, without flash-attn."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    backend = VarlenAttention(plain_kernels.varlen_attn_with_pages, CPU)
    monkeypatch.setitem(ATTENTION_BACKENDS, "varlen", lambda *_: backend)
    return torch.device("cuda")


NO_FLASH_ATTN = "flash-attn cannot be imported (import of flash_attn halted; None in sys.modules)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "kv_dtype"), [(16, None), (256, None), (16, torch.int8), (48, torch.uint8)])
def test_on_a_gpu_every_block_size_type_and_rounding_leaves_decode_steps_to_graphs(
    hopper: torch.device, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None
) -> None:
    """Without flash-attn, torch 2.11's varlen_attn reads no pages: every layer gathered all KV in every step."""
    backend, reason = choose_attention("auto", hopper, dtype, None, block_size, kv_dtype)

    assert backend.name == "triton" and backend.static_obstacle(block_size, kv_dtype or dtype) == ""
    assert reason.endswith("; the first that reads the KV cache in place")
    assert dtype == torch.float32 or reason.startswith(NO_FLASH_ATTN)


@pytest.mark.parametrize(
    ("block_size", "name", "reason"),
    [
        (512, "flash_attn", "the first that reads the KV cache in place"),
        (16, "triton", "flash_attn: blocks of 16 tokens are gathered before attention; set block_size to 256; "),
    ],
)
def test_flash_attn_comes_first_where_it_reads_pages_in_place(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, block_size: int, name: str, reason: str
) -> None:
    flash = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setitem(ATTENTION_BACKENDS, "flash_attn", lambda *_: flash)

    backend, why = choose_attention("auto", hopper, torch.bfloat16, None, block_size)

    assert backend.name == name and why.startswith(reason)


class TimedBackend(CpuAttention):
    """Plain torch, after which the clock of the test stands `seconds` later; or an error."""

    def __init__(self, name: str, seconds: float, clock: list[float]) -> None:
        super().__init__()
        self.name, self._seconds, self._clock = name, seconds, clock
        self.batches: list[tuple[int, int, int]] = []

    def static_obstacle(self, block_size: int, kv_dtype: torch.dtype) -> str:
        return ""

    def __call__(self, q: Any, k: Any, v: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        assert k.shape == v.shape and k.dtype == q.dtype and list(k.shape[1:]) == [64, 2, 8]
        self.batches.append((len(batch.step.seqlens_k), len(q), len(k) * k.shape[1]))
        if self._seconds < 0:
            raise RuntimeError("no kernel image is available")
        out = super().__call__(q, k, v, batch, **options)
        self._clock[0] += self._seconds
        return out


@pytest.mark.parametrize(
    ("seconds", "name", "reason"),
    [
        ({"a": 0.003, "b": 0.002}, "b", "the fastest in a trial (b 4.00 ms, a 6.00 ms)"),
        ({"a": 0.001, "b": 0.002}, "a", "the fastest in a trial (a 2.00 ms, b 4.00 ms)"),
        ({"a": -1, "b": 9}, "b", "a failed in a trial: no kernel image is available; the fastest in a trial (b 18"),
        ({"a": -1, "b": -1}, "a", "a failed in a trial: no kernel image is available; b failed in a trial"),
        ({"a": 9}, "a", "the only one that reads the KV cache in place"),
    ],
)
def test_of_several_that_read_pages_in_place_the_fastest_is_taken(
    seconds: dict[str, float], name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    backends = {own: TimedBackend(own, seconds[own], clock) for own in seconds}
    monkeypatch.setattr(registry, "ATTENTION_BACKENDS", {own: lambda *_, own=own: backends[own] for own in seconds})
    monkeypatch.setattr(registry, "_TRIALS", trials := ((3, 1, 130), (1, 40, 100)))
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    chosen, why = choose_attention("auto", CPU, torch.float32, None, 64, None, Heads(6, 2, 8))

    assert chosen.name == name and why.startswith(reason)
    shapes = [(3, 3, 3 * 192), (1, 40, 128)]
    for backend in backends.values():
        assert len(seconds) == 1 or set(backend.batches) <= set(shapes)
        assert len(backend.batches) == (0 if len(seconds) == 1 else 1 if backend._seconds < 0 else 2 * len(trials) * 3)


@pytest.mark.parametrize(
    ("wanted", "dtype", "kv_dtype", "name"),
    [
        ("auto", torch.bfloat16, None, "flash_attn"),
        ("auto", torch.float32, None, "triton"),
        ("auto", torch.bfloat16, torch.int8, "triton"),
        ("triton", torch.bfloat16, None, "triton"),
        ("varlen", torch.bfloat16, None, "varlen"),
    ],
    ids=str,
)
def test_blocks_of_no_given_size_suit_the_attention_that_is_chosen(
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    name: str,
) -> None:
    """Where flash-attn is installed, nobody has to know that it wants blocks of 256 tokens."""
    monkeypatch.setitem(sys.modules, "flash_attn", plain_kernels)

    backend, _ = choose_attention(wanted, hopper, dtype, kv_dtype=kv_dtype)

    assert backend.name == name and backend.static_obstacle(backend.block_size, kv_dtype or dtype) == ""


@pytest.mark.parametrize(
    ("block_size", "dtype", "name", "reason"),
    [
        (256, torch.bfloat16, "varlen", "the first that reads the KV cache in place"),
        (16, torch.bfloat16, "varlen", "cpu: attention in plain torch is laid out anew for each step; the fastest"),
        (16, torch.float32, "cpu", "FlashAttention needs float16 or bfloat16, this is float32"),
    ],
)
def test_without_triton_the_fastest_other_backend_is_taken(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, block_size: int, dtype: torch.dtype, name: str, reason: str
) -> None:
    monkeypatch.setattr("engine.triton.target.find_spec", lambda name: None)
    if dtype == torch.float32:
        monkeypatch.setitem(ATTENTION_BACKENDS, "varlen", varlen_backend)

    backend, why = choose_attention("auto", hopper, dtype, None, block_size)

    assert backend.name == name and "triton is not installed" in why and reason in why


@pytest.mark.parametrize("wanted", ["flash_attn", "triton", "varlen"])
def test_a_backend_that_cannot_run_is_refused_with_the_reason(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"attention: {wanted} cannot run: .*needs? a CUDA device.*use auto or cpu"):
        choose_attention(wanted, CPU, torch.bfloat16)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="attention: 'xformers' is unknown; use auto, flash_attn, triton, varlen, cpu"
    ):
        choose_attention("xformers", CPU, torch.float32)
