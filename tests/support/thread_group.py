"""A tensor-parallel group of threads, so that sharding runs in one process."""

from __future__ import annotations

import threading

import torch


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

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def exchange(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        to = self._exchange(torch.tensor(destination))
        assert [int(rank) for rank in to].index(self.rank) == source, "the ranks disagree"
        return self._exchange(tensor)[source]

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([sent[self.rank] for sent in self._exchange(tensor)])

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
