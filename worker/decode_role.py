"""Decode work on one worker: reserves for hand-offs, decodes what has landed, prefills here what is not handed over.

Owns every sequence of its requests and their blocks. A request's blocks are free when its last sequence ends. In a
fetch none decodes: what lands is for the prefix cache.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, handoff_pb2, worker_pb2
from decode_worker.receiver import Receiver
from decode_worker.scheduler import BlockCopies, DecodeScheduler
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SampledToken, check_finish
from engine.sequence import (
    Request,
    ScheduledSequence,
    Sequence,
    claim_blocks,
    keep_blocks,
    release_blocks,
    settle_blocks,
)
from engine.step_budget import StepBudget
from engine.step_input import table_of
from kv_transfer.actions import Actions, Chunk, Fail, Land, Ready, ReleasePages, Reserve, SendMessage
from worker.handoff_connection import HandoffConnection, HandoffMessage
from worker.reporter import Reporter

Phase = generation_pb2.Heartbeat


@dataclass
class DecodeTask:
    """A request of this role: first one sequence for the prompt and the output's known start, then `n` that decode."""

    request: Request
    prompt: Sequence
    is_fetch: bool = False
    spare: list[int] = field(default_factory=list)
    """Blocks reserved beyond the prompt's: head-room for the first token of each sequence."""
    is_reserved: bool = False
    has_begun: bool = False  # the router knows what of its prompt was cached: not what a preemption left there
    live: dict[int, Sequence] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    """Sequences the router ended before they were born."""

    @property
    def num_seqs(self) -> int:
        """Sequences that will decode."""
        return 0 if self.is_fetch else self.request.params.n


class DecodeRole:
    """Decodes requests in one continuous batch."""

    def __init__(self, reporter: Reporter, blocks: BlockManager, max_num_seqs: int) -> None:
        self._reporter = reporter
        self._arrivals = itertools.count()
        self._blocks = blocks
        self._scheduler = DecodeScheduler(blocks, max_num_seqs)
        self._receiver = Receiver(blocks.groups)
        self._tasks: dict[RequestKey, DecodeTask] = {}
        self._connections: dict[str, HandoffConnection] = {}
        """Connections by epoch, until they are retired."""
        self._to_reserve: deque[RequestKey] = deque()
        self._held_back: dict[RequestKey, tuple[Request, bool, set[int]]] = {}
        """Attempts that wait for an earlier one of their request to drain: they go on from what it leaves."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tasks or key in self._held_back

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._to_reserve) + self._scheduler.num_waiting + len(self._held_back)

    @property
    def has_work(self) -> bool:
        """Whether anything may come of planning a step."""
        return bool(self._to_reserve) or self._scheduler.has_work

    @property
    def is_only_landing(self) -> bool:
        """Whether nothing here frees a block before a hand-off of another worker arrives."""
        return self._scheduler.is_only_landing

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def resumed_tokens(self) -> Counter[str]:
        """Of preempted sequences, by where they were found."""
        return self._scheduler.resumed_tokens

    @property
    def running(self) -> Seq[Sequence]:
        """The sequences of the batch, in their order."""
        return self._scheduler.running

    def admit(
        self, request: Request, expect_handoff: bool, aborted: Iterable[int] = (), *, is_fetch: bool = False
    ) -> None:
        """The router gave this worker a request, whose KV arrives from a prefill worker or is computed here.
        `is_fetch`: what arrives is for the prefix cache alone."""
        if request.key.attempt > 1 and any(key.request_id == request.key.request_id for key in self._tasks):
            self._held_back[request.key] = request, expect_handoff, set(aborted)
            return
        sequence = Sequence.root(request, next(self._arrivals))
        self._tasks[request.key] = DecodeTask(request, sequence, is_fetch, aborted=set(aborted))
        if expect_handoff:
            self._carry_out(self._receiver.announce(request.key, sequence.num_tokens, is_fetch=is_fetch))
        else:
            self._tasks[request.key].live[0] = sequence
            self._scheduler.add(sequence)

    def cancel(self, key: RequestKey, reason: str, sequence_index: int | None = None) -> None:
        """Ends a request, or one sequence of it, in any state; what the transport may still touch drains first."""
        if key in self._held_back:
            if sequence_index is not None:
                self._held_back[key][2].add(sequence_index)
                return
            del self._held_back[key]
            self._reporter.close_request(key)
            return
        task = self._tasks[key]
        if sequence_index is not None:
            self._abort_sequence(task, sequence_index)
        elif key in self._receiver:
            self._carry_out(self._receiver.cancel(key, reason))
        else:
            for sequence in list(task.live.values()):
                self._scheduler.remove(sequence)
            self._close(task)

    # Connections

    def connection_called(self, connection: HandoffConnection, agreed: handoff_pb2.ReceiverHello) -> None:
        """A prefill worker has called; its pair is about to open."""
        self._connections[connection.epoch] = connection
        self._carry_out(self._receiver.connection_called(connection.epoch, agreed.chunk_tokens, agreed.num_slots))

    def on_message(self, connection: HandoffConnection, message: HandoffMessage) -> None:
        """A message of a prefill worker."""
        assert isinstance(message, handoff_pb2.SenderMessage)
        epoch, receiver = connection.epoch, self._receiver
        match message.WhichOneof("message"):
            case "open":
                self._carry_out(receiver.opened(epoch, RequestKey.of(message.open.key), message.open.num_tokens))
            case "offer":
                self._carry_out(receiver.offered(epoch, message.offer))
            case "commit":
                self._carry_out(receiver.committed(epoch, message.commit))
            case "abort":
                self._carry_out(receiver.peer_aborted(epoch, RequestKey.of(message.abort.key)))

    def connection_open(self, connection: HandoffConnection) -> None:
        self._carry_out(self._receiver.connection_open(connection.epoch))

    def connection_suspected(self, connection: HandoffConnection, is_suspect: bool) -> None:
        """Changes nothing: what was granted to a silent sender may still arrive."""

    def connection_retired(self, connection: HandoffConnection, reason: worker_pb2.Failed.Reason, why: str) -> None:
        self._carry_out(self._receiver.connection_lost(connection.epoch, reason, why))
        self._connections.pop(connection.epoch, None)

    def connection_closed(self, connection: HandoffConnection) -> None:
        """Changes nothing: what was granted has ended by itself."""

    def count_slots(self) -> dict[str, int]:
        """Landing slots by what is in them."""
        return self._receiver.count_stages()

    def _landed(self, chunk: Chunk, error: str, reason: worker_pb2.Failed.Reason) -> None:
        """A granted chunk lies in its pages, or `error` says why not."""
        self._carry_out(self._receiver.landed(chunk, error, reason))

    # Steps

    def plan(self, budget: StepBudget) -> tuple[list[ScheduledSequence], list[Sequence], BlockCopies]:
        """Shares of the next step, who was preempted for it, and the page copies it makes first."""
        scheduled, preempted = self._scheduler.plan(budget)
        self._reserve_waiting()
        started = self._scheduler.admit()
        for sequence in started:
            if sequence.is_fresh and not (task := self._tasks[sequence.request.key]).has_begun:
                task.has_begun = True
                self._reporter.emit_phase(sequence.request.key, Phase.PHASE_PREFILL, sequence.num_cached_tokens)
        if started:
            scheduled, more = self._scheduler.plan(budget)
            preempted += more
        return scheduled, preempted, self._scheduler.take_copies()

    def count_ahead(self, shares: Seq[tuple[ScheduledSequence, int | None]]) -> bool:
        """Counts the shares of a step under way as computed, each with the row that its next token is sampled from, so
        that the step behind it can be planned. False, if that one has to wait for blocks."""
        for scheduled, row in shares:
            if self._is_live(scheduled.sequence):
                scheduled.sequence.count_ahead(scheduled.num_tokens, row)
        return self._scheduler.can_plan_ahead()

    def copied(self, copies: BlockCopies) -> None:
        self._scheduler.copied(copies)

    def process_output(
        self,
        scheduled: ScheduledSequence,
        sampled: list[SampledToken],
        scores: Seq[SampledToken] = (),
        *,
        is_counted: bool = False,
    ) -> None:
        """A share of the step has run; `sampled` holds the next token (of each sequence born by it), `scores` the
        logprobs of prompt tokens that it was to score. `is_counted`: by `count_ahead`.

        A sequence that was aborted while the step ran is passed over.
        """
        sequence = scheduled.sequence
        if not self._is_live(sequence):
            return
        task = self._tasks[sequence.request.key]
        if is_counted:
            sequence.unread_row = None
        else:
            sequence.num_computed_tokens += scheduled.num_tokens
        settle_blocks(sequence, self._blocks, sequence.num_computed_tokens - scheduled.num_tokens)
        if sequence.must_score:
            self._reporter.emit_prompt_logprobs(sequence, sequence.take_scores(scores))
        if not sampled:
            return
        if sequence.is_fresh:
            self._reporter.emit_phase(task.request.key, Phase.PHASE_DECODE)
        born = [sequence] + [Sequence(task.request, i, sequence.arrival) for i in range(1, sequence.fan_out)]
        sequence.fan_out = 1
        for child, token in zip(born, sampled, strict=True):
            self._append(child, token)
        if len(born) > 1:
            children = [c for c in born[1:] if c.index not in task.aborted]
            task.live.update({c.index: c for c in children})
            self._scheduler.fork(sequence, children, [])
        for child in born:
            finish = check_finish(task.request.params, child.output_token_ids)
            if child.index in task.live and (finish is not None or child.index in task.aborted):
                self._end_sequence(task, child)

    def check_idle(self) -> None:
        """Raises AssertionError unless nothing is held."""
        assert not self._tasks and not self._to_reserve and not self._held_back, (self._tasks, self._held_back)
        assert self._scheduler.num_running + self._scheduler.num_waiting + self._scheduler.num_reserved_seqs == 0
        self._receiver.check_idle()

    def _is_live(self, sequence: Sequence) -> bool:
        """Whether it has not ended since it was scheduled."""
        task = self._tasks.get(sequence.request.key)
        return task is not None and task.live.get(sequence.index) is sequence

    def _send(self, action: SendMessage) -> None:
        """On a connection that is retired meanwhile nobody would read it."""
        if (connection := self._connections.get(action.epoch)) is not None:
            connection.send(action.message)

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case SendMessage():
                    self._send(action)
                case Reserve() if self._tasks[action.key].is_fetch:
                    self._reserve_fetch(self._tasks[action.key])
                case Reserve():
                    self._to_reserve.append(action.key)
                    self._reserve_waiting(self._scheduler.most_blocks_due())
                case Land():
                    chunk, prompt = action.chunk, self._tasks[action.chunk.key].prompt
                    table = self._blocks.of_group(prompt.block_table, chunk.range.group)
                    self._connections[chunk.epoch].land(chunk, table, self._landed)
                case Ready() if self._tasks[action.key].is_fetch:
                    self._keep_fetched(self._tasks[action.key])
                case Ready():
                    self._start_decoding(self._tasks[action.key], action.first_tokens)
                case Fail():
                    self._reporter.emit_failure(action.key, action.reason, action.message, action.num_kept_tokens)
                case ReleasePages():
                    self._release_reservation(self._tasks[action.key], action.num_kept_tokens)

    def _reserve_waiting(self, num_blocks_due: int = 0) -> None:
        """Reserves for announced hand-offs, in their order, while places and blocks last. A prompt is computed from
        then on, so none waits for the end of a step here; but what runs has the blocks that it is about to need."""
        while self._to_reserve:
            task = self._tasks[self._to_reserve[0]]
            if not self._scheduler.has_room(task.num_seqs) or not self._reserve(task, num_blocks_due):
                return
            self._to_reserve.popleft()
            self._carry_out(self._receiver.reserved(task.request.key, task.prompt.num_cached_tokens))

    def _reserve(self, task: DecodeTask, num_blocks_due: int) -> bool:
        n, num_tokens = task.num_seqs, task.prompt.num_tokens
        num_spare = max(0, n - 1 if num_tokens % self._blocks.block_size else n) * len(self._blocks.groups)
        if not claim_blocks(task.prompt, self._blocks, is_landing=True, num_beside=num_spare + num_blocks_due):
            return False
        task.spare = self._blocks.allocate(num_spare)
        task.is_reserved = True
        self._scheduler.num_reserved_seqs += n
        return True

    def _reserve_fetch(self, task: DecodeTask) -> None:
        """Takes blocks for a prefix that nobody needs now, or gives it up: it waits for none, and has none before those
        that do."""
        key = task.request.key
        tokens = task.request.prompt_token_ids[: self._receiver.num_tokens(key)]
        task.prompt = Sequence.root(replace(task.request, prompt_token_ids=tokens), task.prompt.arrival)
        if self._to_reserve or not self._reserve(task, self._scheduler.most_blocks_due()):
            self._carry_out(self._receiver.refused(key, "the worker has no blocks to spare for a prefix"))
        else:
            self._carry_out(self._receiver.reserved(key, task.prompt.num_cached_tokens))

    def _keep_fetched(self, task: DecodeTask) -> None:
        num_before, num_tokens = task.prompt.num_cached_tokens, task.prompt.num_tokens
        num_kept = keep_blocks(task.prompt, self._blocks, num_tokens)
        release_blocks(task.prompt, self._blocks)
        self._reporter.emit_fetched(task.request.key, num_kept, num_before)
        self._close(task)

    def _release_reservation(self, task: DecodeTask, num_kept_tokens: int) -> None:
        if task.request.key in self._to_reserve:
            self._to_reserve.remove(task.request.key)
        if task.is_reserved:
            self._scheduler.num_reserved_seqs -= task.num_seqs
            keep_blocks(task.prompt, self._blocks, num_kept_tokens)
            release_blocks(task.prompt, self._blocks)
        self._close(task)

    def _start_decoding(self, task: DecodeTask, first_tokens: tuple[handoff_pb2.FirstToken, ...]) -> None:
        prompt, before = task.prompt, task.prompt.num_computed_tokens
        prompt.num_computed_tokens = prompt.num_tokens
        settle_blocks(prompt, self._blocks, before)
        self._scheduler.num_reserved_seqs -= task.request.params.n
        born = []
        for first in first_tokens:
            if not first.is_finished and first.sequence_index not in task.aborted:
                output = task.request.first_output(first.sequence_index, first.token_id)
                born.append(Sequence(task.request, first.sequence_index, prompt.arrival, output_token_ids=output))
        if born:
            self._reporter.emit_phase(task.request.key, Phase.PHASE_DECODE)
            self._adopt(task, born)
        release_blocks(prompt, self._blocks)
        self._blocks.release(task.spare)
        task.spare = []
        if not task.live:
            self._close(task)

    def _adopt(self, task: DecodeTask, born: list[Sequence]) -> None:
        """The first child takes the prompt's blocks as they are, the others fork from it."""
        prompt, heir = task.prompt, born[0]
        heir.block_table, heir.num_computed_tokens = prompt.block_table, prompt.num_computed_tokens
        heir.num_landed_tokens = prompt.num_landed_tokens
        prompt.block_table = table_of()
        task.live = {child.index: child for child in born}
        self._scheduler.join(heir)
        self._scheduler.fork(heir, born[1:], task.spare)
        for child in born:
            if task.spare and child.block_table and child.num_computed_tokens % self._blocks.block_size == 0:
                child.block_table.extend([task.spare.pop() for _ in self._blocks.groups])

    def _abort_sequence(self, task: DecodeTask, index: int) -> None:
        task.aborted.add(index)
        if (sequence := task.live.get(index)) is not None and sequence.fan_out == 1:
            self._end_sequence(task, sequence)

    def _end_sequence(self, task: DecodeTask, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        del task.live[sequence.index]
        if not task.live:
            self._close(task)

    def _close(self, task: DecodeTask) -> None:
        self._blocks.release(task.spare)
        task.spare = []
        del self._tasks[task.request.key]
        self._reporter.close_request(task.request.key)
        for key in [k for k in self._held_back if k.request_id == task.request.key.request_id]:
            self.admit(*self._held_back.pop(key))

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        """The next token of a sequence, which is reported; or all that the client has already, which are not: the
        next step computes those together, as if they were a prompt's."""
        position = len(sequence.output_token_ids)
        known = sequence.request.known_tokens.get(sequence.index, ())[position:]
        sequence.output_token_ids.extend(known or (sampled.token_id,))
        if not known:
            self._reporter.emit_tokens(sequence, sampled, position)
