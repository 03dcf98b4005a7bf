"""Triton's interpreter made to work with this numpy, and faster: import it in a test of kernels before `engine.triton`.

Skips the test module where triton has no build. `DEVICE` is where the kernels run: interpreted on the CPU, or compiled
where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no build for this platform")

from triton.runtime import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_patch_lang_tensor, _convert_float = interpreter._patch_lang_tensor, interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


def _patch(tensor: Any, scope: Any) -> None:
    """numpy 2.4 refuses int() of an array of one element, which triton 3.6 makes of every scalar that bounds a loop."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
    """triton 3.6 cuts float32 off where a GPU rounds it to the nearest bfloat16, ties to even."""
    if not (source.is_fp32() and target.is_bf16()):
        return _convert_float(numbers, source, target, rounding)
    rounded = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16()
    return rounded.view(torch.uint16).numpy()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """triton 3.6 looks through the whole language whenever one device function calls another: most of its time. What
    that changes stays, and the kernel that is run has done the rest."""
    if function.fn not in _seen:
        _seen.add(function.fn)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """A row of a product has the same bits wherever it stands in a tile, as on a GPU; of numpy's library that depends
    on the processor. Sums in float64 differ by less than float32 shows."""
    if not all(np.issubdtype(part.data.dtype, np.floating) for part in (a, b)):
        return _create_dot(builder, a, b, d, *options)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_seen: set[Any] = set()
interpreter.InterpreterBuilder.create_dot = _dot
interpreter._patch_lang_tensor = _patch
interpreter.InterpretedFunction.__call__ = _call
interpreter._convert_float = _convert
