"""Prefill work on one worker: admits requests, plans their chunks, and carries out what the sender machine decides.

Owns the sequences it computes and their blocks until the sender releases them. The prefix cache keeps the prompt after.
In a fetch nothing is computed: the sequence is what the prefix cache has of the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, handoff_pb2, worker_pb2
from cluster.transports import shares_pages
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SampledToken, check_finish
from engine.sequence import Request, ScheduledSequence, Sequence, release_blocks, settle_blocks
from engine.step_budget import StepBudget
from engine.step_input import table_of
from kv_transfer.actions import Actions, BeginPrefill, Chunk, Fail, Gather, ReleasePages, SendMessage, Transmit
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.sender import Sender
from worker.handoff_connection import HandoffConnection, HandoffMessage
from worker.reporter import Reporter

Phase = generation_pb2.Heartbeat


@dataclass
class PrefillTask:
    """A request of this role. The sequence exists once the decode worker has reserved; in a fetch from its begin."""

    request: Request
    epoch: str
    sequence: Sequence | None = None
    last_step: int = 0
    """The step that has computed all of a fetch, or one behind it."""


class PrefillRole:
    """Computes prompts and hands their KV over."""

    def __init__(self, reporter: Reporter, blocks: BlockManager) -> None:
        self._reporter = reporter
        self._arrivals = itertools.count()
        self._blocks = blocks
        self._scheduler = PrefillScheduler(blocks)
        self._sender = Sender(blocks.groups)
        self._tasks: dict[RequestKey, PrefillTask] = {}
        self._arriving: list[PrefillTask] = []
        """Fetches that are reserved, of which a part is on its way to the pool."""
        self._connections: dict[str, HandoffConnection] = {}
        """Connections by epoch, until they are retired."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tasks or key in self._sender

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for the decode worker's reservation or for blocks here."""
        num_opening = sum([task.sequence is None for task in self._tasks.values()]) if self._tasks else 0
        return self._scheduler.num_waiting + num_opening

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether there is a prompt to plan."""
        return bool(self._scheduler.num_running or self._scheduler.num_waiting or self._arriving)

    def admit(self, request: Request, connection: HandoffConnection) -> None:
        """The router gave this worker a prompt, to be handed over on the connection."""
        self._connections[connection.epoch] = connection
        self._tasks[request.key] = PrefillTask(request, connection.epoch)
        num_tokens = len(request.prompt_token_ids) + len(request.known_start)
        self._carry_out(self._sender.open(request.key, connection.epoch, num_tokens))

    def admit_fetch(self, request: Request, connection: HandoffConnection, last_step: int) -> None:
        """Another worker wants what the prefix cache has of a prompt, none of it newer than `last_step`. Without any of
        it, the fetch fails."""
        tokens, count = request.prompt_token_ids, len(self._blocks.groups)
        cached = self._blocks.match_prefix((*tokens, 0), request.cache_salt) if request.use_prefix_cache else []
        if not cached:
            why = "the prefix cache has nothing of the prompt any more"
            self._reporter.emit_failure(request.key, worker_pb2.Failed.REASON_CAPACITY, why)
            self._reporter.close_request(request.key)
            return
        num_tokens = len(cached) // count * self._blocks.block_size
        sequence = Sequence.root(replace(request, prompt_token_ids=tokens[:num_tokens]), next(self._arrivals))
        sequence.block_table = table_of(cached)
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_tokens
        self._connections[connection.epoch] = connection
        self._tasks[request.key] = PrefillTask(request, connection.epoch, sequence, last_step)
        self._carry_out(self._sender.open(request.key, connection.epoch, num_tokens))

    def cancel(self, key: RequestKey, reason: str) -> None:
        """Computes no further at once; what a gather still reads is released when it is done."""
        self._carry_out(self._sender.abort(key, reason))
        self._stop_computing(key)

    # Connections

    def on_message(self, connection: HandoffConnection, message: HandoffMessage) -> None:
        """A message of a decode worker."""
        assert isinstance(message, handoff_pb2.ReceiverMessage)
        epoch, sender = connection.epoch, self._sender
        match message.WhichOneof("message"):
            case "reserved":
                key = RequestKey.of(message.reserved.key)
                self._carry_out(sender.reserved(epoch, key, message.reserved.num_cached_tokens))
            case "grant":
                key = RequestKey.of(message.grant.key)
                self._carry_out(sender.granted(epoch, key, message.grant.chunk_index))
            case "committed":
                self._carry_out(sender.committed(epoch, RequestKey.of(message.committed.key)))
            case "abort":
                self._carry_out(sender.peer_aborted(epoch, RequestKey.of(message.abort.key)))
                self._stop_aborted(epoch)

    def connection_open(self, connection: HandoffConnection) -> None:
        agreed = connection.agreed
        is_shared = shares_pages(agreed.transport)
        self._carry_out(
            self._sender.connection_open(
                connection.epoch, agreed.chunk_tokens, agreed.num_slots, shares_pages=is_shared
            )
        )

    def connection_suspected(self, connection: HandoffConnection, is_suspect: bool) -> None:
        self._carry_out(self._sender.connection_suspected(connection.epoch, is_suspect))

    def connection_retired(self, connection: HandoffConnection, reason: worker_pb2.Failed.Reason, why: str) -> None:
        self._carry_out(self._sender.connection_lost(connection.epoch, reason, why))
        self._stop_aborted(connection.epoch)
        self._connections.pop(connection.epoch, None)

    def connection_closed(self, connection: HandoffConnection) -> None:
        self._carry_out(self._sender.connection_closed(connection.epoch))

    def num_on(self, epoch: str) -> int:
        """Hand-offs that still need the connection."""
        return self._sender.num_on(epoch)

    def count_slots(self) -> dict[str, int]:
        """Send slots by what is in them."""
        return self._sender.count_stages()

    def _gathered(self, chunk: Chunk) -> None:
        self._carry_out(self._sender.gathered(chunk))

    def _sent(self, chunk: Chunk) -> None:
        self._carry_out(self._sender.sent(chunk))

    # Steps

    def plan(
        self, budget: StepBudget, last_step: int, *, may_wait: Callable[[], bool] = lambda: True
    ) -> list[ScheduledSequence]:
        """Shares of the next step; prompts that start now offer what the prefix cache already has at once. One for
        which there are no blocks is given up where nothing of this role frees any, and it `may_wait` for nobody else's:
        those that are reserved for hand-offs may be waiting for prompts at a worker that waits for this one."""
        self._offer_arrived()
        self._admit(last_step)
        while (waiting := self._scheduler.first_waiting) is not None and not self._holds_blocks and not may_wait():
            why = "all blocks are reserved for hand-offs, which may be waiting for this one"
            self._give_up(waiting.request.key, why)
            self._admit(last_step)
        return self._scheduler.plan(budget)

    @property
    def _holds_blocks(self) -> bool:
        """Whether blocks come back once prompts under way are handed over."""
        return any(task.sequence is not None and task.sequence.block_table for task in self._tasks.values())

    def _admit(self, last_step: int) -> None:
        for sequence in self._scheduler.admit():
            key = sequence.request.key
            self._reporter.emit_phase(key, Phase.PHASE_PREFILL, sequence.num_cached_tokens)
            self._carry_out(self._sender.computed(key, sequence.num_computed_tokens, last_step))

    def step_launching(self, scheduled: ScheduledSequence, step: int) -> None:
        """The share is part of step number `step`, next in the log: a prompt's last share is sent while computed."""
        sequence = scheduled.sequence
        if scheduled.num_tokens == sequence.num_remaining:
            self._carry_out(self._sender.computing(sequence.request.key, sequence.num_tokens, step))

    def process_output(
        self, scheduled: ScheduledSequence, sampled: list[SampledToken], step: int, scores: Seq[SampledToken] = ()
    ) -> None:
        """The share has run; `sampled` holds the first tokens when it reached the prompt's end, `scores` the logprobs
        of prompt tokens that it was to score.

        A prompt that was aborted while the step ran is passed over.
        """
        sequence = scheduled.sequence
        if not self._scheduler.is_running(sequence):
            return
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens += scheduled.num_tokens
        settle_blocks(sequence, self._blocks, before)
        if sequence.must_score:
            self._reporter.emit_prompt_logprobs(sequence, sequence.take_scores(scores))
        self._carry_out(self._sender.computed(sequence.request.key, sequence.num_computed_tokens, step))
        if sampled:
            self._finish_prompt(sequence, sampled)

    def check_idle(self) -> None:
        """Raises AssertionError unless nothing is held."""
        assert not self._tasks, self._tasks
        self._sender.check_idle()

    def _finish_prompt(self, sequence: Sequence, sampled: list[SampledToken]) -> None:
        self._scheduler.remove(sequence)
        request, key, num_before = sequence.request, sequence.request.key, len(sequence.output_token_ids)
        first_tokens: list[handoff_pb2.FirstToken] = []
        is_open = False
        for index, token in enumerate(sampled):
            output = request.first_output(index, token.token_id)
            is_finished = check_finish(request.params, output) is not None
            is_open = is_open or not is_finished
            if request.params.n == 1 or not request.known_tokens.get(index):
                born = Sequence(request, index, sequence.arrival, output_token_ids=output)
                self._reporter.emit_tokens(born, token, num_before)
            first = handoff_pb2.FirstToken(sequence_index=index, token_id=output[num_before], is_finished=is_finished)
            first_tokens.append(first)
        if not is_open:
            self._carry_out(self._sender.abort(key, "the first token ended the request"))
            return
        self._reporter.emit_phase(key, Phase.PHASE_TRANSFER)
        self._connections[self._tasks[key].epoch].prompt_done(key)
        self._carry_out(self._sender.commit(key, first_tokens))

    def _send(self, action: SendMessage) -> None:
        """On a connection that is retired meanwhile nobody would read it."""
        connection = self._connections.get(action.epoch)
        if connection is not None:
            connection.send(action.message)

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case SendMessage():
                    self._send(action)
                case Gather():
                    chunk, sequence = action.chunk, self._tasks[action.chunk.key].sequence
                    assert sequence is not None
                    connection = self._connections[chunk.epoch]
                    table = self._blocks.of_group(sequence.block_table, chunk.range.group)
                    connection.gather(chunk, table, action.after_step, self._gathered)
                case Transmit():
                    self._connections[action.chunk.epoch].transmit(action.chunk, self._sent)
                case BeginPrefill():
                    self._begin(self._tasks[action.key])
                case Fail():
                    self._fail(action)
                case ReleasePages():
                    self._release(action.key)

    def _begin(self, task: PrefillTask) -> None:
        if task.sequence is not None:  # a fetch, of which everything is here
            self._arriving.append(task)
            self._offer_arrived()
            return
        task.sequence = Sequence.root(task.request, next(self._arrivals))
        self._scheduler.add(task.sequence)

    def _offer_arrived(self) -> None:
        """Offers the prefixes that are in the pool by now; one of which a part was lost on its way there fails."""
        for task in list(self._arriving):
            key, sequence = task.request.key, task.sequence
            assert sequence is not None
            have_arrived = self._blocks.have_arrived(sequence.block_table)
            if have_arrived is not None:
                self._arriving.remove(task)
            if have_arrived:
                self._carry_out(self._sender.computed(key, sequence.num_tokens, task.last_step))
                self._carry_out(self._sender.commit(key, []))
            elif have_arrived is not None:
                self._give_up(key, "a part of the prefix was lost on its way to the pool")

    def _give_up(self, key: RequestKey, why: str) -> None:
        """Another worker may have room for what is computed or fetched."""
        self._reporter.emit_failure(key, worker_pb2.Failed.REASON_CAPACITY, why)
        self.cancel(key, why)

    def _fail(self, action: Fail) -> None:
        task = self._tasks.get(action.key)
        sequence = task.sequence if task is not None else None
        num_kept_tokens = 0
        if sequence is not None and sequence.request.use_prefix_cache:
            num_kept_tokens = sequence.num_computed_tokens // self._blocks.block_size * self._blocks.block_size
        self._reporter.emit_failure(action.key, action.reason, action.message, num_kept_tokens)

    def _stop_computing(self, key: RequestKey) -> None:
        task = self._tasks.get(key)
        if task is not None and task.sequence is not None:
            self._scheduler.remove(task.sequence)

    def _stop_aborted(self, epoch: str) -> None:
        """Prompts whose hand-off is over, but whose pages a gather still reads, are not computed any further."""
        for key in [k for k, task in self._tasks.items() if task.epoch == epoch]:
            if not self._sender.is_live(key):
                self._stop_computing(key)

    def _release(self, key: RequestKey) -> None:
        task = self._tasks.pop(key)
        self._arriving = [other for other in self._arriving if other is not task]
        if task.sequence is not None:
            self._scheduler.remove(task.sequence)
            release_blocks(task.sequence, self._blocks)
        self._reporter.close_request(key)
