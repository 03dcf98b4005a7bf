"""The buffers of one direction of one rank: slots that a transport reads or fills, and the stream that copies pages.

A slot is one contiguous buffer, made once and used again for chunk after chunk. It is replaced in one case only: its
pair ended while an operation was posted on it. It does not know what a slot holds; `mover` lays it out.

On the CPU a slot is plain memory. On a GPU it is GPU memory for NCCL, and pinned host memory for Gloo, reached through
one staging buffer on the GPU. Page copies run on a stream of their own, after what the compute stream was given before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Slot:
    """One buffer and what is going on with it."""

    buffer: Tensor
    """[slot elements], where the transport reads or writes."""
    posted_by: object | None = None
    """The link with operations posted on the buffer; None: nothing may touch it."""
    gathered: tuple[str, int] | None = None
    """Pair epoch and number of tokens that a send slot holds."""


class Lane:
    """The slots of one direction. Copies are made by one thread at a time."""

    def __init__(
        self,
        kv: Tensor,
        num_slots: int,
        slot_elements: int,
        *,
        is_host_staged: bool,
        compute_stream: torch.cuda.Stream | None,
    ) -> None:
        """`is_host_staged`: the transport moves CPU memory only. `compute_stream`: None for the device's default."""
        self._dtype, self._device, self._slot_elements = kv.dtype, kv.device, slot_elements
        is_cuda = kv.device.type == "cuda"
        self._is_staged = is_cuda and is_host_staged
        self._staging = torch.empty(slot_elements, dtype=kv.dtype, device=kv.device) if self._is_staged else None
        self._copy_stream: Any = None
        if is_cuda:
            self._compute_stream = compute_stream or torch.cuda.default_stream(kv.device)
            new_stream: Any = torch.cuda.Stream
            self._copy_stream, self._post_stream = new_stream(kv.device), new_stream(kv.device)
        self.slots = [Slot(self._new_buffer()) for _ in range(num_slots)]

    def slot(self, index: int) -> Slot:
        """Raises ValueError."""
        if not 0 <= index < len(self.slots):
            raise ValueError(f"slot {index} is outside [0, {len(self.slots)})")
        return self.slots[index]

    def replace_buffers(self, link: object) -> list[Tensor]:
        """Gives the slots with operations posted by `link` fresh buffers; returns the old ones."""
        quarantined = []
        for slot in self.slots:
            if slot.posted_by is link:
                quarantined.append(slot.buffer)
                slot.buffer, slot.posted_by, slot.gathered = self._new_buffer(), None, None
        return quarantined

    @contextmanager
    def packing(self, buffer: Tensor, num_elements: int) -> Iterator[Tensor]:
        """Yields where to gather to; when the block ends, `buffer` holds it and the pages are not read any more."""
        with self._copying():
            yield buffer if self._staging is None else self._staging
            if self._staging is not None:
                buffer[:num_elements].copy_(self._staging[:num_elements], non_blocking=True)

    @contextmanager
    def unpacking(self, buffer: Tensor, num_elements: int) -> Iterator[Tensor]:
        """Yields where to scatter from; when the block ends, the pages are written and the buffer is free."""
        with self._copying():
            if self._staging is not None:
                self._staging[:num_elements].copy_(buffer[:num_elements], non_blocking=True)
            yield buffer if self._staging is None else self._staging

    def posting(self) -> AbstractContextManager[object]:
        """For posting operations. NCCL starts one after what its caller's stream was given: this one is always empty,
        so that a stalled pair never holds up another."""
        return nullcontext() if self._copy_stream is None else torch.cuda.stream(self._post_stream)

    def waiting(self) -> AbstractContextManager[object]:
        """For waiting on operations. NCCL makes the caller's stream wait as well."""
        return nullcontext() if self._copy_stream is None else torch.cuda.stream(self._copy_stream)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._copy_stream is None:
            yield
            return
        # Kernels launched so far write the pages to gather, or still read what the pages held before.
        self._copy_stream.wait_event(self._compute_stream.record_event())
        with torch.cuda.stream(self._copy_stream):
            yield
        self._copy_stream.synchronize()

    def _new_buffer(self) -> Tensor:
        device = torch.device("cpu") if self._is_staged else self._device
        return torch.empty(self._slot_elements, dtype=self._dtype, device=device, pin_memory=self._is_staged)
