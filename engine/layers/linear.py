"""Megatron's tensor-parallel layers, each built from the slices of a checkpoint that its rank needs.

Column-parallel layers split their outputs, row-parallel ones their inputs and sum afterwards; the embedding and the
head split the vocabulary. Every parameter names the slices it consists of (`TensorSlice`), so sharding and fusing
happen while reading. The group is an argument; these layers know neither models nor steps.

Legend: T tokens, I inputs, O outputs of this rank, E hidden_size, V vocab_size, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.nn.functional as F

from engine.checkpoint import Checkpoint, TensorSlice
from engine.layers.ops import Ops
from engine.quantization import packed, scaled
from engine.quantization.blocks import keep_blocks, kept_kind
from engine.quantization.fp8 import ScaledFp8Matrix
from engine.quantization.integers import make_quantized
from engine.quantization.interface import Kernels, Matrix, RoundedRows, Rows, TritonProducts, make_matrix
from engine.quantization.packed import keep_codes, read_codes, reorder
from engine.quantization.stored import Blocks, Packing, Scaling, Stored
from engine.tp import TPGroup

Order = torch.Tensor | None
"""The order of a tensor's rows, int64; None: as they are."""


@dataclass(frozen=True)
class Loader:
    """Makes parameters of one rank on its device from a checkpoint."""

    checkpoint: Checkpoint
    tp: TPGroup
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels | None
    quantization: str
    packing: Stored | None
    keeps_codes: bool
    """Whether what is packed stays so where it can (`Packing.keeps_codes`)."""
    ops: Ops

    def linear(self, parts: Sequence[TensorSlice], orders: Sequence[Order] = ()) -> Matrix:
        """The matrix of all parts' outputs, one after another; each part may be plain or packed.

        `orders`: for each part, the order in which its outputs are wanted; none: as they are.
        """
        orders = orders or (None,) * len(parts)
        kept = self._keep(parts, orders) if self.keeps_codes else None
        return kept or self.matrix(self._join(parts, self._read_weight, orders))

    def plain(self, parts: Sequence[TensorSlice]) -> torch.Tensor:
        """All parts' outputs in the type that is computed in, for who multiplies with them in a way of its own."""
        return self._join(parts, self._read_weight, (None,) * len(parts))

    def stack(self, parts: Sequence[TensorSlice], orders: Sequence[Order] = ()) -> torch.Tensor:
        """One tensor of all parts, one after another along dim 0; `orders` as of `linear`."""
        return self._join(parts, self.checkpoint.read, orders or (None,) * len(parts))

    def _keep(self, parts: Sequence[TensorSlice], orders: Sequence[Order]) -> Matrix | None:
        """Returns the matrix in its codes; None where a part is plain, or codes cannot be multiplied as they are."""
        if isinstance(self.packing, Scaling):
            return self._keep_int8(self.packing, parts, orders)
        if isinstance(self.packing, Blocks):
            return self._keep_blocks(self.packing, parts, orders)
        if not isinstance(self.packing, Packing) or any(part.name in self.checkpoint for part in parts):
            return None
        codes = [read_codes(self.checkpoint, self.packing, part, self.device) for part in parts]
        found = keep_codes([one.reorder(order) for one, order in zip(codes, orders, strict=True)])
        if found is None:
            return None
        weight, order = found
        return make_quantized(weight, self.kernels, order)

    def _keep_int8(self, scaling: Scaling, parts: Sequence[TensorSlice], orders: Sequence[Order]) -> Matrix | None:
        if not all(scaling.scales_of(part.name) in self.checkpoint for part in parts):
            return None
        whole = [scaled.read_int8(self.checkpoint, scaling, part, self.device) for part in parts]
        data = torch.cat([reorder(part.data, order) for part, order in zip(whole, orders, strict=True)])
        scales = torch.cat([reorder(part.scales, order) for part, order in zip(whole, orders, strict=True)])
        return make_quantized(replace(whole[0], data=data, scales=scales), self.kernels)

    def _keep_blocks(self, blocks: Blocks, parts: Sequence[TensorSlice], orders: Sequence[Order]) -> Matrix | None:
        names, num_inputs = [part.name for part in parts], parts[0].local_shape[1]
        kind = kept_kind(blocks, names, num_inputs, self.quantization, isinstance(self.kernels, TritonProducts))
        weight = None if kind is None else keep_blocks(self.checkpoint, parts, kind, self.device)
        if weight is None:
            return None
        order = _joined(parts, orders, self.device)
        weight = replace(weight, data=reorder(weight.data, order), scales=reorder(weight.scales, order))
        return make_quantized(weight, self.kernels)

    def _read_weight(self, part: TensorSlice, out: torch.Tensor) -> None:
        if isinstance(self.packing, Packing):
            packed.read_weight(self.checkpoint, self.packing, part, out)
        elif isinstance(self.packing, Scaling):
            scaled.read_weight(self.checkpoint, self.packing, part, out)
        else:
            self.checkpoint.read(part, out)

    def _join(
        self,
        parts: Sequence[TensorSlice],
        read: Callable[[TensorSlice, torch.Tensor], None],
        orders: Sequence[Order],
    ) -> torch.Tensor:
        rows = sum(part.local_shape[0] for part in parts)
        out = torch.empty((rows, *parts[0].local_shape[1:]), dtype=self.dtype, device=self.device)
        start = 0
        for part, order in zip(parts, orders, strict=True):
            stop = start + part.local_shape[0]
            read(part, out[start:stop])
            if order is not None:
                out[start:stop] = reorder(out[start:stop], order)
            start = stop
        return out

    def matrix(self, weight: torch.Tensor) -> Matrix:
        """A weight that is multiplied with, in the form that this rank's machine multiplies fastest."""
        return make_matrix(weight, self.kernels, self.quantization)

    def equal_share(self, total: int) -> range:
        """This rank's part of `total` columns or rows that the ranks divide evenly."""
        count = total // self.tp.size
        return range(self.tp.rank * count, (self.tp.rank + 1) * count)


def _joined(parts: Sequence[TensorSlice], orders: Sequence[Order], device: torch.device) -> Order:
    """The order of all parts' rows, one part after another."""
    if all(order is None for order in orders):
        return None
    start, rows = 0, []
    for part, order in zip(parts, orders, strict=True):
        count = part.local_shape[0]
        rows.append(start + (torch.arange(count, device=device) if order is None else order))
        start += count
    return torch.cat(rows)


class RmsNorm:
    """Root mean square normalisation over the last dimension (arXiv 1910.07467)."""

    def __init__(self, loader: Loader, name: str, size: int, eps: float, is_offset: bool = False) -> None:
        """`is_offset`: the checkpoint has how far each weight is from 1."""
        self.weight = loader.stack([TensorSlice(f"{name}.weight", (size,))])
        if is_offset:
            self.weight += 1
        self._eps = eps
        self._ops = loader.ops

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None, rounds: bool = False) -> Rows:
        """With `add`, x += add comes first, in place. `rounds`: for a layer that takes rounded rows."""
        return self._ops.rms_norm(x, self.weight, self._eps, add, rounds)


class ProjectionNorm:
    """Root mean square normalisation over all query heads together and over all key heads, those of all ranks."""

    def __init__(
        self,
        loader: Loader,
        name: str,
        columns: Sequence[tuple[int, range]],
        eps: float,
        head_order: tuple[int, ...] | None,
        num_kv_heads: int,
    ) -> None:
        """`columns`: how many outputs queries have and which are this rank's, then of keys; `head_order`: as of
        `Projection`. Ranks that outnumber the `num_kv_heads` hold keys several times."""
        projections = [
            Projection(f"{name}.{which}_norm", total, own, head_order)
            for which, (total, own) in zip("qk", columns, strict=True)
        ]
        parts = [TensorSlice(f"{p.name}.weight", (p.total,), 0, p.own.start, p.own.stop) for p in projections]
        self._weight = loader.stack(parts, [p.order(loader.device) for p in projections])
        self._num_queries, self._tp, self._eps = len(columns[0][1]), loader.tp, eps
        self._sizes = columns[0][0], columns[1][0] * max(1, loader.tp.size // num_kv_heads)

    def __call__(self, qkv: torch.Tensor) -> None:
        """Normalises the queries and keys of [T, Hq D + 2 H D], in place. Rounds once, after the weight."""
        turned = qkv[:, : len(self._weight)]
        wide = turned.float()
        q, k = wide[:, : self._num_queries], wide[:, self._num_queries :]
        squares = torch.stack([q.square().sum(dim=1), k.square().sum(dim=1)])  # [2, T]
        self._tp.all_reduce(squares)
        for heads, sums, size in zip((q, k), squares, self._sizes, strict=True):
            heads.mul_((sums / size + self._eps).rsqrt().unsqueeze(1))
        turned.copy_(wide.mul_(self._weight))


@dataclass(frozen=True)
class Projection:
    """One of the matrices that a column-parallel layer fuses: `total` outputs, of which this rank computes `own`."""

    name: str
    total: int
    own: range
    head_order: tuple[int, ...] | None = None
    """`RopeConfig.head_order`, where its outputs are heads that are turned."""

    def order(self, device: torch.device) -> Order:
        """The order of this rank's outputs, in which the dimensions of each head are as `head_order` says."""
        if self.head_order is None:
            return None
        of_head = torch.tensor(self.head_order, device=device)
        starts = torch.arange(0, len(self.own), len(of_head), device=device)
        return (starts[:, None] + of_head).flatten()


class Linear(Protocol):
    """A layer with a matrix product and an optional bias."""

    matrix: Matrix
    bias: torch.Tensor | None


def takes_rounded(matrix: Matrix) -> bool:
    """Whether what computes the rows for this matrix should round them."""
    return isinstance(matrix, ScaledFp8Matrix)


def multiply(
    matrix: Matrix, x: Rows, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The matrix' product with [T, I], rounded or not."""
    if isinstance(x, RoundedRows):
        assert isinstance(matrix, ScaledFp8Matrix), "only a product in fp8 takes rounded rows"
        return matrix(x, bias, dtype)
    return matrix(x, bias, dtype)


class ColumnParallelLinear:
    """Several projections of the same input in one matrix product: [T, E] to [T, O], outputs in the given order."""

    def __init__(self, loader: Loader, projections: Sequence[Projection], num_inputs: int, bias: bool) -> None:
        parts = [
            TensorSlice(f"{p.name}.weight", (p.total, num_inputs), 0, p.own.start, p.own.stop) for p in projections
        ]
        orders = [p.order(loader.device) for p in projections]
        self.matrix = loader.linear(parts, orders)
        biases = [TensorSlice(f"{p.name}.bias", (p.total,), 0, p.own.start, p.own.stop) for p in projections]
        self.bias = loader.stack(biases, orders) if bias else None

    def __call__(self, x: Rows) -> torch.Tensor:
        return multiply(self.matrix, x, self.bias)


class RowParallelLinear:
    """[T, I] of this rank's inputs to [T, E], summed over the ranks; the first of them adds the bias."""

    def __init__(self, loader: Loader, name: str, num_inputs: int, num_outputs: int, bias: bool) -> None:
        own = loader.equal_share(num_inputs)
        part = TensorSlice(f"{name}.weight", (num_outputs, num_inputs), 1, own.start, own.stop)
        self.matrix = loader.linear([part])
        self.bias = loader.stack([TensorSlice(f"{name}.bias", (num_outputs,))]) if bias else None
        self._tp = loader.tp

    def __call__(self, x: Rows) -> torch.Tensor:
        out = multiply(self.matrix, x, self.bias if self._tp.rank == 0 else None)
        self._tp.all_reduce(out)
        return out


class VocabShard:
    """This rank's rows of a [V, E] matrix. Where the ranks do not divide V, the last ones hold fewer, or padding."""

    def __init__(self, loader: Loader, name: str, vocab_size: int, hidden_size: int) -> None:
        rows_each = -(-vocab_size // loader.tp.size)
        self.start = min(loader.tp.rank * rows_each, vocab_size)
        self.stop = min(self.start + rows_each, vocab_size)
        self.weight = torch.zeros((rows_each, hidden_size), dtype=loader.dtype, device=loader.device)
        part = TensorSlice(f"{name}.weight", (vocab_size, hidden_size), 0, self.start, self.stop)
        loader.checkpoint.read(part, self.weight[: self.stop - self.start])

    @classmethod
    def of_whole(cls, weight: torch.Tensor) -> Self:
        """All rows of a matrix that is loaded already, whose memory is shared."""
        shard = cls.__new__(cls)
        shard.start, shard.stop, shard.weight = 0, len(weight), weight
        return shard


class VocabParallelEmbedding:
    """[T] token ids to [T, E]: each rank looks up its own ids, the sum over the ranks is the whole."""

    def __init__(self, shard: VocabShard, tp: TPGroup) -> None:
        self._shard = shard
        self._tp = tp

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._tp.size == 1:
            return F.embedding(token_ids, self._shard.weight)
        foreign = (token_ids < self._shard.start) | (token_ids >= self._shard.stop)
        rows = (token_ids - self._shard.start).masked_fill_(foreign, 0)
        out = F.embedding(rows, self._shard.weight).masked_fill_(foreign.unsqueeze(1), 0.0)
        self._tp.all_reduce(out)
        return out


class VocabParallelHead:
    """[R, E] to float32 logits [R, V], whole on every rank."""

    def __init__(self, shard: VocabShard, vocab_size: int, loader: Loader) -> None:
        self.matrix = loader.matrix(shard.weight)
        self.bias: torch.Tensor | None = None
        self._vocab_size = vocab_size
        self._tp = loader.tp

    def __call__(self, hidden: Rows) -> torch.Tensor:
        logits = multiply(self.matrix, hidden, dtype=torch.float32)
        return self._tp.all_gather(logits, dim=-1)[:, : self._vocab_size]
