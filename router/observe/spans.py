"""One request's life as a tree of spans, made once it is over from the instants that it recorded anyway. Pure.

    CALL MODEL                     from the call to the end
    ├── attempt                    for each placement: where and why, and what ended it
    │   ├── queue                  until its worker began with the prompt
    │   ├── prefill                until the worker was done with it, or handed it over
    │   ├── hand-off               until the decode worker had everything; none of a local prefill
    │   └── decode
    └── queue                      what it waited without having been placed

Attempts lie one after the other, and so do the phases of each, as the router heard of them. Attributes are those of
OpenTelemetry's conventions for generative AI, as of semantic-conventions-genai in 2026 (none is stable yet), and
Baton's own under `baton.`. Nothing says what a client wrote or was told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.errors import BatonError, Cancelled
from cluster.lifecycle import RequestState, StateEntry
from cluster.pb import generation_pb2
from router.stream.attempt import Attempt
from router.stream.request import LiveRequest

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
    """The call that a trace is of."""

    operation: str
    """`chat` or `text_completion`."""
    is_streaming: bool
    begun_at: float
    """On the router's clock."""
    begun_time_s: float
    """The wall clock at that moment."""

    def time_ns(self, at: float) -> int:
        """The wall clock at an instant of the router's; nothing of a trace is before its call."""
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
    """What went wrong; empty: nothing."""
    events: tuple[SpanEvent, ...] = ()
    children: tuple[Span, ...] = ()

    @property
    def count(self) -> int:
        """Itself and all below it."""
        return 1 + sum(child.count for child in self.children)


def spans_of(live: LiveRequest, origin: Origin) -> Span:
    """Of a request that is over."""
    story = live.lifecycle.history
    end = story[-1].at
    attributes = _of_request(live, origin)
    error = "" if live.error is None else _blame(attributes, live.error)
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
        tuple(_children(live, origin, story, end)),
    )


def span_of_refusal(error: BatonError, origin: Origin, now: float) -> Span:
    """Of a call that led to no request."""
    attributes: Attributes = {**_of_call(origin), "baton.outcome": "rejected"}
    message = _blame(attributes, error)
    return Span(origin.operation, origin.time_ns(origin.begun_at), origin.time_ns(now), attributes, message)


def _children(live: LiveRequest, origin: Origin, story: tuple[StateEntry, ...], end: float) -> Iterator[Span]:
    begin = story[0].at
    for attempt in live.attempts:
        until = end if attempt.ended_at is None else attempt.ended_at
        is_local, is_last = attempt.placement.prefill_id is None, attempt.ended_at is None
        phases = tuple(_phases(story, begin, until, origin, is_local=is_local, is_last=is_last))
        yield _of_attempt(live, attempt, origin, begin, until, phases)
        begin = until
    if not live.attempts or live.attempts[-1].ended_at is not None:
        yield from _phases(story, begin, end, origin, is_local=True, is_last=True)


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
        error = _blame(attributes, live.error)
    placed = SpanEvent("placed", origin.time_ns(attempt.placed_at))
    return Span("attempt", origin.time_ns(begin), origin.time_ns(end), attributes, error, (placed,), phases)


def _phases(
    story: tuple[StateEntry, ...], begin: float, end: float, origin: Origin, *, is_local: bool, is_last: bool
) -> Iterator[Span]:
    """What the request was in from `begin` to `end`; at `end` itself, if nothing follows. `is_local`: it was not handed
    over, and passed that state in no time."""
    for entry, following in pairwise(story):
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
    request, sampling, usage = live.request, live.request.sampling, live.usage()
    attributes = _of_call(origin) | {
        "gen_ai.request.model": live.model,
        "gen_ai.request.max_tokens": sampling.max_output_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": live.key.request_id,
        "gen_ai.response.model": live.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "baton.outcome": live.lifecycle.state.value,
        "baton.attempts": len(live.attempts),
    }
    if sampling.n > 1:
        attributes["gen_ai.request.choice.count"] = sampling.n
    if request.client_request_id:
        attributes["baton.request_id"] = request.client_request_id
    if live.caller.tenant:
        attributes["baton.tenant"] = live.caller.tenant
    ends = [s.end.finish_reason for s in live.sequences if s.end is not None]
    if ends:
        names = [generation_pb2.FinishReason.Name(reason) for reason in ends]
        attributes["gen_ai.response.finish_reasons"] = [n.removeprefix("FINISH_REASON_").lower() for n in names]
    return attributes


def _blame(attributes: Attributes, error: BatonError) -> str:
    """Notes the kind of an error; its message, or nothing for a client that has left, which is no fault."""
    if isinstance(error, Cancelled):
        return ""
    attributes["error.type"] = error.reason
    return error.message
