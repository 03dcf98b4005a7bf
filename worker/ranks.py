"""What the engine thread needs of its tensor-parallel ranks: one log of steps and transfer commands for all of them."""

from __future__ import annotations

from typing import Protocol

import torch

from cluster.pb import rank_pb2
from engine.step import StepInput


class Ranks(Protocol):
    """The tensor-parallel ranks of this worker, as one; `worker.group.RankGroup` for real ones."""

    @property
    def last_step(self) -> int:
        """Number of the newest step; pages that it touched are safe to move after it."""
        ...

    def step(self, step: StepInput) -> torch.Tensor:
        """Runs one forward pass on every rank; logits [R, V]."""
        ...

    def issue(self, command: rank_pb2.RankCommand) -> int:
        """Appends a transfer command to the log; returns its number, which comes back when every rank is done."""
        ...
