"""The engine thread of a worker: one loop that takes events in, plans a step, runs it and reports its output.

Everything that owns memory or decides runs on this thread, so nothing here is locked. Other threads post to its
`Inbox`: router sessions, streams of hand-off connections and finished rank commands. It waits for work only. A long
step runs elsewhere while this thread goes on taking events in; blocks that are released meanwhile stay held until the
step has ended. It knows no tensors: ranks compute, sample and answer with plain values.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from cluster.crash_record import CrashRecord
from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from cluster.settings import WorkerSettings
from cluster.step_cost import StepSize
from decode_worker.scheduler import BlockCopies
from engine.kv.block_manager import BlockManager
from engine.sampling.constraint import Constrainer
from engine.sampling.params import SampledToken, SampleRow
from engine.sequence import Request, ScheduledSequence, Sequence
from engine.step_budget import StepBudget
from engine.step_input import StepInput, build_step
from worker.decode_role import DecodeRole
from worker.grammar_queue import GrammarQueue, WaitingAdmit
from worker.handoff_connection import HandoffContext
from worker.handoffs import Dial, Handoffs
from worker.prefill_role import PrefillRole
from worker.reporter import CacheReporter, Reporter, RouterSession
from worker.steps import DeviceSpan, StepClock, StepLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATS_INTERVAL_S = 0.2
REPORT_INTERVAL_S = 0.004
"""Tokens in the middle of outputs are sent no more often. Sending takes the interpreter from the step after it, and
costs as much for one token as for ten."""


class Inbox:
    """Calls that other threads have the engine thread make."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """From any thread: calls `function(*arguments)` on the engine thread before the next step."""
        self._calls.put((function, arguments))

    def run(self, wait: bool) -> None:
        """Makes the calls that were posted; waits for one first, if asked to."""
        while wait or not self._calls.empty():
            function, arguments = self._calls.get()
            function(*arguments)
            wait = False

    @property
    def is_empty(self) -> bool:
        return self._calls.empty()


class Launched(Protocol):
    """A step that was launched."""

    @property
    def is_done(self) -> bool:
        """Whether its output is there."""
        ...

    @property
    def span(self) -> DeviceSpan | None:
        """The step on a device that may still be at it when it `is_done`; None where `is_done` is its end."""
        ...

    def sample(self, rows: Seq[Seq[SampleRow]]) -> list[SampledToken]:
        """Waits for the step, or raises what made it fail, and samples each row of logits for its rows, one or more."""
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

    def launch(self, step: StepInput) -> Launched:
        """Sets one forward pass off on every rank; the one before it must be done.

        A short step is done when this returns. When a long one ends, something is posted to the engine thread.
        """
        ...


@dataclass
class Flight:
    """A step that has been launched, and what it was scheduled from."""

    launched: Launched
    decoding: list[ScheduledSequence]
    prefilling: list[ScheduledSequence]
    ends: list[ScheduledSequence]
    """Shares that lead to tokens, as they were at the launch: a sequence aborted since has lost its count."""
    num_scored: list[int]
    """Prompt tokens that each share scores, those that decode first."""
    preempted: list[Sequence]
    copies: BlockCopies


class Core:
    """State of one worker."""

    def __init__(
        self,
        inbox: Inbox,
        ranks: Ranks,
        blocks: BlockManager,
        handoff_context: HandoffContext,
        dial: Dial,
        settings: WorkerSettings,
        *,
        max_model_len: int,
        vocab_size: int,
        num_layers: int,
        step_log: StepLog,
        constrainer: Constrainer | None = None,
        crash_record: CrashRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox = inbox
        self.blocks = blocks
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._settings = settings
        self._reserved_tokens = settings.engine.max_num_batched_tokens
        self._max_model_len = max_model_len
        self._step_log = step_log
        self._crash_record = crash_record
        self._clock = clock
        self._step_clock = StepClock()
        self._stats = handoff_context.stats
        self._sent_stats = worker_pb2.WorkerStats()
        self._stats_due = 0.0
        self._report_due = 0.0
        self._flight: Flight | None = None
        self._is_stopping = False
        self.reporter = Reporter(step_log)
        self._grammars = GrammarQueue(constrainer, inbox.post, self._admit, self._refuse)
        self._cache_reporter = CacheReporter(blocks, self.reporter)
        self.prefill = PrefillRole(self.reporter, blocks, num_layers)
        self.decode = DecodeRole(self.reporter, blocks, settings.engine.max_num_seqs, num_layers)
        self.handoffs = Handoffs(
            handoff_context,
            self.prefill,
            self.decode,
            dial,
            worker_id=settings.worker_id,
            max_pairs=settings.transfer.max_pairs,
            answer_timeout_s=2 * settings.transfer.timeout_s,
        )

    # The loop

    def run(self) -> None:
        """Returns after `stop`; raises when a step fails, which ends the worker."""
        is_idle = True
        while not self._is_stopping:
            is_idle = not self.turn(wait=is_idle)
        self._step_log.close()

    def turn(self, wait: bool) -> bool:
        """Makes the calls that were posted (waits for one, if asked to), and moves the step on as far as it goes.

        True when a step has ended; False when there is nothing to do before something is posted.
        """
        self.inbox.run(wait)
        if self._flight is None:
            self._flight = self._launch()
        has_ended = self._flight is not None and self._flight.launched.is_done
        if has_ended:
            self._finish()
        self._flush(is_idle=not has_ended)
        return has_ended

    def stop(self) -> None:
        """On the engine thread (through the inbox)."""
        self._is_stopping = True

    def _launch(self) -> Flight | None:
        """Plans a step and sets it off; None when there is nothing to run."""
        last_step = self._ranks.num_steps
        engine, tpot_s = self._settings.engine, self._settings.slo.tpot_s
        budget = StepBudget(engine.max_num_batched_tokens, tpot_s, lambda: self._step_clock.cost)
        decoding, preempted, copies = self.decode.plan(budget)
        prefilling = self.prefill.plan(budget, last_step)
        scheduled = decoding + prefilling
        if not scheduled:
            self._step_clock.rests()
            self.decode.copied(copies)
            if self._crash_record is not None:
                self._crash_record.rests()
            return None
        slices = [p.sequence.slice(p.num_tokens) for p in scheduled]
        step = build_step(slices, self.blocks.block_size, copies)
        for p in prefilling:
            self.prefill.step_launching(p, last_step + 1)
        ends = [p for p in scheduled if p.num_tokens == p.sequence.num_remaining]
        _ask_ahead(ends)
        num_scored = [len(s.scored.next_token_ids) if s.scored is not None else 0 for s in slices]
        self.blocks.begin_step()
        has_prompt = len(step.token_ids) > len(scheduled)
        if has_prompt or self.reporter.is_pressing:  # nothing waits for a long step; who starts now is known before it
            self.reporter.flush()
        if self._crash_record is not None:
            self._crash_record.step_begins(p.sequence.request.key.request_id for p in scheduled)
        now = self._clock()
        self._step_clock.begins(now, _size_of(scheduled) if self._step_clock.wants(has_prompt) else None)
        launched = self._ranks.launch(step)
        return Flight(launched, decoding, prefilling, ends, num_scored, preempted, copies)

    def _finish(self) -> None:
        """Processes the output of a step that has ended."""
        flight, self._flight = self._flight, None
        assert flight is not None
        scheduled = flight.decoding + flight.prefilling
        sampled = self._sample(flight.launched, scheduled, flight.ends)
        self._step_clock.ends(self._clock(), flight.launched.span)
        scores: dict[int, list[SampledToken]] = {}
        if any(flight.num_scored):
            tokens = iter(flight.launched.scores())
            scores = {id(p): list(islice(tokens, n)) for p, n in zip(scheduled, flight.num_scored, strict=True)}
        self.blocks.end_step()
        last_step = self._ranks.num_steps
        self.handoffs.step_ended(last_step)
        self.decode.copied(flight.copies)
        self._count(scheduled, len(flight.decoding))
        for p in flight.ends:
            problem = next((token.problem for token in sampled[id(p)] if token.problem), "")
            if problem:
                self._fail(p.sequence.request.key, f"the output cannot be constrained any further: {problem}")
        for p in flight.decoding:
            self.decode.process_output(p, sampled[id(p)], scores.get(id(p), ()))
        for p in flight.prefilling:
            self.prefill.process_output(p, sampled[id(p)], last_step, scores.get(id(p), ()))
        self._step_log.write(self._stats.num_steps, scheduled, flight.preempted, self.blocks)

    def _sample(
        self, launched: Launched, scheduled: list[ScheduledSequence], ends: list[ScheduledSequence]
    ) -> dict[int, list[SampledToken]]:
        """The tokens each share of the step leads to, none for one that ends inside its prompt."""
        sampled: dict[int, list[SampledToken]] = {id(p): [] for p in scheduled}
        rows = [p.sequence.sample_rows() for p in ends]
        tokens = iter(launched.sample(rows))
        for p, of_one in zip(ends, rows, strict=True):
            sampled[id(p)] = [next(tokens) for _ in of_one]
        return sampled

    def _count(self, scheduled: list[ScheduledSequence], num_decoding: int) -> None:
        self._stats.num_steps += 1
        for i, p in enumerate(scheduled):
            if i < num_decoding and p.num_tokens == 1:
                self._stats.num_decode_tokens += 1
            else:
                self._stats.num_prefill_tokens += p.num_tokens

    # Router sessions

    def session_opened(self, session: RouterSession, info: worker_pb2.WorkerInfo) -> None:
        self.reporter.open_session(session)
        self.reporter.send(session, worker_pb2.Event(info=info))
        self.reporter.send(session, worker_pb2.Event(stats=self._measure()))
        self._cache_reporter.open_session(session)

    def session_closed(self, session: RouterSession) -> None:
        """A router is gone: nobody waits for its requests."""
        self._grammars.close_session(session)
        self._cache_reporter.close_session(session)
        for key in self.reporter.close_session(session):
            self._cancel(key, "the router closed its session", None)

    def command(self, session: RouterSession, command: worker_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "admit":
                waiting = WaitingAdmit(session, command.admit)
                (self._grammars.add if command.admit.sampling.grammar else self._admit)(waiting)
            case "cancel":
                index = command.cancel.sequence_index if command.cancel.HasField("sequence_index") else None
                self._cancel(RequestKey.of(command.cancel.key), "cancelled", index)
            case "resync_cache":
                self._cache_reporter.resync(session)
            case "update_settings":
                # While workers are replaced for a larger step, those of before keep the one they have memory for.
                settings = self._settings.with_run_time(command.update_settings.json)
                tokens = min(settings.engine.max_num_batched_tokens, self._reserved_tokens)
                self._settings = settings.with_values(max_num_batched_tokens=tokens)

    def _admit(self, waiting: WaitingAdmit) -> None:
        session, admit, has_cache = waiting.session, waiting.admit, self._settings.engine.enable_prefix_cache
        request = Request.from_proto(admit, enable_prefix_cache=has_cache, constraint=waiting.constraint)
        problem = request.problem(self._vocab_size, self._max_model_len)
        if request.key in self.reporter or request.key in self.prefill or request.key in self.decode:
            problem = "this worker already holds a request of this id and attempt"
        if problem:
            self._refuse(waiting, worker_pb2.Failed.REASON_INVALID, problem)
            return
        self.reporter.open_request(request.key, session, report_each_token=admit.tell_each_token)
        if admit.role == worker_pb2.ROLE_DECODE:
            self.decode.admit(request, admit.expect_handoff, waiting.aborted)
            return
        self.prefill.admit(request, self.handoffs.connect_to(admit.decode_peer))

    def _refuse(self, waiting: WaitingAdmit, reason: worker_pb2.Failed.Reason, problem: str) -> None:
        failed = worker_pb2.Failed(key=waiting.admit.key, reason=reason, message=problem)
        self.reporter.send(waiting.session, worker_pb2.Event(failed=failed))

    def _cancel(self, key: RequestKey, reason: str, sequence_index: int | None) -> None:
        self._grammars.cancel(key, sequence_index)
        if key in self.reporter and sequence_index is None:
            self._step_log.cancelled(key)
        if key in self.decode:
            self.decode.cancel(key, reason, sequence_index)
        if key in self.prefill and sequence_index is None:
            self.prefill.cancel(key, reason)

    def _fail(self, key: RequestKey, problem: str) -> None:
        """Fails a request that no worker can go on with."""
        if key in self.reporter:
            self.reporter.emit_failure(key, worker_pb2.Failed.REASON_INVALID, problem)
            self._cancel(key, problem, None)

    # Reports to routers

    def _flush(self, is_idle: bool) -> None:
        now = self._clock()
        if is_idle or now >= self._stats_due:
            stats = self._measure()
            if stats != self._sent_stats:
                self._sent_stats.CopyFrom(stats)
                self._stats_due = now + STATS_INTERVAL_S
                self.reporter.send_all(worker_pb2.Event(stats=self._sent_stats))
        self._cache_reporter.gather()
        if is_idle or self.reporter.is_pressing or now >= self._report_due:
            self._report_due = now + REPORT_INTERVAL_S
            self.reporter.flush()

    def between_steps(self, work: Callable[[], T]) -> T | None:
        """On the engine thread (through the inbox): the result of `work`; None, and not run, during a step."""
        return None if self._flight is not None else work()

    def _measure(self) -> worker_pb2.WorkerStats:
        stats, blocks = self._stats, self.blocks
        stats.blocks_free, stats.blocks_held = blocks.num_free, blocks.num_held
        stats.blocks_cached, stats.blocks_total = blocks.num_cached, blocks.num_total
        stats.num_running_seqs = self.decode.num_running + self.prefill.num_running
        stats.num_waiting_requests = self.decode.num_waiting + self.prefill.num_waiting + len(self._grammars)
        stats.num_requests = self.reporter.num_requests
        stats.num_preemptions = self.decode.num_preemptions
        cost = self._step_clock.cost
        if cost is not None:
            stats.step_cost.CopyFrom(cost.to_proto())
        return stats


def _ask_ahead(ends: list[ScheduledSequence]) -> None:
    """Asks which tokens may follow, so that the answers are there when the step is done."""
    constrained = [p.sequence for p in ends if p.sequence.request.params.constraint is not None]
    for row in (row for sequence in constrained for row in sequence.sample_rows()):
        assert row.params.constraint is not None
        row.params.constraint.ask(row.sequence_index, row.output_token_ids)
    for sequence in constrained:
        assert sequence.request.params.constraint is not None
        sequence.request.params.constraint.flush()


def _size_of(scheduled: list[ScheduledSequence]) -> StepSize:
    """One token of a sequence is its next one; more are a prompt's, or computed like those."""
    held = [p.sequence.num_computed_tokens + 1 for p in scheduled if p.num_tokens == 1]
    size = StepSize(num_sequences=len(held), num_kv_tokens=sum(held))
    for p in scheduled:
        if p.num_tokens > 1:
            size += StepSize.of_prompt(p.num_tokens, p.sequence.num_computed_tokens)
    return size
