"""Has the ranks of a worker copy blocks between the KV pool and the tier below it, and measures how long that takes.

Copies run beside the steps; the engine thread hears of their end. Whether a prefix is loaded or computed is decided by
what loads have taken and what steps cost. Runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from cluster.pb import rank_pb2
from cluster.step_cost import StepCost
from engine.kv.tiered_blocks import BlockMove, TieredBlocks
from worker.handoff_connection import Done, ErrorKind

logger = logging.getLogger(__name__)

_WEIGHT = 0.2
"""Of the newest load, in the time of a block."""
_FADE = 0.99
"""What is left of that time each time it decides against a load: loads that were slow once are tried again."""


class TierMoves:
    """Carries out what `blocks` wants moved."""

    def __init__(
        self,
        blocks: TieredBlocks,
        issue: Callable[[rank_pb2.RankCommand, Done], None],
        clock: Callable[[], float],
        *,
        num_ended_steps: Callable[[], int],
        cost: Callable[[], StepCost | None],
    ) -> None:
        """`cost`: of steps, None before it is known."""
        self.blocks = blocks
        self._issue = issue
        self._clock = clock
        self._num_ended_steps = num_ended_steps
        self._cost = cost
        self._block_s: float | None = None
        self.load_s = 0.0
        """Seconds of all loads, from when each was set off."""
        self.load_bytes = self.save_bytes = 0
        blocks.is_quicker = self.is_quicker

    def issue(self) -> None:
        """Sets off what is to be moved now."""
        for move in self.blocks.take_moves():
            command = rank_pb2.BlockMove(
                blocks=move.blocks, slots=move.slots, is_load=move.is_load, after_step=self._num_ended_steps()
            )
            self._issue(rank_pb2.RankCommand(move_blocks=command), partial(self._moved, move, self._clock()))

    def is_quicker(self, num_blocks: int, num_tokens: int, num_before: int) -> bool:
        """Whether to load so many blocks takes less time than to compute the tokens in them, behind `num_before`
        others."""
        cost = self._cost()
        if self._block_s is None or cost is None or not cost.knows_prompts:
            return True
        if self._block_s * num_blocks < cost.of_prompt(num_tokens, num_before):
            return True
        self._block_s *= _FADE
        return False

    def _moved(self, move: BlockMove, begun_at: float, error: str, kind: ErrorKind, size_bytes: int) -> None:
        self.blocks.moved(move, error)
        if error:
            what = "loaded from" if move.is_load else "saved to"
            logger.warning("%d KV blocks were not %s host memory: %s", len(move.blocks), what, error)
        elif move.is_load:
            seconds = self._clock() - begun_at
            each = seconds / len(move.blocks)
            self._block_s = each if self._block_s is None else self._block_s + _WEIGHT * (each - self._block_s)
            self.load_s += seconds
            self.load_bytes += size_bytes
        else:
            self.save_bytes += size_bytes
