"""A pair between two GPUs of any hosts: a ProcessGroupNCCL of two ranks, the pair's own, made without blocking.

Its kernels take few thread blocks and run on NCCL's own stream, behind a stream of the pair, on which a send waits for
the gather into its slot: the compute stream knows nothing of them. Nothing here waits on the GPU without a limit: an
operation is polled until it has ended, failed, or its time is up, and then the communicator of this pair is aborted.
"""

from __future__ import annotations

import math
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported without saying so

from cluster.errors import TransferFailed
from kv_transfer.transports.interface import RECEIVER, SENDER, Meeting, TransferWork, reason_of

MIN_CTAS, MAX_CTAS = 1, 4
"""Thread blocks of a transfer: enough to fill a link, few enough to leave the GPU to the model."""
POLL_S = 0.0002
ERROR_AFTER_S = 0.1

_ENVIRONMENT = {
    # A transfer that fails must fail a request, not the process: the pair's owner waits, aborts and reports.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class NcclPair:
    """One side. Slots lie in the memory of the GPU that has the pages."""

    def __init__(self, meeting: Meeting) -> None:
        """Blocks until the other rank is there. Raises TransferFailed, also when both ranks are on one GPU."""
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        # Read once by torch: how long a communicator that does not block may take to come up.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(meeting.timeout_s)))
        self.name = f"nccl pair {meeting.prefix}"
        self._device = meeting.device
        rank, self._peer = (SENDER, RECEIVER) if meeting.is_sender else (RECEIVER, SENDER)
        self._lock = threading.Lock()
        self._group: Any = None
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=meeting.timeout_s)
        options.config.blocking = 0
        options.config.min_ctas, options.config.max_ctas = MIN_CTAS, MAX_CTAS
        self.pages: Tensor | None = None
        try:
            with torch.cuda.device(self._device), meeting.stores.client(meeting.store_address) as store:
                # Operations start after, and end before, what this stream is given: nothing else ever is.
                new_stream: Any = torch.cuda.Stream
                self._stream = new_stream(self._device)
                with torch.cuda.stream(self._stream):  # not memory that steps under way have just given back
                    self.slots: list[Tensor] = [
                        torch.empty(meeting.slot_bytes, dtype=torch.uint8, device=self._device)
                        for _ in range(meeting.num_slots)
                    ]
                self._group = nccl(PrefixStore(meeting.prefix, store), rank, 2, options)
                self._meet(meeting)
        except (RuntimeError, TransferFailed) as error:
            self.close()
            remedy = "two ranks on one GPU need transport: cuda_ipc or gloo"
            raise TransferFailed(f"{self.name} was not made: {reason_of(error)}; {remedy}") from error

    def __repr__(self) -> str:
        return self.name

    @property
    def is_closed(self) -> bool:
        return self._group is None

    def send(self, slot: int, num_bytes: int, after: torch.cuda.Event | None = None) -> TransferWork:
        return self._post("send", self._filled(slot, num_bytes), after)

    def receive(self, slot: int, num_bytes: int) -> TransferWork:
        return self._post("recv", self._filled(slot, num_bytes))

    def release(self, slot: int) -> None:
        """Does nothing: each side has slots of its own."""

    def close(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        try:
            group.abort()
        except RuntimeError as error:
            raise TransferFailed(f"{self.name} could not be closed: {reason_of(error)}") from error
        self.slots = []

    def _filled(self, slot: int, num_bytes: int) -> Tensor:
        slots = self.slots
        if self.is_closed:
            raise TransferFailed(f"{self.name} is closed")
        return slots[slot][:num_bytes]

    def _meet(self, meeting: Meeting) -> None:
        # A communicator that comes up without blocking shows its failure only at its first operation.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.eager_connect_single_device(self._device)
            greeting = torch.zeros(1, device=self._device)
        self._post("send" if meeting.is_sender else "recv", greeting).wait(meeting.timeout_s)

    def _post(self, operation: str, tensor: Tensor, after: torch.cuda.Event | None = None) -> TransferWork:
        group = self._group
        name = f"{'send' if operation == 'send' else 'receive'} on {self.name}"
        if group is None:
            raise TransferFailed(f"{self.name} is closed")
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                return _NcclWork(self, getattr(group, operation)([tensor], self._peer, 0), self._stream, name)
        except RuntimeError as error:
            raise TransferFailed(f"{name} failed: {reason_of(error)}") from error


class _NcclWork:
    def __init__(self, pair: NcclPair, work: Any, stream: Any, name: str) -> None:
        self._pair = pair
        self._work = work
        self._name = name
        work.wait()  # makes the current stream wait, not this thread
        self._ended: Any = stream.record_event()

    def wait(self, timeout_s: float) -> None:
        why, deadline = f"Timed out after {timeout_s:.1f} s", time.monotonic() + timeout_s
        has_ended_early = False
        try:
            while not self._ended.query():
                if self._pair.is_closed or time.monotonic() > deadline:
                    break
                if not has_ended_early and self._work.is_completed():
                    # An operation that ends for NCCL but not on the GPU, which follows within a moment, has failed.
                    has_ended_early, why = True, "NCCL reports an error of the connection"
                    deadline = min(deadline, time.monotonic() + ERROR_AFTER_S)
                time.sleep(POLL_S)
            has_ended = self._ended.query()
        except RuntimeError as error:
            raise TransferFailed(f"{self._name} failed: {reason_of(error)}") from error
        finally:
            self._work = None
        if self._pair.is_closed:  # an aborted operation ends as well
            raise TransferFailed(f"{self._name} failed: the pair was closed")
        if not has_ended:
            raise TransferFailed(f"{self._name} failed: {why}")


def make_pair(meeting: Meeting) -> NcclPair:
    """Blocks until the other side is there. Raises TransferFailed."""
    return NcclPair(meeting)


def obstacle() -> str | None:
    """Why this machine cannot use it, or None."""
    return None if dist.is_nccl_available() else "this build of torch has no NCCL"
