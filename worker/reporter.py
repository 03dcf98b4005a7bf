"""Reports to routers: which session each request came on, and the events gathered for it since the last batch.

What is reported at one time travels as one batch. A session that is closed gets nothing more. `CacheReporter` reports
what the prefix cache can serve: all of it once, then what changes, in small numbered events. Runs on the engine thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, generation_pb2, worker_pb2
from engine.kv.block_manager import BlockManager
from engine.kv.cache_events import CacheEvents
from engine.kv.retaining_blocks import RetainingBlocks
from engine.sampling.params import Finish, SampledToken, check_finish
from engine.sequence import Sequence
from worker.steps import StepLog

RouterSession = Callable[[list[worker_pb2.Event]], None]
"""Sends events to one router, from any thread, and returns at once; its identity is the session's."""

PROMPT_TOKENS_EACH = 256
"""Prompt tokens whose logprobs one event carries at most."""
MOST_HASHES = 2048
"""Block hashes that one event carries at most: some 37 KB."""
_FINISH_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}


class Reporter:
    """Gathers events for the sessions of one worker."""

    def __init__(self, step_log: StepLog | None = None) -> None:
        self._step_log = step_log or StepLog(None)
        self._sessions: dict[RouterSession, None] = {}
        self._session_of: dict[RequestKey, RouterSession] = {}
        self._report_each: set[RequestKey] = set()
        """Requests whose every token is sent at once."""
        self.is_pressing = False
        """Whether something was gathered that should be sent soon: anything but a token in the middle of an output."""
        self._tokens: dict[tuple[RequestKey, int], worker_pb2.Tokens] = {}
        """The newest event of each sequence: its next tokens join it."""
        self._gathered: defaultdict[RouterSession, list[worker_pb2.Event]] = defaultdict(list)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._session_of

    @property
    def has_gathered(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._gathered)

    @property
    def num_requests(self) -> int:
        return len(self._session_of)

    def open_session(self, session: RouterSession) -> None:
        self._sessions[session] = None

    def close_session(self, session: RouterSession) -> list[RequestKey]:
        """Returns the requests that came on it."""
        self._sessions.pop(session, None)
        self._gathered.pop(session, None)
        return [key for key, s in self._session_of.items() if s == session]

    def is_heard(self, key: RequestKey) -> bool:
        """Whether the session that a request came on is open."""
        return self._session_of.get(key) in self._sessions

    def open_request(self, key: RequestKey, session: RouterSession, *, report_each_token: bool = False) -> None:
        self._session_of[key] = session
        if report_each_token:
            self._report_each.add(key)

    def close_request(self, key: RequestKey) -> None:
        self._session_of.pop(key, None)
        self._report_each.discard(key)

    def send(self, session: RouterSession, event: worker_pb2.Event, *, can_wait: bool = False) -> None:
        """Gathers an event for one session."""
        if session in self._sessions:
            self._gathered[session].append(event)
            self.is_pressing |= not can_wait

    def send_all(self, event: worker_pb2.Event) -> None:
        for session in self._sessions:
            self._gathered[session].append(event)

    def emit(self, key: RequestKey, event: worker_pb2.Event, *, can_wait: bool = False) -> None:
        """Gathers an event for the session of a request."""
        session = self._session_of.get(key)
        if session is not None:
            self.send(session, event, can_wait=can_wait)

    def emit_phase(self, key: RequestKey, phase: generation_pb2.Heartbeat.Phase, num_cached_tokens: int = 0) -> None:
        changed = worker_pb2.PhaseChanged(key=key.to_proto(), phase=phase, num_cached_tokens=num_cached_tokens)
        self.emit(key, worker_pb2.Event(phase=changed))

    def emit_failure(
        self, key: RequestKey, reason: worker_pb2.Failed.Reason, message: str, num_kept_tokens: int = 0
    ) -> None:
        """Reports that the request cannot go on here."""
        self._step_log.failed(key)
        failed = worker_pb2.Failed(key=key.to_proto(), reason=reason, message=message, num_kept_tokens=num_kept_tokens)
        self.emit(key, worker_pb2.Event(failed=failed))

    def emit_fetched(self, key: RequestKey, num_tokens: int, num_cached_tokens: int) -> None:
        """Reports that a fetch is over: the prefix cache has so many tokens of the prefix; before, so many."""
        fetched = worker_pb2.Fetched(key=key.to_proto(), num_tokens=num_tokens, num_cached_tokens=num_cached_tokens)
        self.emit(key, worker_pb2.Event(fetched=fetched))

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None:
        """Reports token `index` of a sequence's output, and whether it ended the sequence."""
        request, of_sequence = sequence.request, (sequence.request.key, sequence.index)
        finish = check_finish(request.params, sequence.output_token_ids or [sampled.token_id])
        is_pressing = index == 0 or finish is not None or request.key in self._report_each
        tokens = self._tokens.get(of_sequence)
        if tokens is None or index != tokens.first_token_index + len(tokens.token_ids):
            event = worker_pb2.Event()
            tokens = event.tokens
            tokens.key.CopyFrom(request.key.to_proto())
            tokens.sequence_index, tokens.first_token_index = sequence.index, index
            self._tokens[of_sequence] = tokens
            self.emit(request.key, event, can_wait=True)
        self.is_pressing |= is_pressing
        tokens.token_ids.append(sampled.token_id)
        if request.params.top_logprobs is not None:
            tokens.logprobs.append(logprob_to_proto(sampled))
        if finish is not None:
            finish_to_proto(finish, tokens)

    def emit_prompt_logprobs(self, sequence: Sequence, scores: Seq[SampledToken]) -> None:
        """Reports the logprobs of the prompt's tokens that this sequence was scored for last."""
        request, begin = sequence.request, sequence.num_scored_tokens - len(scores)
        for start in range(0, len(scores), PROMPT_TOKENS_EACH):
            logprobs = worker_pb2.PromptLogprobs(
                key=request.key.to_proto(),
                first_token_index=begin + start,
                logprobs=[logprob_to_proto(score) for score in scores[start : start + PROMPT_TOKENS_EACH]],
            )
            self.emit(request.key, worker_pb2.Event(prompt_logprobs=logprobs))

    def flush(self) -> None:
        """Sends what was gathered."""
        if self._gathered:
            for session, events in self._gathered.items():
                session(events)
            self._gathered.clear()
            self._tokens.clear()
        self.is_pressing = False


class CacheReporter:
    """Sessions are those of `reporter`, where they are opened first.

    Each session begins with a snapshot and gets another when it asks (its router missed something) or when too much had
    changed. Only net changes are sent, once a turn at most and nothing in a turn without any, so that a step that fills
    no block costs nothing; while there is no session nothing is noted.
    """

    def __init__(self, blocks: BlockManager, reporter: Reporter) -> None:
        self._blocks = blocks
        self._reporter = reporter
        self._num_sent: dict[RouterSession, int] = {}
        """Events by session."""

    def open_session(self, session: RouterSession) -> None:
        """Sends it everything that is cached."""
        if not self._num_sent:
            self._blocks.watch_cache(True)
        self.gather()  # to the others: what follows a snapshot must not be in it already
        self._num_sent[session] = 0
        self._send_snapshot(session)

    def close_session(self, session: RouterSession) -> None:
        if self._num_sent.pop(session, None) is not None and not self._num_sent:
            self._blocks.watch_cache(False)

    def resync(self, session: RouterSession) -> None:
        """Sends one session everything again."""
        self.gather()
        if session in self._num_sent:
            self._send_snapshot(session)

    def gather(self) -> None:
        """Sends every session what has changed since the last call."""
        events = self._blocks.take_cache_events()
        if events is not None:
            for session in self._num_sent:
                self._send(session, events)

    def _send_snapshot(self, session: RouterSession) -> None:
        self._send(session, CacheEvents(list(self._blocks.cached_hashes), [], is_snapshot=True))

    def _send(self, session: RouterSession, events: CacheEvents) -> None:
        for part in _parts(events):
            event = worker_pb2.Event()
            cache = event.cache  # filled in its place: a message that is put into another one is copied
            cache.sequence_number, cache.snapshot = self._next_number(session), part.is_snapshot
            cache.evicted.extend(part.evicted)
            cache.stored.extend(part.stored)
            self._reporter.send(session, event, can_wait=True)

    def _next_number(self, session: RouterSession) -> int:
        self._num_sent[session] = number = self._num_sent[session] + 1
        return number


def _parts(events: CacheEvents) -> Iterator[CacheEvents]:
    """At least one. Evicted before stored: so a listener never has to hold more hashes than the pool has blocks."""
    num_evicted, num_hashes = len(events.evicted), len(events.evicted) + len(events.stored)
    if num_hashes <= MOST_HASHES:
        yield events
        return
    for first in range(0, num_hashes, MOST_HASHES):
        last = first + MOST_HASHES
        stored = events.stored[max(0, first - num_evicted) : max(0, last - num_evicted)]
        yield CacheEvents(stored, events.evicted[first:last], is_snapshot=events.is_snapshot and not first)


def logprob_to_proto(sampled: SampledToken) -> generation_pb2.TokenLogprob:
    """Without a logprob it is a prompt's first token."""
    if sampled.logprob is None:
        return generation_pb2.TokenLogprob(token_id=sampled.token_id, undefined=True)
    top = [generation_pb2.TokenAlternative(token_id=i, logprob=logprob) for i, logprob in sampled.top]
    return generation_pb2.TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob, rank=sampled.rank, top=top)


def finish_to_proto(finish: Finish, tokens: worker_pb2.Tokens) -> None:
    """Marks `tokens` as the last of their sequence."""
    tokens.finish_reason = _FINISH_REASONS[finish.reason]
    if finish.stop_token_id is not None:
        tokens.stop_token_id = finish.stop_token_id


def list_sessions(
    blocks: RetainingBlocks, request: admin_pb2.ListSessionsRequest, now: float
) -> admin_pb2.ListSessionsResponse:
    """The sessions that a request asks for, those with the most time left first, and how much lies in which tier."""
    found = [each for each in blocks.sessions() if not request.HasField("tenant") or each[0].tenant == request.tenant]
    found.sort(key=lambda each: -each[2])
    return admin_pb2.ListSessionsResponse(
        sessions=[
            admin_pb2.KeptSession(
                tenant=name.tenant,
                session_id=name.session_id,
                tiers=[
                    admin_pb2.SessionBlocks(tier=tier, num_blocks=blocks.num_kept(tier, keys))
                    for tier in blocks.retentions
                ],
                remaining_s=max(0.0, until - now),
            )
            for name, keys, until in found[: request.num_sessions]
        ],
        num_total=len(found),
        has_share=True,
    )
