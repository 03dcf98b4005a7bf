"""Owns copies of small arrays to the device and back, queued among the kernels that run there: the host waits for none.

A copy to or from ordinary memory waits until the device has done all that was launched before it. One to or from
page-locked memory is only queued; torch keeps that memory until the copy is over. Knows nothing of what is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.ArrayLike, device: torch.device, dtype: type[np.generic] | None = None) -> torch.Tensor:
    """A copy of the values on the device, of numpy's type where none is given. On the CPU it may share their memory."""
    array: npt.NDArray[Any] = np.asarray(values, dtype=dtype)
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Fetched:
    """Tensors on their way to the host, behind what was launched before them and before what comes later."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, is_rewritten: bool = False) -> None:
        """`is_rewritten`: before they are read, which on a CPU would show."""
        self._tensors = [t.clone() for t in tensors] if is_rewritten and tensors[0].device.type == "cpu" else tensors
        self._copied: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[list[Any]]:
        """The tensors' values, once they are there. Does not wait for what was launched later."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.tolist() for tensor in self._tensors]
