"""Answers a body of completions: whole as JSON, event by event, or as a line of a batch.

    nothing sent -> (a failure: its status) | (the first event: 200, a stream) -> chunks -> [DONE], or an error in it

A stream that is asked for with `Baton-Resume: true` goes on after any of its events, which have ids: the same call with
that id as `Last-Event-ID` gets the rest. All three read the body, call GenerationService and name errors in the same
way. Owns the tasks of a call: they end with it, also when its client hangs up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cluster.errors import BatonError, FieldViolation, NotFound, OutOfRange
from cluster.pb import generation_pb2 as pb
from router.api.call import INLINE_BYTES, MOST_PRIORITY, Call, ClientStalled, Principal, run_aside
from router.api.violations import invalid, shortened
from router.batches.lines import Line, LineResult
from router.batches.store import Batch
from router.openai import specs
from router.openai.bodies import ChatBody, CompletionBody
from router.openai.completions import ChoicePosition, Chunks, Form, StreamPosition
from router.openai.errors import LAST_EVENT, RESUME, RESUME_NAMES, HttpFailure, failure_of
from router.openai.http import checked, failed, id_headers, log, too_large
from router.openai.logprobs import TokenBytes
from router.stream.failures import router_failed

KEEP_ALIVE_S = 15.0
"""A stream that is silent for so long gets a comment, so that proxies leave it open."""
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_RETRY_AFTER_S = 1.0

BodyKind = type[CompletionBody] | type[ChatBody]
Generate = Callable[[pb.GenerateRequest, Call], Coroutine[Any, Any, pb.GenerateResponse]]
GenerateStream = Callable[[pb.GenerateStreamRequest, Call], Coroutine[Any, Any, None]]
Write = Callable[[pb.GenerateStreamResponse], Awaitable[None]]


@dataclass(frozen=True)
class CompletionCall:
    """The completion that a body asks for, and its form."""

    body: CompletionBody | ChatBody
    specs: list[pb.GenerationSpec]
    """One for each prompt."""
    form: Form
    names: Mapping[str, str]
    """This client's names for fields of the .proto, as `failure_of` takes them."""
    may_resume: bool = False
    resumed: StreamPosition | None = None
    """The place where the client was when its stream broke; None: it begins."""

    @classmethod
    def read(cls, found: object, kind: BodyKind, request_id: str, token_bytes: TokenBytes) -> CompletionCall:
        """Raises InvalidRequest or NotServed."""
        body = checked(found, kind)
        if isinstance(body, ChatBody):
            wanted = [specs.chat_spec(body, request_id)]
        else:
            wanted = specs.completion_specs(body, request_id)
        return cls(body, wanted, Form.of(body, token_bytes), specs.names_of(vars(body)))

    def with_resume(self, headers: Mapping[str, str]) -> CompletionCall:
        """This call as the headers want it: to be resumed, or resuming. Raises InvalidRequest or NotFound."""
        may_resume, last = resumption(headers, is_streaming=bool(self.body.stream), num_prompts=len(self.specs))
        if not may_resume:
            return self
        names, spec = {**RESUME_NAMES, **self.names}, self.specs[0]
        spec.resume.SetInParent()
        if last is None:
            return replace(self, names=names, may_resume=True)
        position = StreamPosition.parse(last)
        if position is None or len(position.choices) > self.form.n:
            raise unknown_event(last)
        position.choices += [ChoicePosition() for _ in range(self.form.n - len(position.choices))]
        spec.resume.generation_id = position.generation_id
        spec.resume.next_token_indexes[:] = [choice.num_tokens for choice in position.choices]
        form = replace(self.form, created=position.created)
        return replace(self, names=names, form=form, may_resume=True, resumed=position)

    def failure(self, error: BatonError) -> HttpFailure:
        """As its client is told."""
        return failure_of(error, self.names)

    async def whole(self, generate: Generate, call: Call, receive: Receive | None = None) -> dict[str, Any]:
        """Raises ClientDisconnect when `receive` says so."""
        calls = [generate(pb.GenerateRequest(spec=spec), call) for spec in self.specs]
        return self.form.whole(await together(calls, receive))


class Events(Protocol):
    """What the client of one stream is sent, in its dialect: JSON objects, each named by its `type` if it has one."""

    keep_alive: bytes
    """Sent where there is nothing else to send."""
    last: bytes
    """Sent behind all objects of a stream that did not fail."""

    @property
    def event_id(self) -> str:
        """Names the place that the client has come to with the latest object; empty: the stream cannot be resumed."""
        ...

    def of(self, event: pb.GenerateStreamResponse, prompt: int) -> Iterable[Mapping[str, Any]]:
        """The objects for one event of a prompt's stream."""
        ...

    def end(self) -> Iterable[Mapping[str, Any]]:
        """The objects that are still due once all prompts are completed."""
        ...

    def failure(self, error: BatonError) -> HttpFailure: ...


def resumption(headers: Mapping[str, str], *, is_streaming: bool, num_prompts: int = 1) -> tuple[bool, str | None]:
    """Returns whether the headers ask for a stream that may be resumed, and the event after which it is to go on; None:
    it begins. Raises InvalidRequest."""
    asked, last = headers.get(RESUME), headers.get(LAST_EVENT)
    may_resume = asked is not None or last is not None
    for is_wrong, field, what in (
        (asked not in (None, "true"), RESUME, "must be true, or left out"),
        (may_resume and not is_streaming, "stream", f"must be true with {RESUME} or {LAST_EVENT}"),
        (may_resume and num_prompts > 1, "prompt", f"must be one with {RESUME} or {LAST_EVENT}, not several"),
    ):
        if is_wrong:
            raise invalid((FieldViolation(field, what),))
    return may_resume, last


class StreamedAnswer:
    """A response of Starlette's: server-sent events."""

    def __init__(
        self,
        specs: Sequence[pb.GenerationSpec],
        events: Events,
        generate: GenerateStream,
        call: Call,
        request_id: str,
    ) -> None:
        self._specs = specs
        self._events = events
        self._generate = generate
        self._call = call
        self._request_id = request_id
        self._has_begun = False
        self._silent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests = [pb.GenerateStreamRequest(spec=spec) for spec in self._specs]
        calls = [
            self._generate(request, replace(self._call, write=self._writer(number, send)))
            for number, request in enumerate(requests)
        ]
        try:
            await together(calls, receive, self._keep_alive(send))
            for data in self._events.end():
                await self._send_event(send, data)
            if self._events.last:
                await self._send(send, self._events.last)
        except (ClientDisconnect, ClientStalled):
            return  # the server closes the connection
        except BatonError as error:
            failure = self._events.failure(error)
            if not self._has_begun:
                await failed(failure, self._request_id)(scope, receive, send)
                return
            await self._send(send, _event(failure.body))
        await send({"type": "http.response.body", "body": b""})

    def _writer(self, prompt: int, send: Send) -> Write:
        async def write(event: pb.GenerateStreamResponse) -> None:
            for data in self._events.of(event, prompt):
                await self._send_event(send, data)

        return write

    async def _send_event(self, send: Send, data: Mapping[str, Any]) -> None:
        await self._send(send, _event(data, self._events.event_id))

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            ids = id_headers(self._request_id).items()
            headers = [*_STREAM_HEADERS, *((name.encode(), value.encode("latin-1")) for name, value in ids)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._silent_s = 0.0
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._silent_s += 1.0
            if self._silent_s >= KEEP_ALIVE_S:
                await self._send(send, self._events.keep_alive)


class CompletionEvents:
    """The chunks of a completion or a chat completion, as `Events`."""

    keep_alive, last = b": waiting\n\n", b"data: [DONE]\n\n"

    def __init__(self, wanted: CompletionCall) -> None:
        self._wanted = wanted
        self._chunks = Chunks(wanted.form, wanted.resumed)

    @property
    def event_id(self) -> str:
        return self._chunks.event_id if self._wanted.may_resume else ""

    def of(self, event: pb.GenerateStreamResponse, prompt: int) -> Iterable[Mapping[str, Any]]:
        return self._chunks.of(event, prompt)

    def end(self) -> Iterable[Mapping[str, Any]]:
        form = self._wanted.form
        if (form.includes_usage or form.wants_timing) and not self._chunks.has_usage:
            yield self._chunks.last()

    def failure(self, error: BatonError) -> HttpFailure:
        resumed = self._wanted.resumed
        is_behind_its_end = isinstance(error, OutOfRange) and resumed is not None
        return self._wanted.failure(unknown_event(str(resumed)) if is_behind_its_end else error)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _event(data: Mapping[str, Any], event_id: str = "") -> bytes:
    head = f"id: {event_id}\n" if event_id else ""
    if "type" in data:
        head += f"event: {data['type']}\n"
    return f"{head}data: {_encode(data)}\n\n".encode()


def unknown_event(event_id: str) -> NotFound:
    what = "names no event of a stream that can be resumed"
    return NotFound(f"{LAST_EVENT} {shortened(event_id)!r} {what}", violations=(FieldViolation(LAST_EVENT, what),))


async def together(
    calls: Sequence[Coroutine[Any, Any, Any]],
    receive: Receive | None = None,
    keep_alive: Coroutine[Any, Any, None] | None = None,
) -> list[Any]:
    """Returns the results of all calls. The first failure, or the client's hanging up, ends the others and is
    raised."""
    beside = [each for each in (receive and _until_gone(receive), keep_alive) if each is not None]
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(each) for each in beside]
            tasks = [group.create_task(each) for each in calls]
            for task in tasks:
                await task
            for other in others:
                other.cancel()
    except BaseExceptionGroup as failures:
        raise _first_of(failures) from failures
    return [task.result() for task in tasks]


def _first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that the client gets, of several at once."""
    found = failures.exceptions[0]
    if isinstance(found, BatonError | ClientDisconnect | asyncio.CancelledError):
        return found
    log.error("a call over HTTP failed", exc_info=found)
    return router_failed()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


def run_last(spec: pb.GenerationSpec) -> None:
    """Gives a request the lowest priority, unless its own is none that there is."""
    if abs(spec.scheduling.priority) <= MOST_PRIORITY:
        spec.scheduling.priority = -MOST_PRIORITY


@dataclass(frozen=True)
class OtherLines:
    """How lines of an endpoint other than completions are answered."""

    answer: Callable[[dict[str, Any], Call, str], Awaitable[Mapping[str, Any]]]
    """(body, call, id of the request): raises as GenerationService does."""
    names_of: Callable[[dict[str, Any]], Mapping[str, str]]
    """Names of fields of the .proto in a body, as `failure_of` takes them."""


class LineAnswerer:
    """Answers a line of a batch as the same body over HTTP would be, at the lowest priority, whatever its body says.

    A refusal for load, or for a worker that was lost, is no answer yet. `principal_of_id`: the owner of an API key, by
    its id. `max_body_bytes`: the limit for the same body over HTTP. `others`: by endpoint.
    """

    def __init__(
        self,
        generate: Generate,
        principal_of_id: Callable[[str], Principal],
        token_bytes: TokenBytes,
        max_body_bytes: int,
        others: Mapping[str, OtherLines] = MappingProxyType({}),
    ) -> None:
        self._generate = generate
        self._others = others
        self._principal_of_id = principal_of_id
        self._token_bytes = token_bytes
        self._max_body_bytes = max_body_bytes

    async def answer(self, batch: Batch, line: Line, request_id: str) -> LineResult:
        try:
            return LineResult(200, await self._whole(batch, line, request_id))
        except BatonError as error:
            other = self._others.get(batch.endpoint)
            failure = failure_of(error, (specs if other is None else other).names_of(line.body))
            retry_after_s, is_refusal = None, error.grpc_code == "RESOURCE_EXHAUSTED"
            if is_refusal or error.grpc_code == "UNAVAILABLE":
                retry_after_s = error.retry_after_s or _RETRY_AFTER_S
            return LineResult(failure.status, failure.body, retry_after_s, is_refusal)
        except Exception:
            log.exception("a line of a batch failed")
            failure = failure_of(router_failed())
            return LineResult(failure.status, failure.body)

    async def _whole(self, batch: Batch, line: Line, request_id: str) -> Mapping[str, Any]:
        most = self._max_body_bytes
        if line.size_bytes > most and len(json.dumps(line.body, ensure_ascii=False).encode()) > most:
            raise too_large(most)
        for field in ("stream", "background"):
            if line.body.get(field) is True:
                raise invalid((FieldViolation(field, "must be false in a batch"),))
        if batch.endpoint in self._others:
            call = Call(self._principal_of_id(batch.key_id))
            return await self._others[batch.endpoint].answer(line.body, call, request_id)
        kind: BodyKind = ChatBody if batch.endpoint == "/v1/chat/completions" else CompletionBody
        wanted = await run_aside(
            line.size_bytes > INLINE_BYTES, lambda: CompletionCall.read(line.body, kind, request_id, self._token_bytes)
        )
        for spec in wanted.specs:
            run_last(spec)
        return await wanted.whole(self._generate, Call(self._principal_of_id(batch.key_id)))
