"""Pairs: one communicator between one rank of a sending worker and one rank of a receiving worker.

A pair is its own two-rank process group (the sender is rank 0) over a key prefix of the store that the receiving worker
serves; never the default group, never `new_group`. So it fails, is closed and is made anew without touching another.
Buffers are contiguous tensors; what they mean, and when they may be used again, is known above (`mover`).

Life of a pair: made (both ranks meet, or TransferFailed within the timeout) -> sends and receives, matched in the order
in which each side posts them -> closed, by either side or after any failure. A pair that failed once is never
used again. Once `close` has returned, the transport touches no buffer any more and nobody waits on it.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported without saying so

from cluster.address import format_address, parse_address
from cluster.errors import BatonError, ConfigError

SENDER, RECEIVER = 0, 1
_DATA_TAG, _CLOSE_TAG = 0, 1

NCCL_MIN_CTAS, NCCL_MAX_CTAS = 1, 4
"""Thread blocks of a transfer: enough to fill a link, few enough to leave the GPU to the model."""
_NCCL_ENVIRONMENT = {
    # A transfer that fails must fail a request, not the process: the pair's owner waits, aborts and reports.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class TransferFailed(BatonError):
    """KV could not be moved: the peer is gone, silent for too long, or the pair was closed. Another path may work."""

    grpc_code = "UNAVAILABLE"
    reason = "TRANSFER_FAILED"


class Work(Protocol):
    """One posted send or receive."""

    def wait(self, timeout_s: float) -> None:
        """Blocks until the buffer is sent or filled; raises TransferFailed, after which the pair must be closed."""
        ...


class Pair(Protocol):
    """One side of a connection between two ranks."""

    def send(self, tensor: Tensor) -> Work:
        """Posts a send of a contiguous tensor; raises TransferFailed when the pair is broken."""
        ...

    def receive(self, tensor: Tensor) -> Work:
        """Posts a receive into a contiguous tensor; raises TransferFailed when the pair is broken."""
        ...

    def close(self) -> None:
        """Ends the pair for both sides and wakes whoever waits on it. Idempotent, from any thread."""
        ...


def choose_transport(wanted: str, device: str) -> tuple[str, str]:
    """The transport for a worker on `device` (`cpu` or `cuda`), and why. Raises ConfigError.

    `wanted` is `auto`, `gloo` or `nccl`.
    """
    is_cuda = torch.device(device).type == "cuda"
    has_nccl = dist.is_nccl_available()
    match wanted:
        case "gloo":
            return "gloo", "it was asked for"
        case "nccl" if not is_cuda:
            raise ConfigError(f"transport: nccl moves GPU memory, but the device is {device}; use auto or gloo")
        case "nccl" if not has_nccl:
            raise ConfigError("transport: this build of torch has no NCCL; use auto or gloo, or a CUDA build")
        case "nccl":
            return "nccl", "it was asked for"
        case "auto" if not is_cuda:
            return "gloo", f"the KV cache is in {device} memory"
        case "auto" if not has_nccl:
            return "gloo", "this build of torch has no NCCL"
        case "auto":
            return "nccl", "the KV cache is on a GPU"
    raise ConfigError(f"transport: {wanted!r} is none of auto, gloo, nccl")


def serve_store(host: str) -> tuple[TCPStore, str]:
    """Serves the store at which pairs meet, on a free port of `host` only; returns it and its `host:port`.

    The store lives as long as the object. Left to itself TCPStore would listen on every address. Raises ConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"the pair store cannot listen on {host}: {error.strerror}; set host to an address of this machine"
            ) from error
        listener.listen(128)
        port: int = listener.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, format_address(host, port)


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """A client of a served store; a wait for a key fails after `timeout_s`. Raises TransferFailed."""
    try:
        host, port = parse_address(address)
        # TCPStore takes a refusal for a server that is not up yet and keeps trying; ours was up before it was named.
        socket.create_connection((host, port), timeout=timeout_s).close()
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError, ValueError) as error:
        raise TransferFailed(f"the pair store at {address} cannot be reached: {_reason(error)}") from error


class _GroupPair(ABC):
    # What both kinds share. The group, and its sockets, die with the last reference to it and to its works.

    def __init__(self, group: Any, name: str, rank: int) -> None:
        self.name = name
        self._peer = 1 - rank
        self._group = group
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return self.name

    def send(self, tensor: Tensor) -> Work:
        try:
            return _GroupWork(self._open_group().send([tensor], self._peer, _DATA_TAG), f"send on {self.name}")
        except RuntimeError as error:
            raise TransferFailed(f"send on {self.name} failed: {_reason(error)}") from error

    def receive(self, tensor: Tensor) -> Work:
        try:
            return _GroupWork(self._open_group().recv([tensor], self._peer, _DATA_TAG), f"receive on {self.name}")
        except RuntimeError as error:
            raise TransferFailed(f"receive on {self.name} failed: {_reason(error)}") from error

    def close(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            self._end(group)

    @abstractmethod
    def _end(self, group: Any) -> None: ...

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise TransferFailed(f"{self.name} is closed")
        return group


class GlooPair(_GroupPair):
    """A pair over TCP between the CPU memory of any two hosts."""

    def __init__(self, store: TCPStore, prefix: str, rank: int, *, host: str, timeout_s: float) -> None:
        """Blocks until the other rank is there. `host` is this side's own address. Raises TransferFailed."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        name = f"gloo pair {prefix}"
        try:
            options._devices = [gloo.create_device(hostname=host)]
            super().__init__(gloo(PrefixStore(prefix, store), rank, 2, options), name, rank)
        except RuntimeError as error:
            raise TransferFailed(f"{name} was not made: {_reason(error)}") from error

    def _end(self, group: Any) -> None:
        # ProcessGroupGloo.abort does nothing. A wait that times out does: it shuts the connection down under the
        # pair's lock, so that no buffer is touched after it, and fails every other wait on both sides.
        try:
            group.recv([torch.empty(1)], self._peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return
        raise TransferFailed(f"{self.name} could not be closed")


class NcclPair(_GroupPair):
    """A pair between two GPUs. Its kernels run on a stream of its own and wait for the caller's current stream."""

    def __init__(self, store: TCPStore, prefix: str, rank: int, *, device: torch.device, timeout_s: float) -> None:
        """Blocks until the other rank is there. Raises TransferFailed, also when both ranks are on one GPU."""
        for variable, value in _NCCL_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        # Read once by torch: how long a communicator that does not block may take to come up.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0
        options.config.min_ctas, options.config.max_ctas = NCCL_MIN_CTAS, NCCL_MAX_CTAS
        name = f"nccl pair {prefix}"
        try:
            with torch.cuda.device(device):
                super().__init__(nccl(PrefixStore(prefix, store), rank, 2, options), name, rank)
        except RuntimeError as error:
            raise TransferFailed(f"{name} was not made: {_reason(error)}") from error
        try:
            self._meet(rank, device, timeout_s)
        except (RuntimeError, TransferFailed) as error:
            self.close()
            remedy = "two ranks on one GPU need transport: gloo"
            raise TransferFailed(f"{name} was not made: {_reason(error)}; {remedy}") from error

    def _end(self, group: Any) -> None:
        try:
            group.abort()
        except RuntimeError as error:
            raise TransferFailed(f"{self.name} could not be closed: {_reason(error)}") from error

    def _meet(self, rank: int, device: torch.device, timeout_s: float) -> None:
        # A communicator that comes up without blocking shows its failure only at its first operation.
        with torch.cuda.device(device):
            self._open_group().eager_connect_single_device(device)
            greeting = torch.zeros(1, device=device)
            (self.send(greeting) if rank == SENDER else self.receive(greeting)).wait(timeout_s)


def make_pair(
    transport: str,
    store: TCPStore,
    prefix: str,
    *,
    is_sender: bool,
    host: str,
    device: torch.device,
    timeout_s: float,
) -> Pair:
    """One side of the pair named `prefix`; returns once the other side is there. Raises TransferFailed."""
    rank = SENDER if is_sender else RECEIVER
    match transport:
        case "gloo":
            return GlooPair(store, prefix, rank, host=host, timeout_s=timeout_s)
        case "nccl":
            return NcclPair(store, prefix, rank, device=device, timeout_s=timeout_s)
    raise ConfigError(f"transport: {transport!r} is none of gloo, nccl")


class _GroupWork:
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
            raise TransferFailed(f"{self._name} failed: {_reason(error)}") from error
        finally:
            self._work = None


def _reason(error: Exception) -> str:
    # The first sentence, without the source position of the library that raised it.
    lines = re.sub(r"\[\S+\.(cc|cpp|h|hpp):\d+\]\s*", "", str(error)).strip().splitlines()
    return lines[0].split(". ")[0] if lines else type(error).__name__
