"""Reads linear layers that a checkpoint holds in 8 bits with scales: fp8 and int8, one scale for a block of a weight.

DeepSeek's fp8 has a scale for each 128 x 128 weights; FBGEMM's and compressed-tensors' have one for each output, or one
for all. They are made numbers of when they are read; int8 with a scale for each output stays as it is where Baton's
kernels multiply with it.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.native.structures import INT8
from engine.quantization.integers import Quantized
from engine.quantization.stored import Scaling

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_ROWS_AT_ONCE = 256


def read_weight(checkpoint: Checkpoint, scaling: Scaling, part: TensorSlice, out: Tensor) -> None:
    """Copies a slice of a weight [O, I] into `out`: exact in float32, to nearest in another type. Raises
    CheckpointError for what is missing, or of another shape or type."""
    if scaling.scales_of(part.name) not in checkpoint:
        return checkpoint.read(part, out)
    codes = _read_codes(checkpoint, scaling, part, out.device)
    scales = _read_scales(checkpoint, scaling, part).to(out.device)
    rows, columns = _blocks(scaling, part, out.device)
    for start in range(0, len(out), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        out[some].copy_(codes[some].float().mul_(scales[rows[some]][:, columns]))
    return None


def read_int8(checkpoint: Checkpoint, scaling: Scaling, part: TensorSlice, device: torch.device) -> Quantized:
    """A slice with a scale for each output as it is. Raises as `read_weight` does."""
    rows, _ = _blocks(scaling, part, device)
    scales = _read_scales(checkpoint, scaling, part).to(device)[rows, 0]
    return Quantized(_read_codes(checkpoint, scaling, part, device), scales, INT8, 0)


def _read_codes(checkpoint: Checkpoint, scaling: Scaling, part: TensorSlice, device: torch.device) -> Tensor:
    codes = torch.empty(part.local_shape, dtype=_CODES[scaling.form], device=device)
    checkpoint.read(part, codes)
    return codes


def _read_scales(checkpoint: Checkpoint, scaling: Scaling, part: TensorSlice) -> Tensor:
    """Returns the scales of the whole weight, float32 [blocks of outputs, blocks of inputs]."""
    name = scaling.scales_of(part.name)
    wanted, found = scaling.scales_shape(part.shape), checkpoint.shape_of(name)
    if not scaling.fits(found, part.shape):
        raise CheckpointError(
            f"{checkpoint.describe(name)} has shape {list(found)}; a weight of {list(part.shape)} in the blocks "
            f"that config.json's quantization_config names has scales {list(wanted)}"
        )
    scales = torch.empty(found)
    checkpoint.read(TensorSlice(name, found), scales)
    return scales.view(wanted)


def _blocks(scaling: Scaling, part: TensorSlice, device: torch.device) -> tuple[Tensor, Tensor]:
    """The block of each output and of each input of a slice."""
    places = []
    for dim, (size, block) in enumerate(zip(part.shape, scaling.block, strict=True)):
        start, stop = (part.start, part.stop) if dim == part.dim else (0, None)
        places.append(torch.arange(start, size if stop is None else stop, device=device) // (block or size))
    return places[0], places[1]
