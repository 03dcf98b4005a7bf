"""Has the ranks of a worker copy blocks between the KV pool and the tiers below it, and measures how long that takes.

Copies run beside the steps; the engine thread hears of their end. Whether a prefix is loaded or computed is decided by
what loads have taken and what steps cost. Runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from cluster.pb import rank_pb2, worker_pb2
from cluster.step_cost import StepCost
from engine.kv.kv_tier import BlockMove, KvTierName, MoveKind, TierKey
from engine.kv.tiered_blocks import TieredBlocks
from kv_transfer.block_store import StoreObjects
from worker.handoff_connection import Done, ErrorKind

logger = logging.getLogger(__name__)

_KINDS = {
    MoveKind.SAVE: rank_pb2.BlockMove.KIND_SAVE,
    MoveKind.LOAD: rank_pb2.BlockMove.KIND_LOAD,
    MoveKind.SPILL: rank_pb2.BlockMove.KIND_SPILL,
    MoveKind.READ: rank_pb2.BlockMove.KIND_READ,
    MoveKind.PUSH: rank_pb2.BlockMove.KIND_PUSH,
    MoveKind.FETCH: rank_pb2.BlockMove.KIND_FETCH,
}
_OF_STORE = (MoveKind.PUSH, MoveKind.FETCH)
_MOST_BLOCKS = 2**32 - 1
_WEIGHT = 0.2
"""Of the newest load, in the time of a block."""
_FADE = 0.99
"""What is left of that time each time it decides against a load: loads that were slow once are tried again."""
FlushDone = Callable[[int, int, str], None]
"""Called on the engine thread with the blocks that prompts could find, those deleted from the store, and an error."""


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
        store: StoreObjects | None = None,
    ) -> None:
        """`cost`: of steps, None before it is known. `store`: rank 0's part of it."""
        self.blocks = blocks
        self._issue = issue
        self._clock = clock
        self._num_ended_steps = num_ended_steps
        self._cost = cost
        self._store = store
        self._failing: set[MoveKind] = set()
        self._block_s: dict[MoveKind, float] = {}
        """Of the moves up that have been made."""
        self.seconds = dict.fromkeys(MoveKind, 0.0)
        """Of all moves, from when each was set off."""
        self.size_bytes = dict.fromkeys(MoveKind, 0)
        self._figures: list[tuple[KvTierName, int, int, int]] = []
        """Those that the stats have."""
        blocks.is_quicker = self.is_quicker

    def issue(self) -> None:
        """Sets off what is to be moved now."""
        for move in self.blocks.take_moves():
            command = rank_pb2.BlockMove(
                kind=_KINDS[move.kind],
                sources=move.sources,
                targets=move.targets,
                after_step=self._num_ended_steps(),
                groups=[group for group, _ in move.keys],
                digests=[digest for _, digest in move.keys],
            )
            self._issue(rank_pb2.RankCommand(move_blocks=command), partial(self._moved, move, self._clock()))

    def flush(self, done: FlushDone) -> None:
        """Empties all, as `TieredBlocks.flush_cache`, and what would be found later on a disk or in the store; `done`
        is called when that is so."""
        num_blocks, num_stored, problems = self.blocks.flush_cache(), 0, list[str]()
        left = [rank_pb2.BlockMove.KIND_FLUSH] if self.blocks.disk.num_total else []
        left += [rank_pb2.BlockMove.KIND_FLUSH_STORE] if self._store is not None else []
        if not left:
            done(num_blocks, 0, "")

        def flushed(kind: rank_pb2.BlockMove.Kind, error: str, error_kind: ErrorKind, size_bytes: int) -> None:
            nonlocal num_stored
            left.remove(kind)
            if error:
                what = "the KV on the disk or in the store is not flushed, and may be found later"
                logger.warning("%s: %s", what, error)
                problems.append(f"{what}: {error}")
            if self._store is not None:
                num_stored += size_bytes // (self._store.object_bytes * self._store.num_ranks)
            if not left:
                done(num_blocks, num_stored, "; ".join(problems))

        for kind in tuple(left):
            command = rank_pb2.RankCommand(move_blocks=rank_pb2.BlockMove(kind=kind))
            self._issue(command, partial(flushed, kind))

    @property
    def stored(self) -> tuple[int, int] | None:
        """Blocks of this worker's size in the store, of whomever, when it looked last, and the most; None: no store."""
        if (store := self._store) is None:
            return None
        block_bytes = store.object_bytes * store.num_ranks
        return min(store.used_bytes // block_bytes, _MOST_BLOCKS), min(store.limit_bytes // block_bytes, _MOST_BLOCKS)

    def measure(self, stats: worker_pb2.WorkerStats) -> None:
        """Brings the figures of the tiers up to date; those without a slot are left out."""
        tiers = self.blocks.tiers
        hits = self.blocks.hit_tokens
        figures = [(name, len(tier), tier.num_total, hits[name]) for name, tier in tiers.items() if tier.num_total]
        if (stored := self.stored) is not None:
            figures.append(("store", *stored, hits["store"]))
        if figures != self._figures:
            self._figures = figures
            del stats.tiers[:]
            for name, num_kept, num_total, num_hit in figures:
                stats.tiers.add(tier=name, blocks_kept=num_kept, blocks_total=num_total, num_hit_tokens=num_hit)

    def take_over(
        self, number: int, found: Callable[[], Iterable[tuple[int, TierKey]]], done: Callable[[str], None]
    ) -> None:
        """Has the files of that number, which another worker has left, take the place of the present ones. `found`:
        what is in them, once the ranks have them; `done` is told of an error, or "" at the end."""

        def taken(error: str, kind: ErrorKind, size_bytes: int) -> None:
            if not error:
                self.blocks.find_again(found())
                logger.info("took over %d KV blocks on the disk that another worker has left", len(self.blocks.disk))
            done(error)

        self.blocks.forget_disk()
        command = rank_pb2.BlockMove(kind=rank_pb2.BlockMove.KIND_TAKE_OVER, disk_number=number)
        self._issue(rank_pb2.RankCommand(move_blocks=command), taken)

    def is_quicker(self, num_moves: Mapping[MoveKind, int], num_tokens: int, num_before: int) -> bool:
        """Whether to move so many blocks up takes less time than to compute the tokens in them, behind `num_before`
        others."""
        cost = self._cost()
        if cost is None or not cost.knows_prompts or not num_moves.keys() <= self._block_s.keys():
            return True
        if sum(self._block_s[kind] * num for kind, num in num_moves.items()) < cost.of_prompt(num_tokens, num_before):
            return True
        for kind in num_moves:
            self._block_s[kind] *= _FADE
        return False

    def _moved(self, move: BlockMove, begun_at: float, error: str, kind: ErrorKind, size_bytes: int) -> None:
        self.blocks.moved(move, error)
        if error:
            if move.kind not in self._failing:
                logger.warning("the %s of %d KV blocks failed: %s", move.kind.value, len(move.keys), error)
            if move.kind in _OF_STORE:  # each prompt might have some: told once, until one goes well
                self._failing.add(move.kind)
            return
        self._failing.discard(move.kind)
        seconds = self._clock() - begun_at
        self.seconds[move.kind] += seconds
        self.size_bytes[move.kind] += size_bytes
        if move.kind.is_up:
            each, before = seconds / len(move.keys), self._block_s.get(move.kind)
            self._block_s[move.kind] = each if before is None else before + _WEIGHT * (each - before)
