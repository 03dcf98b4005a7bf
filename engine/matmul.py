"""One weight matrix and the fastest product with it that this machine has. Knows no layer and no rank.

On the CPU in float32, torch multiplies through MKL, which on some processors stays at half of their rate; oneDNN
reaches it with a weight that was packed once. A single row is bound by memory and by the cost of the call, and there
MKL is quicker, so a matrix that fits in a cache keeps both forms; a larger one keeps the packed form only.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_PACKED_FROM_ROWS = 6
"""Fewer rows than this multiply faster unpacked."""
_BOTH_FORMS_BYTES = 16 << 20
_PACKED_FOR_ROWS = 32


class Matrix:
    """A weight [O, I]; called with [T, I] gives [T, O]. Takes the tensor over."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._num_outputs = weight.shape[0]
        self._packed = _pack(weight)
        keeps_plain = self._packed is None or weight.nbytes <= _BOTH_FORMS_BYTES
        self._plain = weight if keeps_plain else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        num_rows = x.shape[0]
        if self._plain is not None and (self._packed is None or num_rows < _PACKED_FROM_ROWS):
            return F.linear(x, self._plain, bias)
        if num_rows == 0:
            return x.new_empty(0, self._num_outputs)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's layout; None where that does not apply or this build of torch lacks it."""
    is_float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not is_float32_on_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed
