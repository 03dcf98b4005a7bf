"""The routes of responses: created, read, streamed again, cancelled, deleted; their input, item by item."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from cluster.errors import BatonError, FieldViolation, Unavailable
from cluster.pb import generation_pb2 as pb
from cluster.state import StoreAway
from router.api.call import Call, ClientStalled
from router.api.violations import invalid
from router.openai.errors import HttpFailure, failure_of, timing_headers
from router.openai.files import page_answer
from router.openai.generating import (
    CompletionEvents,
    Generate,
    GenerateStream,
    StreamedAnswer,
    resumption,
    run_last,
    together,
    unknown_event,
)
from router.openai.http import (
    CALLS,
    GENERATES,
    Answer,
    Operation,
    Reception,
    checked,
    checked_texts,
    log,
    parse,
)
from router.responses.answers import DeletedResponse, Event, ItemPage, ResponseAnswer, StreamedEvent
from router.responses.background import BackgroundRuns
from router.responses.bodies import ItemsQuery, ResponseBody, ResponseQuery
from router.responses.call import NAMES, ResponseCall, ResponseReader, names_of
from router.responses.position import ResponsePosition, ToldEvents
from router.responses.store import KeptResponse, ResponseStore

_RETRY_AFTER_S = 1.0


class ResponseRoutes:
    """`operations`: for the HTTP API. `store` and `runs` None: no response is kept here."""

    def __init__(
        self,
        reception: Reception,
        reader: ResponseReader,
        generate: Generate,
        generate_stream: GenerateStream,
        store: ResponseStore | None,
        runs: BackgroundRuns | None,
    ) -> None:
        self._reception = reception
        self._reader = reader
        self._generate = generate
        self._generate_stream = generate_stream
        self._store = store
        self._runs = runs
        self.operations = [
            Operation(
                "POST",
                "/v1/responses",
                self._create,
                "Answer in a conversation, of which the answer is kept",
                GENERATES,
                ResponseAnswer,
                body=ResponseBody,
                chunk=StreamedEvent,
                names=NAMES,
            ),
        ]
        one = "/v1/responses/{response_id}"
        self.kept_operations = [
            Operation(
                "GET",
                one,
                self._get,
                "A response that is kept, or its events",
                (*CALLS, 404),
                ResponseAnswer,
                query=ResponseQuery,
                chunk=StreamedEvent,
            ),
            Operation("DELETE", one, self._delete, "Delete a response", (*CALLS, 404), DeletedResponse),
            Operation(
                "POST",
                f"{one}/cancel",
                self._cancel,
                "Cancel a response in the background",
                (*CALLS, 404),
                ResponseAnswer,
            ),
            Operation(
                "GET",
                f"{one}/input_items",
                self._input_items,
                "The items of a response's input",
                (*CALLS, 404),
                ItemPage,
                query=ItemsQuery,
            ),
        ]
        """Those that need the store."""

    async def _create(self, request: Request) -> Answer:
        self._reception.check(request)
        body = await self._reception.read(request, lambda data: parse(data, ResponseBody))
        request.state.names = names_of(body)
        call = self._reception.call(request)  # the key may have been revoked meanwhile
        request_id: str = request.state.request_id
        position = None if body.background else _position(request.headers, is_streaming=bool(body.stream))
        wanted = await self._reader.read(body, call, request_id, position)
        if body.background and self._runs is not None:
            answer = await self._runs.start(wanted, call)
            return self._streamed(answer["id"], 0, call, request_id) if body.stream else JSONResponse(answer)
        if body.stream:
            return self._generated(wanted, call, request_id)
        answer = await self._whole(wanted, call, request.receive)
        return JSONResponse(answer, headers=timing_headers(answer.get("timing", {})))

    async def answer_line(self, found: dict[str, Any], call: Call, request_id: str) -> ResponseAnswer:
        """Answers the body of a batch's line. It is kept only if it says so: thousands would push out what the tenant
        keeps."""
        body = checked(found, ResponseBody)
        wanted = await self._reader.read(body.model_copy(update={"store": bool(body.store)}), call, request_id)
        run_last(wanted.spec)
        return await self._whole(wanted, call)

    async def _whole(self, wanted: ResponseCall, call: Call, receive: Receive | None = None) -> ResponseAnswer:
        """Raises ClientDisconnect when `receive` says so."""
        asked = pb.GenerateRequest(spec=wanted.spec)
        (found,) = await together([self._generate(asked, wanted.generating(call))], receive)
        answer = wanted.events().whole(found)
        await self._keep(wanted, answer, call)
        return answer

    def _generated(self, wanted: ResponseCall, call: Call, request_id: str) -> StreamedAnswer:
        events = _GeneratedEvents(wanted)

        async def generate(asked: pb.GenerateStreamRequest, call: Call) -> None:
            await self._generate_stream(asked, call)
            await self._keep(wanted, events.answer, call)

        return StreamedAnswer([wanted.spec], events, generate, wanted.generating(call), request_id)

    async def _keep(self, wanted: ResponseCall, answer: ResponseAnswer, call: Call) -> None:
        """Keeps a response that is over, before its client is told of that, unless one whose stream broke was kept
        already. It is answered where it cannot be kept, too, and says so."""
        if not answer["store"] or self._store is None:
            return
        is_resumed = wanted.position is not None and bool(wanted.position.generation_id)
        try:
            if is_resumed and await self._store.is_kept(call.principal.tenant, wanted.response_id):
                return
            response = wanted.stored(call.principal, status=answer["status"])
            await self._store.add(response, wanted.given, answer, *wanted.kept_turns[-1:])
        except (StoreAway, HttpFailure) as error:
            log.warning("response %s is not kept: %s", wanted.response_id, error)
            answer["store"] = False

    async def _get(self, request: Request) -> Answer:
        call, kept = await self._found(request)
        query = checked_texts(request.query_params, ResponseQuery)
        assert self._store is not None and self._runs is not None
        if query.stream != "true":
            if query.starting_after >= 0:
                raise invalid((FieldViolation("starting_after", "needs stream=true"),))
            return JSONResponse(await self._store.answer((await self._runs.settled(kept)).response))
        if not kept.response.is_background:
            what = "must be false: only the events of responses with background: true are kept"
            raise invalid((FieldViolation("stream", what),))
        response_id = kept.response.response_id
        return self._streamed(response_id, query.starting_after + 1, call, request.state.request_id)

    def _streamed(self, response_id: str, first: int, call: Call, request_id: str) -> StreamedAnswer:
        """The events of a response in the background; it goes on when its client hangs up."""

        async def generate(_: pb.GenerateStreamRequest, call: Call) -> None:
            assert self._runs is not None
            try:
                async with aclosing(self._runs.follow(call.principal.tenant, response_id, first)) as events:
                    async for event in events:
                        await self._write(call, event)
            except StoreAway as error:
                away = "the store of responses cannot be reached for the moment; go on with starting_after"
                raise Unavailable(away, retry_after_s=_RETRY_AFTER_S) from error

        return StreamedAnswer([pb.GenerationSpec()], _StoredEvents(), generate, call, request_id)

    async def _write(self, call: Call, event: Event) -> None:
        """Raises ClientStalled."""
        try:
            async with asyncio.timeout(self._reception.stalled_client_s):
                await call.write(event)
        except TimeoutError:
            raise ClientStalled("the client does not read its stream") from None

    async def _delete(self, request: Request) -> Response:
        _, kept = await self._found(request)
        assert self._store is not None and self._runs is not None
        is_gone = await self._store.delete(kept)
        if kept.response.is_open:
            await self._runs.end(kept.response)
        answer: DeletedResponse = {"id": kept.response.response_id, "object": "response", "deleted": is_gone}
        return JSONResponse(answer)

    async def _cancel(self, request: Request) -> Response:
        """One that is over is answered as it is."""
        _, kept = await self._found(request)
        assert self._runs is not None
        if not kept.response.is_background:
            raise HttpFailure(400, "not_in_background", "only a response with background: true can be cancelled")
        return JSONResponse(await self._runs.cancel(kept))

    async def _input_items(self, request: Request) -> Response:
        _, kept = await self._found(request)
        query = checked_texts(request.query_params, ItemsQuery)
        assert self._store is not None
        items: list[Any] = (await self._store.given(kept.response.response_id))["items"]
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == query.after]
            if not places:
                raise invalid((FieldViolation("after", "is no id of this list; begin without it"),))
            items = items[places[0] + 1 :]
        return JSONResponse(page_answer(items[: query.limit + 1], query.limit))

    async def _found(self, request: Request) -> tuple[Call, KeptResponse]:
        """Raises NotFound."""
        self._reception.check(request)
        call = self._reception.call(request)
        assert self._store is not None
        return call, await self._store.find(call.principal.tenant, request.path_params["response_id"])


def _position(headers: Mapping[str, str], *, is_streaming: bool) -> ResponsePosition | None:
    """Where a stream is that may be resumed; None: this one may not. Raises InvalidRequest or NotFound."""
    may_resume, last = resumption(headers, is_streaming=is_streaming)
    if not may_resume:
        return None
    position = ResponsePosition.new() if last is None else ResponsePosition.parse(last)
    if position is None:
        raise unknown_event(str(last))
    return position


class _GeneratedEvents:
    """The events of a response that its client waits for, as `generating.Events`. The last one waits until it is
    kept."""

    keep_alive, last = CompletionEvents.keep_alive, CompletionEvents.last

    def __init__(self, wanted: ResponseCall) -> None:
        self._position = wanted.position
        self._names = names_of(wanted.body)
        self._events = wanted.events(None if wanted.position is None else wanted.position.told)
        self._held: list[tuple[Event, ToldEvents]] = []
        self._has_begun = False

    @property
    def event_id(self) -> str:
        return "" if self._position is None else str(self._position)

    @property
    def answer(self) -> ResponseAnswer:
        return self._events.answer

    def of(self, event: pb.GenerateStreamResponse, prompt: int) -> Iterable[Mapping[str, Any]]:
        if self._position is not None and event.HasField("started"):
            self._position = replace(self._position, generation_id=event.started.generation_id)
        events = list(zip(self._events.of(event), self._events.marks, strict=True))
        self._has_begun = self._has_begun or bool(events)
        if event.HasField("completed"):
            self._held, events = events[-1:], events[:-1]
        yield from self._told(events)

    def end(self) -> Iterable[Mapping[str, Any]]:
        for event, _ in self._held:
            event["response"]["store"] = self.answer["store"]
        yield from self._told(self._held)

    def _told(self, events: Iterable[tuple[Event, ToldEvents]]) -> Iterable[Event]:
        for event, mark in events:
            if self._position is not None:
                self._position = replace(self._position, told=mark)
            yield event

    def failure(self, error: BatonError) -> HttpFailure:
        failure = failure_of(error, self._names)
        if self._has_begun:
            failure.body = self._events.fail(failure)
        return failure


class _StoredEvents:
    """The events of a response in the background, as `generating.Events`."""

    keep_alive, last, event_id = CompletionEvents.keep_alive, CompletionEvents.last, ""

    def of(self, event: Any, prompt: int) -> Iterable[Mapping[str, Any]]:
        return (event,)

    def end(self) -> Iterable[Mapping[str, Any]]:
        return ()

    def failure(self, error: BatonError) -> HttpFailure:
        return failure_of(error, NAMES)
