"""Tensor parallelism's one seam: `TPGroup`, the two collectives that layers need, and who implements them.

`SingleGroup` is one rank; `ProcessGroupTP` spans processes over Gloo or NCCL, made from a store and never torch's
default group; `ThreadGroup` spans threads of one process, so that sharding runs where there is one process only.
Layers get a group as an argument and know none of these. Sums are taken so that every rank gets the same bits.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


class TPGroup(Protocol):
    """The ranks that hold one model. Calls block (on CUDA: order the current stream) until all ranks called."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the ranks, in place."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, all of one shape, joined along `dim` in rank order."""
        ...


class SingleGroup:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """A sum of one term is already there."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor


class ProcessGroupTP:
    """Ranks in processes of their own, over a ProcessGroupGloo or ProcessGroupNCCL that this object owns."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=dim)

    def close(self) -> None:
        """Ends the communicator; other ranks that wait in a collective fail."""
        self._group.abort()


def make_process_group(
    store: Store, rank: int, size: int, device: str, *, host: str = "127.0.0.1", timeout_s: float = 300.0
) -> TPGroup:
    """Joins `size` ranks that share `store`: NCCL on CUDA, else Gloo bound to `host`. A single rank needs no group."""
    if size == 1:
        return SingleGroup()
    timeout = timedelta(seconds=timeout_s)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        return ProcessGroupTP(dist.ProcessGroupNCCL(store, rank, size, nccl_options))
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupTP(gloo(store, rank, size, options))


class ThreadGroup:
    """One rank of a group whose ranks are threads of this process; `ThreadGroup.create(n)` makes them all."""

    def __init__(self, rank: int, board: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(board)
        self._board = board
        self._barrier = barrier

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        board: list[torch.Tensor | None] = [None] * size
        barrier = threading.Barrier(size, timeout=timeout_s)
        return [cls(rank, board, barrier) for rank in range(size)]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=dim)

    def abort(self) -> None:
        """Frees ranks that wait for one that failed: they raise BrokenBarrierError."""
        self._barrier.abort()

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of every rank's tensor, taken before any rank goes on."""
        self._board[self.rank] = tensor
        self._barrier.wait()
        tensors = [other.clone() for other in self._board if other is not None]
        self._barrier.wait()
        return tensors
