"""Prefill work on one worker: admits jobs, plans their chunks, and carries out what the sender machine decides.

Owns the sequences it computes and their blocks until the sender releases them. The prefix cache keeps the prompt after.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from cluster.keys import RequestKey
from cluster.pb import generation_pb2, handoff_pb2, worker_pb2
from engine.block_manager import BlockManager
from engine.sampling import SampledToken, check_finish
from engine.sequence import Job, Planned, Sequence, publish_blocks, release_blocks
from kv_transfer.actions import Actions, BeginPrefill, Fail, Gather, ReleasePages, Tell, Transmit
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.sender import Sender


class Reporter(Protocol):
    """Tells the router; keeps which request is whose."""

    def emit(self, key: RequestKey, event: worker_pb2.Event) -> None: ...

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None: ...

    def close_request(self, key: RequestKey) -> None: ...


class Carrier(Protocol):
    """Carries messages and KV between this worker and its peers."""

    def tell(self, peer: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None: ...

    def gather(self, action: Gather, block_table: list[int]) -> None: ...

    def transmit(self, action: Transmit) -> None: ...


@dataclass
class PrefillTask:
    """A job of this role. The sequence exists once the decode worker has reserved."""

    job: Job
    peer: str
    sequence: Sequence | None = None


class PrefillRole:
    """Computes prompts and hands their KV over."""

    def __init__(
        self, reporter: Reporter, carrier: Carrier, blocks: BlockManager, num_slots: int, chunk_tokens: int
    ) -> None:
        self._reporter = reporter
        self._carrier = carrier
        self._arrivals = itertools.count()
        self._blocks = blocks
        self._scheduler = PrefillScheduler(blocks)
        self._sender = Sender(num_slots, chunk_tokens)
        self._tasks: dict[RequestKey, PrefillTask] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tasks

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for the decode worker's reservation or for blocks here."""
        return self._scheduler.num_waiting + sum(task.sequence is None for task in self._tasks.values())

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def admit(self, job: Job, peer: str) -> None:
        """The router gave this worker a prompt, to be handed to `peer`."""
        self._tasks[job.key] = PrefillTask(job, peer)
        self._carry_out(self._sender.open(job.key, peer, len(job.prompt_token_ids)))

    def cancel(self, key: RequestKey, reason: str) -> None:
        """Computes no further at once; what a gather still reads is released when it is done."""
        self._carry_out(self._sender.abort(key, reason))
        self._stop_computing(key)

    def hear(self, message: handoff_pb2.ReceiverMessage) -> None:
        """A message of a decode worker."""
        match message.WhichOneof("message"):
            case "reserved":
                key = RequestKey.of(message.reserved.key)
                self._carry_out(self._sender.reserved(key, message.reserved.num_cached_tokens))
            case "grant":
                self._carry_out(self._sender.granted(RequestKey.of(message.grant.key), message.grant.chunk_index))
            case "committed":
                self._carry_out(self._sender.committed(RequestKey.of(message.committed.key)))
            case "abort":
                key = RequestKey.of(message.abort.key)
                self._carry_out(self._sender.peer_aborted(key))
                self._stop_computing(key)

    def peer_ready(self, peer: str, chunk_tokens: int) -> None:
        self._carry_out(self._sender.peer_ready(peer, chunk_tokens))

    def peer_lost(self, peer: str) -> None:
        self._carry_out(self._sender.peer_lost(peer))
        for key in [k for k, task in self._tasks.items() if task.peer == peer]:
            self._stop_computing(key)

    def gathered(self, action: Gather) -> None:
        self._carry_out(self._sender.gathered(action.key, action.chunk_index))

    def sent(self, action: Transmit) -> None:
        self._carry_out(self._sender.sent(action.key, action.chunk_index))

    def plan(self, budget: int) -> list[Planned]:
        """Shares of the next step; prompts that start now offer what the prefix cache already has at once."""
        for sequence in self._scheduler.admit():
            key = sequence.job.key
            phase = worker_pb2.PhaseChanged(
                key=key.to_proto(),
                phase=generation_pb2.Heartbeat.PHASE_PREFILL,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            self._reporter.emit(key, worker_pb2.Event(phase=phase))
            self._carry_out(self._sender.computed(key, sequence.num_computed_tokens))
        return self._scheduler.plan(budget)

    def absorb(self, planned: Planned, sampled: list[SampledToken]) -> None:
        """A share of the step has run; `sampled` holds the first tokens when it reached the prompt's end."""
        sequence = planned.sequence
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens += planned.num_tokens
        publish_blocks(sequence, self._blocks, before)
        self._carry_out(self._sender.computed(sequence.job.key, sequence.num_computed_tokens))
        if sampled:
            self._finish_prompt(sequence, sampled)

    def check_idle(self, num_slots: int) -> None:
        """Raises AssertionError unless nothing is held."""
        assert not self._tasks, self._tasks
        self._sender.check_idle(num_slots)

    def _finish_prompt(self, sequence: Sequence, sampled: list[SampledToken]) -> None:
        self._scheduler.remove(sequence)
        key = sequence.job.key
        first_tokens: list[handoff_pb2.FirstToken] = []
        is_open = False
        for index, token in enumerate(sampled):
            finish = check_finish(sequence.job.params, [token.token_id])
            is_open = is_open or finish is None
            self._reporter.emit_tokens(Sequence(sequence.job, index, sequence.arrival), token, 0)
            first = handoff_pb2.FirstToken(
                sequence_index=index, token_id=token.token_id, is_finished=finish is not None
            )
            first_tokens.append(first)
        if not is_open:
            self._carry_out(self._sender.abort(key, "the first token ended the request"))
            return
        phase = worker_pb2.PhaseChanged(key=key.to_proto(), phase=generation_pb2.Heartbeat.PHASE_TRANSFER)
        self._reporter.emit(key, worker_pb2.Event(phase=phase))
        self._carry_out(self._sender.commit(key, first_tokens))

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Tell():
                    self._carrier.tell(action.peer, action.message)
                case Gather():
                    sequence = self._tasks[action.key].sequence
                    assert sequence is not None
                    self._carrier.gather(action, sequence.block_table)
                case Transmit():
                    self._carrier.transmit(action)
                case BeginPrefill():
                    self._begin(self._tasks[action.key])
                case Fail():
                    failed = worker_pb2.Failed(key=action.key.to_proto(), reason=action.reason, message=action.message)
                    self._reporter.emit(action.key, worker_pb2.Event(failed=failed))
                case ReleasePages():
                    self._release(action.key)

    def _begin(self, task: PrefillTask) -> None:
        task.sequence = Sequence(task.job, 0, next(self._arrivals), fan_out=task.job.params.n)
        self._scheduler.add(task.sequence)

    def _stop_computing(self, key: RequestKey) -> None:
        task = self._tasks.get(key)
        if task is not None and task.sequence is not None:
            self._scheduler.remove(task.sequence)

    def _release(self, key: RequestKey) -> None:
        task = self._tasks.pop(key)
        if task.sequence is not None:
            self._scheduler.remove(task.sequence)
            release_blocks(task.sequence, self._blocks)
        self._reporter.close_request(key)
