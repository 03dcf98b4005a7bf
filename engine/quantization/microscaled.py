"""Reads experts that a checkpoint holds in MXFP4: numbers of four bits (E2M1), 32 inputs with a power of two (E8M0).

The layout is gpt-oss's: of a weight [O, I] the tensor `*_blocks` [O, I / 32, 16], two numbers in a byte, the first one
low, and `*_scales` [O, I / 32]; all experts of a layer lie in one tensor. Every other weight is plain.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.models.experts import MXFP4_GROUP
from engine.native.structures import MXFP4
from engine.quantization.integers import Quantized

_NO_NUMBER = 255
"""The scale that stands for none."""


def read_expert(checkpoint: Checkpoint, part: TensorSlice, device: torch.device) -> Quantized:
    """Reads a slice of a weight [O, I] that `part` names without `_blocks`; along inputs in whole groups around it.

    Raises CheckpointError for tensors that are missing, of another shape or type, or with scales that are no
    number.
    """
    num_outputs, num_inputs = part.shape
    if num_inputs % MXFP4_GROUP:
        raise CheckpointError(
            f"{part.name}_blocks: MXFP4 has groups of {MXFP4_GROUP} inputs, which do not divide the {num_inputs} "
            "that config.json asks for"
        )
    start, stop = part.start, part.shape[part.dim] if part.stop is None else part.stop
    if part.dim == 1:
        start, stop = start // MXFP4_GROUP, -(-stop // MXFP4_GROUP)
    shape = (num_outputs, num_inputs // MXFP4_GROUP)
    blocks = TensorSlice(f"{part.name}_blocks", (*shape, MXFP4_GROUP // 2), part.dim, start, stop, part.stack)
    scales = TensorSlice(f"{part.name}_scales", shape, part.dim, start, stop, part.stack)
    codes, exponents = (torch.empty(piece.local_shape, dtype=torch.uint8, device=device) for piece in (blocks, scales))
    checkpoint.read(blocks, codes)
    checkpoint.read(scales, exponents)
    if bool((exponents == _NO_NUMBER).any()):
        raise CheckpointError(f"{checkpoint.describe(scales.name)} has scales of {_NO_NUMBER}, which are no number")
    return Quantized(codes.flatten(1), exponents, MXFP4, MXFP4_GROUP)


def decode_expert(checkpoint: Checkpoint, part: TensorSlice, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Reads the slice as numbers: exact, unless `dtype` has fewer bits of exponent than bfloat16. Raises as
    `read_expert` does."""
    whole = read_expert(checkpoint, part, device).dequantize(dtype)
    return whole.narrow(1, part.start % MXFP4_GROUP, part.local_shape[1]) if part.dim == 1 else whole
