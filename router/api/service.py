"""GenerationService: the public API, in terms of the parts below it.

Each method validates, hands a request to the dispatcher, and writes what comes back; leaving it in any way cancels what
still runs, unless it may be resumed (`router.stream.resume`). Long texts are tokenized on a thread, so that one
client's prompt does not hold up another's tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from cluster.auth import Gate
from cluster.errors import BatonError, DeadlineExceeded, FailedPrecondition, FieldViolation
from cluster.pb import generation_pb2 as pb
from cluster.state import Store
from router.api.call_context import CallContext
from router.api.chat_input import read_chat
from router.api.grammar import Grammars
from router.api.handlers import ClientStalled
from router.api.model_card import model_card
from router.api.principal import Principal, caller_of
from router.api.served_model import ServedModel
from router.api.tokenizer import Encoded, Tokenizer
from router.api.validate import Prompt, ValidatedRequest, check_model, validate
from router.api.violations import Violations, invalid
from router.observe.spans import Origin
from router.observe.tracing import CallTrace, Traces
from router.queue.preadmission import least_of
from router.routing.dispatcher import Dispatcher
from router.stream.coalescing import MessageRate
from router.stream.detokenizer import Detokenizer
from router.stream.record import GenerationRecord
from router.stream.request import LiveRequest
from router.stream.resume import Resumables, StreamReader
from router.stream.stream_writer import StreamWriter

T = TypeVar("T")

INLINE_BYTES = 8 * 1024
"""A request up to this size is worked on in the event loop; a thread would cost more."""
_SEED_BITS = 63


class GenerationService:
    """`executor` runs the tokenizer on long texts; `gate` knows who calls."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        executor: Executor,
        pace: MessageRate,
        gate: Gate,
        store: Store,
        traces: Traces,
        *,
        resume_window_s: float,
        stalled_client_timeout_s: float,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._grammars = Grammars(lambda: tokenizer.definition, model.vocab_size)
        self._dispatcher = dispatcher
        self._executor = executor
        self._pace = pace
        self._gate = gate
        self._traces = traces
        self._stalled_client_timeout_s = stalled_client_timeout_s
        self.resumables = Resumables(
            dispatcher,
            store,
            window_s=resume_window_s,
            revive=self._revive,
            new_detokenizers=self._new_detokenizers,
        )

    async def Generate(self, request: pb.GenerateRequest, context: CallContext) -> pb.GenerateResponse:
        reader = await self._open(request, context, is_streaming=False)
        live = reader.live
        try:
            while not live.is_over:
                await live.wait()
                reader.check()
            events = live.take()
            if reader.is_kept:
                await self.resumables.before_telling(reader)
        finally:
            self._leave(reader)
        if live.error is not None:
            raise live.error
        return pb.GenerateResponse(
            generation_id=live.key.request_id,
            model=live.model,
            outputs=[event.delta for event in events if event.HasField("delta")],
            ends=[event.sequence_end for event in events if event.HasField("sequence_end")],
            usage=live.usage(),
            timing=live.timing(),
        )

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: CallContext) -> None:
        reader = await self._open(request, context, is_streaming=True)
        try:
            with self._pace.stream():
                await self._tell(reader, context)
        except ClientStalled:
            self._dispatcher.counters.refused["client_stalled"] += 1
            self.resumables.give_up(reader)
            raise
        finally:
            self._leave(reader)
        if reader.live.error is not None:
            raise reader.live.error

    async def _tell(self, reader: StreamReader, context: CallContext) -> None:
        """Everything, until it is over. A client that named an interval gets that and no pauses."""
        live = reader.live
        outlet = StreamWriter(context, live, self._stalled_client_timeout_s)
        is_paced = live.request.stream_interval_tokens is None
        while True:
            reader.check()
            await live.wait()
            reader.check()
            is_over = live.is_over
            events = live.take()
            if reader.is_kept:
                await self.resumables.before_telling(reader)
            for event in events:
                await outlet.write(event)
            if is_over:
                return
            if is_paced and live.first_token_at is not None and self._pace.spacing_s:
                await live.pause(self._pace.spacing_s)

    async def Tokenize(self, request: pb.TokenizeRequest, context: CallContext) -> pb.TokenizeResponse:
        encoded = await self._aside(request.ByteSize() > INLINE_BYTES, lambda: self._tokenize(request))
        offsets = encoded.offsets if request.return_offsets else ()
        return pb.TokenizeResponse(
            token_ids=encoded.token_ids,
            offsets=[pb.TokenOffset(start=start, end=end) for start, end in offsets],
            max_context_tokens=self._model.max_model_len,
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: CallContext) -> pb.DetokenizeResponse:
        """The text that generation would have given for these tokens: special tokens have none."""
        check_model("model", request.model, self._model)
        wrong = Violations()
        wrong.token_ids("token_ids", request.token_ids, self._model.vocab_size)
        wrong.raise_if_any()
        is_long = request.ByteSize() > INLINE_BYTES
        text = await self._aside(is_long, lambda: self._tokenizer.decode(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: CallContext
    ) -> pb.CancelGenerationResponse:
        """A generation of another tenant is as unknown as one that never was."""
        caller = caller_of(self._gate.key_of(context))
        response = pb.CancelGenerationResponse()
        for generation_id in dict.fromkeys(request.generation_ids):
            why = "by CancelGeneration"
            live = self._dispatcher.find(generation_id)
            is_theirs = live is not None and live.caller.tenant == caller.tenant
            is_cancelled = await self.resumables.cancel(generation_id, caller, why)
            is_cancelled = is_cancelled or (is_theirs and self._dispatcher.cancel(generation_id, why))
            (response.cancelled_ids if is_cancelled else response.unknown_ids).append(generation_id)
        return response

    async def GetModel(self, request: pb.GetModelRequest, context: CallContext) -> pb.GetModelResponse:
        check_model("model", request.model, self._model)
        return pb.GetModelResponse(model=self._card())

    async def ListModels(self, request: pb.ListModelsRequest, context: CallContext) -> pb.ListModelsResponse:
        wrong = Violations()
        if request.page_size < 0:
            wrong.add("page_size", f"must not be negative (got {request.page_size})")
        if request.page_token:
            wrong.add("page_token", "is not one that this server gave; there is one page only")
        wrong.raise_if_any()
        return pb.ListModelsResponse(models=[self._card()])

    async def _open(
        self, request: pb.GenerateRequest | pb.GenerateStreamRequest, context: CallContext, *, is_streaming: bool
    ) -> StreamReader:
        """As `_begin`; also traced, where the call is sampled."""
        spec = request.spec
        operation = "chat" if spec.HasField("chat") else "text_completion"
        origin = Origin(operation, is_streaming, self._dispatcher.clock(), time.time())
        trace = self._traces.begin(context.invocation_metadata() or (), origin)
        try:
            return await self._begin(request, context, origin, trace)
        except BatonError as error:
            if trace is not None:
                trace.refused(error, self._dispatcher.clock())
            raise

    async def _begin(
        self,
        request: pb.GenerateRequest | pb.GenerateStreamRequest,
        context: CallContext,
        origin: Origin,
        trace: CallTrace | None,
    ) -> StreamReader:
        """Submits a new generation, or goes on with the one that `spec.resume` names."""
        is_streaming = origin.is_streaming
        caller = caller_of(self._gate.key_of(context))
        if not request.HasField("spec"):
            raise invalid((FieldViolation("spec", "must be set"),))
        _check_deadline(context)
        if request.spec.resume.generation_id:
            reader = await self.resumables.resume(request.spec, caller, is_streaming=is_streaming)
            if reader.live.trace is None:
                first = (("traceparent", reader.traceparent),)
                reader.live.trace = self._traces.begin(first, origin) if reader.traceparent else trace
            return reader
        if request.spec.HasField("resume") and not is_streaming:
            only = "must be set in Generate, which tells no id before its end; call GenerateStream first"
            raise invalid((FieldViolation("spec.resume.generation_id", only),))
        self._dispatcher.refuse_early(least_of(request.spec, self._model, caller, context.time_remaining()))
        is_long = request.ByteSize() > INLINE_BYTES or request.spec.sampling.WhichOneof("constraint") is not None
        valid = await self._aside(is_long, lambda: self._validate(request.spec, is_streaming, caller.tenant))
        live = LiveRequest(
            f"gen-{secrets.token_hex(12)}",
            valid,
            [self._tokenizer.new_detokenizer(valid.prompt_token_ids) for _ in range(valid.sampling.n)],
            model=self._model.name,
            now=origin.begun_at,
            arrival_time_s=origin.begun_time_s,
            is_streaming=is_streaming,
            caller=caller,
            may_resume=request.spec.HasField("resume"),
        )
        live.trace = trace
        self._dispatcher.submit(live, time_left_s=context.time_remaining())
        is_kept = live.may_resume and not live.is_over  # who is refused at once has no id to come back with
        return self.resumables.keep(live, request.spec) if is_kept else StreamReader(live, is_kept=False)

    def _leave(self, reader: StreamReader) -> None:
        if reader.is_kept:
            self.resumables.leave(reader)
        else:
            self._dispatcher.cancel(reader.live.key.request_id, "the client left")

    def _revive(
        self, generation_id: str, record: GenerationRecord, caller: Principal, first_attempt: int
    ) -> LiveRequest:
        """Validated again, as the limits are this router's; sampled as it was. Arrived when it did."""
        origin = record.origin
        valid = self._validate(origin.spec, True, caller.tenant)
        if any(token_id >= self._model.vocab_size for tokens in record.tokens for token_id in tokens.token_ids):
            raise FailedPrecondition("the record of this generation is not one of the served model; ask anew")
        age_s = max(0.0, time.time() - origin.arrival_time_s)
        valid = replace(valid, sampling=origin.sampling)
        return LiveRequest(
            generation_id,
            valid,
            [self._tokenizer.new_detokenizer(valid.prompt_token_ids) for _ in range(valid.sampling.n)],
            model=self._model.name,
            now=self._dispatcher.clock() - age_s,
            arrival_time_s=origin.arrival_time_s,
            is_streaming=True,
            caller=caller,
            may_resume=True,
            first_attempt=first_attempt,
        )

    def _new_detokenizers(self, live: LiveRequest) -> list[Detokenizer]:
        return [self._tokenizer.new_detokenizer(live.request.prompt_token_ids) for _ in live.sequences]

    async def _aside(self, is_long: bool, work: Callable[[], T]) -> T:
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _validate(self, spec: pb.GenerationSpec, is_streaming: bool, tenant: str) -> ValidatedRequest:
        seed = secrets.randbits(_SEED_BITS)
        return validate(
            spec,
            self._model,
            self._encode,
            check_grammar=self._grammars.check,
            fresh_seed=seed,
            is_streaming=is_streaming,
            tenant=tenant,
        )

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return self._encode_with_offsets(prompt, add_special_tokens=True).token_ids

    def _encode_with_offsets(self, prompt: Prompt, *, add_special_tokens: bool) -> Encoded:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode_chat(prompt.messages, prompt.tools, prompt.template_kwargs)

    def _tokenize(self, request: pb.TokenizeRequest) -> Encoded:
        check_model("model", request.model, self._model)
        wrong = Violations()
        kind = request.WhichOneof("input")
        if kind is None:
            wrong.add("input", "exactly one of text or chat must be set (none is)")
        prompt: Prompt = read_chat(request.chat, wrong, "chat") if kind == "chat" else request.text
        wrong.raise_if_any()
        return self._encode_with_offsets(prompt, add_special_tokens=request.add_special_tokens)

    def _card(self) -> pb.Model:
        revisions = [worker.info.weights_revision for worker in self._dispatcher.fleet if worker.info is not None]
        return model_card(self._model, self._tokenizer, revisions[0] if revisions else "")


def _check_deadline(context: CallContext) -> None:
    time_left_s = context.time_remaining()
    if time_left_s is not None and time_left_s <= 0:
        raise DeadlineExceeded("the deadline had passed when the request arrived")
