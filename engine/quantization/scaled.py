"""Reads linear layers that a checkpoint holds in 8 bits with scales: fp8 and int8, one scale for a block of a weight.

DeepSeek's fp8 has a scale for each 128 x 128 weights; FBGEMM's and compressed-tensors' have one for each output, or one
for all. They are made numbers of when they are read; int8 with a scale for each output stays as it is where Baton's
kernels multiply with it.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.native.structures import INT8
from engine.quantization.integers import Quantized
from engine.quantization.interface import Kernels, TritonProducts

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Scaling:
    """Weights are codes times scales; layers without scales are plain."""

    form: Literal["fp8", "int8"]
    block: tuple[int | None, int | None]
    """Outputs and inputs that share a scale; None: all of them."""
    scale_name: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"

    unused_tensors = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
    """Endings of tensors for activations that are rounded, which are not here."""

    @property
    def scales_by(self) -> str:
        """Says which weights share a scale."""
        rows, columns = self.block
        if rows is not None and columns is not None:
            return f"in blocks of {rows}x{columns}"
        return "by outputs" if rows == 1 else "by tensors"

    def keeps_codes(self, quantization: str, dtype: torch.dtype, kernels: Kernels | None) -> bool:
        """Whether a model that is loaded so multiplies with int8 as it is: it loses nothing by it, and kernels for the
        CPU round activations to 8 bits for the product, of the size of what bfloat16 rounds."""
        if self.form != "int8" or self.block != (1, None) or quantization not in ("none", "int8"):
            return False
        is_free = isinstance(kernels, TritonProducts) or (kernels is not None and kernels.has_products)
        return quantization == "int8" or (is_free and dtype == torch.bfloat16)

    def read(self, checkpoint: Checkpoint, part: TensorSlice, out: Tensor) -> None:
        """Copies a slice of a weight [O, I] into `out`: exact in float32, to nearest in another type. Raises
        CheckpointError for what is missing, or of another shape or type."""
        if not self.has(checkpoint, part):
            return checkpoint.read(part, out)
        codes = self._read_codes(checkpoint, part, out.device)
        scales = self._read_scales(checkpoint, part).to(out.device)
        rows, columns = self._blocks(part, out.device)
        for start in range(0, len(out), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            out[some].copy_(codes[some].float().mul_(scales[rows[some]][:, columns]))
        return None

    def read_int8(self, checkpoint: Checkpoint, part: TensorSlice, device: torch.device) -> Quantized:
        """A slice with a scale for each output as it is. Raises as `read` does."""
        rows, _ = self._blocks(part, device)
        scales = self._read_scales(checkpoint, part).to(device)[rows, 0]
        return Quantized(self._read_codes(checkpoint, part, device), scales, INT8, 0)

    def has(self, checkpoint: Checkpoint, part: TensorSlice) -> bool:
        """Whether a weight is in codes."""
        return self._scales_of(part) in checkpoint

    def _read_codes(self, checkpoint: Checkpoint, part: TensorSlice, device: torch.device) -> Tensor:
        codes = torch.empty(part.local_shape, dtype=_CODES[self.form], device=device)
        checkpoint.read(part, codes)
        return codes

    def _read_scales(self, checkpoint: Checkpoint, part: TensorSlice) -> Tensor:
        """Returns the scales of the whole weight, float32 [blocks of outputs, blocks of inputs]."""
        name = self._scales_of(part)
        wanted = tuple(
            1 if block is None else -(-size // block) for size, block in zip(part.shape, self.block, strict=True)
        )
        found = checkpoint.shape_of(name)
        if math.prod(found) != math.prod(wanted) or (min(wanted) > 1 and found != wanted):
            raise CheckpointError(
                f"{checkpoint.describe(name)} has shape {list(found)}; a weight of {list(part.shape)} in the blocks "
                f"that config.json's quantization_config names has scales {list(wanted)}"
            )
        scales = torch.empty(found)
        checkpoint.read(TensorSlice(name, found), scales)
        return scales.view(wanted)

    def _blocks(self, part: TensorSlice, device: torch.device) -> tuple[Tensor, Tensor]:
        """The block of each output and of each input of a slice."""
        places = []
        for dim, (size, block) in enumerate(zip(part.shape, self.block, strict=True)):
            start, stop = (part.start, part.stop) if dim == part.dim else (0, None)
            places.append(torch.arange(start, size if stop is None else stop, device=device) // (block or size))
        return places[0], places[1]

    def _scales_of(self, part: TensorSlice) -> str:
        return f"{part.name.removesuffix('.weight')}.{self.scale_name}"
