"""Baton's own kernels for the CPU: products with few rows, attention over pages, and what lies between products.

`native()` compiles and loads them once for each process; where that cannot be, it says why and the engine computes the
same in plain torch. Tensors are rows of contiguous memory in float32 or bfloat16, and everything a call is given must
have one type, which callers check once, when a model is loaded.

Legend: T tokens, I inputs, O outputs, S sequences, B blocks in the longest table, N blocks of the pool, K block_size,
Hq/H query/KV heads, D head_dim, W width of an MLP.
"""

from __future__ import annotations

import copy
import ctypes
import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.native.build import BuildFailed, build
from engine.native.structures import DecodeBatch, DecodeModel, NativeExperts, SharedRank, Tiles, Weight

DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 1024
_POINTER, _COUNT, _FLOAT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_WEIGHT = ctypes.POINTER(Weight)
DECODE_PAGES = {torch.bfloat16: "bfloat16", torch.int8: "int8"}
"""Types of pages that `decode` reads."""
PROMPTS = ((torch.float32, "float"), (torch.bfloat16, "bfloat16"))
"""Types that `prompt_attention` computes in; a processor that has one has those before it."""
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER, _COUNT, *[_POINTER] * 3, _COUNT, _COUNT, _FLOAT],
    "silu_mul": [_POINTER, _POINTER, _COUNT, _COUNT],
    "gelu_mul": [_POINTER, _POINTER, _COUNT, _COUNT],
}
_PAGE_SIGNATURES: dict[str, list[Any]] = {
    "rotate_and_store": [_POINTER, _POINTER, _FLOAT, *[_POINTER] * 5, *[_COUNT] * 4],
    "paged_attention": [
        *[_POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _POINTER],
        *[*[_COUNT] * 5, _FLOAT, _COUNT, _FLOAT, _POINTER],
    ],
}


class Native:
    """The loaded library. Calls let other threads run; they compute with torch's number of threads."""

    is_fixed = False
    """Whether who uses it is to give a row the same bits in any step (`fixed`); its own functions do."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._functions: dict[tuple[str | torch.dtype, ...], Any] = {}
        """The functions by name, type that is computed in and, where pages are read or written, theirs."""
        for dtype in DTYPES:
            of_type = str(dtype).removeprefix("torch.")
            for name, arguments in _SIGNATURES.items():
                self._functions[name, dtype] = self._bind(f"{name}_{of_type}", arguments)
            for name, arguments in _PAGE_SIGNATURES.items():
                self._functions[name, dtype, dtype] = self._bind(f"{name}_{of_type}", arguments)
                self._functions[name, dtype, torch.int8] = self._bind(f"{name}_{of_type}_int8", arguments)
        self._mask_rows = self._bind("mask_rows", [_POINTER, _COUNT, _COUNT, _POINTER, _POINTER, _COUNT, _FLOAT])
        self._largest_kept = self._bind("largest_kept", [_POINTER, _COUNT, _COUNT, _POINTER, _COUNT, _FLOAT, _POINTER])
        self._known: tuple[list[ref[npt.NDArray[np.int32]]], npt.NDArray[np.uintp]] = [], np.empty(0, np.uintp)
        """The words of the rows that were masked last, and their addresses."""
        products = self._library.baton_products()
        self.has_products = products > 0
        """Whether this processor multiplies bytes (AVX512-VNNI); without it, `linear` and `decode` are not there."""
        self.has_bf16_products = products > 1
        """Whether it multiplies bfloat16 as well (AVX512-BF16)."""
        if self.has_products:
            self._linear = self._bind("linear", [_POINTER, _WEIGHT, _POINTER, _POINTER, _FLAG, _COUNT])
            self._experts = self._bind("experts", [_POINTER] * 8 + [_COUNT])
            self._decode = {
                kind: self._bind(f"decode_{name}", [_POINTER] * 2, ctypes.c_int) for kind, name in DECODE_PAGES.items()
            }
        arguments = [_POINTER, _COUNT, _POINTER, _POINTER, _FLAG, _POINTER, _POINTER]
        arguments += [*[_COUNT] * 6, _FLOAT, _COUNT, _FLOAT, _POINTER]
        self._prompts = {
            dtype: self._bind(f"prompt_attention_{name}", arguments)
            for dtype, name in PROMPTS[: self._library.baton_prompt_attentions()]
        }

        if sys.platform == "linux":
            memory, count = ctypes.POINTER(SharedRank), ctypes.c_int32
            arguments = [memory, count, _POINTER, _POINTER, _COUNT, _COUNT, count, count]
            self.ranks_meet = self._bind("ranks_meet", arguments, count)
            self.ranks_leave = self._bind("ranks_leave", [memory])
            self.ranks_bytes = self._bind("ranks_bytes", [_COUNT, _COUNT], _COUNT)

    def fixed(self) -> Native:
        """Returns the same library, for a model whose rows are to have the same bits in any step."""
        other = copy.copy(self)
        other.is_fixed = True
        return other

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, rounds: bool = False
    ) -> Tensor:
        """[T, E] normalised; with `add`, x += add first, in place."""
        assert not rounds, "no product on a CPU takes rounded rows"
        num_tokens, width = x.shape
        out = torch.empty((num_tokens, width), dtype=x.dtype)
        self._functions["rms_norm", x.dtype](
            x.data_ptr(), x.stride(0), _address(add), weight.data_ptr(), out.data_ptr(), num_tokens, width, eps
        )
        return out

    def silu_mul(self, gate_up: Tensor, rounds: bool = False) -> Tensor:
        """silu(gate) * up of [T, 2 W]: [T, W]."""
        assert not rounds, "no product on a CPU takes rounded rows"
        return self._gate("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up of [T, 2 W], gelu by its approximation with tanh: [T, W]."""
        return self._gate("gelu_mul", gate_up)

    def _gate(self, name: str, gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype)
        self._functions[name, gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), num_tokens, width)
        return out

    def mask_rows(self, logits: Tensor, kept: Mapping[int, npt.NDArray[np.int32]]) -> None:
        """Makes all of the rows named of float32 logits [R, V] minus infinity but what their words have a bit for, the
        lowest first."""
        rows = np.fromiter(kept, np.int64, len(kept))
        addresses = rows.ctypes.data, self._addresses(kept).ctypes.data
        self._mask_rows(logits.data_ptr(), logits.stride(0), logits.shape[1], *addresses, len(kept), -math.inf)

    def largest_kept(self, logits: Tensor, kept: Mapping[int, npt.NDArray[np.int32]]) -> Tensor:
        """The first of the largest of each row of float32 logits [R, V], in the rows named of those that their words
        have a bit for: int64 [R]."""
        words = np.zeros(len(logits), np.uintp)
        words[np.fromiter(kept, np.int64, len(kept))] = self._addresses(kept)
        at = torch.empty(len(logits), dtype=torch.int64)
        sizes = logits.stride(0), logits.shape[1], words.ctypes.data, len(logits)
        self._largest_kept(logits.data_ptr(), *sizes, -math.inf, at.data_ptr())
        return at

    def _addresses(self, kept: Mapping[int, npt.NDArray[np.int32]]) -> npt.NDArray[np.uintp]:
        """Where the words of each row lie, one after another. Numpy takes microseconds to tell: they are looked up once
        while the rows of the steps are the same, as a sequence's words stay where they are."""
        words = list(kept.values())
        those, addresses = self._known
        if len(those) != len(words) or not all(known() is each for known, each in zip(those, words, strict=True)):
            addresses = np.fromiter((each.ctypes.data for each in words), np.uintp, len(words))
            self._known = [ref(each) for each in words], addresses
        return addresses

    def rotate_and_store(
        self,
        qkv: Tensor,
        head_norm: Tensor | None,
        eps: float,
        rope_rows: tuple[Tensor, Tensor],
        slots: Tensor,
        pages: tuple[Tensor, Tensor],
        num_heads: int,
    ) -> Tensor:
        """Normalises (if asked to) and turns the query and key heads of [T, Hq + 2 H, D], and stores keys and values.

        In place; returns the query heads, a view. `head_norm` is [Hq + H, D], `slots` int64 [T]. Pages are as computed,
        or `engine.kv.pool.encode`d.
        """
        num_tokens, all_heads, head_dim = qkv.shape
        num_kv_heads = (all_heads - num_heads) // 2
        cos, sin = rope_rows
        self._functions["rotate_and_store", qkv.dtype, pages[0].dtype](
            qkv.data_ptr(),
            _address(head_norm),
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            pages[0].data_ptr(),
            pages[1].data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
        )
        return qkv[:, :num_heads]

    def paged_attention(
        self,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        tables: Tensor,
        lengths: Tensor,
        rows: Tensor,
        out: Tensor,
        scale: float,
        window: int,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        log_sums: Tensor | None = None,
    ) -> None:
        """Writes, for S sequences, what token `rows[s]` of q sees: its own and the keys before it.

        q and out are [T, Hq, D], tables int32 [S, B], lengths int32 [S] in tokens, rows int64 [S]; `window` is how many
        keys before its own it sees, -1 for all. Pages may be `engine.kv.pool.encode`d. Reads no key that is not asked
        for. `soft_cap`: scores become soft_cap * tanh(score / soft_cap), 0: they stay. `sinks`, float32 [Hq]: a score
        of each head whose key has no value. `log_sums`, float32 [T, Hq], gets the logarithm of the sum of each
        softmax; of no keys that is -1e30, and what is seen zeros.
        """
        k, v = pages
        _, block_size, num_kv_heads, _ = k.shape
        self._functions["paged_attention", q.dtype, k.dtype](
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            lengths.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            _address(log_sums),
            lengths.shape[0],
            q.shape[1],
            num_kv_heads,
            q.shape[2],
            block_size,
            scale,
            window,
            soft_cap,
            _address(sinks),
        )

    def computes_prompts(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether `prompt_attention` is there for heads of this type and size."""
        return dtype in self._prompts and head_dim % 16 == 0

    def prompt_attention(
        self,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        table: Tensor,
        num_keys: int,
        out: Tensor,
        scale: float,
        window: int,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes what the newest Q tokens of a sequence of `num_keys` see: their own and the keys before them.

        q and out are [Q, Hq, D], table int32 [B]; the rest is as for `paged_attention`.
        """
        k, v = pages
        _, block_size, num_kv_heads, _ = k.shape
        num_queries, num_heads, head_dim = q.shape
        self._prompts[q.dtype](
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            k.dtype == torch.int8,
            table.data_ptr(),
            out.data_ptr(),
            num_queries,
            num_keys,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            scale,
            window,
            soft_cap,
            _address(sinks),
        )

    def linear(
        self, x: Tensor, tiles: Tiles, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """bfloat16 [T, I] times a weight: [T, O] in `dtype`, which is bfloat16 or float32. For a weight in fewer bits
        x is rounded to 8, with a scale for every SPAN inputs."""
        num_tokens = x.shape[0]
        out = torch.empty((num_tokens, tiles.num_outputs), dtype=dtype)
        self._linear(x.data_ptr(), tiles.weight, _address(bias), out.data_ptr(), dtype == torch.float32, num_tokens)
        return out

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        experts: NativeExperts,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
        choice: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """bfloat16 [T, E] through the experts that a router's logits, float32 [T, N], choose: [T, E].

        With `shared`, [T, E], the output of the expert that every token takes is added, times the sigmoid of `gate`,
        float32 [T, 1], if there is one. `choice`: experts [T, K] and their shares, instead of those that the logits
        choose.
        """
        out = torch.empty_like(x)
        if len(x):
            chosen, shares = (None, None) if choice is None else (choice[0].int(), choice[1].float().contiguous())
            choices = logits.data_ptr(), _address(chosen), _address(shares)
            addresses = x.data_ptr(), *choices, _address(shared), _address(gate), out.data_ptr()
            self._experts(ctypes.byref(experts), *addresses, len(x))
        return out

    def decode(self, model: DecodeModel, batch: DecodeBatch, pages: torch.dtype) -> bool:
        """Computes a whole step: writes keys and values to the pages, which are of this type, and the logits. False,
        and nothing is computed, when the batch names a token, position or block that is not there."""
        return bool(self._decode[pages](ctypes.byref(model), ctypes.byref(batch)))

    def _bind(self, name: str, arguments: list[Any], result: Any = None) -> Any:
        function = getattr(self._library, f"baton_{name}")
        function.argtypes, function.restype = arguments, result
        return function


@cache
def native() -> tuple[Native | None, str]:
    """The kernels and their origin; or None, and why there are none."""
    try:
        path = build()
        return Native(str(path)), f"compiled for this processor ({path.name})"
    except BuildFailed as error:
        return None, str(error)
    except OSError as error:
        return None, f"the library cannot be loaded: {error}"


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
