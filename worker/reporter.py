"""What routers hear: which session each request came on, and the events gathered for it since it was last told.

What is told at one time travels as one batch. A session that is gone hears nothing more. Runs on the engine thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Protocol

from cluster.pb import worker_pb2
from cluster.request_key import RequestKey
from engine.sampling.params import SampledToken, check_finish
from engine.sequence import Sequence
from worker.convert import finish_to_proto, logprob_to_proto

PROMPT_TOKENS_EACH = 256
"""Prompt tokens whose logprobs one event carries at most."""


class Voice(Protocol):
    """The speaking side of sessions; returns at once."""

    def events(self, session: str, events: list[worker_pb2.Event]) -> None: ...


class Reporter:
    """Of one worker. `voice` is set before the first event."""

    voice: Voice

    def __init__(self) -> None:
        self._sessions: set[str] = set()
        self._session_of: dict[RequestKey, str] = {}
        self._told_each: set[RequestKey] = set()
        """Requests whose every token presses."""
        self.is_pressing = False
        """Whether something was gathered that should be told soon: anything but a token in the middle of an output."""
        self._tokens: dict[tuple[RequestKey, int], worker_pb2.Tokens] = {}
        """Of each sequence, what was gathered last: its next tokens join it."""
        self._gathered: defaultdict[str, list[worker_pb2.Event]] = defaultdict(list)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._session_of

    @property
    def num_requests(self) -> int:
        return len(self._session_of)

    def open_session(self, session: str) -> None:
        self._sessions.add(session)

    def close_session(self, session: str) -> list[RequestKey]:
        """Returns the requests that came on it."""
        self._sessions.discard(session)
        self._gathered.pop(session, None)
        return [key for key, s in self._session_of.items() if s == session]

    def open_request(self, key: RequestKey, session: str, *, tell_each_token: bool = False) -> None:
        self._session_of[key] = session
        if tell_each_token:
            self._told_each.add(key)

    def close_request(self, key: RequestKey) -> None:
        self._session_of.pop(key, None)
        self._told_each.discard(key)

    def tell(self, session: str, event: worker_pb2.Event, *, can_wait: bool = False) -> None:
        """Gathers an event for one session."""
        if session in self._sessions:
            self._gathered[session].append(event)
            self.is_pressing |= not can_wait

    def tell_all(self, event: worker_pb2.Event) -> None:
        for session in self._sessions:
            self._gathered[session].append(event)

    def emit(self, key: RequestKey, event: worker_pb2.Event, *, can_wait: bool = False) -> None:
        """Gathers an event for the session of a request."""
        session = self._session_of.get(key)
        if session is not None:
            self.tell(session, event, can_wait=can_wait)

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None:
        """Tells the router token `index` of a sequence's output, and whether it ended the sequence."""
        request, of_sequence = sequence.request, (sequence.request.key, sequence.index)
        finish = check_finish(request.params, sequence.output_token_ids or [sampled.token_id])
        is_pressing = index == 0 or finish is not None or request.key in self._told_each
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
        """Tells the router the logprobs of the prompt's tokens that this sequence was scored for last."""
        request, begin = sequence.request, sequence.num_scored_tokens - len(scores)
        for start in range(0, len(scores), PROMPT_TOKENS_EACH):
            told = worker_pb2.PromptLogprobs(
                key=request.key.to_proto(),
                first_token_index=begin + start,
                logprobs=[logprob_to_proto(score) for score in scores[start : start + PROMPT_TOKENS_EACH]],
            )
            self.emit(request.key, worker_pb2.Event(prompt_logprobs=told))

    def flush(self) -> None:
        """Hands what was gathered to the speaking side."""
        for session, events in self._gathered.items():
            self.voice.events(session, events)
        self._gathered.clear()
        self._tokens.clear()
        self.is_pressing = False
