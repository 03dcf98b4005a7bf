"""What the engine thread needs of its tensor-parallel ranks: one log of steps and transfer commands for all of them."""

from __future__ import annotations

from typing import Protocol

from cluster.pb import rank_pb2
from engine.model_runner import StepOutput
from engine.step_input import StepInput


class Launched(Protocol):
    """A step that was set off."""

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> StepOutput:
        """Waits for the step and what came of it, or raises what made it fail."""
        ...


class Ranks(Protocol):
    """The tensor-parallel ranks of this worker, as one; `worker.group.RankGroup` for real ones."""

    @property
    def num_steps(self) -> int:
        """How many steps were launched: a transfer command may name the newest, or the next, as the one it follows."""
        ...

    def launch(self, step: StepInput) -> Launched:
        """Sets one forward pass off on every rank; the one before it must be done.

        A short step is done when this returns. When a long one ends, whoever made the ranks is woken.
        """
        ...

    def issue(self, command: rank_pb2.RankCommand) -> int:
        """Appends a transfer command to the log; returns its number, which comes back when every rank is done."""
        ...
