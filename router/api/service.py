"""GenerationService: the public API, in terms of the parts below it.

Each method validates, hands a request to the dispatcher, and writes what comes back. When a call ends in any way, its
generation is cancelled unless it may be resumed (`router.stream.resume`). Methods that need no worker are in
`router.api.model_service`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from cluster.errors import BatonError, DeadlineExceeded, FailedPrecondition, FieldViolation, QuotaExceeded
from cluster.grammar import GrammarLimits
from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2 as pb
from cluster.pb.journal_pb2 import JournalEntry
from cluster.settings import RouterSettings
from cluster.state import Store
from router.api.call import INLINE_BYTES, Call, ClientStalled, Principal, ValidatedRequest, run_aside
from router.api.chat_forms import ChatForms
from router.api.conversations import Conversations, Turn
from router.api.grammar import Grammars, TryGrammar, constraint_of
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import ReadPrompt, TryForm, read_prompt, salt_of, validate
from router.api.violations import Violations, invalid
from router.observe.tracing import CallTrace, Origin, Traces
from router.queue.admission import AdmissionRequest
from router.routing.dispatcher import Dispatcher
from router.stream.client_stream import MessageRate, StreamReader, StreamWriter
from router.stream.detokenizer import Detokenizer
from router.stream.failures import WeightsLost
from router.stream.request import LiveRequest
from router.stream.resume import Resumables, ResumeHooks
from router.tool_calls.output import OutputForm

MOST_CANCELLED = 256
"""Ids in one CancelGeneration, each of which may cost a read of the store."""
_SEED_BITS = 63
_NICENESS = 5
"""Compiling what any client sends gives way to serving."""


class GenerationService:
    """`executor` runs the tokenizer on long texts."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        executor: Executor,
        rate: MessageRate,
        store: Store,
        traces: Traces,
        settings: RouterSettings,
        *,
        fresh_id: Callable[[], str] = lambda: f"gen-{secrets.token_hex(12)}",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`fresh_id` names a new generation."""
        self._fresh_id = fresh_id
        self._wall_clock = wall_clock
        self._model = model
        self._tokenizer = tokenizer
        engine, of_router = settings.engine, settings.router
        limits = GrammarLimits(engine.grammar_timeout_s, memory_bytes=engine.grammar_memory_bytes, niceness=_NICENESS)
        self._grammars = Grammars(
            lambda: tokenizer.definition,
            model.vocab_size,
            limits,
            compile_s_per_min=of_router.grammar_s_per_min,
        )
        self.forms = ChatForms(tokenizer, settings.model.tool_format)
        self._conversations = Conversations(tokenizer)
        self._dispatcher = dispatcher
        self._executor = executor
        self._rate = rate
        self._traces = traces
        self._stalled_client_timeout_s = of_router.stalled_client_timeout_s
        hooks = ResumeHooks(
            dispatcher.clock,
            dispatcher.adopt,
            dispatcher.cancel,
            self._revive,
            lambda live: self._new_detokenizers(live.request),
            dispatcher.fleet.has_lost,
            dispatcher.counters,
        )
        self.resumables = Resumables(store, hooks, window_s=of_router.resume_window_s)

    async def stop(self) -> None:
        """Forgets what may be resumed, and ends the processes of grammars."""
        await self.resumables.stop()
        await asyncio.to_thread(self._grammars.close)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        reader, events = await self._run_whole(request, call)
        while isinstance(reader.live.error, WeightsLost) and not reader.is_kept:
            reader, events = await self._run_whole(request, call)  # anew: its client has got nothing yet
        live = reader.live
        if live.error is not None:
            raise _with_timing(live.error, reader)
        return pb.GenerateResponse(
            generation_id=live.key.request_id,
            model=live.model,
            outputs=[event.delta for event in events if event.HasField("delta")],
            ends=[event.sequence_end for event in events if event.HasField("sequence_end")],
            usage=live.usage,
            timing=reader.timing(),
            prompt_logprobs=next((event.started.prompt_logprobs for event in events if event.HasField("started")), ()),
        )

    async def _run_whole(
        self, request: pb.GenerateRequest, call: Call
    ) -> tuple[StreamReader, Sequence[pb.GenerateStreamResponse]]:
        """Generates up to the end, and returns all events."""
        reader = await self._open(request, call, is_streaming=False)
        try:
            while not reader.live.is_over:
                await reader.output.wait()
                reader.check()
            events = reader.take()
            if reader.is_kept:
                await self.resumables.before_send(reader, events)
            return reader, events
        finally:
            self._leave(reader)

    async def GenerateStream(self, request: pb.GenerateStreamRequest, call: Call) -> None:
        reader = await self._open(request, call, is_streaming=True)
        call.opened(reader.live.key.request_id)
        try:
            with self._rate.stream():
                await self._send(reader, call)
        except ClientStalled:
            self._dispatcher.counters.refused["client_stalled"] += 1
            self.resumables.abort(reader)
            raise
        finally:
            self._leave(reader)
        if reader.live.error is not None:
            raise _with_timing(reader.live.error, reader)

    async def _send(self, reader: StreamReader, call: Call) -> None:
        """Sends every event until the request is over. A client that named an interval gets that and no pauses."""
        live = reader.live
        is_spaced = live.request.stream_interval_tokens is None
        async with StreamWriter(call, reader, self._stalled_client_timeout_s) as writer:
            while True:
                await reader.output.wait()
                reader.check()
                is_over = live.is_over
                events = reader.take()
                if reader.is_kept:
                    await self.resumables.before_send(reader, events)
                for event in events:
                    await writer.write(event)
                writer.rest()
                if is_over:
                    return
                if is_spaced and live.first_token_at is not None and self._rate.spacing_s:
                    await reader.output.pause(self._rate.spacing_s)

    async def CancelGeneration(self, request: pb.CancelGenerationRequest, call: Call) -> pb.CancelGenerationResponse:
        """Answers for another tenant's generation as if it did not exist."""
        wrong = Violations()
        wrong.at_most("generation_ids", request.generation_ids, MOST_CANCELLED, "ids")
        wrong.raise_if_any()
        principal = call.principal
        response = pb.CancelGenerationResponse()
        for generation_id in dict.fromkeys(request.generation_ids):
            why = "by CancelGeneration"
            live = self._dispatcher.find(generation_id)
            is_theirs = live is not None and live.principal.tenant == principal.tenant
            is_cancelled = await self.resumables.cancel(generation_id, principal, why)
            is_cancelled = is_cancelled or (is_theirs and self._dispatcher.cancel(generation_id, why))
            (response.cancelled_ids if is_cancelled else response.unknown_ids).append(generation_id)
        return response

    async def _open(
        self, request: pb.GenerateRequest | pb.GenerateStreamRequest, call: Call, *, is_streaming: bool
    ) -> StreamReader:
        """Begins the generation, and traces it where the call is sampled."""
        spec = request.spec
        operation = "chat" if spec.HasField("chat") else "text_completion"
        origin = Origin(operation, is_streaming, self._dispatcher.clock(), self._wall_clock())
        trace = self._traces.begin(call.metadata, origin)
        try:
            return await self._begin(request, call, origin, trace)
        except BatonError as error:
            if trace is not None:
                trace.refused(error, self._dispatcher.clock())
            raise

    async def _begin(
        self,
        request: pb.GenerateRequest | pb.GenerateStreamRequest,
        call: Call,
        origin: Origin,
        trace: CallTrace | None,
    ) -> StreamReader:
        """Submits a new generation, or goes on with the one that `spec.resume` names."""
        is_streaming, principal = origin.is_streaming, call.principal
        if not request.HasField("spec"):
            raise invalid((FieldViolation("spec", "must be set"),))
        time_left_s = call.time_remaining()
        if time_left_s is not None and time_left_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        if request.spec.resume.generation_id:
            reader = await self.resumables.resume(request.spec, principal, is_streaming=is_streaming)
            if not reader.live.traceparent:
                if reader.traceparent:
                    trace = self._traces.begin((("traceparent", reader.traceparent),), origin)
                _follow(reader.live, trace)
            return reader
        if request.spec.HasField("resume") and not is_streaming:
            only = "must be set in Generate, which sends no id before its end; call GenerateStream first"
            raise invalid((FieldViolation("spec.resume.generation_id", only),))
        least = AdmissionRequest.smallest(
            request.spec,
            principal,
            time_left_s,
            max_model_len=self._model.max_model_len,
            max_sequences=self._model.max_sequences,
        )
        self._dispatcher.refuse_early(least)
        spec, is_long = request.spec, request.ByteSize() > INLINE_BYTES
        turn = self._new_turn(spec, call)
        prompt = await run_aside(is_long, lambda: self._read_prompt(spec, turn), self._executor)
        try_grammar, try_form = await self._try_grammars(spec.sampling, prompt.form, principal)
        valid = await run_aside(
            is_long,
            lambda: self._validate(spec, prompt, is_streaming, principal.tenant, try_grammar, try_form),
            self._executor,
        )
        live = LiveRequest(
            self._fresh_id(),
            valid,
            self._new_detokenizers(valid),
            model=self._model.name,
            now=origin.begun_at,
            arrival_time_s=origin.begun_time_s,
            is_streaming=is_streaming,
            principal=principal,
            may_resume=request.spec.HasField("resume"),
        )
        live.observers.append(turn)
        _follow(live, trace)
        self._dispatcher.submit(live, time_left_s=call.time_remaining())
        is_kept = live.may_resume and not live.is_over  # who is refused at once has no id to come back with
        return self.resumables.keep(live, request.spec) if is_kept else StreamReader(live)

    def _leave(self, reader: StreamReader) -> None:
        if reader.is_kept:
            self.resumables.remove(reader)
        else:
            self._dispatcher.cancel(reader.live.key.request_id, "the client left")

    def _revive(
        self,
        key: RequestKey,
        record: JournalEntry,
        principal: Principal,
        first_wanted: Sequence[int],
        is_streaming: bool,
    ) -> LiveRequest:
        """Validates the request of a record again, by this router's limits; its sampling and arrival time stay."""
        origin = record.origin
        valid = self._validate(
            origin.spec,
            read_prompt(
                origin.spec,
                self._model,
                lambda prompt: tuple(origin.prompt_token_ids) or self._tokenizer.encode_prompt(prompt).token_ids,
                self.forms.form_of,
            ),
            True,
            principal.tenant,
            lambda kind, text: origin.sampling.grammar,
            lambda form, content: origin.sampling.grammar,
        )
        if any(token_id >= self._model.vocab_size for tokens in record.tokens for token_id in tokens.token_ids):
            raise FailedPrecondition("the record of this generation is not one of the served model; ask anew")
        age_s = max(0.0, self._wall_clock() - origin.arrival_time_s)
        valid = replace(valid, sampling=origin.sampling)
        return LiveRequest(
            key.request_id,
            valid,
            self._new_detokenizers(valid),
            model=self._model.name,
            now=self._dispatcher.clock() - age_s,
            arrival_time_s=origin.arrival_time_s,
            is_streaming=is_streaming,
            principal=principal,
            may_resume=True,
            first_attempt=key.attempt,
            first_wanted=first_wanted,
        )

    def _new_detokenizers(self, request: ValidatedRequest) -> list[Detokenizer]:
        """One for each sequence."""
        n = request.sampling.params.n
        return [self._tokenizer.new_detokenizer(request.prompt_token_ids, request.marks) for _ in range(n)]

    async def _try_grammars(
        self, params: pb.SamplingParams, form: OutputForm | None, principal: Principal
    ) -> tuple[TryGrammar, TryForm]:
        """Compiles the request's grammars, if it has any, and returns what `validate` is to be told of them."""
        constraint, content = constraint_of(params), _Tried("")
        if constraint is not None:
            content = await self._tried(self._grammars.compile(*constraint, principal))
        whole = content
        if form is not None and content.problem is None:
            ids = self.forms.special_ids
            whole = await self._tried(self._grammars.compile_form(form, ids, content.grammar, principal))
        return lambda kind, text: content.outcome(), lambda form, text: whole.outcome()

    async def _tried(self, compiling: Awaitable[str]) -> _Tried:
        try:
            return _Tried(await compiling)
        except ValueError as error:
            return _Tried("", error)
        except QuotaExceeded:
            self._dispatcher.counters.refused["quota_grammars"] += 1
            raise

    def _new_turn(self, spec: pb.GenerationSpec, call: Call) -> Turn:
        salt = None if spec.cache.bypass_prefix_cache else salt_of(call.principal.tenant, spec.cache.cache_salt)
        least_output = 1 if spec.stopping.clip_to_context else max(1, spec.stopping.max_output_tokens)
        return Turn(self._conversations, salt, call, self._model.max_model_len - least_output)

    def _read_prompt(self, spec: pb.GenerationSpec, turn: Turn) -> ReadPrompt:
        return read_prompt(spec, self._model, turn.encode, self.forms.form_of, infill=self._tokenizer.infill)

    def _validate(
        self,
        spec: pb.GenerationSpec,
        prompt: ReadPrompt,
        is_streaming: bool,
        tenant: str,
        try_grammar: TryGrammar,
        try_form: TryForm,
    ) -> ValidatedRequest:
        return validate(
            spec,
            self._model,
            prompt,
            try_grammar=try_grammar,
            try_form=try_form,
            fresh_seed=secrets.randbits(_SEED_BITS),
            is_streaming=is_streaming,
            tenant=tenant,
        )


@dataclass(frozen=True)
class _Tried:
    """What came of a grammar."""

    grammar: str
    problem: ValueError | None = None

    def outcome(self) -> str:
        if self.problem is not None:
            raise self.problem
        return self.grammar


def _with_timing(error: BatonError, reader: StreamReader) -> BatonError:
    error.timing = reader.timing()
    return error


def _follow(live: LiveRequest, trace: CallTrace | None) -> None:
    """Traces the request from now on, where its call is sampled."""
    if trace is not None:
        live.traceparent = trace.traceparent
        live.observers.append(trace)
