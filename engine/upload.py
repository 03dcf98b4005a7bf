"""Owns the way of small arrays to the device: queued behind the kernels that run there, so that nobody waits for them.

A copy from ordinary memory waits until the device has done all that was launched before it. One from page-locked memory
is only queued; torch keeps that memory until the copy is over. Knows nothing of what is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.ArrayLike, device: torch.device, dtype: type[np.generic] | None = None) -> torch.Tensor:
    """A copy of the values on the device, of numpy's type where none is given. On the CPU it may share their memory."""
    array: npt.NDArray[Any] = np.asarray(values, dtype=dtype)
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
