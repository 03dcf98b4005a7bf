"""A pair over TCP, between the host memory of any two machines: a ProcessGroupGloo of two ranks, the pair's own.

Never the default group, never `new_group`: it fails, is closed and is made anew alone. Each slot has a message tag of
its own, so that a slot can only land in the slot of the same number.
"""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported without saying so

from cluster.errors import TransferFailed
from kv_transfer.transports.interface import RECEIVER, SENDER, Meeting, TransferWork, reason_of


class GlooPair:
    """One side. Slots lie in host memory, pinned where the pages lie on a GPU."""

    def __init__(self, meeting: Meeting) -> None:
        """Blocks until the other rank is there. Raises TransferFailed."""
        self.name = f"gloo pair {meeting.prefix}"
        rank, self._peer = (SENDER, RECEIVER) if meeting.is_sender else (RECEIVER, SENDER)
        self._lock = threading.Lock()
        self.pages: Tensor | None = None
        is_pinned = meeting.device.type == "cuda"
        self.slots: list[Tensor] = [
            torch.empty(meeting.slot_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(meeting.num_slots)
        ]
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=meeting.timeout_s)
        options._threads = 1
        try:
            options._devices = [gloo.create_device(hostname=meeting.host)]
            with meeting.stores.client(meeting.store_address) as store:
                # The group, and its sockets, die with the last reference to it and to its works.
                self._group = gloo(PrefixStore(meeting.prefix, store), rank, 2, options)
        except RuntimeError as error:
            raise TransferFailed(f"{self.name} was not made: {reason_of(error)}") from error

    def __repr__(self) -> str:
        return self.name

    def send(self, slot: int, num_bytes: int, after: torch.cuda.Event | None = None) -> TransferWork:
        """Slots lie in host memory, and are filled when the gather has returned: `after` tells nothing new."""
        return self._post("send", slot, num_bytes)

    def receive(self, slot: int, num_bytes: int) -> TransferWork:
        return self._post("recv", slot, num_bytes)

    def release(self, slot: int) -> None:
        """Does nothing: each side has slots of its own."""

    def close(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        # ProcessGroupGloo.abort does nothing. A wait that times out does: it shuts the connection down under the
        # connection's lock, so that no slot is touched after it, and fails every other wait on both sides.
        try:
            group.recv([torch.empty(1)], self._peer, len(self.slots)).wait(timedelta(milliseconds=1))
        except RuntimeError:
            self.slots = []
            return
        raise TransferFailed(f"{self.name} could not be closed")

    def _post(self, operation: str, slot: int, num_bytes: int) -> TransferWork:
        slots, group = self.slots, self._group  # in this order: a pair that is being closed drops the group first
        name = f"{'send' if operation == 'send' else 'receive'} on {self.name}"
        if group is None:
            raise TransferFailed(f"{self.name} is closed")
        try:
            return _GlooWork(getattr(group, operation)([slots[slot][:num_bytes]], self._peer, slot), name)
        except RuntimeError as error:
            raise TransferFailed(f"{name} failed: {reason_of(error)}") from error


class _GlooWork:
    # Lets go of torch's work as soon as it has ended: a work that is kept, by a traceback say, keeps its sockets open.

    def __init__(self, work: Any, name: str) -> None:
        self._work = work
        self._name = name

    def wait(self, timeout_s: float) -> None:
        # 0 means "for ever" to torch.
        timeout = timedelta(milliseconds=max(1, math.ceil(timeout_s * 1000)))
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            raise TransferFailed(f"{self._name} failed: {reason_of(error)}") from error
        finally:
            self._work = None


def make_pair(meeting: Meeting) -> GlooPair:
    """Blocks until the other side is there. Raises TransferFailed."""
    return GlooPair(meeting)


def obstacle() -> str | None:
    """None: it runs everywhere."""
    return None
