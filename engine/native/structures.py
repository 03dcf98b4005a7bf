"""Structures that the C++ sources read: weights in tiles, and the model and batch of a decode step, fields in order.

A tile holds four bytes of 64 outputs together, for each four bytes of inputs.

bf16:  bfloat16 [O / 64, I / 2, 64, 2];
int8:  uint8 [O / 64, I / 4, 64, 4], plus 128, with float32 [O] scales;
int4:  uint8 [O / 64, I / 8, 64, 4], four inputs in the low halves and the next four in the high ones, each plus 8, with
       bfloat16 scales [O / 64, G, 64];
zeros: the same codes as they are, with float16 [O / 64, G, 2, 64], scales and what is taken off each code;
int8 in groups: codes as in int8, with float16 [O / 64, G, 64] scales;
mxfp4: E2M1 numbers in halves in the same order, with uint8 scales [O / 64, G, 64]: exponents of two as float32 has
       them, of half the scale, 0 for a scale of zero.

Legend: O outputs, padded to TILE; I inputs, padded to SPAN in fewer bits; G groups of inputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
BF16, INT8, INT4, INT4_ZEROS, INT8_GROUPS, MXFP4 = range(6)
INT4_SPAN = 32
"""Inputs of a group, at least; a group is a multiple of it."""
SPAN = 128
"""Inputs of a token that share the scale it is rounded to 8 bits with."""
TILE = 64


class Weight(ctypes.Structure):
    """`Weight` of products.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("format", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("order", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Tiles:
    """`kind` is one of BF16, INT8, INT4, INT4_ZEROS, INT8_GROUPS, MXFP4; `group`: inputs that share a scale, where they
    do. `order`, int64 [I], of kinds that round tokens: which input of a token each input is; None: the natural order.
    """

    data: Tensor
    scales: Tensor | None
    kind: int
    group: int
    num_outputs: int
    num_inputs: int
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scales, self.order) if tensor is not None)

    @cached_property
    def weight(self) -> Weight:
        """For the kernels; valid as long as this object."""
        return Weight(
            data=self.data.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            format=self.kind,
            group=self.group,
            width=self.num_inputs,
            inputs=self.num_inputs if self.kind == BF16 else -(-self.num_inputs // SPAN) * SPAN,
            outputs=self.num_outputs,
            order=None if self.order is None else self.order.data_ptr(),
        )


class NativeMatrix(ctypes.Structure):
    """A weight and its bias, or none."""

    _fields_ = (("weight", Weight), ("bias", _POINTER))


SILU, GELU_TANH, CLAMPED = range(3)


class NativeGate(ctypes.Structure):
    """An activation; `limit` and `alpha` are those of CLAMPED (`engine.models.experts.ClampedGate`)."""

    _fields_ = (("activation", _COUNT), ("limit", _FLOAT), ("alpha", _FLOAT))


class NativeExperts(ctypes.Structure):
    """The experts of a layer, N of them, and matrices of those that this rank holds. `places`: int32 [N], where the
    matrices of an expert are, -1 for those of other ranks; `tokens`: int64 [N], to which each expert's are added. All
    `gate_up` are of one size and format, and all `down`."""

    _fields_ = (
        *((name, ctypes.POINTER(NativeMatrix)) for name in ("gate_up", "down")),
        *((name, _COUNT) for name in ("count", "per_token", "normalizes")),
        ("gating", NativeGate),
        ("places", ctypes.POINTER(ctypes.c_int32)),
        ("tokens", _POINTER),
    )


class Layer(ctypes.Structure):
    """One decoder layer and the pages it writes. With `experts` its `gate_up` and `down` are those of the expert that
    every token takes, or nothing."""

    _fields_ = (
        *((name, NativeMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "output_norm", "mlp_output_norm", "head_norm")),
        *((name, _POINTER) for name in ("cos", "sin", "sinks", "keys", "values")),
        ("window", _COUNT),
        ("group", _COUNT),
        ("experts", ctypes.POINTER(NativeExperts)),
        *((name, NativeMatrix) for name in ("router", "shared_gate")),
    )


class DecodeModel(ctypes.Structure):
    """A whole decoder."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        *((name, _POINTER) for name in ("embedding", "norm")),
        ("head", NativeMatrix),
        *((name, _COUNT) for name in ("num_layers", "hidden", "q_heads", "kv_heads", "dim", "block_size")),
        *((name, _COUNT) for name in ("num_tokens", "num_positions", "num_blocks", "num_groups")),
        *((name, _FLOAT) for name in ("eps", "scale", "soft_cap", "embedding_scale")),
        ("gating", NativeGate),
    )


class DecodeBatch(ctypes.Structure):
    """One new token of each of T sequences: int32 [T] each, logits float32 [T, V]. Of G groups of layers, one after
    another: slots int32 [G, T], tables int32 [G, T, table_width].
    `spent`, float64 [2]: the seconds that products and attention take are added to it."""

    _fields_ = (
        *((name, _POINTER) for name in ("token_ids", "positions", "slots", "lengths", "tables", "logits", "spent")),
        *((name, _COUNT) for name in ("tokens", "table_width")),
    )


RANK_SUMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Kinds of collectives of ranks.cpp that sum, by type."""
RANK_GATHER, RANK_BROADCAST, RANK_EXCHANGE, RANK_ALL_TO_ALL = range(3, 7)
RANK_LEFT, RANK_DIED, RANK_LATE, RANK_DIFFERS = range(1, 5)
"""How one fails."""


class RankSaid(ctypes.Structure):
    """A rank's word on its collective."""

    _fields_ = (*((name, ctypes.c_int32) for name in ("kind", "to", "from_", "unused")), ("bytes", _COUNT))


class SharedRank(ctypes.Structure):
    """A group of ranks that share memory, as one of them sees it: `Group` of ranks.cpp. `processes`: int32 [size],
    descriptors that can be read once a rank's process has ended, -1 for this one's. Times are in nanoseconds."""

    _fields_ = (
        ("memory", _POINTER),
        ("processes", _POINTER),
        *((name, _COUNT) for name in ("size", "rank", "chunk_bytes", "timeout", "spin", "round", "blamed")),
        ("theirs", RankSaid),
    )
