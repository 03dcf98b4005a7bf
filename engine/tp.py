"""Tensor-parallel groups: `TPGroup`, the collectives of layers and of sampled tokens, and its implementations.

`SingleGroup` is one rank; `ProcessGroupTP` spans processes over Gloo or NCCL, made from a store and never torch's
default group. Layers get a group as an argument and know neither. Every rank gets the same bits of a sum; `OrderedSums`
gives them to each row whatever else is summed with it.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    Store,
)

from engine.native.structures import RANK_ALL_TO_ALL, RANK_BROADCAST, RANK_EXCHANGE, RANK_GATHER, RANK_SUMS
from engine.rank_memory import RankMemory, share_memory


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

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's, in place."""
        ...

    def exchange(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        """Sends bytes, uint8 [B], to one rank, and returns as many that another one sends. Each rank is the
        destination of one; a rank may be its own."""
        ...

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends the i-th of [n, ..], contiguous, to rank i, and returns what each rank sends to this one, in order."""
        ...


class SingleGroup:
    """A single rank, which has nothing to exchange."""

    rank = 0
    size = 1
    origin = "not needed"

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor: a sum of one term."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor."""

    def exchange(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        return tensor

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        """Does nothing."""


class ExpertSlices:
    """The ranks of one of `num_groups` groups, which slice the same experts; sums are those of the whole worker, since
    what experts give adds up over all ranks."""

    def __init__(self, whole: TPGroup, num_groups: int) -> None:
        self.size = whole.size // num_groups
        self.rank = whole.rank % self.size
        self.all_reduce, self.all_gather, self.broadcast = whole.all_reduce, whole.all_gather, whole.broadcast
        self.exchange, self.all_to_all = whole.exchange, whole.all_to_all


class ProcessGroupTP:
    """Ranks in processes of their own, over a ProcessGroupGloo or ProcessGroupNCCL that this object owns.

    NCCL is told that somebody waits for each collective: it then runs on the current stream, as every other kernel, in
    place of one of its own with an event before and one after it.
    """

    def __init__(self, process_group: Any, origin: str = "") -> None:
        """`origin`: by what it is, and why, for the log."""
        self._group, self.origin = process_group, origin
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._reduce, self._gather, self._broadcast = AllreduceOptions(), AllgatherOptions(), BroadcastOptions()
        self._to_all = AllToAllOptions()
        for options in (self._reduce, self._gather, self._broadcast, self._to_all):
            options.asyncOp = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        _wait(self._group.allreduce([tensor], self._reduce))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        joined = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        _wait(self._group._allgather_base(joined, tensor.contiguous(), self._gather))
        dim %= tensor.ndim
        return joined.view(self.size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        _wait(self._group.broadcast([tensor], self._broadcast))

    def exchange(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        received = torch.empty_like(tensor)
        sizes = [[len(tensor) * (rank == other) for rank in range(self.size)] for other in (source, destination)]
        _wait(self._group.alltoall_base(received, tensor, *sizes, self._to_all))
        return received

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(tensor)
        as_bytes = (one.view(-1).view(torch.uint8) for one in (received, tensor))  # Gloo does not know all types
        _wait(self._group.alltoall_base(*as_bytes, [], [], self._to_all))
        return received

    def close(self) -> None:
        """Ends the communicator; other ranks that wait in a collective fail."""
        self._group.abort()


class SharedMemoryTP:
    """Ranks of one machine on CPUs, in memory that they share: processes, or threads of one.

    Sums are made in float32 and in rank order, whatever the tensor's size, of float32, bfloat16 and float16. Raises
    what `RankMemory.meet` raises.
    """

    def __init__(self, memory: RankMemory, origin: str) -> None:
        self._memory, self.origin = memory, origin
        self.rank, self.size = memory.rank, memory.size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self._memory.meet(RANK_SUMS[tensor.dtype], None, tensor.data_ptr(), tensor.nbytes)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        tensor, dim, shape = tensor.contiguous(), dim % tensor.ndim, list(tensor.shape)
        piece = math.prod(shape[dim:]) * tensor.itemsize
        shape[dim] *= self.size
        joined = tensor.new_empty(shape)
        self._memory.meet(RANK_GATHER, tensor.data_ptr(), joined.data_ptr(), tensor.nbytes, piece)
        return joined

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self._memory.meet(RANK_BROADCAST, None, tensor.data_ptr(), tensor.nbytes)

    def exchange(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        addresses = tensor.data_ptr(), received.data_ptr()
        self._memory.meet(RANK_EXCHANGE, *addresses, tensor.nbytes, 0, destination, source)
        return received

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous() and len(tensor) == self.size
        received = torch.empty_like(tensor)
        addresses = tensor.data_ptr(), received.data_ptr()
        self._memory.meet(RANK_ALL_TO_ALL, *addresses, tensor.nbytes // self.size)
        return received

    def close(self) -> None:
        """Ends the group; other ranks that wait in a collective fail."""
        self._memory.close()


class OrderedSums:
    """The ranks of another group, whose sums are made in float32 and in rank order, whatever the tensor's size.

    NCCL and Gloo choose the order by the size, and by where an element lies. So each rank gets all terms here and adds
    them itself: among n ranks it receives n / 2 times as much.
    """

    def __init__(self, group: TPGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        first, *others = self._group.all_gather(tensor.unsqueeze(0), dim=0)
        total = first.float()
        for term in others:
            total += term
        tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._group.all_gather(tensor, dim)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor)

    def exchange(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        return self._group.exchange(tensor, destination, source)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._group.all_to_all(tensor)


def with_ordered_sums(group: TPGroup) -> TPGroup:
    """Returns a group whose sums are as those of `OrderedSums`: the same one where they are already."""
    return group if isinstance(group, SingleGroup | SharedMemoryTP) else OrderedSums(group)


def _wait(work: Any) -> None:
    """Some groups leave nothing to wait for."""
    if work is not None:
        work.wait()


JoinedGroup = SingleGroup | SharedMemoryTP | ProcessGroupTP


def make_process_group(
    store: Store,
    rank: int,
    size: int,
    device: str,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = 300.0,
    obstacle: str = "",
) -> JoinedGroup:
    """Joins `size` ranks that share `store`: by NCCL on CUDA, else in memory if they can share it, else by Gloo, bound
    to `host`. A single rank needs no group. `obstacle`: why they are not to share memory, the same on each of them."""
    if size == 1:
        return SingleGroup()
    timeout = timedelta(seconds=timeout_s)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        return ProcessGroupTP(dist.ProcessGroupNCCL(store, rank, size, nccl_options), "by NCCL")
    memory, reason = None, obstacle
    if not obstacle:
        memory, reason = share_memory(PrefixStore("memory", store), rank, size, timeout_s)
    if memory is not None:
        return SharedMemoryTP(memory, reason)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupTP(gloo(store, rank, size, options), f"by Gloo over {host}, since {reason}")
