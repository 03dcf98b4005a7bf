"""Traces of requests: each is a tree of spans, made once its request is over from the instants that it recorded.

    Traces.begin (a call came: is it sampled?) -> CallTrace.on_end (its request has ended) | refused (it led to none)

    CALL MODEL                     from the call to the end
    ├── attempt                    for each placement: where and why, and what ended it
    │   ├── queue                  until its worker began with the prompt
    │   ├── prefill                until the worker was done with it, or handed it over
    │   ├── hand-off               until the decode worker had everything; none for a local prefill
    │   └── decode
    └── queue                      the time that it waited without being placed

Attempts follow one another, and so do the phases of each, as the router learned of them. Attributes are those of
OpenTelemetry's conventions for generative AI, as of semantic-conventions-genai in 2026 (none is stable yet), and
Baton's own under `baton.`. No prompt and no output is in a span. Knows no OpenTelemetry: `router.observe.otel` sends
the spans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.auth import Metadata
from cluster.errors import BatonError, Cancelled
from cluster.lifecycle import RequestState, StateEntry
from cluster.pb import generation_pb2
from router.stream.request import Attempt, LiveRequest, RequestObserver

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]
Attributes = dict[str, Value]

_NAMES = {
    RequestState.QUEUED: "queue",
    RequestState.PREFILLING: "prefill",
    RequestState.TRANSFERRING: "hand-off",
    RequestState.DECODING: "decode",
}


@dataclass(frozen=True)
class Origin:
    """The call that is traced."""

    operation: str
    """`chat` or `text_completion`."""
    is_streaming: bool
    begun_at: float
    """Seconds on the router's clock."""
    begun_time_s: float
    """The wall clock at that moment."""

    def time_ns(self, at: float) -> int:
        """Converts an instant of the router's clock to the wall clock; nothing in a trace is before its call."""
        return round((self.begun_time_s + max(0.0, at - self.begun_at)) * 1e9)


@dataclass(frozen=True)
class SpanEvent:
    name: str
    time_ns: int


@dataclass(frozen=True)
class Span:
    """Times in nanoseconds since 1970."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: Attributes
    error: str = ""
    """Why it failed; empty: it did not."""
    events: tuple[SpanEvent, ...] = ()
    children: tuple[Span, ...] = ()

    @property
    def count(self) -> int:
        """The number of spans in this tree."""
        return 1 + sum(child.count for child in self.children)


class CallTrace(RequestObserver):
    """The trace of one call that is sampled."""

    def __init__(self, traceparent: str, origin: Origin, send: Callable[[Span], None]) -> None:
        """`traceparent`: the call's own span, as W3C trace context writes it."""
        self.traceparent = traceparent
        self._origin = origin
        self._send = send

    def on_end(self, live: LiveRequest) -> None:
        try:
            self._send(spans_of(live, self._origin))
        except Exception:
            log.exception("the trace of %s could not be made", live.key.request_id)

    def refused(self, error: BatonError, now: float) -> None:
        """The call led to no request."""
        self._send(span_of_refusal(error, self._origin, now))


class Traces:
    """Traces nothing; the base of what does. Used from the event loop; nothing of it waits or raises."""

    def begin(self, metadata: Metadata, origin: Origin) -> CallTrace | None:
        """None: the call is not sampled."""
        return None

    def close(self) -> None:
        """Sends what is left within about two seconds. Blocks: call it on another thread."""


def spans_of(live: LiveRequest, origin: Origin) -> Span:
    """The spans of a request that has ended."""
    history = live.lifecycle.history
    end = history[-1].at
    attributes = _of_request(live, origin)
    error = "" if live.error is None else _set_error(attributes, live.error)
    events: tuple[SpanEvent, ...] = ()
    first = live.first_token_at
    if first is not None and first >= origin.begun_at:
        events = (SpanEvent("first_token", origin.time_ns(first)),)
        attributes["gen_ai.response.time_to_first_chunk"] = first - origin.begun_at
    return Span(
        f"{origin.operation} {live.model}",
        origin.time_ns(origin.begun_at),
        origin.time_ns(end),
        attributes,
        error,
        events,
        tuple(_children(live, origin, history, end)),
    )


def span_of_refusal(error: BatonError, origin: Origin, now: float) -> Span:
    """The span of a call that led to no request."""
    attributes: Attributes = {**_of_call(origin), "baton.outcome": "rejected"}
    message = _set_error(attributes, error)
    return Span(origin.operation, origin.time_ns(origin.begun_at), origin.time_ns(now), attributes, message)


def _children(live: LiveRequest, origin: Origin, history: tuple[StateEntry, ...], end: float) -> Iterator[Span]:
    begin = history[0].at
    for attempt in live.attempts:
        until = end if attempt.ended_at is None else attempt.ended_at
        is_local, is_last = attempt.placement.prefill_id is None, attempt.ended_at is None
        phases = tuple(_phases(history, begin, until, origin, is_local=is_local, is_last=is_last))
        yield _of_attempt(live, attempt, origin, begin, until, phases)
        begin = until
    if not live.attempts or live.attempts[-1].ended_at is not None:
        yield from _phases(history, begin, end, origin, is_local=True, is_last=True)


def _of_attempt(
    live: LiveRequest, attempt: Attempt, origin: Origin, begin: float, end: float, phases: tuple[Span, ...]
) -> Span:
    placement = attempt.placement
    attributes: Attributes = {
        "baton.attempt": attempt.key.attempt,
        "baton.placement.reason": placement.reason,
        "baton.placement.kind": str(placement.kind),
        "baton.decode_worker": placement.decode_id,
    }
    if placement.prefill_id is not None:
        attributes["baton.prefill_worker"] = placement.prefill_id
    error = ""
    if attempt.has_failed:
        attributes["error.type"] = error = attempt.why
    elif attempt.ended_at is not None:
        attributes["baton.moved"] = attempt.why
    elif live.error is not None:
        error = _set_error(attributes, live.error)
    placed = SpanEvent("placed", origin.time_ns(attempt.placed_at))
    return Span("attempt", origin.time_ns(begin), origin.time_ns(end), attributes, error, (placed,), phases)


def _phases(
    history: tuple[StateEntry, ...], begin: float, end: float, origin: Origin, *, is_local: bool, is_last: bool
) -> Iterator[Span]:
    """The phases of the request from `begin` to `end`; at `end` itself, if no attempt follows (`is_last`). `is_local`:
    it was not handed over, so that an empty transfer is left out."""
    for entry, following in pairwise(history):
        is_entered = begin <= entry.at and (entry.at < end or is_last)
        lasts = entry.at < begin < following.at
        since, until = max(entry.at, begin), min(following.at, end)
        is_passed_over = is_local and entry.state is RequestState.TRANSFERRING and since == until
        if (is_entered or lasts) and not is_passed_over:
            yield Span(_NAMES[entry.state], origin.time_ns(since), origin.time_ns(until), {})


def _of_call(origin: Origin) -> Attributes:
    return {
        "gen_ai.operation.name": origin.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.stream": origin.is_streaming,
    }


def _of_request(live: LiveRequest, origin: Origin) -> Attributes:
    request, sampling, usage = live.request, live.request.sampling, live.usage
    attributes = _of_call(origin) | {
        "gen_ai.request.model": live.model,
        "gen_ai.request.max_tokens": sampling.stopping.max_output_tokens,
        "gen_ai.request.temperature": sampling.params.temperature,
        "gen_ai.request.top_p": sampling.params.top_p,
        "gen_ai.response.id": live.key.request_id,
        "gen_ai.response.model": live.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "baton.outcome": live.lifecycle.state.value,
        "baton.attempts": len(live.attempts),
    }
    if sampling.params.n > 1:
        attributes["gen_ai.request.choice.count"] = sampling.params.n
    if request.client_request_id:
        attributes["baton.request_id"] = request.client_request_id
    if live.principal.tenant:
        attributes["baton.tenant"] = live.principal.tenant
    ends = [s.end.finish_reason for s in live.sequences if s.end is not None]
    if ends:
        names = [generation_pb2.FinishReason.Name(reason) for reason in ends]
        attributes["gen_ai.response.finish_reasons"] = [n.removeprefix("FINISH_REASON_").lower() for n in names]
    return attributes


def _set_error(attributes: Attributes, error: BatonError) -> str:
    """Sets `error.type`; returns the message, or nothing for a client that has left, which is no error."""
    if isinstance(error, Cancelled):
        return ""
    attributes["error.type"] = error.reason
    return error.message
