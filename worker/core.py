"""The engine thread of a worker: one loop that hears events, plans a step, runs it and tells what came of it.

Everything that owns memory or decides runs on this thread, so nothing here is locked. Other threads `post` to it:
router sessions and hand-off links (the speaking side, `worker.service`) and finished rank commands. It never waits but
for work. A long step runs elsewhere while this thread goes on hearing; blocks that are given back meanwhile stay held
until it has ended. Sessions and links are opaque names here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from cluster.pb import worker_pb2
from cluster.request_key import RequestKey
from cluster.settings import WorkerSettings
from cluster.step_cost import StepCost, StepSize
from decode_worker.role import DecodeRole
from decode_worker.scheduler import BlockCopies
from engine.kv.block_manager import BlockManager
from engine.sampling.constraint import Constrainer
from engine.sampling.params import SampledToken
from engine.sampling.sampler import Sampler
from engine.sequence import Request, ScheduledSequence, Sequence
from engine.step_budget import StepBudget
from engine.step_input import build_step
from prefill_worker.role import PrefillRole
from worker.cache_reporter import CacheReporter
from worker.convert import request_of
from worker.handoff_connection import Carrier, PeerLinks
from worker.metrics import HandoffMetrics, HeldResources
from worker.ranks import Launched, Ranks
from worker.reporter import Reporter, Voice
from worker.step_clock import StepClock
from worker.step_log import StepLog
from worker.step_meter import StepMeter

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATS_INTERVAL_S = 0.2
TELL_INTERVAL_S = 0.004
"""Tokens in the middle of outputs are told no oftener. Telling takes the interpreter from the step after it, and costs
as much for one token as for ten."""


class Speaker(Voice, PeerLinks, Protocol):
    """The speaking side, whole."""


@dataclass
class Flight:
    """A step that has been launched, and what it was scheduled from."""

    launched: Launched
    decoding: list[ScheduledSequence]
    prefilling: list[ScheduledSequence]
    ends: list[ScheduledSequence]
    """Shares that lead to tokens, as they were when it set off: a sequence given up since has lost its count."""
    num_scored: list[int]
    """Prompt tokens that each share scores, those that decode first."""
    preempted: list[Sequence]
    copies: BlockCopies


class Core:
    """State of one worker. `attach` comes before `run`."""

    def __init__(
        self,
        blocks: BlockManager,
        sampler: Sampler,
        metrics: HandoffMetrics,
        settings: WorkerSettings,
        *,
        max_model_len: int,
        num_layers: int,
        step_log: StepLog,
        constrainer: Constrainer | None = None,
        clock: Callable[[], float] = time.monotonic,
        meter: StepMeter | None = None,
    ) -> None:
        """`meter`: None where nobody reads it."""
        self.blocks = blocks
        self._sampler = sampler
        self._settings = settings
        self._max_model_len = max_model_len
        self._step_log = step_log
        self._constrainer = constrainer
        self._clock = clock
        self.meter = meter
        self._step_clock = StepClock()
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._stats = worker_pb2.WorkerStats()
        self._sent_stats = worker_pb2.WorkerStats()
        self._stats_due = 0.0
        self._tell_due = 0.0
        self._flight: Flight | None = None
        self._is_stopping = False
        self.reporter = Reporter()
        self._cache_reporter = CacheReporter(blocks, self.reporter)
        self.carrier = Carrier(
            settings.worker_id,
            self._stats,
            metrics,
            max_pairs=settings.transfer.max_pairs,
            answer_timeout_s=2 * settings.transfer.timeout_s,
        )
        self.prefill = PrefillRole(self.reporter, self.carrier, blocks, num_layers)
        self.decode = DecodeRole(self.reporter, self.carrier, blocks, settings.engine.max_num_seqs, num_layers)
        self.carrier.prefill, self.carrier.decode = self.prefill, self.decode

    def attach(self, ranks: Ranks, speaker: Speaker) -> None:
        """Sets what carries the work out: the ranks, and the speaking side."""
        self._ranks = self.carrier.ranks = ranks
        self.carrier.links = self.reporter.voice = speaker

    def post(self, handler: Callable[..., None], *arguments: Any) -> None:
        """From any thread: runs `handler(*arguments)` on the engine thread before the next step."""
        self._inbox.put((handler, arguments))

    def prepare_grammar(self, grammar: str) -> None:
        """From any thread, before a request with it is admitted: what takes time is done then. A wrong one is refused
        when it comes."""
        if self._constrainer is not None:
            with contextlib.suppress(ValueError):
                self._constrainer.prepare(grammar)

    # The loop

    def run(self) -> None:
        """Returns after `stop`; raises when a step fails, which ends the worker."""
        is_idle = True
        while not self._is_stopping:
            is_idle = not self.turn(wait=is_idle)
        self._step_log.close()

    def turn(self, wait: bool) -> bool:
        """Hears what was posted (waits for something to be, if told to), and moves the step on as far as it goes.

        True when a step has ended; False when there is nothing to do but to hear of something.
        """
        self._hear(wait)
        if self._flight is None:
            self._flight = self._launch()
        has_ended = self._flight is not None and self._flight.launched.is_done
        if has_ended:
            self._finish()
        self._flush(is_idle=not has_ended)
        return has_ended

    def stop(self) -> None:
        """On the engine thread (through `post`)."""
        self._is_stopping = True

    def wake(self) -> None:
        """A step that ran elsewhere has ended: the next turn sees it."""

    def _hear(self, wait: bool) -> None:
        if wait:
            handler, arguments = self._inbox.get()
            handler(*arguments)
        while not self._inbox.empty():
            handler, arguments = self._inbox.get()
            handler(*arguments)

    def _launch(self) -> Flight | None:
        """Plans a step and sets it off; None when there is nothing to run."""
        last_step = self._ranks.num_steps
        engine, tpot_s = self._settings.engine, self._settings.slo.tpot_ms / 1000
        budget = StepBudget(engine.max_num_batched_tokens, tpot_s, self._learned_cost)
        decoding, preempted, copies = self.decode.plan(budget)
        prefilling = self.prefill.plan(budget, last_step)
        scheduled = decoding + prefilling
        if not scheduled:
            self._step_clock.rests()
            self.decode.copied(copies)
            return None
        slices = [p.sequence.slice(p.num_tokens) for p in scheduled]
        step = build_step(slices, self.blocks.block_size, copies)
        for p in prefilling:
            self.prefill.launching(p, last_step + 1)
        ends = [p for p in scheduled if p.num_tokens == p.sequence.num_remaining]
        num_scored = [len(s.scored.next_token_ids) if s.scored is not None else 0 for s in slices]
        self.blocks.begin_step()
        has_prompt = len(step.token_ids) > len(scheduled)
        if has_prompt or self.reporter.is_pressing:  # nothing waits for a long step; who starts now is known before it
            self.reporter.flush()
        now = self._clock()
        self._step_clock.begins(now, _size_of(scheduled) if self._step_clock.wants(has_prompt) else None)
        if self.meter is not None:
            self.meter.launched(step, now)
        launched = self._ranks.launch(step)
        return Flight(launched, decoding, prefilling, ends, num_scored, preempted, copies)

    def _learned_cost(self) -> StepCost | None:
        return self._step_clock.cost

    def _finish(self) -> None:
        """Takes in what a step that has ended led to."""
        flight, self._flight = self._flight, None
        assert flight is not None
        scheduled = flight.decoding + flight.prefilling
        output = flight.launched.result()
        sampled = self._sample(output.logits, scheduled, flight.ends)
        now = self._clock()
        self._step_clock.ends(now)
        if self.meter is not None:
            self.meter.ended(now)
        scores: dict[int, list[SampledToken]] = {}
        if output.scores is not None:
            tokens = iter(output.scores.tokens())
            scores = {id(p): list(islice(tokens, n)) for p, n in zip(scheduled, flight.num_scored, strict=True)}
        self.blocks.end_step()
        self.carrier.last_step = self._ranks.num_steps
        self.decode.copied(flight.copies)
        self._count(scheduled, len(flight.decoding))
        for p in flight.ends:
            problem = next((token.problem for token in sampled[id(p)] if token.problem), "")
            if problem:
                self._give_up(p.sequence.request.key, f"the output cannot be constrained any further: {problem}")
        for p in flight.decoding:
            self.decode.absorb(p, sampled[id(p)], scores.get(id(p), ()))
        for p in flight.prefilling:
            self.prefill.absorb(p, sampled[id(p)], self.carrier.last_step, scores.get(id(p), ()))
        self._step_log.write(self._stats.num_steps, scheduled, flight.preempted, self.blocks)

    def _sample(
        self, logits: torch.Tensor, scheduled: list[ScheduledSequence], ends: list[ScheduledSequence]
    ) -> dict[int, list[SampledToken]]:
        """The tokens each share of the step leads to, none for one that ends inside its prompt."""
        sampled: dict[int, list[SampledToken]] = {id(p): [] for p in scheduled}
        if not ends:
            return sampled
        rows = [p.sequence.sample_rows() for p in ends]
        if len(ends) != sum(map(len, rows)):
            logits = logits[[i for i, of_one in enumerate(rows) for _ in of_one]]
        tokens = iter(self._sampler.sample(logits, [row for of_one in rows for row in of_one]))
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

    def session_opened(self, session: str, info: worker_pb2.WorkerInfo) -> None:
        self.reporter.open_session(session)
        self.reporter.tell(session, worker_pb2.Event(info=info))
        self.reporter.tell(session, worker_pb2.Event(stats=self._measure()))
        self._cache_reporter.open_session(session)

    def session_closed(self, session: str) -> None:
        """A router is gone: nobody waits for its requests."""
        self._cache_reporter.close_session(session)
        for key in self.reporter.close_session(session):
            self._cancel(key, "the router closed its session", None)

    def command(self, session: str, command: worker_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "admit":
                self._admit(session, command.admit)
            case "cancel":
                index = command.cancel.sequence_index if command.cancel.HasField("sequence_index") else None
                self._cancel(RequestKey.of(command.cancel.key), "cancelled", index)
            case "resync_cache":
                self._cache_reporter.resync(session)
            case "update_settings":
                self._settings = self._settings.with_run_time(command.update_settings.json)

    def _admit(self, session: str, admit: worker_pb2.Admit) -> None:
        try:
            request = request_of(admit, self._settings.engine.enable_prefix_cache, self._constrainer)
            problem = self._problem_of(request)
        except ValueError as error:
            problem = str(error)
        if problem:
            reason = worker_pb2.Failed.REASON_INVALID
            failed = worker_pb2.Failed(key=admit.key, reason=reason, message=problem)
            self.reporter.tell(session, worker_pb2.Event(failed=failed))
            return
        self.reporter.open_request(request.key, session, tell_each_token=admit.tell_each_token)
        if admit.role == worker_pb2.ROLE_DECODE:
            self.decode.admit(request, admit.expect_handoff)
            return
        self.prefill.admit(request, self.carrier.link_to(admit.decode_peer))

    def _problem_of(self, request: Request) -> str:
        """Why a request cannot run, or nothing. The router has checked; one bad id would end the step of everybody."""
        num_prompt_tokens, max_output_tokens = len(request.prompt_token_ids), request.params.max_output_tokens
        known = [token_id for token_ids in request.known_tokens.values() for token_id in token_ids]
        ids = (*request.prompt_token_ids, *known, *request.params.logit_bias, *request.params.allowed_token_ids)
        if request.key in self.reporter or request.key in self.prefill or request.key in self.decode:
            return "this worker already holds a request of this id and attempt"
        if num_prompt_tokens == 0:
            return "the prompt is empty"
        if max(ids) >= self._sampler.vocab_size:
            return f"token id {max(ids)} is outside the vocabulary of {self._sampler.vocab_size}"
        if num_prompt_tokens + max_output_tokens > self._max_model_len:
            total = f"{num_prompt_tokens} prompt + {max_output_tokens} output tokens"
            return f"{total} exceed max_model_len {self._max_model_len}"
        if len(request.known_start) >= max_output_tokens:
            return f"{len(request.known_start)} output tokens are known, and {max_output_tokens} are the most"
        return ""

    def _cancel(self, key: RequestKey, reason: str, sequence_index: int | None) -> None:
        if key in self.reporter and sequence_index is None:
            self._step_log.cancelled(key)
        if key in self.decode:
            self.decode.cancel(key, reason, sequence_index)
        if key in self.prefill and sequence_index is None:
            self.prefill.cancel(key, reason)

    def _give_up(self, key: RequestKey, problem: str) -> None:
        """A request that no worker can go on with."""
        if key in self.reporter:
            reason = worker_pb2.Failed.REASON_INVALID
            failed = worker_pb2.Failed(key=key.to_proto(), reason=reason, message=problem)
            self.reporter.emit(key, worker_pb2.Event(failed=failed))
            self._cancel(key, problem, None)

    # Telling routers

    def _flush(self, is_idle: bool) -> None:
        now = self._clock()
        if is_idle or now >= self._stats_due:
            stats = self._measure()
            if stats != self._sent_stats:
                self._sent_stats.CopyFrom(stats)
                self._stats_due = now + STATS_INTERVAL_S
                self.reporter.tell_all(worker_pb2.Event(stats=self._sent_stats))
        self._cache_reporter.gather()
        if is_idle or self.reporter.is_pressing or now >= self._tell_due:
            self._tell_due = now + TELL_INTERVAL_S
            self.reporter.flush()

    def held(self) -> HeldResources:
        """What this worker holds now, for whoever watches it."""
        blocks, quarantined = self.blocks, self.carrier.count_quarantined
        return HeldResources(
            pairs=self.carrier.count_links(),
            send_slots=self.prefill.count_slots() | {"quarantined": quarantined(is_sender=True)},
            landing_slots=self.decode.count_slots() | {"quarantined": quarantined(is_sender=False)},
            blocks={"free": blocks.num_free, "held": blocks.num_held, "cached": blocks.num_cached},
            num_preemptions=self.decode.num_preemptions,
        )

    def between_steps(self, work: Callable[[], T]) -> T | None:
        """On the engine thread (through `post`): what `work` gives; while a step is under way it is not run: None."""
        return None if self._flight is not None else work()

    def _measure(self) -> worker_pb2.WorkerStats:
        stats, blocks = self._stats, self.blocks
        stats.blocks_free, stats.blocks_held = blocks.num_free, blocks.num_held
        stats.blocks_cached, stats.blocks_total = blocks.num_cached, blocks.num_total
        stats.num_running_seqs = self.decode.num_running + self.prefill.num_running
        stats.num_waiting_requests = self.decode.num_waiting + self.prefill.num_waiting
        stats.num_requests = self.reporter.num_requests
        stats.num_preemptions = self.decode.num_preemptions
        cost = self._step_clock.cost
        if cost is not None:
            stats.step_cost.CopyFrom(cost.to_proto())
        return stats


def _size_of(scheduled: list[ScheduledSequence]) -> StepSize:
    """One token of a sequence is its next one; more are a prompt's, or computed like those."""
    held = [p.sequence.num_computed_tokens + 1 for p in scheduled if p.num_tokens == 1]
    size = StepSize(num_sequences=len(held), num_kv_tokens=sum(held))
    for p in scheduled:
        if p.num_tokens > 1:
            size += StepSize.of_prompt(p.num_tokens, p.sequence.num_computed_tokens)
    return size
