"""The steps of one worker, from their plan to their output: what both roles want computed, as one batch.

    plan -> launched -> sampled (the choice of tokens is set off) -> read -> processed by the roles

A long step runs elsewhere while the engine thread goes on taking events in; blocks that are released meanwhile stay
held until the step has ended. Knows no tensors: ranks compute, sample and answer with plain values.

Where steps overlap, the next one is planned and launched between "sampled" and "read", as if every sequence went on,
so that a device has it queued while the host reads and processes. Its ids are rows of the step before, which the device
looks up. What a sequence that has ended meanwhile (by a stop token, its client or its router) leads to in that step is
thrown away, and its blocks come back when that step has ended. Tokens are the same: each is chosen by what comes before
it in its sequence, with the step itself where the device counts that, else when all steps before have been processed. A
step waits for the one before it where the host has a say in between: constraints, prompts
that are scored, handed over or become several sequences, and blocks that only a preemption gives.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from cluster.crash_record import CrashRecord
from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from cluster.settings import WorkerSettings
from cluster.step_cost import StepCost, StepSize
from decode_worker.scheduler import BlockCopies
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SampledToken, SampleRow
from engine.sequence import ScheduledSequence, Sequence
from engine.step_budget import StepBudget
from engine.step_input import StepInput, build_step
from worker.decode_role import DecodeRole
from worker.handoffs import Handoffs
from worker.prefill_role import PrefillRole
from worker.reporter import Reporter
from worker.steps import DeviceSpan, StepClock, StepLog


class Launched(Protocol):
    """A step that was launched."""

    @property
    def is_done(self) -> bool:
        """Whether its output is there; on a device that runs behind, whether it is queued there."""
        ...

    @property
    def span(self) -> DeviceSpan | None:
        """The step on a device that may still be at it when it `is_done`; None where `is_done` is its end."""
        ...

    def sample(self, rows: Seq[Seq[SampleRow]]) -> None:
        """Sets the choice of tokens off, unless that was a part of the step: of each row of logits for its rows, one or
        more. Waits for the step to be done, and raises what made it fail."""
        ...

    def tokens(self) -> list[SampledToken]:
        """Waits for the tokens that `sample` set off."""
        ...

    def scores(self) -> list[SampledToken]:
        """The prompt tokens that the step was to score."""
        ...


class Ranks(Protocol):
    """The tensor-parallel ranks of this worker, as one (`worker.group.RankGroup`)."""

    @property
    def num_steps(self) -> int:
        """Number of steps launched: a transfer command may name the newest, or the next, as the one it follows."""
        ...

    def launch(self, step: StepInput, rows: Callable[[], Seq[SampleRow]]) -> Launched:
        """Sets one forward pass off on every rank; the one before it must be done.

        `rows`, of its logits, are asked for at once, if the choice of tokens can be a part of the pass. A short step is
        done when this returns. When a long one ends, something is posted to the engine thread.
        """
        ...


@dataclass
class Flight:
    """A step that has been launched, and what it was scheduled from."""

    number: int
    """Counted from 1, as transfer commands name steps."""
    launched: Launched
    decoding: list[ScheduledSequence]
    prefilling: list[ScheduledSequence]
    ends: list[ScheduledSequence]
    """Shares that lead to tokens, as they were at the launch: a sequence aborted since has lost its count."""
    num_scored: list[int]
    """Prompt tokens that each share scores, those that decode first."""
    preempted: list[Sequence]
    copies: BlockCopies
    is_counted: bool = False
    """Whether its shares were counted as computed before its tokens were read, to plan the step behind it."""

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step needs nothing of it but its tokens, on the device."""
        if self.prefilling or any(self.num_scored):
            return False
        return all(p.sequence.fan_out == 1 and p.sequence.request.params.constraint is None for p in self.ends)

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        return self.decoding + self.prefilling


class StepPipeline:
    """Runs one step at a time, or where they overlap one and another behind it."""

    def __init__(
        self,
        ranks: Ranks,
        blocks: BlockManager,
        prefill: PrefillRole,
        decode: DecodeRole,
        handoffs: Handoffs,
        reporter: Reporter,
        *,
        stats: worker_pb2.WorkerStats,
        step_log: StepLog,
        crash_record: CrashRecord | None,
        clock: Callable[[], float],
        fail: Callable[[RequestKey, str], None],
        overlaps: bool,
    ) -> None:
        """Steps and tokens are counted in `stats`. `fail` gives up a request that no worker can go on with."""
        self._ranks = ranks
        self._blocks = blocks
        self._prefill = prefill
        self._decode = decode
        self._handoffs = handoffs
        self._reporter = reporter
        self._stats = stats
        self._step_log = step_log
        self._crash_record = crash_record
        self._clock = clock
        self._fail = fail
        self._overlaps = overlaps
        self._step_clock = StepClock()
        self._flight: Flight | None = None

    @property
    def is_due(self) -> bool:
        """Whether `advance` may do anything, which only one that takes its steps in runs can tell."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return self._flight is None

    @property
    def num_ended(self) -> int:
        """Steps whose output has been processed."""
        return self._ranks.num_steps - (not self.is_idle)

    @property
    def cost(self) -> StepCost | None:
        """The cost of steps, as it was found; None before there are enough to tell."""
        return self._step_clock.cost

    def advance(self, settings: WorkerSettings) -> bool:
        """Launches a step if none is under way, and processes the output of one that is done, behind which it may
        launch the next.

        True when a step has ended; False when there is nothing to do before something is posted.
        """
        if self._flight is None:
            self._flight = self._launch(settings)
        flight = self._flight
        if flight is None or not flight.launched.is_done:
            return False
        rows = self._sample(flight)
        self._flight = self._follow(flight, settings)
        self._process(flight, self._read(flight, rows))
        return True

    def _follow(self, flight: Flight, settings: WorkerSettings) -> Flight | None:
        """Launches the step behind one whose tokens are not read; None where that has to wait."""
        if not (self._overlaps and flight.can_be_followed):
            return None
        rows = {id(p): row for row, p in enumerate(flight.ends)}
        flight.is_counted = True
        has_room = self._decode.count_ahead([(p, rows.get(id(p))) for p in flight.decoding])
        return self._launch(settings) if has_room else None

    def _launch(self, settings: WorkerSettings) -> Flight | None:
        """Plans a step and sets it off; None when there is nothing to run."""
        if not (self._decode.has_work or self._prefill.has_work):
            if self._flight is None:
                self._rest()
            return None
        number = self._ranks.num_steps + 1
        budget = StepBudget(settings.engine.max_num_batched_tokens, settings.slo.tpot_s, lambda: self._step_clock.cost)
        decoding, preempted, copies = self._decode.plan(budget)
        prefilling = self._prefill.plan(budget, number - 1, may_wait=lambda: not self._decode.is_only_landing)
        scheduled = decoding + prefilling
        if not scheduled:
            self._decode.copied(copies)
            if self._flight is None:
                self._rest()
            return None
        slices = [p.sequence.slice(p.num_tokens) for p in scheduled]
        step = build_step(slices, self._blocks.block_size, copies, len(self._blocks.groups))
        for p in prefilling:
            self._prefill.step_launching(p, number)
        ends = [p for p in scheduled if p.num_tokens == p.sequence.num_remaining]
        if not self._overlaps:
            _ask_ahead(ends)
        num_scored = [len(s.scored.next_token_ids) if s.scored is not None else 0 for s in slices]
        self._blocks.begin_step()
        has_prompt = len(step.token_ids) > len(scheduled)
        if has_prompt or self._reporter.is_pressing:  # nothing waits for a long step; who starts is known before it
            self._reporter.flush()
        if self._crash_record is not None:
            self._crash_record.step_begins(p.sequence.request.key.request_id for p in scheduled)
        size = size_of_shares(scheduled) if self._step_clock.wants(has_prompt) else None
        self._step_clock.begins(self._clock(), size)
        launched = self._ranks.launch(step, lambda: [row for p in ends for row in p.sequence.sample_rows()])
        if self._overlaps:  # a device is at it, which does not wait for that
            _ask_ahead(ends)
        return Flight(number, launched, decoding, prefilling, ends, num_scored, preempted, copies)

    def _rest(self) -> None:
        self._step_clock.rests()
        if self._crash_record is not None:
            self._crash_record.rests()

    def _process(self, flight: Flight, sampled: dict[int, list[SampledToken]]) -> None:
        """Hands the roles what a step that has ended led to."""
        scores: dict[int, list[SampledToken]] = {}
        if any(flight.num_scored):
            tokens = iter(flight.launched.scores())
            scores = {id(p): list(islice(tokens, n)) for p, n in zip(flight.scheduled, flight.num_scored, strict=True)}
        self._blocks.end_step()
        self._handoffs.step_ended(flight.number)
        self._decode.copied(flight.copies)
        self._count(flight)
        for p in flight.ends:
            problem = next((token.problem for token in sampled[id(p)] if token.problem), "")
            if problem:
                self._fail(p.sequence.request.key, problem)
        for p in flight.decoding:
            self._decode.process_output(p, sampled[id(p)], scores.get(id(p), ()), is_counted=flight.is_counted)
        for p in flight.prefilling:
            self._prefill.process_output(p, sampled[id(p)], flight.number, scores.get(id(p), ()))
        self._step_log.write(self._stats.num_steps, flight.scheduled, flight.preempted, self._blocks)

    def _sample(self, flight: Flight) -> list[list[SampleRow]]:
        """Sets the choice of a step's tokens off; returns the rows of each of its ends."""
        rows = [p.sequence.sample_rows() for p in flight.ends]
        flight.launched.sample(rows)
        self._step_clock.ends(self._clock(), flight.launched.span)
        return rows

    def _read(self, flight: Flight, rows: list[list[SampleRow]]) -> dict[int, list[SampledToken]]:
        """The tokens each share of the step leads to, none for one that ends inside its prompt."""
        sampled: dict[int, list[SampledToken]] = {id(p): [] for p in flight.scheduled}
        tokens = iter(flight.launched.tokens())
        for p, of_one in zip(flight.ends, rows, strict=True):
            sampled[id(p)] = list(islice(tokens, len(of_one)))
        return sampled

    def _count(self, flight: Flight) -> None:
        self._stats.num_steps += 1
        for p in flight.decoding:
            if p.num_tokens == 1:
                self._stats.num_decode_tokens += 1
            else:
                self._stats.num_prefill_tokens += p.num_tokens
        self._stats.num_prefill_tokens += sum(p.num_tokens for p in flight.prefilling)


def _ask_ahead(ends: list[ScheduledSequence]) -> None:
    """Asks which tokens may follow, so that the answers are there when the step is done."""
    constraint = None
    for sequence in (p.sequence for p in ends if p.sequence.request.params.constraint is not None):
        for row in sequence.sample_rows():
            constraint = row.params.constraint
            assert constraint is not None
            constraint.ask(row.sequence_index, row.output_token_ids, row.params.stop_token_ids)
    if constraint is not None:
        constraint.flush()


def size_of_shares(scheduled: list[ScheduledSequence]) -> StepSize:
    """One token of a sequence is its next one; more are a prompt's, or computed like those."""
    held = [p.sequence.num_computed_tokens + 1 for p in scheduled if p.num_tokens == 1]
    size = StepSize(num_sequences=len(held), num_kv_tokens=sum(held))
    for p in scheduled:
        if p.num_tokens > 1:
            size += StepSize.of_prompt(p.num_tokens, p.sequence.num_computed_tokens)
    return size
