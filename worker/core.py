"""The engine thread of a worker: one loop that hears events, plans a step, runs it and tells what came of it.

Everything that owns memory or decides runs on this thread, so nothing here is locked. Other threads `post` to it:
router sessions and hand-off links (the speaking side, `worker.service`) and finished rank commands. It never waits but
for work. Sessions and peers are opaque names here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from decode_worker.role import DecodeRole
from engine.block_manager import BlockManager
from engine.sampling import SampledToken, Sampler, check_finish
from engine.sequence import Planned, Sequence, total_tokens
from engine.step import StepInput, build_step
from kv_transfer.actions import Gather, Land, Transmit
from prefill_worker.role import PrefillRole
from worker.convert import finish_to_proto, job_of, logprob_to_proto
from worker.step_log import StepLog

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.2


class Voice(Protocol):
    """The speaking side; every method may be called from the engine thread and returns at once."""

    def events(self, session: str, events: list[worker_pb2.Event]) -> None: ...

    def tell_receiver(self, peer: str, message: handoff_pb2.SenderMessage) -> None: ...

    def tell_sender(self, epoch: str, message: handoff_pb2.ReceiverMessage) -> None: ...

    def open_link(self, peer: str, address: str, incarnation: str) -> None: ...

    def close_link(self, peer: str) -> None: ...


class Ranks(Protocol):
    """The tensor-parallel ranks of this worker, as one."""

    @property
    def last_step(self) -> int: ...

    def step(self, step: StepInput) -> torch.Tensor: ...

    def issue(self, command: rank_pb2.RankCommand) -> int: ...


class Core:
    """State of one worker. `voice` and `group` are set before `run`."""

    voice: Voice
    group: Ranks

    def __init__(
        self,
        blocks: BlockManager,
        sampler: Sampler,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_slots: int,
        chunk_tokens: int,
        step_log: StepLog,
    ) -> None:
        self.blocks = blocks
        self._sampler = sampler
        self._budget = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._step_log = step_log
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._arrivals = itertools.count()
        self._session_of: dict[RequestKey, str] = {}
        self._outgoing: defaultdict[str, list[worker_pb2.Event]] = defaultdict(list)
        self._sessions: set[str] = set()
        self._epoch_of: dict[str, str] = {}
        """Pair epoch of each peer; on the receiving side the peer's name is the epoch."""
        self._on_done: dict[int, Callable[[str, int], None]] = {}
        self._stats = worker_pb2.WorkerStats()
        self._sent_stats = worker_pb2.WorkerStats()
        self._stats_due = 0.0
        self._is_stopping = False
        self.prefill = PrefillRole(self, blocks, num_slots, chunk_tokens)
        self.decode = DecodeRole(self, blocks, max_num_seqs, num_slots, chunk_tokens)

    # From other threads

    def post(self, handler: Callable[..., None], *arguments: Any) -> None:
        """Runs `handler(*arguments)` on the engine thread before the next step."""
        self._inbox.put((handler, arguments))

    def command_done(self, number: int, error: str, size_bytes: int) -> None:
        self.post(self._command_done, number, error, size_bytes)

    # The loop

    def run(self) -> None:
        """Returns after `stop`; raises when a step fails, which ends the worker."""
        is_idle = True
        while not self._is_stopping:
            is_idle = not self.turn(wait=is_idle)
        self._step_log.close()

    def turn(self, wait: bool) -> bool:
        """Hears what was posted (waits for something to be, if told to), runs at most one step; whether it did."""
        self._hear(wait)
        has_run = self._step()
        self._flush(is_idle=not has_run)
        return has_run

    def stop(self) -> None:
        """On the engine thread (through `post`)."""
        self._is_stopping = True

    def _hear(self, wait: bool) -> None:
        if wait:
            handler, arguments = self._inbox.get()
            handler(*arguments)
        while not self._inbox.empty():
            handler, arguments = self._inbox.get()
            handler(*arguments)

    def _step(self) -> bool:
        """Plans and runs one step; False when there was nothing to run."""
        decoding, preempted, copies = self.decode.plan(self._budget)
        prefilling = self.prefill.plan(self._budget - total_tokens(decoding))
        planned = decoding + prefilling
        if not planned:
            self.decode.copied(copies)
            return False
        self._tell()  # who starts now is known before the step ends
        step = build_step([p.sequence.slice(p.num_tokens) for p in planned], self.blocks.block_size, copies)
        sampled = self._sample(self.group.step(step), planned)
        self.decode.copied(copies)
        self._count(planned, len(decoding))
        for p in decoding:
            self.decode.absorb(p, sampled[id(p)])
        for p in prefilling:
            self.prefill.absorb(p, sampled[id(p)])
        self._step_log.write(self._stats.num_steps, planned, preempted, self.blocks)
        return True

    def _sample(self, logits: torch.Tensor, planned: list[Planned]) -> dict[int, list[SampledToken]]:
        """The tokens each share of the step leads to, none for one that ends inside its prompt."""
        sampled: dict[int, list[SampledToken]] = {id(p): [] for p in planned}
        ends = [p for p in planned if p.num_tokens == p.sequence.num_remaining]
        if not ends:
            return sampled
        rows = [p.sequence.sample_rows() for p in ends]
        if len(ends) != sum(map(len, rows)):
            logits = logits[[i for i, of_one in enumerate(rows) for _ in of_one]]
        tokens = iter(self._sampler.sample(logits, [row for of_one in rows for row in of_one]))
        for p, of_one in zip(ends, rows, strict=True):
            sampled[id(p)] = [next(tokens) for _ in of_one]
        return sampled

    def _count(self, planned: list[Planned], num_decoding: int) -> None:
        self._stats.num_steps += 1
        for i, p in enumerate(planned):
            if i < num_decoding and p.num_tokens == 1:
                self._stats.num_decode_tokens += 1
            else:
                self._stats.num_prefill_tokens += p.num_tokens

    # Router sessions

    def session_opened(self, session: str, info: worker_pb2.WorkerInfo) -> None:
        self._sessions.add(session)
        self._outgoing[session].append(worker_pb2.Event(info=info))
        self._outgoing[session].append(worker_pb2.Event(stats=self._measure()))

    def session_closed(self, session: str) -> None:
        """A router is gone: nobody waits for its requests."""
        self._sessions.discard(session)
        self._outgoing.pop(session, None)
        for key in [k for k, s in self._session_of.items() if s == session]:
            self._cancel(key, "the router closed its session", None)

    def command(self, session: str, command: worker_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "admit":
                self._admit(session, command.admit)
            case "cancel":
                index = command.cancel.sequence_index if command.cancel.HasField("sequence_index") else None
                self._cancel(RequestKey.of(command.cancel.key), "cancelled", index)

    def _admit(self, session: str, admit: worker_pb2.Admit) -> None:
        job = job_of(admit)
        problem = self._check(job.key, len(job.prompt_token_ids), job.params.max_output_tokens)
        if problem:
            reason = worker_pb2.Failed.REASON_INVALID
            failed = worker_pb2.Failed(key=admit.key, reason=reason, message=problem)
            self._outgoing[session].append(worker_pb2.Event(failed=failed))
            return
        self._session_of[job.key] = session
        if admit.role == worker_pb2.ROLE_DECODE:
            self.decode.admit(job, admit.expect_handoff)
            return
        peer = f"{admit.decode_peer.worker_id}@{admit.decode_peer.incarnation}"
        self.voice.open_link(peer, admit.decode_peer.address, admit.decode_peer.incarnation)
        self.prefill.admit(job, peer)

    def _check(self, key: RequestKey, num_prompt_tokens: int, max_output_tokens: int) -> str:
        if key in self._session_of:
            return "this worker already holds a request of this id and attempt"
        if num_prompt_tokens == 0:
            return "the prompt is empty"
        if num_prompt_tokens + max_output_tokens > self._max_model_len:
            total = f"{num_prompt_tokens} prompt + {max_output_tokens} output tokens"
            return f"{total} exceed max_model_len {self._max_model_len}"
        return ""

    def _cancel(self, key: RequestKey, reason: str, sequence_index: int | None) -> None:
        if key in self._session_of and sequence_index is None:
            self._step_log.cancelled(key)
        if key in self.decode:
            self.decode.cancel(key, reason, sequence_index)
        if key in self.prefill and sequence_index is None:
            self.prefill.cancel(key, reason)

    # Links to decode workers (this worker sends) and from prefill workers (this worker receives)

    def link_up(self, peer: str, hello: handoff_pb2.ReceiverHello) -> None:
        pair = rank_pb2.OpenPair(
            pair_epoch=hello.pair_epoch, store_address=hello.store_address, is_sender=True, remote=hello.layout
        )
        self._open_pair(peer, pair, lambda: self.prefill.peer_ready(peer, hello.chunk_tokens))

    def link_heard(self, peer: str, message: handoff_pb2.ReceiverMessage) -> None:
        self.prefill.hear(message)

    def link_down(self, peer: str) -> None:
        self._close_pair(peer)
        self.prefill.peer_lost(peer)

    def peer_up(self, epoch: str, store_address: str, hello: handoff_pb2.SenderHello) -> None:
        pair = rank_pb2.OpenPair(pair_epoch=epoch, store_address=store_address, is_sender=False, remote=hello.layout)
        self._open_pair(epoch, pair, lambda: self.decode.peer_ready(epoch))

    def peer_heard(self, epoch: str, message: handoff_pb2.SenderMessage) -> None:
        self.decode.hear(epoch, message)

    def peer_down(self, epoch: str) -> None:
        self._close_pair(epoch)
        self.decode.peer_lost(epoch)

    def _open_pair(self, peer: str, pair: rank_pb2.OpenPair, ready: Callable[[], None]) -> None:
        def opened(error: str, _: int) -> None:
            if error:
                logger.warning("pair %s with %s did not open: %s", pair.pair_epoch, peer, error)
                self.voice.close_link(peer)
            elif self._epoch_of.get(peer) == pair.pair_epoch:
                ready()

        self._epoch_of[peer] = pair.pair_epoch
        self._issue(rank_pb2.RankCommand(open_pair=pair), opened)

    def _close_pair(self, peer: str) -> None:
        epoch = self._epoch_of.pop(peer, None)
        if epoch is not None:
            command = rank_pb2.RankCommand(close_pair=rank_pb2.ClosePair(pair_epoch=epoch))
            self._issue(command, lambda error, _: None)

    # What the roles ask of their host

    def next_arrival(self) -> int:
        return next(self._arrivals)

    def emit(self, key: RequestKey, event: worker_pb2.Event) -> None:
        session = self._session_of.get(key)
        if session in self._sessions:
            self._outgoing[session].append(event)

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None:
        """Tells the router token `index` of a sequence's output, and whether it ended the sequence."""
        job = sequence.job
        tokens = worker_pb2.Tokens(
            key=job.key.to_proto(),
            sequence_index=sequence.index,
            first_token_index=index,
            token_ids=[sampled.token_id],
        )
        if job.params.top_logprobs is not None:
            tokens.logprobs.append(logprob_to_proto(sampled))
        finish = check_finish(job.params, sequence.output_token_ids or [sampled.token_id])
        if finish is not None:
            finish_to_proto(finish, tokens)
        self.emit(job.key, worker_pb2.Event(tokens=tokens))

    def close_request(self, key: RequestKey) -> None:
        self._session_of.pop(key, None)

    def tell(self, peer: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None:
        if isinstance(message, handoff_pb2.SenderMessage):
            self.voice.tell_receiver(peer, message)
        else:
            self.voice.tell_sender(peer, message)

    def gather(self, action: Gather, block_table: list[int]) -> None:
        command = rank_pb2.Gather(
            pair_epoch=self._epoch_of.get(action.peer, ""),
            slot=action.slot,
            token_start=action.token_start,
            token_end=action.token_end,
            block_table=block_table,
            after_step=self.group.last_step,
        )

        def done(error: str, size_bytes: int) -> None:
            self._stats.kv_bytes_sent += size_bytes
            self.prefill.gathered(action)
            self._retire_on(error, action.peer)

        self._issue(rank_pb2.RankCommand(gather=command), done)

    def transmit(self, action: Transmit) -> None:
        command = rank_pb2.Send(
            pair_epoch=self._epoch_of.get(action.peer, ""), slot=action.slot, num_tokens=action.num_tokens
        )

        def done(error: str, _: int) -> None:
            self.prefill.sent(action)
            self._retire_on(error, action.peer)

        self._issue(rank_pb2.RankCommand(send=command), done)

    def land(self, action: Land, block_table: list[int]) -> None:
        command = rank_pb2.Receive(
            pair_epoch=self._epoch_of.get(action.peer, ""),
            slot=action.slot,
            token_start=action.token_start,
            token_end=action.token_end,
            block_table=block_table,
            after_step=self.group.last_step,
        )

        def done(error: str, size_bytes: int) -> None:
            self._stats.kv_bytes_received += size_bytes
            self.decode.landed(action, error)
            self._retire_on(error, action.peer)

        self._issue(rank_pb2.RankCommand(receive=command), done)

    def _retire_on(self, error: str, peer: str) -> None:
        """A pair whose operation failed is closed alone; the next request opens another."""
        if error:
            self.voice.close_link(peer)

    def _issue(self, command: rank_pb2.RankCommand, done: Callable[[str, int], None]) -> None:
        self._on_done[self.group.issue(command)] = done

    def _command_done(self, number: int, error: str, size_bytes: int) -> None:
        self._on_done.pop(number)(error, size_bytes)

    # Telling routers

    def _flush(self, is_idle: bool) -> None:
        now = time.monotonic()
        if is_idle or now >= self._stats_due:
            stats = self._measure()
            if stats != self._sent_stats:
                self._sent_stats.CopyFrom(stats)
                self._stats_due = now + STATS_INTERVAL_S
                for session in self._sessions:
                    self._outgoing[session].append(worker_pb2.Event(stats=self._sent_stats))
        self._tell()

    def _tell(self) -> None:
        for session, events in self._outgoing.items():
            self.voice.events(session, events)
        self._outgoing.clear()

    def _measure(self) -> worker_pb2.WorkerStats:
        stats, blocks = self._stats, self.blocks
        stats.blocks_free, stats.blocks_held = blocks.num_free, blocks.num_held
        stats.blocks_cached, stats.blocks_total = blocks.num_cached, blocks.num_total
        stats.num_running_seqs = self.decode.num_running + self.prefill.num_running
        stats.num_waiting_requests = self.decode.num_waiting + self.prefill.num_waiting
        stats.num_requests = len(self._session_of)
        stats.num_preemptions = self.decode.num_preemptions
        return stats
