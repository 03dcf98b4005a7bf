"""Clients of a simulated cluster: each submits one request to the router, and reads its stream to the end.

What a client notes is what a real one would see behind a network that takes no time: when its first and its last token
came, in which order, and how the request ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cluster.api_keys import KeyQuota
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2, worker_pb2
from router.api.call import Principal, ValidatedRequest
from router.queue.quota import UNLIMITED
from router.routing.dispatcher import Dispatcher
from router.stream.client_stream import StreamReader
from router.stream.request import LiveRequest, RequestObserver
from simulate.model import END_TOKEN, VOCAB, seed_of, undisturbed
from simulate.watched_router import DigitText, Told
from simulate.workload import RequestShape


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a load, and what its client says of it."""

    shape: RequestShape
    """`at` counts from the begin of the run; the output ends after its `num_output_tokens`."""
    max_output_tokens: int | None = None
    """Most tokens of the output, as the client says; None: as many as it has."""
    tenant: str = ""
    """Also the id of its API key."""
    weight: float = 1.0
    """The tenant's."""
    quota: KeyQuota = UNLIMITED
    """The key's."""
    priority: int = 0
    time_left_s: float | None = None
    """Seconds to its deadline; None: it has none."""
    leaves_after_s: float | None = None
    """The client cancels so long after it has asked; None: it waits for the end."""
    pause_s: float = 0.0
    """The client reads no more often than that."""
    n: int = 1
    """Sequences."""
    stop: str = ""
    """Ends an output where its text has it; empty: nothing does, and no text is wanted."""
    may_resume: bool = False
    """Its client goes on at another router when its own is lost."""
    bypass_prefix_cache: bool = False
    """It shares no KV with other requests."""
    returns_after_s: float | None = None
    """A client that has left, and may resume, comes back so long after that; None: it does not."""
    turn_before: SimRequest | None = None
    """The turn of the same conversation with whose prompt and output its own prompt begins. The prompts of both are
    named by their blocks."""

    def prompt(self, seed: int, number: int) -> list[int]:
        """Its tokens in the run of this seed, as the request of this number."""
        tokens, before = self.shape.prompt(VOCAB, seed, number), self.turn_before
        if before is None:
            return tokens
        begun = before.prompt(seed, number)
        begun += undisturbed(begun, before.num_output_tokens)
        return begun + tokens[len(begun) :]

    @property
    def at_s(self) -> float:
        return self.shape.at

    @property
    def principal(self) -> Principal:
        return Principal(self.tenant, self.tenant, weight=self.weight, quota=self.quota)

    @property
    def cost(self) -> int:
        """Tokens that it is counted for while it waits: its prompt, and the most that it may get."""
        most = self.max_output_tokens or self.num_output_tokens
        return self.shape.num_prompt_tokens + self.n * most

    @property
    def num_output_tokens(self) -> int:
        """At least 1: some rows of traces have none."""
        return max(1, self.shape.num_output_tokens)

    @property
    def may_end_early(self) -> bool:
        """Whether its end token ends its output, and not the most that its client says."""
        return self.max_output_tokens not in (None, self.num_output_tokens)


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request; times are seconds from the begin of the run."""

    number: int
    """In the order of arrivals."""
    request: SimRequest
    state: RequestState = RequestState.QUEUED
    """The state in which it ended."""
    reason: str = ""
    """Why it did not finish."""
    told: list[Told] = field(default_factory=list)
    """The output of each sequence, as the client was told it; nothing in the fast fidelity."""
    num_tokens: int = 0
    """Tokens of the first sequence."""
    is_complete: bool = False
    """The client was told that all is well."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0
    placed_s: float | None = None
    """When it was first given to workers; None: it never was."""
    num_cached_tokens: int = 0
    num_attempts: int = 0
    prefill_id: str = ""
    """The worker that its last attempt was to prefill on; empty: the decode worker, or it was not placed."""
    decode_id: str = ""
    over_s: float | None = None
    """When it was over for its router, whose client may read on; None: nobody has watched that."""
    output_s: list[float] = field(default_factory=list)
    """When its router got each of its tokens, if that was watched."""

    def __post_init__(self) -> None:
        self.told = [Told() for _ in range(self.request.n)]

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first sequence."""
        return self.told[0].token_ids

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for an output of one token."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.request.at_s

    def note(self, event: generation_pb2.GenerateStreamResponse, now: float) -> None:
        """The client was told something. Raises AssertionError where that breaks the contract of the stream."""
        assert not self.is_complete, f"request {self.number} was told something after its end"
        kind = event.WhichOneof("event")
        if kind == "delta":
            self.told[event.delta.index].add(event.delta)
            self.num_tokens = len(self.token_ids)
            self.last_token_s = now
            if self.first_token_s is None:
                self.first_token_s = now
        elif kind == "sequence_end":
            self.told[event.sequence_end.index].end(event.sequence_end)
        elif kind == "completed":
            assert all(told.has_ended for told in self.told), f"request {self.number} ended before its sequences"
            self.is_complete = True

    def check(self, seed: int) -> None:
        """Raises AssertionError unless its tokens are those of the undisturbed run, and all of them if it finished.
        `seed`: of the prompts."""
        request, number = self.request, self.number
        prompt, num_output = request.prompt(seed, number), request.num_output_tokens
        assert self.is_complete == self.is_finished, f"request {number} was told another end than it had"
        shares_none = request.bypass_prefix_cache and self.num_attempts < 2
        assert not (shares_none and self.num_cached_tokens), f"request {number} found KV of others in a prefix cache"
        for index, told in enumerate(self.told):
            expected = undisturbed(prompt, num_output, index)
            if request.may_end_early:
                expected[-1] = END_TOKEN
            try:
                told.check(expected, request.stop, self.is_finished)
            except AssertionError as error:
                raise AssertionError(f"request {number}: {error}") from None

    def check_times(self, queue_timeout_s: float) -> None:
        """Raises AssertionError where it was given to workers after its deadline, or waited longer than any may."""
        waited_until_s = self.over_s if self.placed_s is None else self.placed_s
        if waited_until_s is not None:
            waited_s, left_s = waited_until_s - self.request.at_s, self.request.time_left_s
            most_s = queue_timeout_s if left_s is None else min(queue_timeout_s, left_s)
            assert waited_s <= most_s + 1e-6, (
                f"request {self.number} waited {waited_s:.3f} s, and {most_s:.3f} are most"
            )

    def check_length(self) -> None:
        """Raises AssertionError where it finished without all its tokens."""
        is_whole = self.num_tokens == self.request.num_output_tokens
        assert is_whole or not self.is_finished, f"request {self.number} ended after {self.num_tokens} tokens"


OnEnd = Callable[[RequestOutcome], None]
"""Called when a request is over."""


class _NoText:
    """The simulated model has no tokenizer (`router.stream.detokenizer.Detokenizer`)."""

    is_whole = True

    def push(self, token_ids: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Witness(RequestObserver):
    """Notes when a router got each token of a request, and when the request was over for it."""

    def __init__(self, outcome: RequestOutcome, clock: Callable[[], float], begun_at: float) -> None:
        self._outcome = outcome
        self._clock = clock
        self._begun_at = begun_at

    def on_tokens(self, count: int, interval_s: float | None) -> None:
        self._outcome.output_s += [self._clock() - self._begun_at] * count

    def on_end(self, live: LiveRequest) -> None:
        self._outcome.over_s = self._clock() - self._begun_at


async def run_client(
    dispatcher: Dispatcher,
    number: int,
    request: SimRequest,
    seed: int,
    begun_at: float,
    way: Callable[[], Awaitable[None]] | None = None,
    *,
    is_watched: bool = False,
) -> RequestOutcome:
    """Submits a request and reads its stream to its end. `seed`: of the prompts. `begun_at`: the begin of the run on
    the router's clock. `way`: waits while the request is on its way, and its first and its last tokens; None: not."""
    clock, outcome = dispatcher.clock, RequestOutcome(number, request)
    if way is not None:
        await way()
    live = _live(number, request, tuple(request.prompt(seed, number)), clock(), is_streaming=True)
    if is_watched:
        live.observers.append(Witness(outcome, clock, begun_at))
    _submit(dispatcher, live, request)
    reader = StreamReader(live)
    while True:
        await reader.output.wait()
        if request.pause_s and not live.is_over:
            await asyncio.sleep(request.pause_s)
        if way is not None and (live.is_over or (live.num_tokens and not outcome.num_tokens)):
            await way()
        is_over = live.is_over
        for event in reader.take():
            outcome.note(event, clock() - begun_at)
        if is_over:
            break
    _note_end(outcome, live, begun_at, clock() - begun_at)
    return outcome


class WatchedOutcome(RequestObserver):
    """Notes what becomes of a request whose stream nobody reads, at the times at which it would be read at once."""

    def __init__(self, outcome: RequestOutcome, clock: Callable[[], float], begun_at: float, on_end: OnEnd) -> None:
        self._outcome = outcome
        self._clock = clock
        self._begun_at = begun_at
        self._on_end = on_end

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._outcome.first_token_s = self._clock() - self._begun_at

    def on_end(self, live: LiveRequest) -> None:
        outcome, (sequence,) = self._outcome, live.sequences
        outcome.num_tokens = sequence.num_tokens
        if sequence.last_token_at is not None:
            outcome.last_token_s = sequence.last_token_at - self._begun_at
        _note_end(outcome, live, self._begun_at, self._clock() - self._begun_at)
        self._on_end(outcome)


def watch_client(
    dispatcher: Dispatcher, number: int, request: SimRequest, begun_at: float, on_end: OnEnd
) -> RequestOutcome:
    """Submits a request whose tokens have no content, and calls `on_end` at its end; the outcome is filled by then."""
    clock, outcome = dispatcher.clock, RequestOutcome(number, request)
    outcome.told.clear()
    watched = WatchedOutcome(outcome, clock, begun_at, on_end)
    live = _live(number, request, request.shape.outline(number), clock(), is_streaming=False)
    live.observers.append(watched)
    _submit(dispatcher, live, request)
    return outcome


def _submit(dispatcher: Dispatcher, live: LiveRequest, request: SimRequest) -> None:
    dispatcher.submit(live, time_left_s=request.time_left_s)
    if request.leaves_after_s is not None:
        loop = asyncio.get_running_loop()
        loop.call_later(request.leaves_after_s, dispatcher.cancel, live.key.request_id, "the client left")


def _live(number: int, request: SimRequest, prompt: tuple[int, ...], now: float, *, is_streaming: bool) -> LiveRequest:
    return LiveRequest(
        f"sim-{number}",
        _validated(number, request, prompt),
        [DigitText() if request.stop else _NoText() for _ in range(request.n)],
        model="",
        now=now,
        arrival_time_s=now,
        is_streaming=is_streaming,
        principal=request.principal,
    )


def _note_end(outcome: RequestOutcome, live: LiveRequest, begun_at: float, now: float) -> None:
    outcome.ended_s, outcome.state = now, live.lifecycle.state
    outcome.reason = "" if live.error is None else live.error.reason
    outcome.num_cached_tokens, outcome.num_attempts = live.num_cached_tokens, len(live.attempts)
    if live.placement is not None:
        outcome.placed_s = live.attempts[0].placed_at - begun_at
        outcome.prefill_id, outcome.decode_id = live.placement.prefill_id or "", live.placement.decode_id


def _validated(number: int, request: SimRequest, prompt: tuple[int, ...]) -> ValidatedRequest:
    num_output = request.num_output_tokens
    most = request.max_output_tokens or num_output
    sampling = worker_pb2.Sampling(
        params=generation_pb2.SamplingParams(
            temperature=1, top_p=1, repetition_penalty=1, n=request.n, seed=seed_of(number, num_output)
        ),
        stopping=generation_pb2.StoppingCriteria(
            max_output_tokens=most, stop_token_ids=(END_TOKEN,) if request.may_end_early else ()
        ),
    )
    return ValidatedRequest(
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=(request.stop,) if request.stop else (),
        include_stop_in_output=not request.stop,
        wants_text=bool(request.stop),
        wants_token_ids=True,
        wants_logprobs=False,
        wants_timing=False,
        stream_interval_tokens=None,
        cache_salt=request.tenant.encode(),
        bypass_prefix_cache=request.bypass_prefix_cache,
        queue_timeout_s=None,
        priority=request.priority,
        prompt_logprobs=None,
        client_request_id="",
    )
