"""FlashAttention on CUDA: the flash-attn package, and torch's own `varlen_attn`.

Both read pages through a block table when the pool's block_size is a multiple of 256 (their kernels' requirement) and
its heads are not rounded; else the keys of the batch are gathered first. What torch's function takes and can do depends
on its version, so its signature is read and pages are tried once. `*_backend` return a reason where they can't run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from engine.attention.interface import Attention, AttentionBatch, PagedBatch, unfixed
from engine.kv.pool import is_rounded
from engine.quantization.interface import Kernels
from engine.step_input import SequenceSlice, build_step

_PAGE_MULTIPLE = 256
_MOST_OFF = 0.02
"""Difference between two ways to compute a trial in bfloat16."""


def flash_attn_backend(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Attention | str:
    """The flash-attn package's backend, or why there is none."""
    if obstacle := _obstacle(device, dtype) or unfixed(kernels):
        return obstacle
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        return f"flash-attn cannot be imported ({error})"
    return FlashAttention(module.flash_attn_varlen_func)


def varlen_backend(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Attention | str:
    """The backend over torch's varlen_attn, or why there is none."""
    if obstacle := _obstacle(device, dtype) or unfixed(kernels):
        return obstacle
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        return f"this torch has no varlen_attn ({error})"
    if "window_size" not in inspect.signature(module.varlen_attn).parameters:
        return f"varlen_attn of torch {torch.__version__} takes no window_size; install torch 2.11 or newer"
    return VarlenAttention(module.varlen_attn, device)


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why no FlashAttention kernel can run on this device in this type; empty if one can."""
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device, this is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention needs float16 or bfloat16, this is {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashAttention needs compute capability 8.0 or newer"
    return ""


class _RaggedKernel:
    """A function of flash-attn's form: queries, keys and values, and the batch's sizes in its order."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: PagedBatch, **options: Any
    ) -> torch.Tensor:
        sizes = (paged.cu_seqlens_q, paged.cu_seqlens_k, paged.max_seqlen_q, paged.max_seqlen_k)
        out: torch.Tensor = self._function(q, k, v, *sizes, **options)
        return out

    def _call_gathered(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, **options: Any
    ) -> torch.Tensor:
        """Gathers the pages' keys and values first, part by part."""
        outs = [
            self._call(q[rows], part.gather(k, q.dtype), part.gather(v, q.dtype), part.paged, **options)
            for rows, part in batch.parts
        ]
        return torch.cat(outs)


class FlashAttention(_RaggedKernel):
    """`flash_attn.flash_attn_varlen_func`."""

    name = "flash_attn"
    block_size = _PAGE_MULTIPLE

    def static_obstacle(self, block_size: int, kv_dtype: torch.dtype) -> str:
        return _page_obstacle(block_size, kv_dtype)

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
    ) -> torch.Tensor:
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        if not self.static_obstacle(batch.block_size, k.dtype):
            return self._call(q, k, v, batch.paged, block_table=batch.paged.block_table, **options)
        return self._call_gathered(q, k, v, batch, **options)


class VarlenAttention(_RaggedKernel):
    """`torch.nn.attention.varlen.varlen_attn`, called with the arguments that its version has."""

    name = "varlen"
    block_size = _PAGE_MULTIPLE

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        super().__init__(function)
        parameters = inspect.signature(function).parameters
        self._has_gqa = "enable_gqa" in parameters
        self._has_splits = "num_splits" in parameters
        self._takes_groups = True
        self._takes_groups = self._has_gqa or self._try_groups(device)
        self._paging_obstacle = "its varlen_attn takes no block_table"
        if {"block_table", "seqused_k"} <= parameters.keys():
            self._paging_obstacle = self._try_pages(device)

    def static_obstacle(self, block_size: int, kv_dtype: torch.dtype) -> str:
        if self._paging_obstacle:
            return f"torch {torch.__version__} cannot read pages in place: {self._paging_obstacle}"
        return _page_obstacle(block_size, kv_dtype)

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
    ) -> torch.Tensor:
        window = (window_size[0], 0 if causal else window_size[1])
        if not self.static_obstacle(batch.block_size, k.dtype):
            return self._attend_pages(q, k, v, batch.paged, softmax_scale, window)
        return self._call_gathered(q, k, v, batch, scale=softmax_scale, window_size=window)

    def _attend_pages(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        paged: PagedBatch,
        softmax_scale: float,
        window: tuple[int, int],
    ) -> torch.Tensor:
        options: dict[str, Any] = {"block_table": paged.block_table, "seqused_k": paged.seqlens_k}
        if self._has_splits and not _may_split(q, k, paged, window):
            # Split in any other case, rows of later sequences stay unwritten: github.com/pytorch/pytorch/issues/194167
            options["num_splits"] = 1
        return self._call(q, k, v, paged, scale=softmax_scale, window_size=window, **options)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: PagedBatch, **options: Any
    ) -> torch.Tensor:
        if self._has_gqa:
            options["enable_gqa"] = True
        elif not self._takes_groups and "block_table" not in options and q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        if _may_split(q, k, paged, options["window_size"]):
            options["window_size"] = (-1, -1)
        return super()._call(q, k, v, paged, **options)

    def _try_groups(self, device: torch.device) -> bool:
        """Whether query heads may share a KV head although no argument says so: as of torch 2.11, whose kernel takes
        them. Else keys and values are copied for each."""
        q, k, v = _noise(((8, 4, 64), (8, 2, 64), (8, 2, 64)), device)
        ends = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
        paged = PagedBatch(ends, ends, ends.diff(), ends[:0], 5, 5)
        options: dict[str, Any] = {"scale": 0.125, "window_size": (-1, 0)}
        copied = self._call(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), paged, **options)
        try:
            shared = self._call(q, k, v, paged, **options)
        except (RuntimeError, ValueError, TypeError):
            return False
        return bool(shared.shape == copied.shape and (shared.float() - copied.float()).abs().max() < _MOST_OFF)

    def _try_pages(self, device: torch.device) -> str:
        """Why pages cannot be read through a table, empty if they can: some versions know the argument and refuse it.

        Two sequences in two pages, laid out in reverse: what is read in place must equal what is read after a copy.
        """
        pages = (2, _PAGE_MULTIPLE, 2, 64)
        q, k, v = _noise(((2, 4, 64), pages, pages), device)
        step = build_step([SequenceSlice((0,), 99, (1,), True), SequenceSlice((0,), 199, (0,), True)], _PAGE_MULTIPLE)
        batch = AttentionBatch(step, _PAGE_MULTIPLE, device)
        self._paging_obstacle = "not tried yet"
        copied = self(q, k, v, batch, softmax_scale=0.125)
        try:
            in_place = self._attend_pages(q, k, v, batch.paged, 0.125, (-1, 0))
        except (RuntimeError, ValueError, TypeError) as error:
            return str(error).partition("\n")[0]
        difference = (in_place.float() - copied.float()).abs().max().item()
        return "" if difference < _MOST_OFF else f"it is off by {difference:.2g} in a trial"


def _may_split(q: torch.Tensor, k: torch.Tensor, paged: PagedBatch, window: tuple[int, int]) -> bool:
    """Whether every sequence has one token, which sees all keys, causal or not.

    Told that there is no window, the kernel takes query heads that share a KV head for rows of one sequence, and may
    then split the keys of long sequences over the whole GPU.
    """
    return paged.max_seqlen_q == 1 and window in ((-1, 0), (-1, -1)) and q.shape[1] > k.shape[-2]


def _noise(shapes: Iterable[tuple[int, ...]], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def _page_obstacle(block_size: int, kv_dtype: torch.dtype) -> str:
    """Why such pages cannot be read in place; empty if they can."""
    if is_rounded(kv_dtype):
        return "a rounded KV cache is gathered and unpacked before attention; set kv_cache_dtype to auto"
    if block_size % _PAGE_MULTIPLE:
        return f"blocks of {block_size} tokens are gathered before attention; set block_size to {_PAGE_MULTIPLE}"
    return ""
