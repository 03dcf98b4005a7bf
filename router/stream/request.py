"""The state of one request: its identity, lifecycle, attempts and placement, and who observes it.

    place -> on_phase / on_prompt_logprobs / on_tokens -> (restart | move -> place ...)
    finish / fail / cancel / reject -> is_over

Events record what happened and hand output to the request's `OutputBuffer`, which wakes the client's task. Owns the
instants from which every latency follows. Knows no message to a client, no connection of a client, no queue.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cluster.errors import BatonError, Cancelled, InternalError
from cluster.lifecycle import Lifecycle, RequestKey, RequestState
from cluster.pb import generation_pb2, worker_pb2
from router.api.call import ANYONE, Principal, ValidatedRequest
from router.routing.load_tracker import NOT_FETCHED, Charge, FetchedPrefix, Placement, RequestLoad
from router.routing.policies.interface import RoutingRequest, SessionKey
from router.routing.prefix_index import PromptHashes
from router.routing.retry import RetryState
from router.routing.worker_client import PromptTokens, WorkerClient
from router.stream.detokenizer import Detokenizer
from router.stream.output import OutputBuffer, SequenceOutput
from router.stream.prompt_logprobs import PromptLogprobs

_STATE_OF_PHASE = {
    generation_pb2.Heartbeat.PHASE_PREFILL: RequestState.PREFILLING,
    generation_pb2.Heartbeat.PHASE_TRANSFER: RequestState.TRANSFERRING,
    generation_pb2.Heartbeat.PHASE_DECODE: RequestState.DECODING,
}
_IN_ORDER = (RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING)


class Effect(enum.Enum):
    """The effect of tokens on their sequence."""

    OPEN = "it goes on"
    ENDED = "the worker ended it"
    STOPPED = "a stop string ended it, and workers must cancel it"


@dataclass(eq=False)
class Attempt:
    """One attempt at a request: where it runs, what it holds there, and how it ended if another attempt followed.

    Instants are on the router's clock.
    """

    key: RequestKey
    placement: Placement
    placed_at: float
    charge: Charge
    prefill: WorkerClient | None
    """None: the decode worker computes the prompt. After a move: the worker that decoded before."""
    workers: list[WorkerClient]
    """The workers that hold something for it: at first both, then the decode worker."""
    fetched: FetchedPrefix = NOT_FETCHED
    """What the computing worker has fetched for it."""
    fetch_s: float = 0.0
    """Seconds after its placement for which it waited for that."""
    is_move: bool = False
    """The request was moved here while it decoded."""
    num_prefilled_outputs: int = 0
    """Output tokens that are prefilled with the prompt: the prefill worker sends the next one."""
    timed: tuple[float, int] | None = None
    """When its output was last timed, and the tokens that were there; None: it does not decode yet."""
    ended_at: float | None = None
    """None: no other attempt followed."""
    why: str = ""
    """The reason for its end."""
    has_failed: bool = False
    """It ended, and not because the request was moved on purpose."""

    def cancel(self, sequence_index: int | None = None, *, by: WorkerClient | None = None) -> None:
        """Sends a cancel of the request, or of one of its sequences, to each of its workers except `by`."""
        command = worker_pb2.Command(cancel=worker_pb2.Cancel(key=self.key.to_proto(), sequence_index=sequence_index))
        for worker in self.workers:
            if worker is not by:
                worker.send(command)


class RequestObserver:
    """Follows a request without changing it: metrics, activity, traces. Called on the event loop; must not raise."""

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """The first token came, `seconds` after the request's arrival."""

    def on_tokens(self, count: int, interval_s: float | None) -> None:
        """`count` tokens of one sequence came, `interval_s` after its last ones; None: they are its first."""

    def on_end(self, live: LiveRequest) -> None:
        """The request has reached its terminal state."""


class LiveRequest:
    """Used from one event loop. `now` is always the router's monotonic clock."""

    def __init__(
        self,
        generation_id: str,
        request: ValidatedRequest,
        detokenizers: Iterable[Detokenizer],
        *,
        model: str,
        now: float,
        arrival_time_s: float,
        is_streaming: bool,
        principal: Principal = ANYONE,
        may_resume: bool = False,
        first_attempt: int = 1,
        first_wanted: Sequence[int] = (),
    ) -> None:
        """`arrival_time_s` is the wall clock at `now`. One detokenizer for each sequence.

        `may_resume`: what the client has been sent is kept, so that it can be sent again. `first_wanted`: the client
        holds the tokens of each sequence before its own, and their text; empty: none.
        """
        self.key = RequestKey(generation_id, first_attempt)
        self.request = request
        self.prompt = PromptTokens(request.prompt_token_ids)
        self.principal = principal
        self.model = model
        self.lifecycle = Lifecycle(now, "arrived")
        self.may_resume = may_resume
        sequences = [
            SequenceOutput(
                index,
                request,
                detokenizer,
                generation_id=generation_id,
                first_wanted=first_wanted[index] if first_wanted else 0,
                is_kept=may_resume,
            )
            for index, detokenizer in enumerate(detokenizers)
        ]
        prompt_logprobs = PromptLogprobs(len(request.prompt_token_ids), request.prompt_logprobs, is_kept=may_resume)
        self.output = OutputBuffer(sequences, prompt_logprobs, is_streaming=is_streaming)
        self.attempts: list[Attempt] = []
        """In the order of their placement; empty while the request has only waited."""
        self.placed_revision = ""
        """Names the weights of the workers that it was placed on last; empty: it was not, or they are not known."""
        self.retry = RetryState()
        self.error: BatonError | None = None
        self.queue_position = 0
        self.arrival_time_s = arrival_time_s
        self.arrived_at = now
        self.first_token_at: float | None = None
        self.num_cached_tokens = 0
        self.num_fetched_tokens = 0
        """Part of those that were fetched from another worker for it."""
        self.num_moves = 0
        """Times that it was placed again."""
        self.is_stopped_here = False
        """A stop string ended at least one sequence."""
        self.observers: list[RequestObserver] = []
        self.traceparent = ""
        """The request's own span, as W3C trace context writes it; empty: it is not traced."""

    @property
    def sequences(self) -> list[SequenceOutput]:
        return self.output.sequences

    @property
    def attempt(self) -> Attempt:
        """The attempt that runs, or the last one that ran."""
        return self.attempts[-1]

    @property
    def placement(self) -> Placement | None:
        """The last placement; None while the request has only waited."""
        return self.attempts[-1].placement if self.attempts else None

    @property
    def has_run(self) -> bool:
        """An earlier attempt ran, here or at another router."""
        return self.key.attempt > 1

    @property
    def is_over(self) -> bool:
        return self.lifecycle.is_terminal

    @property
    def is_complete(self) -> bool:
        """All sequences have ended."""
        return all(sequence.end is not None for sequence in self.sequences)

    @property
    def has_left_prefill(self) -> bool:
        """Decode has begun, and every token is here that the prefill worker sends."""
        if self.lifecycle.state is not RequestState.DECODING:
            return False
        num_prefilled = self.attempt.num_prefilled_outputs
        return all(sequence.num_tokens > num_prefilled for sequence in self.sequences)

    @property
    def weights_revision(self) -> str:
        """Names the weights from which all of its output has to come; empty: there is no output, or they are not
        known."""
        has_prompt_logprobs = self.request.prompt_logprobs is not None and self.output.prompt_logprobs.is_complete
        return self.placed_revision if has_prompt_logprobs or self.num_tokens else ""

    @property
    def exposed_s(self) -> float:
        """Seconds that the client has waited longer for decode to begin than for its first token; 0: no longer."""
        decode = self.lifecycle.instant(RequestState.DECODING, last=True)
        return 0.0 if decode is None or self.first_token_at is None else max(0.0, decode - self.first_token_at)

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs, as far as they are here: another attempt goes on from them."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @cached_property
    def to_place(self) -> RoutingRequest:
        """This attempt as a policy sees it: output tokens that are here are computed again, like a prompt.

        When there are several sequences, each with its own tokens, caches hold no more than the prompt.
        """
        request, token_ids = self.request, self.request.prompt_token_ids
        if len(self.sequences) == 1 and self.num_tokens:
            token_ids = (*token_ids, *self.sequences[0].known_ids)
        prompt = PromptHashes(token_ids, request.cache_salt)
        work = self.work._replace(num_prompt_tokens=len(request.prompt_token_ids) + self.num_tokens)
        uses_cache = not request.bypass_prefix_cache and request.prompt_logprobs is None
        session = SessionKey(self.principal.tenant, request.session_id) if request.session_id else None
        return RoutingRequest(work, prompt, uses_cache, session)

    @cached_property
    def work(self) -> RequestLoad:
        """The load of the request as it came."""
        num_prompt, sampling = len(self.request.prompt_token_ids), self.request.sampling
        n = sampling.params.n
        return RequestLoad(num_prompt, n, num_prompt + n * sampling.stopping.max_output_tokens)

    @property
    def usage(self) -> generation_pb2.Usage:
        return generation_pb2.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self.num_cached_tokens,
            reasoning_tokens=sum(sequence.num_thinking_tokens for sequence in self.sequences),
        )

    def on_phase(self, event: worker_pb2.PhaseChanged, now: float) -> None:
        """Phases of two workers may come interleaved: the later state stays."""
        if event.phase == generation_pb2.Heartbeat.PHASE_PREFILL and not self.num_tokens:
            self.num_cached_tokens, fetched = (
                event.num_cached_tokens,
                self.attempts[-1].fetched if self.attempts else NOT_FETCHED,
            )
            self.num_fetched_tokens = max(0, min(self.num_cached_tokens, fetched.num_tokens) - fetched.num_before)
        state = _STATE_OF_PHASE.get(event.phase)
        if state is not None and self._reach(state, now, "reported by a worker"):
            self.output.heartbeat()

    def on_prompt_logprobs(self, event: worker_pb2.PromptLogprobs) -> None:
        """The client is sent all of them together. Raises InternalError for what does not come next."""
        self.output.prompt_logprobs.add(event)
        if self.output.prompt_logprobs.is_complete:
            self.output.notify()

    def on_tokens(self, event: worker_pb2.Tokens, now: float) -> Effect:
        """Tokens of a sequence that has ended, or that the request does not have, change nothing."""
        output, index = self.output, event.sequence_index
        if index >= len(output.sequences):
            return Effect.OPEN
        sequence = output.sequences[index]
        if sequence.end is not None:
            return Effect.OPEN
        num_before, last_at = sequence.num_tokens, sequence.last_token_at
        is_stopped = sequence.add(event)
        num_new = sequence.num_tokens - num_before
        if num_new:
            sequence.last_token_at = now
            interval_s = None if last_at is None else now - last_at
            for observer in self.observers:
                observer.on_tokens(num_new, interval_s)
        if self.first_token_at is None and sequence.num_tokens:
            if not output.prompt_logprobs.is_complete:
                raise InternalError("the first token came before the logprobs of the prompt")
            self.first_token_at = now
            for observer in self.observers:
                observer.on_first_token(now - self.arrived_at, len(self.request.prompt_token_ids))
            self._reach(RequestState.PREFILLING, now, "a token came")
        if sequence.end is None:
            if sequence.is_due:
                output.notify()
            return Effect.OPEN
        self.is_stopped_here |= is_stopped
        output.add_end(sequence)
        return Effect.STOPPED if is_stopped else Effect.ENDED

    def place(self, attempt: Attempt) -> None:
        """Begins an attempt, which gets the tokens that are here."""
        attempt.num_prefilled_outputs = self.num_tokens if len(self.sequences) == 1 else 0
        self.attempts.append(attempt)

    def restart(self, now: float, why: str) -> None:
        """The attempt has failed and another begins: what still comes from it does not count any more."""
        if self.lifecycle.state is not RequestState.QUEUED:
            self.lifecycle.advance(RequestState.QUEUED, now, why)
        self._begin_attempt(now, why, has_failed=True)
        self.output.heartbeat()

    def move(self, now: float, why: str) -> None:
        """The request leaves the worker that decodes it, and goes on from the same tokens on another."""
        self.lifecycle.advance(RequestState.TRANSFERRING, now, why)
        self._begin_attempt(now, why, has_failed=False)

    def rewind(self, first_wanted: Sequence[int], detokenizers: Iterable[Detokenizer], *, is_streaming: bool) -> None:
        """From here on another client reads it, which holds the tokens of each sequence before its `first_wanted`."""
        self.output = self.output.rewound(first_wanted, detokenizers, is_streaming=is_streaming)

    def finish(self, now: float) -> None:
        """Every sequence has ended. A first token that ends it all finishes without a hand-off."""
        self._reach(RequestState.DECODING, now, "ended by its first token")
        self._end(RequestState.FINISHED, now, None, "every sequence ended")

    def fail(self, error: BatonError, now: float) -> None:
        self._end(RequestState.FAILED, now, error, error.reason)

    def reject(self, error: BatonError, now: float) -> None:
        """It leaves the queue without having run."""
        self._end(RequestState.REJECTED, now, error, error.reason)

    def cancel(self, now: float, why: str) -> None:
        self.output.cancel()
        self._end(RequestState.CANCELLED, now, Cancelled(f"the generation was cancelled: {why}"), why)

    def _reach(self, state: RequestState, now: float, why: str) -> bool:
        """Advances to `state` if it is ahead; a state that was skipped on the way is entered at the same instant."""
        at = _IN_ORDER.index(self.lifecycle.state) if self.lifecycle.state in _IN_ORDER else len(_IN_ORDER)
        target = _IN_ORDER.index(state)
        if target <= at:
            return False
        without_hand_off = state is RequestState.DECODING and self.is_complete
        for step in _IN_ORDER[at + 1 : target + 1]:
            if step is not RequestState.TRANSFERRING or not without_hand_off:
                self.lifecycle.advance(step, now, why)
        return True

    def _begin_attempt(self, now: float, why: str, *, has_failed: bool) -> None:
        if self.attempts:
            last = self.attempt
            last.ended_at, last.why, last.has_failed = now, why, has_failed
        self.key = RequestKey(self.key.request_id, self.key.attempt + 1)
        self.num_moves += 1
        self.__dict__.pop("to_place", None)
        self.output.restart()

    def _end(self, state: RequestState, now: float, error: BatonError | None, why: str) -> None:
        self.lifecycle.advance(state, now, why)
        self.error = error
        for observer in self.observers:
            observer.on_end(self)
        self.output.close()
