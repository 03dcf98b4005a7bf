"""Wire formats: how the KV of one chunk is turned into the bytes of a slot's payload, and back.

`native` carries the sender's own dtype, bit for bit. `int8` and `fp8` carry one byte for each value and one float32
scale for each (layer, key or value, token, head), symmetric: the largest magnitude of the D values meets the largest
code. A value v of a row whose largest magnitude is m comes back within

    int8   m / 254                                  (half a step of m / 127)
    fp8    max(|v| / 16, m / 448 / 1024)            (e4m3: half a unit of 3 mantissa bits; below 2^-6, half of 2^-9)

and, on top of it, what rounding to the receiver's dtype costs. Rows of zeros come back as zeros. A row with a NaN or an
infinity comes back as NaNs: nothing that was broken looks whole. It knows no pages, no headers and no transports.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 2.0**-120
"""Its inverse is finite. Rows whose values are all below it come back as zeros."""
_LARGEST_VALUE = torch.finfo(torch.float32).max * (1 - 2.0**-22)
"""What the largest code may come back as: dividing and multiplying again must not end in infinity."""
_FLOAT16_OVER_FP8 = 2.0**8
SCALE_BYTES = 4


def quantize(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Encodes `values` [..., D] of any float dtype into `codes` [..., D], int8 or fp8, and `scales` [...], float32."""
    largest_code = _LARGEST_CODE[codes.dtype]
    exact = values.float()
    magnitudes = exact.abs()
    scale = magnitudes.amax(dim=-1).div_(largest_code)
    is_broken = scale.isfinite().logical_not_()
    scale.clamp_(_SMALLEST_SCALE, _LARGEST_VALUE / largest_code)
    # What the codes of a broken row are does not matter: its scale makes NaN of every one.
    scales.copy_(scale.masked_fill_(is_broken, float("nan")))
    scaled = torch.mul(exact, scale.reciprocal_().unsqueeze(-1), out=magnitudes)
    codes.copy_(scaled.round_() if codes.dtype == torch.int8 else scaled)


def dequantize(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Decodes into `values` [..., D] of any float dtype."""
    if codes.dtype == torch.int8:
        values.copy_(codes.float().mul_(scales.unsqueeze(-1)))
    else:
        values.copy_(_fp8_as_float(codes).mul_((scales * _FLOAT16_OVER_FP8).unsqueeze(-1)))


def _fp8_as_float(codes: Tensor) -> Tensor:
    """e4m3 codes as float32, 2^-8 of their values: torch's CPU converts one at a time, this all at once.

    The seven low bits of e4m3 fit the lower exponent and upper mantissa of a float16, whose exponent begins 8 lower.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper half
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()
