"""What decode.cpp reads: a model, once described, and the batch of one step. Fields are in its order."""

from __future__ import annotations

import ctypes

from engine.native.tiles import Weight

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeMatrix(ctypes.Structure):
    """A weight and its bias, or none."""

    _fields_ = (("weight", Weight), ("bias", _POINTER))


class Layer(ctypes.Structure):
    """One decoder layer over its pages."""

    _fields_ = (
        *((name, NativeMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "head_norm", "keys", "values")),
        ("window", _COUNT),
    )


class DecodeModel(ctypes.Structure):
    """The layers, and what is around them."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        *((name, _POINTER) for name in ("embedding", "norm", "cos", "sin")),
        ("head", NativeMatrix),
        *((name, _COUNT) for name in ("num_layers", "hidden", "q_heads", "kv_heads", "dim", "block_size")),
        *((name, _COUNT) for name in ("num_tokens", "num_positions", "num_blocks")),
        *((name, _FLOAT) for name in ("eps", "scale")),
    )


class DecodeBatch(ctypes.Structure):
    """One new token of each of T sequences: int32 [T] each, tables int32 [T, table_width], logits float32 [T, V].
    `spent`, float64 [2]: the seconds that products and attention take are added to it."""

    _fields_ = (
        *((name, _POINTER) for name in ("token_ids", "positions", "slots", "lengths", "tables", "logits", "spent")),
        *((name, _COUNT) for name in ("tokens", "table_width")),
    )
