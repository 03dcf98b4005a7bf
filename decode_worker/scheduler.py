"""Decides which sequences the next step runs: continuous batching with preemption. Pure: no clock, socket or tensor.

Running sequences each get their next token; one whose tokens are not all computed (preempted earlier, or prefilled
here) gets a chunk of them from what the budget leaves. When a sequence needs a block and none is free, the
youngest one is preempted: its blocks return, stay findable while nobody takes them, and it goes on before any newcomer
with what is found of them, in the pool or the tiers below it, where loading is quicker than computing. The oldest
always runs on, so something always ends. Owns the page copies that forks ask for; both pages stay referenced until
copied, or until the fork has left.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as Seq
from itertools import chain

from engine.kv.block_manager import BlockManager
from engine.sequence import (
    ScheduledSequence,
    Sequence,
    claim_blocks,
    cover_blocks,
    keep_blocks,
    num_missing,
    release_blocks,
    take_arrived,
)
from engine.step_budget import StepBudget

BlockCopies = list[tuple[int, int]]


def _by_arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival, sequence.index


class DecodeScheduler:
    """Sequences waiting to be computed here, and sequences in the running batch."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._waiting: list[Sequence] = []
        self._loading: list[Sequence] = []
        """Those whose cached blocks are on their way to the pool."""
        self._running: list[Sequence] = []
        self._copies: BlockCopies = []
        self.num_reserved_seqs = 0
        """Sequences promised a place when their hand-off ends."""
        self.num_preemptions = 0
        self.resumed_tokens = Counter[str]()
        """Of preempted sequences that have blocks again, by where their KV was found, or is computed again."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan."""
        return bool(self._running or self._waiting or self._loading)

    @property
    def is_only_landing(self) -> bool:
        """Whether nothing here frees a block before a hand-off of another worker arrives."""
        return self.num_reserved_seqs > 0 and not (self._running or self._loading)

    @property
    def running(self) -> Seq[Sequence]:
        """The batch, in its order."""
        return self._running

    def has_room(self, num_seqs: int) -> bool:
        """Whether newcomers may take `num_seqs` places; those preempted come first."""
        return not self._waiting and self._num_places(num_seqs) <= self._max_num_seqs

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose tokens must be computed here."""
        insort(self._waiting, sequence, key=_by_arrival)

    def join(self, sequence: Sequence) -> None:
        """Takes a sequence whose KV is here into the next step."""
        insort(self._running, sequence, key=_by_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out in any state and returns its blocks."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._loading:
            self._loading.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._release(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences into the batch while places and blocks last, each once its cached blocks are there;
        returns those moved."""
        started = self._start()
        while self._waiting and self._num_places(self._waiting[0].fan_out) <= self._max_num_seqs:
            if not claim_blocks(self._waiting[0], self._blocks):
                break
            self._loading.append(self._waiting.pop(0))
        return started + self._start()

    def _start(self) -> list[Sequence]:
        """Has those run whose cached blocks are there, and counts where preempted ones have found what they had; those
        that have lost some wait again."""
        arrived, lost = take_arrived(self._loading, self._blocks)
        for sequence in lost:
            self.add(sequence)
        for sequence in arrived:
            if sequence.num_preempted_tokens:
                self.resumed_tokens.update(sequence.hits)
                num_found = sum(sequence.hits.values())
                self.resumed_tokens["computed"] += max(0, sequence.num_preempted_tokens - num_found)
            sequence.num_preempted_tokens = 0
            self.join(sequence)
        return arrived

    def most_blocks_due(self) -> int:
        """Blocks that the running sequences may need for the next step, once the one under way has ended."""
        blocks, num_due = self._blocks, 0
        count = len(blocks.groups)
        for sequence in self._running:
            if (num := num_missing(sequence, sequence.num_tokens + 1, blocks)) > 0:
                num_due += num
            num_due += (sequence.fan_out - 1) * count
        return num_due

    def can_plan_ahead(self) -> bool:
        """Whether the next step has room without preempting anyone: blocks of a step under way do not come back."""
        blocks = self._blocks
        if any(self._is_uncovered(sequence) for sequence in self._running):
            return False
        return blocks.can_allocate(sum(max(0, num_missing(s, s.num_tokens, blocks)) for s in self._running))

    def plan(self, budget: StepBudget) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """Shares of the next step, which begins with this, and who was preempted to make room."""
        preempted = self._make_room()
        remaining = [(sequence, sequence.num_remaining) for sequence in self._running]
        scheduled = [ScheduledSequence(s, 1) for s in budget.decode([s for s, num in remaining if num == 1])]
        for sequence, num in remaining:
            if num > 1 and (num_tokens := budget.prompt(sequence, cover_blocks(sequence, self._blocks))):
                scheduled.append(ScheduledSequence(sequence, num_tokens))
        return scheduled, preempted

    def fork(self, parent: Sequence, children: list[Sequence], spare: list[int]) -> None:
        """Lets children share the parent's prompt blocks; a partly filled last block is copied for each.

        Blocks come from `spare` first; a child for which there is none waits and is computed anew.
        """
        count = len(self._blocks.groups)
        num_full, is_partial = divmod(parent.num_computed_tokens, self._blocks.block_size)
        end = num_full * count
        for child in children:
            if is_partial and not spare and not self._blocks.can_allocate(count):
                self.add(child)
                continue
            child.block_table = parent.block_table[:end]
            self._blocks.share(child.block_table)
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_landed_tokens = parent.num_landed_tokens
            if is_partial:
                targets = [spare.pop() for _ in range(count)] if spare else self._blocks.allocate(count)
                for source, target in zip(parent.block_table[end : end + count], targets, strict=True):
                    self._copy(source, target)
                child.block_table.extend(targets)
            self.join(child)

    def take_copies(self) -> BlockCopies:
        """Page copies (source, target) that the next step makes first; give them back with `copied` afterwards."""
        copies, self._copies = self._copies, []
        return copies

    def copied(self, copies: BlockCopies) -> None:
        for pair in copies:
            self._blocks.release(list(pair))

    def _copy(self, source: int, target: int) -> None:
        self._blocks.share([source, target])
        self._copies.append((source, target))

    def _release(self, sequence: Sequence) -> None:
        """Returns its blocks, and those of page copies that nobody else waits for: they would hold up the oldest."""
        own = set(sequence.block_table)
        dropped = [pair for pair in self._copies if pair[1] in own]
        if dropped:
            self._copies = [pair for pair in self._copies if pair[1] not in own]
            self.copied(dropped)
        release_blocks(sequence, self._blocks)

    def _num_places(self, more: int) -> int:
        return sum(s.fan_out for s in chain(self._running, self._loading)) + self.num_reserved_seqs + more

    def _make_room(self) -> list[Sequence]:
        """Gives each running sequence the blocks of its tokens; returns who was preempted for them."""
        preempted: list[Sequence] = []
        blocks = self._blocks
        size = blocks.block_size  # where nothing has a window there is one group
        short = [s for s in self._running if blocks.has_windows or s.num_tokens > len(s.block_table) * size]
        for sequence in short:
            needed = num_missing(sequence, sequence.num_tokens, blocks)
            while needed > 0 and sequence not in preempted and not blocks.can_allocate(needed):
                preempted.append(self._preempt_youngest())
            if needed > 0 and sequence not in preempted:
                sequence.block_table.extend(blocks.allocate(needed))
            while sequence not in preempted and self._is_uncovered(sequence):
                preempted.append(self._preempt_youngest())
        return preempted

    def _is_uncovered(self, sequence: Sequence) -> bool:
        """Whether the next token of a sequence has no block in a window, which gets its blocks as it goes on."""
        blocks, table = self._blocks, sequence.block_table
        row = sequence.num_computed_tokens // blocks.block_size * len(blocks.groups)
        is_here = not blocks.has_windows or min(table[row : row + len(blocks.groups)], default=0) >= 0
        return not is_here and not cover_blocks(sequence, blocks)

    def _preempt_youngest(self) -> Sequence:
        """Preempts one of those that run, or whose blocks are on their way: what arrives stays cached."""
        victim = max(chain(self._running[-1:], self._loading), key=_by_arrival)
        if victim in self._loading:
            self._loading.remove(victim)
        else:
            self._running.remove(victim)
            victim.num_preempted_tokens = victim.num_computed_tokens
            if not victim.request.use_prefix_cache:  # else they can be found
                keep_blocks(victim, self._blocks, victim.num_computed_tokens)
        self._release(victim)
        self.add(victim)
        self.num_preemptions += 1
        return victim
