"""The engine thread of a worker: one loop that takes events in, moves its steps on and reports their output.

Everything that owns memory or decides runs on this thread, so nothing here is locked. Other threads post to its
`Inbox`: router sessions, streams of hand-off connections and finished rank commands. It waits for work only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from cluster.crash_record import CrashRecord
from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, worker_pb2
from cluster.settings import WorkerSettings
from cluster.step_cost import StepCost
from engine.kv.block_manager import BlockManager
from engine.kv.retaining_blocks import RetainingBlocks
from engine.kv.stored_blocks import StoredBlocks
from engine.kv.tiered_blocks import TieredBlocks
from engine.sampling.constraint import Constrainer
from engine.sequence import Request
from engine.token_hash import obstacle
from kv_transfer.block_store import StoreObjects
from worker.decode_role import DecodeRole
from worker.grammar_queue import GrammarQueue, WaitingAdmit, WaitingAdmits
from worker.handoff_connection import HandoffContext
from worker.handoffs import Dial, Handoffs
from worker.prefill_role import PrefillRole
from worker.reporter import CacheReporter, Reporter, RouterSession, list_sessions
from worker.step_pipeline import Ranks, StepPipeline
from worker.steps import StepLog
from worker.store_lookups import StoreLookups
from worker.tier_moves import FlushDone, TierMoves

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
        step_log: StepLog,
        constrainer: Constrainer | None = None,
        crash_record: CrashRecord | None = None,
        overlaps: bool = False,
        store: StoreObjects | None = None,
        clock: Callable[[], float] = time.monotonic,
        pipeline: type[StepPipeline] = StepPipeline,
        reporters: tuple[type[Reporter], type[CacheReporter]] = (Reporter, CacheReporter),
    ) -> None:
        """`overlaps`: a step is launched before the tokens of the one before it are read. `store`: where prompts are
        looked up. `pipeline` runs the steps, `reporters` tell of them."""
        self.inbox = inbox
        self.blocks = blocks
        self._vocab_size = vocab_size
        self._settings = settings
        self._reserved_tokens = settings.engine.max_num_batched_tokens
        self._max_model_len = max_model_len
        self._step_log = step_log
        self._clock = clock
        self._stats = handoff_context.stats
        self._sent_stats = worker_pb2.WorkerStats()
        self._figures: tuple[int, ...] = ()
        """Those of blocks, sequences and requests that the stats have."""
        self._measured_cost: StepCost | None = None
        """The cost of steps that the stats have."""
        self._had_requests = False
        """Whether there were requests, by the stats that were sent last."""
        self.stats_due = 0.0
        """When stats are measured again, and sent if they have changed."""
        self._report_due = 0.0
        self._is_stopping = False
        self.reporter = reporters[0](step_log)
        self._grammars = GrammarQueue(constrainer, inbox.post, self._admit, self._refuse)
        self._cache_reporter = reporters[1](blocks, self.reporter)
        self.prefill = PrefillRole(self.reporter, blocks)
        self.decode = DecodeRole(self.reporter, blocks, settings.engine.num_seqs)
        self.handoffs = Handoffs(
            handoff_context,
            self.prefill,
            self.decode,
            dial,
            worker_id=settings.worker_id,
            max_pairs=settings.transfer.max_pairs,
            answer_timeout_s=2 * settings.transfer.timeout_s,
        )
        self._steps = pipeline(
            ranks,
            blocks,
            self.prefill,
            self.decode,
            self.handoffs,
            self.reporter,
            stats=self._stats,
            step_log=step_log,
            crash_record=crash_record,
            clock=clock,
            fail=self._fail,
            overlaps=overlaps,
        )
        self.tier: TierMoves | None = None
        if isinstance(blocks, TieredBlocks) and blocks.host.num_total:
            self.tier = self._tier_of(blocks, handoff_context, store)
        self.lookups: StoreLookups | None = None
        if store is not None and isinstance(blocks, StoredBlocks):
            self.lookups = StoreLookups(store, blocks, inbox.post, self._admit_now)
        self._waiting: tuple[WaitingAdmits, ...] = (self._grammars, *filter(None, [self.lookups]))
        self.sessions = blocks if isinstance(blocks, RetainingBlocks) and blocks.session_share else None

    def _tier_of(self, blocks: TieredBlocks, context: HandoffContext, store: StoreObjects | None) -> TierMoves:
        steps = self._steps
        return TierMoves(
            blocks,
            context.issue,
            self._clock,
            num_ended_steps=lambda: steps.num_ended,
            cost=lambda: steps.cost,
            store=store,
        )

    # The loop

    def run(self) -> None:
        """Returns after `stop`; raises when a step fails, which ends the worker."""
        is_idle = True
        while not self._is_stopping:
            is_idle = not self.turn(wait=is_idle)
        self._step_log.close()

    def put_by(self, limit_s: float) -> None:
        """After `run`: copies what is cached to disk and store, if there are any, for the worker that comes next."""
        if self.tier is None or not (self.tier.blocks.disk.num_total or self.lookups is not None):
            return
        end = self._clock() + limit_s
        timer = threading.Timer(limit_s, self.inbox.post, (lambda: None,))
        timer.start()
        self.tier.blocks.put_by()
        self.tier.issue()
        while self.tier.blocks.num_under_way.total() and self._clock() < end:
            self.inbox.run(wait=True)
            self.tier.issue()
        timer.cancel()

    def turn(self, wait: bool) -> bool:
        """Makes the calls that were posted (waits for one, if asked to), and moves the step on as far as it goes.

        True when a step has ended; False when there is nothing to do before something is posted.
        """
        self.inbox.run(wait)
        has_ended = self._steps.advance(self._settings)
        if self.sessions is not None:
            self.sessions.tick(self._clock())
        if self.tier is not None:
            self.tier.issue()
        self._flush(is_idle=not has_ended)
        return has_ended

    @property
    def is_turn_due(self) -> bool:
        """Whether a turn could do anything now but to look, apart from the calls that were posted."""
        reporter = self.reporter
        return (
            self._steps.is_due
            or reporter.has_gathered
            or not (reporter.num_requests and self._had_requests)
            or self.blocks.has_stored
            or self._clock() >= self.stats_due
            or self.tier is not None
            or self.sessions is not None
        )

    def stop(self) -> None:
        """On the engine thread (through the inbox)."""
        self._is_stopping = True

    # Router sessions

    def session_opened(self, session: RouterSession, info: worker_pb2.WorkerInfo) -> None:
        self.reporter.open_session(session)
        self.reporter.send(session, worker_pb2.Event(info=info))
        self.reporter.send(session, worker_pb2.Event(stats=self._measure()))
        self._cache_reporter.open_session(session)

    def session_closed(self, session: RouterSession) -> None:
        """A router is gone: nobody waits for its requests."""
        for waiting in self._waiting:
            waiting.close_session(session)
        self._cache_reporter.close_session(session)
        for key in self.reporter.close_session(session):
            self._cancel(key, "the router closed its session", None)

    def command(self, session: RouterSession, command: worker_pb2.Command, prompt: tuple[int, ...] = ()) -> None:
        """`prompt`: the tokens of the request's, where the command has none."""
        match command.WhichOneof("command"):
            case "admit":
                waiting = WaitingAdmit(session, command.admit, prompt)
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

    def _admit_now(self, waiting: WaitingAdmit) -> None:
        """Once it is known what the store has of its prompt."""
        self._admit(waiting, may_wait=False)

    def _admit(self, waiting: WaitingAdmit, *, may_wait: bool = True) -> None:
        session, admit, has_cache = waiting.session, waiting.admit, self._settings.engine.enable_prefix_cache
        request = Request.from_proto(
            admit,
            enable_prefix_cache=has_cache,
            constraint=waiting.constraint,
            prompt_token_ids=waiting.prompt_token_ids,
        )
        problem = request.problem(self._vocab_size, self._max_model_len)
        timed = self._settings.engine.timed_steps
        if not problem and timed.is_on:
            problem = obstacle(request, takes_constraints=timed.script is not None)
        if request.key in self.reporter or request.key in self.prefill or request.key in self.decode:
            problem = "this worker already holds a request of this id and attempt"
        if problem:
            self._refuse(waiting, worker_pb2.Failed.REASON_INVALID, problem)
            return
        computes = not (admit.prefix_only or admit.expect_handoff)
        if may_wait and computes and self.lookups is not None and self.lookups.takes(waiting, request):
            return
        self.reporter.open_request(request.key, session, report_each_token=admit.tell_each_token)
        if admit.role == worker_pb2.ROLE_DECODE:
            self.decode.admit(request, admit.expect_handoff, waiting.aborted, is_fetch=admit.prefix_only)
            return
        connection = self.handoffs.connect_to(admit.decode_peer)
        if admit.prefix_only:
            self.prefill.admit_fetch(request, connection, self.handoffs.last_step)
        else:
            self.prefill.admit(request, connection)

    def _refuse(self, waiting: WaitingAdmit, reason: worker_pb2.Failed.Reason, problem: str) -> None:
        failed = worker_pb2.Failed(key=waiting.admit.key, reason=reason, message=problem)
        self.reporter.send(waiting.session, worker_pb2.Event(failed=failed))

    def _cancel(self, key: RequestKey, reason: str, sequence_index: int | None) -> None:
        for waiting in self._waiting:
            waiting.cancel(key, sequence_index)
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
        now, reporter = self._clock(), self.reporter
        has_requests = reporter.num_requests > 0
        is_due = now >= self.stats_due
        # While it has requests there will be another turn, so that some things may wait: stats until they are due, and
        # which blocks were evicted until others are stored in their place.
        is_last = is_due or not has_requests
        # Whether it has any request is told at once: who waits for a worker to be free, or busy, goes by it.
        has_turned = has_requests is not self._had_requests
        if is_due or (is_idle and (has_turned or (is_last and self._steps.is_idle))):
            stats = self._measure(is_due=is_due)
            if stats != self._sent_stats:
                self._sent_stats.CopyFrom(stats)
                self._had_requests = has_requests
                self.stats_due = now + STATS_INTERVAL_S
                reporter.send_all(worker_pb2.Event(stats=stats))
        if is_last or self.blocks.has_stored:
            self._cache_reporter.gather()
        if is_idle or reporter.is_pressing or now >= self._report_due:
            self._report_due = now + REPORT_INTERVAL_S
            reporter.flush()

    def flush_cache(self, done: FlushDone) -> None:
        """On the engine thread: makes all that is cached unfindable; `done` is called there when the tiers are flushed,
        too."""
        if self.tier is None:
            done(self.blocks.flush_cache(), 0, "")
        else:
            self.tier.flush(done)

    def kept_sessions(self, request: admin_pb2.ListSessionsRequest) -> admin_pb2.ListSessionsResponse:
        """On the engine thread: whose KV is kept."""
        if self.sessions is None:
            return admin_pb2.ListSessionsResponse()
        self.sessions.tick(now := self._clock(), at_once=True)
        return list_sessions(self.sessions, request, now)

    def end_session(self, request: admin_pb2.EndSessionRequest) -> int:
        """On the engine thread: how many sessions of this id there were."""
        if self.sessions is None:
            return 0
        names = {name for name, *_ in self.sessions.sessions() if name.session_id == request.session_id}
        ended = [name for name in names if not request.HasField("tenant") or name.tenant == request.tenant]
        for name in ended:
            self.sessions.end(name)
        return len(ended)

    def between_steps(self, work: Callable[[], T]) -> T | None:
        """On the engine thread (through the inbox): the result of `work`; None, and not run, during a step."""
        return work() if self._steps.is_idle else None

    def _measure(self, *, is_due: bool = True) -> worker_pb2.WorkerStats:
        """What a step costs is worked out anew where that `is_due`: it takes longer than all the rest."""
        stats, blocks = self._stats, self.blocks
        figures = (
            blocks.num_free,
            blocks.num_held,
            blocks.num_cached,
            blocks.num_total,
            self.decode.num_running + self.prefill.num_running,
            self.decode.num_waiting + self.prefill.num_waiting + sum(map(len, self._waiting)),
            self.reporter.num_requests,
            self.decode.num_preemptions,
            blocks.hit_tokens["device"],
        )
        if figures != self._figures:  # a look at the same ones is cheaper than to put them into the message
            self._figures = figures
            stats.blocks_free, stats.blocks_held, stats.blocks_cached, stats.blocks_total = figures[:4]
            stats.num_running_seqs, stats.num_waiting_requests, stats.num_requests = figures[4:7]
            stats.num_preemptions, stats.num_hit_tokens = figures[7:]
        if self.tier is not None:
            self.tier.measure(stats)
        if is_due or self._measured_cost is None:
            cost = self._steps.cost
            if cost is not self._measured_cost:
                assert cost is not None, "what was learned of steps is not forgotten"
                stats.step_cost.CopyFrom(cost.to_proto())
                self._measured_cost = cost
        return stats
