"""Attention of a ragged batch over paged KV: one interface in flash-attn's terms.

`PagedBatch` is what `flash_attn_varlen_func` takes beside the tensors, `AttentionBatch` makes it from a step; a backend
derives what else it needs once a step (`once`) and reuses it in every layer. The new tokens' KV is in the pages before
a backend is called. Causal masks and windows align bottom-right: query i of Q sees key j of K when
i + K - Q - window_size[0] <= j <= i + K - Q + window_size[1], a bound of -1 being none, and causal a right bound of 0.

Legend: S sequences, T query tokens, B blocks in the longest table, N blocks of the pool, K block_size,
Hq/H query/KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch

from engine.copies import upload
from engine.kv.pool import decode, is_rounded
from engine.quantization.interface import Kernels
from engine.step_input import IntArray, StepInput

Derived = TypeVar("Derived")
_MAX_GATHERED = 1 << 16
"""Keys that are gathered at a time: some 300 MB of an 8B model's."""


@dataclass(frozen=True)
class PagedBatch:
    """The arguments of `flash_attn_varlen_func` beside the tensors: on the device, except the two bounds."""

    cu_seqlens_q: torch.Tensor  # int32 [S+1]
    cu_seqlens_k: torch.Tensor  # int32 [S+1]
    seqlens_k: torch.Tensor  # int32 [S]
    block_table: torch.Tensor  # int32 [S, B]
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class AttentionBatch:
    """One step's sequences, and the values that backends derive from them.

    With `fixed`, which `engine.cuda_graphs` sets, only the number of sequences of the step counts: the rest is in
    device memory that changes from step to step, and backends with a `static_obstacle` must not be called.
    """

    step: StepInput
    block_size: int
    device: torch.device
    fixed: PagedBatch | None = None
    _derived: dict[Hashable, object] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Returns what `make` returned at its first call in this step; `key` must differ between backends."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(Derived, self._derived[key])

    def to_device(self, array: np.typing.NDArray[Any]) -> torch.Tensor:
        return upload(array, self.device)

    @cached_property
    def seqlens_q(self) -> IntArray:
        return np.diff(self.step.cu_seqlens_q)

    @cached_property
    def host_cu_seqlens_k(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(self.step.seqlens_k)]).astype(np.int32)

    @cached_property
    def paged(self) -> PagedBatch:
        """Copies, since arrays that came as bytes cannot be written and torch would warn."""
        if self.fixed is not None:
            return self.fixed
        return PagedBatch(
            cu_seqlens_q=self.to_device(self.step.cu_seqlens_q.copy()),
            cu_seqlens_k=self.to_device(self.host_cu_seqlens_k),
            seqlens_k=self.to_device(self.step.seqlens_k.copy()),
            block_table=self.to_device(self.step.block_tables.copy()),
            max_seqlen_q=int(self.seqlens_q.max()),
            max_seqlen_k=int(self.step.seqlens_k.max()),
        )

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum of seqlens_k]: the slot of every key of every sequence, for backends that cannot read pages.

        Computed on the device, from what is there already.
        """
        paged, count = self.paged, int(self.host_cu_seqlens_k[-1])
        every = torch.arange(len(paged.seqlens_k), device=self.device)
        sequence = every.repeat_interleave(paged.seqlens_k, output_size=count)
        position = torch.arange(count, device=self.device) - paged.cu_seqlens_k[sequence]
        blocks = paged.block_table[sequence, position // self.block_size].long()
        return blocks * self.block_size + position % self.block_size

    def gather(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pages to [sum of seqlens_k, H, D] of a floating type: sequences one after another, as flash-attn wants."""
        cells = pages.flatten(0, 1).index_select(0, self.key_slots)
        return decode(cells, dtype) if is_rounded(cells.dtype) else cells

    @cached_property
    def parts(self) -> list[tuple[slice, AttentionBatch]]:
        """Rows and sequences that follow one another and can be gathered together; more would take too much memory."""
        parts: list[tuple[slice, AttentionBatch]] = []
        ends, first, keys = self.step.cu_seqlens_q.tolist(), 0, 0
        lengths = self.step.seqlens_k.tolist()
        for sequence, length in enumerate(lengths):
            keys += length
            if sequence + 1 == len(lengths) or keys + lengths[sequence + 1] > _MAX_GATHERED:
                rows, sequences = slice(ends[first], ends[sequence + 1]), slice(first, sequence + 1)
                parts.append((rows, AttentionBatch(_part(self.step, rows, sequences), self.block_size, self.device)))
                first, keys = sequence + 1, 0
        return parts


class Attention(Protocol):
    """A backend. Stateless: what belongs to a step is kept in its batch."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that suit it best."""
        ...

    def static_obstacle(self, block_size: int, kv_dtype: torch.dtype) -> str:
        """Why it cannot compute from a batch's `paged` alone, as a captured step must; empty if it can."""
        ...

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
        """[T, Hq, D] queries against [N, K, H, D] pages; returns [T, Hq, D]."""
        ...


def merge(parts: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """Attention to all keys, [T, Hq, D], of attention to n parts of them: [n, T, Hq, D], and the logarithms of the sums
    of the softmaxes, float32 [n, T, Hq], as backends give them that take `log_sums` (arXiv 2501.01005). A part may have
    no keys."""
    shares = torch.softmax(log_sums, dim=0).unsqueeze(-1)
    return (parts.float() * shares).sum(dim=0).to(parts.dtype)


def unfixed(kernels: Kernels | None) -> str:
    """Says that a backend whose rows depend on one another does not fit, where kernels are fixed; empty elsewhere."""
    return "a row's bits depend on the rest of the step there" if kernels is not None and kernels.is_fixed else ""


def _part(step: StepInput, rows: slice, sequences: slice) -> StepInput:
    """Some sequences of a step, as far as attention looks at it."""
    return replace(
        step,
        token_ids=step.token_ids[rows],
        positions=step.positions[rows],
        slot_mapping=step.slot_mapping[rows],
        cu_seqlens_q=step.cu_seqlens_q[sequences.start : sequences.stop + 1] - rows.start,
        seqlens_k=step.seqlens_k[sequences],
        block_tables=step.block_tables[sequences],
    )
