"""How one call is answered: whole as JSON, or event by event; and that it ends when its client is gone.

    nothing sent -> (a failure: its status) | (the first event: 200, a stream) -> chunks -> [DONE], or an error in it

Owns the response of a call, and the tasks that work on it: they end with it, in whatever way it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import BatonError, InternalError
from cluster.pb import generation_pb2 as pb
from router.api.call import ClientStalled
from router.openai.answers import Chunks, Form
from router.openai.errors import HttpFailure, failure_of

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""A stream that is silent for so long gets a comment, so that proxies leave it open."""
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Unary = Callable[[], Coroutine[Any, Any, pb.GenerateResponse]]
OnEvent = Callable[[pb.GenerateStreamResponse], Awaitable[None]]
Streaming = Callable[[OnEvent], Coroutine[Any, Any, None]]


class ClientGone(Exception):
    """It has hung up."""


class WholeAnswer:
    """A response of Starlette's: one object, made of a generation for each prompt."""

    def __init__(self, form: Form, generations: Sequence[Unary], request_id: str) -> None:
        self._form = form
        self._generations = generations
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answers = await _together([generate() for generate in self._generations], receive)
        except ClientGone:
            return
        except BatonError as error:
            response = failed(failure_of(error, self._form.names), self._request_id)
        else:
            response = JSONResponse(self._form.whole(answers), headers={"x-request-id": self._request_id})
        await response(scope, receive, send)


class StreamedAnswer:
    """A response of Starlette's: server-sent events."""

    def __init__(self, form: Form, generations: Sequence[Streaming], request_id: str) -> None:
        self._form = form
        self._generations = generations
        self._request_id = request_id
        self._chunks = Chunks(form)
        self._has_begun = False
        self._silent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _together(
                [generate(self._teller(number, send)) for number, generate in enumerate(self._generations)],
                receive,
                self._keep_alive(send),
            )
            if self._form.includes_usage:
                await self._send(send, _event(self._chunks.usage()))
            await self._send(send, b"data: [DONE]\n\n")
        except (ClientGone, ClientStalled):
            return  # the server closes the connection
        except BatonError as error:
            failure = failure_of(error, self._form.names)
            if not self._has_begun:
                await failed(failure, self._request_id)(scope, receive, send)
                return
            await self._send(send, _event(failure.body))
        await send({"type": "http.response.body", "body": b""})

    def _teller(self, prompt: int, send: Send) -> OnEvent:
        async def tell(event: pb.GenerateStreamResponse) -> None:
            for chunk in self._chunks.of(event, prompt):
                await self._send(send, _event(chunk))

        return tell

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [*_STREAM_HEADERS, (b"x-request-id", self._request_id.encode("latin-1"))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._silent_s = 0.0
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._silent_s += 1.0
            if self._silent_s >= KEEP_ALIVE_S:
                await self._send(send, b": waiting\n\n")


def failed(failure: HttpFailure, request_id: str) -> JSONResponse:
    headers = failure.headers | {"x-request-id": request_id}
    return JSONResponse(failure.body, status_code=failure.status, headers=headers)


async def _together(
    work: Sequence[Coroutine[Any, Any, Any]], receive: Receive, beside: Coroutine[Any, Any, None] | None = None
) -> list[Any]:
    """Results of all of them. The first failure, or the client's leaving, ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(_until_gone(receive))]
            if beside is not None:
                others.append(group.create_task(beside))
            tasks = [group.create_task(each) for each in work]
            for task in tasks:
                await task
            for other in others:
                other.cancel()
    except BaseExceptionGroup as failures:
        raise first_of(failures) from failures
    return [task.result() for task in tasks]


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several that failed together, what the client is told."""
    found = failures.exceptions[0]
    if isinstance(found, BatonError | ClientGone | asyncio.CancelledError):
        return found
    log.error("a call over HTTP failed", exc_info=found)
    return InternalError("the router failed on this request; its log says why")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
