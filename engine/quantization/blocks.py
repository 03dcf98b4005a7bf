"""Weights of a GGUF file, which has them in blocks: 32 or 256 inputs of an output with their scales.

Q8_0, Q4_0 and Q4_K are kept in their bits where kernels multiply with them, in the forms of
`engine.quantization.integers`; Q5_0 becomes bytes there. All but Q4_K lose nothing by that. Its scales and minima are
products of two numbers in the file, and are rounded to float16: by 2^-11 of themselves, less than decoding to bfloat16
rounds weights. Other types are decoded.

Legend: O outputs, I inputs, B blocks, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.checkpoint import Checkpoint, TensorSlice
from engine.gguf_checkpoint import Bytes, GgufCheckpoint
from engine.native.structures import INT4_ZEROS, INT8_GROUPS
from engine.quantization.integers import Quantized, keep
from engine.quantization.stored import Blocks

GROUP = 32
"""Inputs that share a scale in the types that are kept."""
_OF_FOUR_BITS, _OF_EIGHT_BITS = frozenset({"Q4_0", "Q4_K"}), frozenset({"Q8_0", "Q5_0"})
_MOST_ZERO = 60_000.0
"""A group whose minimum is so many steps away is nothing but its minimum, as far as float16 goes."""


def kept_kind(
    blocks: Blocks, names: Sequence[str], num_inputs: int, quantization: str, is_in_triton: bool
) -> int | None:
    """Returns the kind, of `engine.native.structures`, in which weights of one input are kept together, or None.

    `num_inputs`: of each rank. Only for a model that keeps codes.
    """
    found = {blocks.stored_type(name) for name in names}
    if num_inputs % GROUP or not found:
        return None
    if found <= _OF_FOUR_BITS and quantization in ("none", "int4"):
        return INT4_ZEROS
    if found <= _OF_EIGHT_BITS and quantization in ("none", "int8") and not is_in_triton:
        return INT8_GROUPS
    return None


def keep_blocks(
    checkpoint: Checkpoint, parts: Sequence[TensorSlice], kind: int, device: torch.device
) -> Quantized | None:
    """All parts' outputs in one weight of this kind; None where float16 cannot hold their scales.

    Raises CheckpointError for tensors that are missing or of another shape.
    """
    assert isinstance(checkpoint, GgufCheckpoint), "only GGUF has blocks"
    read = [_unpack(checkpoint, part) for part in parts]
    codes, scales, zeros = (torch.cat([torch.from_numpy(each[at]) for each in read]) for at in range(3))
    rounded = scales.to(torch.float16)
    if not rounded.isfinite().all() or (rounded.float() - scales).abs().max() > 2.0**-11 * scales.abs().max():
        return None
    if kind == INT8_GROUPS:
        return Quantized(codes.to(device), rounded.to(device), INT8_GROUPS, GROUP)
    return keep(codes.to(device), zeros.to(device), rounded.to(device), GROUP)


def _unpack(checkpoint: GgufCheckpoint, part: TensorSlice) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:  # type: ignore[type-arg]
    """Codes [O, I], float32 scales [O, G] and what is taken off codes, float32 [O, G], of a slice."""
    raw, offset = checkpoint.raw_blocks(part)
    unpack = {"Q8_0": _q8_0, "Q5_0": _q5_0, "Q4_0": _q4_0, "Q4_K": _q4_k}[checkpoint.type_of(part.name)]
    codes, scales, zeros = unpack(raw)
    count = part.local_shape[1]
    groups = slice(offset // GROUP, (offset + count) // GROUP)
    return (
        np.ascontiguousarray(codes.reshape(len(raw), -1)[:, offset : offset + count]),
        np.ascontiguousarray(scales.reshape(len(raw), -1)[:, groups]),
        np.ascontiguousarray(zeros.reshape(len(raw), -1)[:, groups]),
    )


Unpacked = tuple[npt.NDArray[np.int8 | np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]


def _float16(raw: Bytes, start: int) -> npt.NDArray[np.float32]:
    """[O, B], from two bytes of each block."""
    return np.ascontiguousarray(raw[:, :, start : start + 2]).view(np.float16)[:, :, 0].astype(np.float32)


def _q8_0(raw: Bytes) -> Unpacked:
    """A scale, and 32 signed bytes."""
    scales = _float16(raw, 0)
    return np.ascontiguousarray(raw[:, :, 2:]).view(np.int8), scales, np.zeros_like(scales)


def _q5_0(raw: Bytes) -> Unpacked:
    """A scale, the highest bits of 32 codes, and their others as in Q4_0; each plus 16."""
    scales = _float16(raw, 0)
    pairs, high = raw[:, :, 6:], np.unpackbits(raw[:, :, 2:6], axis=2, bitorder="little")
    codes = np.concatenate((pairs & 15, pairs >> 4), axis=2) | high << 4
    return (codes.astype(np.int16) - 16).astype(np.int8), scales, np.zeros_like(scales)


def _q4_0(raw: Bytes) -> Unpacked:
    """A scale, and 16 bytes: the first half of the codes low, the second high, each plus 8."""
    scales = _float16(raw, 0)
    pairs = raw[:, :, 2:]
    return np.concatenate((pairs & 15, pairs >> 4), axis=2), scales, np.full_like(scales, 8)


def _q4_k(raw: Bytes) -> Unpacked:
    """Scales of scales and of minima; eight of either in six bits each; 128 bytes, of which each 32 hold two groups."""
    of_scales, of_minima, packed = _float16(raw, 0), _float16(raw, 2), raw[:, :, 4:16]
    low, middle, high = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    factors = np.concatenate((low & 63, high & 15 | low >> 6 << 4), axis=2).astype(np.float32)
    offsets = np.concatenate((middle & 63, high >> 4 | middle >> 6 << 4), axis=2).astype(np.float32)
    pairs = raw[:, :, 16:].reshape(*raw.shape[:2], 4, 1, 32)
    codes = np.concatenate((pairs & 15, pairs >> 4), axis=3).reshape(*raw.shape[:2], 8, 32)
    scales, minima = of_scales[:, :, None] * factors, of_minima[:, :, None] * offsets  # [O, B, 8]
    is_flat = np.abs(minima) > _MOST_ZERO * np.abs(scales)
    zeros = np.where(is_flat, 1, minima / np.where(scales == 0, 1, scales)).astype(np.float32)
    return np.where(is_flat[..., None], 0, codes).astype(np.uint8), np.where(is_flat, minima, scales), zeros
