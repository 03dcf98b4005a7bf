"""Steps of the fast fidelity: those of a worker in which nothing begins, ends or arrives are taken in one go.

    plan -> a run of steps that are alike -> cut, where something arrives that the next step has to do with -> processed

The roles, their schedulers and the block manager are the real ones: they plan the first step of a run as every step,
and get the tokens of all its steps at once. No KV and no token has any content. Blocks that the run needs are
allocated where it begins; where they do not all fit, steps are taken one by one. Outputs are reported at their first
token and their last, and a few times a second between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.pb import rank_pb2
from cluster.settings import WorkerSettings
from cluster.step_cost import StepSize
from decode_worker.scheduler import BlockCopies
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SampledToken, check_finish
from engine.sequence import ScheduledSequence, publish_blocks
from engine.sequence import Sequence as Output
from engine.step_budget import StepBudget
from engine.token_hash import StateArray
from prefill_worker.sender import MIN_LAYERED_TOKENS
from simulate.links import DirectReporter, Tokens
from simulate.model import END_TOKEN, KvPages, output_length
from simulate.ranks import Pages, SimulatedRanks, do_nothing
from simulate.virtual_loop import ScheduledCall
from simulate.workload import LEAST_TOKEN
from worker.decode_role import DecodeRole
from worker.handoff_connection import Done
from worker.prefill_role import PrefillRole
from worker.reporter import finish_to_proto
from worker.step_pipeline import StepPipeline, size_of_shares

LONGEST_S = 0.25
"""A run takes no longer, and outputs are reported as often: routers take a worker that sends no token for a second for
stalled."""
TOKEN = LEAST_TOKEN
"""Every token of an output but its end."""
_NO_STATES: StateArray = np.zeros(0, dtype=np.uint64)


class NoPages(KvPages):
    """A pool whose pages have no content, in one piece of all layers."""

    def __init__(self, block_size: int) -> None:
        super().__init__(0, block_size, 1)

    def read(self, block_table: Sequence[int], start: int, end: int) -> StateArray:
        return _NO_STATES

    def land(self, block_table: Sequence[int], start: int, states: StateArray, layers: tuple[int, int]) -> None:
        """Changes nothing."""

    def move(self, kind: rank_pb2.BlockMove.Kind, source: int, target: int) -> None:
        """Changes nothing."""


class StepRun:
    """Steps of the same sequences, each with one token more of them than the one before it."""

    __slots__ = ("begun_at", "first_s", "growth_s", "is_done", "num_steps", "timer")

    def __init__(self, begun_at: float, first_s: float, growth_s: float, num_steps: int) -> None:
        """Each step takes `growth_s` longer than the one before it."""
        self.begun_at = begun_at
        self.first_s = first_s
        self.growth_s = growth_s
        self.num_steps = num_steps
        self.is_done = False
        self.timer: ScheduledCall | None = None

    @property
    def seconds(self) -> float:
        return self.end_of(self.num_steps) - self.begun_at

    def end_of(self, step: int) -> float:
        """When a step ends, counted from 1."""
        return self.begun_at + step * self.first_s + self.growth_s * (step * (step - 1) / 2)

    def cut(self, now: float) -> bool:
        """Ends it with the step that is under way; False: it does in any case."""
        under_way = 1 + bisect_left(range(1, self.num_steps), now, key=self.end_of)
        is_shorter = under_way < self.num_steps
        self.num_steps = under_way
        return is_shorter


class RunRanks(SimulatedRanks):
    """Ranks that take steps in runs, and hand a prompt over in one chunk of all layers.

    That chunk sets off when the first of `num_parts` parts is computed, and lands no earlier than if each part had
    travelled while the next one was computed.
    """

    def __init__(self, *of_all_ranks: Any, num_parts: int = 1, offer_s: float = 0.0) -> None:
        """`offer_s`: seconds from a chunk's gather to its transfer."""
        super().__init__(*of_all_ranks)
        self._num_parts = num_parts
        self._offer_s = offer_s
        self._run: StepRun | None = None

    def run_of(self, size: StepSize, most_steps: int) -> StepRun:
        """A run of as many steps, or as take `LONGEST_S`; `size` is the first one's."""
        first_s = last_s = self._curve.seconds(size) * self.slowdown
        num_steps = max(1, min(most_steps, int(LONGEST_S / first_s) if first_s > 0 else most_steps))
        if num_steps > 1:
            more = StepSize(num_kv_tokens=(num_steps - 1) * size.num_sequences)
            last_s = self._curve.seconds(size + more) * self.slowdown
        return StepRun(self._world.loop.time(), first_s, (last_s - first_s) / max(1, num_steps - 1), num_steps)

    def begin(self, run: StepRun, size: StepSize) -> None:
        """Sets a run off. Like a step, it has one number."""
        self.num_steps += 1
        if self._world.keeps_trace:
            self._world.note(f"{self._name} run {self.num_steps}: {run.num_steps} of {size}")
        self._run = run
        self._time(run)
        self._gather_waiting()

    def cut(self, run: StepRun) -> None:
        """Something has arrived that the next step has to do with."""
        if run.cut(self._world.loop.time()):
            assert run.timer is not None
            run.timer.cancel()
            self._time(run)

    def _time(self, run: StepRun) -> None:
        run.timer = self._world.loop.call_at(run.end_of(run.num_steps), self._end_run, run)

    def _end_run(self, run: StepRun) -> None:
        if not self._is_dead:
            run.is_done = True
            self.busy_s += run.seconds
            self._num_done += 1
            self._post(do_nothing)

    def issue(self, command: rank_pb2.RankCommand | tuple[str, Any], done: Done) -> None:
        """A command of a chunk is its name and what it is about (`simulate.links.DirectConnection`)."""
        if isinstance(command, tuple):
            kind, what = command
            getattr(self, kind)(what, done)
        else:
            super().issue(command, done)

    # The hand-off of a prompt whose last step is under way

    def _written_at(self, what: Pages) -> float:
        run = self._run
        assert run is not None, "a chunk is of a step, and there was none"
        is_short = what.chunk.range.num_tokens < MIN_LAYERED_TOKENS
        return run.begun_at + run.seconds / (1 if is_short else self._num_parts)

    def _complete_at(self, what: Pages, size_bytes: int) -> float:
        if self._run is None or what.after_step <= self._num_done:
            return 0.0
        end = self._run.begun_at + self._run.seconds
        return end + self._offer_s + size_bytes / self._num_parts / self.nic.spec.bytes_per_s


@dataclass
class _Flight:
    """A run that was launched, and what it was planned from."""

    number: int
    run: StepRun
    size: StepSize
    going_on: list[Output]
    """Sequences that get a token in each step."""
    others: list[ScheduledSequence]
    """Other shares of decode, of which there are none in a run of several steps."""
    prefilling: list[ScheduledSequence]
    ends: set[int]
    """Identities of the shares that lead to a token."""
    copies: BlockCopies
    waiting: tuple[int, ...]


class RunPipeline(StepPipeline):
    """Takes the steps of a worker in runs; its ranks are `RunRanks`."""

    _ranks: RunRanks
    _reporter: DirectReporter

    def __init__(
        self, ranks: Any, blocks: BlockManager, prefill: PrefillRole, decode: DecodeRole, *rest: Any, **more: Any
    ) -> None:
        super().__init__(ranks, blocks, prefill, decode, *rest, **more)
        self._under_way: _Flight | None = None
        self._told: dict[Output, int] = {}
        """Tokens of the outputs of running sequences that are reported."""
        self._lengths: dict[Output, int] = {}
        """Tokens that those outputs will have in the end."""
        self._tell_due = 0.0

    @property
    def is_idle(self) -> bool:
        return self._under_way is None

    @property
    def is_due(self) -> bool:
        if (flight := self._under_way) is None:
            return self._decode.has_work or self._prefill.has_work
        return flight.run.is_done or (flight.run.num_steps > 1 and self._has_changed(flight))

    def advance(self, settings: WorkerSettings) -> bool:
        """Does what the pipeline's does, but that the next run is launched at once: then nothing is left to do."""
        flight = self._under_way
        if flight is not None and not flight.run.is_done:
            if flight.run.num_steps > 1 and self._has_changed(flight):
                self._ranks.cut(flight.run)
            return False
        if flight is not None:
            self._under_way = None
            self._end(flight)
        self._under_way = self._begin(settings)
        return False

    def _has_changed(self, flight: _Flight) -> bool:
        """Whether the next step would not be like those of the run."""
        return self._waiting != flight.waiting or flight.going_on != self._decode.running

    @property
    def _waiting(self) -> tuple[int, ...]:
        return self._decode.num_waiting, self._prefill.num_waiting, self._prefill.num_running

    def _begin(self, settings: WorkerSettings) -> _Flight | None:
        """Plans a step and sets it off, and those like it; None when there is nothing to run."""
        if not (self._decode.has_work or self._prefill.has_work):
            return None
        flight = self._begin_alike(settings)
        if flight is not None:
            return flight
        number = self._ranks.num_steps + 1
        budget = StepBudget(settings.engine.max_num_batched_tokens, settings.slo.tpot_s, lambda: self._step_clock.cost)
        decoding, preempted, copies = self._decode.plan(budget)
        prefilling = self._prefill.plan(budget, number - 1)
        for sequence in preempted:
            self._tell(sequence)
        scheduled = decoding + prefilling
        if not scheduled:
            self._decode.copied(copies)
            return None
        for p in prefilling:
            self._prefill.step_launching(p, number)
        self._blocks.begin_step()
        if self._reporter.is_pressing:
            self._reporter.flush()
        going_on, others = self._parted(decoding)
        size = size_of_shares(scheduled)
        is_alike = len(going_on) == len(scheduled) and not copies
        run = self._ranks.run_of(size, self._most_steps(going_on) if is_alike else 1)
        if run.num_steps > 1 and not self._provide(going_on, run.num_steps):
            run.num_steps = 1
        self._ranks.begin(run, size)
        ends = {id(p) for p in (*others, *prefilling) if p.num_tokens == p.sequence.num_remaining}
        waiting = self._waiting if run.num_steps > 1 else ()
        return _Flight(number, run, size, going_on, others, prefilling, ends, copies, waiting)

    def _begin_alike(self, settings: WorkerSettings) -> _Flight | None:
        """Does what `_begin` does where every sequence gets a token in each step and nothing else is to be planned, as
        it mostly is; None, and nothing done, otherwise."""
        running, waiting = self._decode.running, self._waiting
        if any(waiting) or not 0 < len(running) <= settings.engine.max_num_batched_tokens:
            return None
        for sequence in running:
            if sequence not in self._told and not self._goes_on(sequence):
                return None
        size = StepSize(num_sequences=len(running), num_kv_tokens=sum([s.num_computed_tokens + 1 for s in running]))
        run = self._ranks.run_of(size, self._most_steps(running))
        if not self._provide(running, run.num_steps):
            return None
        self._blocks.begin_step()
        if self._reporter.is_pressing:
            self._reporter.flush()
        self._ranks.begin(run, size)
        waiting = waiting if run.num_steps > 1 else ()
        return _Flight(self._ranks.num_steps, run, size, list(running), [], [], set(), [], waiting)

    def _goes_on(self, sequence: Output) -> bool:
        """Whether a sequence that has not been told of gets a token in each step; it is told of from now on then."""
        if sequence.num_remaining != 1 or sequence.is_fresh:
            return False
        self._told[sequence] = len(sequence.output_token_ids)
        self._lengths[sequence] = output_length(sequence.request.params)
        return True

    def _end(self, flight: _Flight) -> None:
        """Hands the roles what the run has led to."""
        run, now = flight.run, self._clock()
        self._blocks.end_step()
        self._handoffs.step_ended(flight.number)
        self._decode.copied(flight.copies)
        self._learn(run, flight.size)
        self._stats.num_steps += run.num_steps
        self._stats.num_decode_tokens += run.num_steps * len(flight.going_on)
        self._stats.num_prefill_tokens += flight.size.num_prompt_tokens
        self._go_on(flight.going_on, run.num_steps, is_due=now >= self._tell_due)
        for p in flight.others:
            self._tell(p.sequence)
            self._decode.process_output(p, _sampled(p.sequence, id(p) in flight.ends))
        for p in flight.prefilling:
            self._prefill.process_output(p, _sampled(p.sequence, id(p) in flight.ends), flight.number)

    def _learn(self, run: StepRun, size: StepSize) -> None:
        for step in self._step_clock.wanted(run.num_steps, bool(size.num_prompt_tokens)):
            more = StepSize(num_kv_tokens=step * size.num_sequences)
            self._step_clock.note(size + more if step else size, run.first_s + step * run.growth_s)

    def _parted(self, shares: list[ScheduledSequence]) -> tuple[list[Output], list[ScheduledSequence]]:
        """Sequences that get a token in each step, and the other shares."""
        going_on, others, told = [], [], self._told
        for p in shares:
            sequence = p.sequence
            if sequence in told or (p.num_tokens == 1 and self._goes_on(sequence)):
                going_on.append(sequence)
            else:
                others.append(p)
        return going_on, others

    def _most_steps(self, sequences: Sequence[Output]) -> int:
        """Steps until the first of these outputs ends."""
        lengths = self._lengths
        return max(1, min([lengths[sequence] - len(sequence.output_token_ids) for sequence in sequences]))

    def _provide(self, sequences: Sequence[Output], num_steps: int) -> bool:
        """Gives the batch the blocks of so many steps, each with one token of every sequence. False, and none given,
        where they do not all fit."""
        block_size, blocks = self._blocks.block_size, self._blocks
        short = []
        num_missing = 0
        for sequence in sequences:
            num_tokens = sequence.num_computed_tokens + num_steps
            if (num := -(-num_tokens // block_size) - len(sequence.block_table)) > 0:
                short.append((sequence, num))
                num_missing += num
        if not blocks.can_allocate(num_missing):
            return False
        for sequence, num in short:
            sequence.block_table.extend(blocks.allocate(num))
        return True

    def _go_on(self, sequences: list[Output], num_steps: int, *, is_due: bool) -> None:
        """Hands out the tokens of a run; reports them where that `is_due`, and where they end an output."""
        told, lengths, tokens = self._told, self._lengths, [TOKEN] * num_steps
        if sequences != self._decode.running:
            live = set(self._decode.running)  # others have been aborted meanwhile
            sequences = [sequence for sequence in sequences if sequence in live]
        for sequence in sequences:
            output = sequence.output_token_ids
            output += tokens
            sequence.num_computed_tokens += num_steps
            has_ended = len(output) >= lengths[sequence]
            if has_ended and sequence.request.params.stop_token_ids:
                output[-1] = END_TOKEN
            if is_due or has_ended:
                publish_blocks(sequence, self._blocks, 0)
                self._report(sequence)
            if has_ended:
                del told[sequence], lengths[sequence]
                self._decode.cancel(sequence.request.key, "its output is complete", sequence.index)
        if is_due:
            self._tell_due = self._clock() + LONGEST_S
            live = set(self._decode.running)
            self._told = {sequence: num for sequence, num in told.items() if sequence in live}
            self._lengths = {sequence: lengths[sequence] for sequence in self._told}

    def _tell(self, sequence: Output) -> None:
        """Reports what has not been of a sequence that stops getting a token in each step."""
        if self._told.get(sequence, len(sequence.output_token_ids)) < len(sequence.output_token_ids):
            self._report(sequence)
        self._told.pop(sequence, None)
        self._lengths.pop(sequence, None)

    def _report(self, sequence: Output) -> None:
        """Reports the tokens of an output that are not reported yet, and whether it has ended."""
        request, output, num_told = sequence.request, sequence.output_token_ids, self._told[sequence]
        tokens = Tokens(request.key, sequence.index, num_told, output[num_told:])
        finish = check_finish(request.params, output)
        if finish is not None:
            finish_to_proto(finish, tokens)  # type: ignore[arg-type]
        self._told[sequence] = len(output)
        self._reporter.tell(request.key, "tokens", tokens, can_wait=finish is None)


def _sampled(sequence: Output, is_end: bool) -> list[SampledToken]:
    """The token that a share leads to, if it does."""
    if not is_end:
        return []
    params = sequence.request.params
    ends_here = params.stop_token_ids and len(sequence.output_token_ids) + 1 >= output_length(params)
    return [SampledToken(END_TOKEN if ends_here else TOKEN)]
