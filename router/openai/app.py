"""The routes of the HTTP door: OpenAI's, and those by which machines ask after the router.

Reads and checks a body, asks the gate who calls, and hands the specs to `GenerationService`. Knows no worker and no
queue; every rule about a request is the service's.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from cluster.auth import Gate
from cluster.errors import BatonError, FieldViolation, InternalError, InvalidRequest, OutOfRange, PermissionDenied
from cluster.pb import admin_pb2
from cluster.pb import generation_pb2 as pb
from router.api.call import INLINE_BYTES, Call, principal_of
from router.api.model_service import ModelService
from router.api.validate import LONGEST_NAME
from router.api.violations import invalid
from router.openai import specs
from router.openai.answers import Form, TokenBytes
from router.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.openai.errors import HttpFailure, body_of, failure_of
from router.openai.exchange import OnEvent, StreamedAnswer, WholeAnswer, failed, log
from router.openai.json_text import read_json
from router.openai.schema import openapi

GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
STATUS = admin_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
Body = TypeVar("Body", bound=BaseModel)
Wanted = TypeVar("Wanted")
Answer = Callable[[Scope, Receive, Send], Awaitable[None]]
Generate = Callable[[pb.GenerateRequest, Call], Coroutine[Any, Any, pb.GenerateResponse]]
GenerateStream = Callable[[pb.GenerateStreamRequest, Call], Coroutine[Any, Any, None]]
Handler = Callable[[Request, str], Awaitable[Answer]]
"""Of a request with its id."""


class OpenAiApp:
    """`app` is the ASGI application."""

    def __init__(
        self,
        generate: Generate,
        generate_stream: GenerateStream,
        models: ModelService,
        gate: Gate,
        token_bytes: TokenBytes,
        registries: Sequence[CollectorRegistry],
        can_serve: Callable[[], bool],
        *,
        max_body_bytes: int,
        stalled_client_s: float,
        more_routes: Sequence[Route] = (),
    ) -> None:
        """`stalled_client_s`: a client that sends nothing more of its body for so long is given up. `more_routes`: of
        other parts of the door."""
        self._generate_one = generate
        self._generate_streamed = generate_stream
        self._model_service = models
        self._gate = gate
        self._token_bytes = token_bytes
        self._registries = registries
        self._can_serve = can_serve
        self._max_body_bytes = max_body_bytes
        self._stalled_client_s = stalled_client_s
        self._begun = int(time.time())
        routes = [
            Route("/v1/completions", guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
            Route("/v1/models", guarded(self._models), methods=["GET"]),
            Route("/v1/models/{model:path}", guarded(self._model), methods=["GET"]),
            Route("/tokenize", guarded(self._tokenize), methods=["POST"]),
            Route("/detokenize", guarded(self._detokenize, {"token_ids": "tokens"}), methods=["POST"]),
            Route("/metrics", guarded(self._metrics), methods=["GET"]),
            Route("/healthz", guarded(self._health), methods=["GET"]),
            Route("/readyz", guarded(self._ready), methods=["GET"]),
            Route("/version", guarded(self._version), methods=["GET"]),
            Route("/openapi.json", guarded(self._openapi), methods=["GET"]),
            *more_routes,
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})

    async def _completions(self, request: Request, request_id: str) -> Answer:
        self._check(request, GENERATION)
        body, wanted = await self._read(request, CompletionBody, lambda body: specs.completion_specs(body, request_id))
        return self._answer(request, body, wanted, request_id)

    async def _chat(self, request: Request, request_id: str) -> Answer:
        self._check(request, GENERATION)
        body, wanted = await self._read(request, ChatBody, lambda body: specs.chat_spec(body, request_id))
        return self._answer(request, body, [wanted], request_id)

    def _answer(
        self, request: Request, body: CompletionBody | ChatBody, wanted: list[pb.GenerationSpec], request_id: str
    ) -> Answer:
        form = form_of(body, wanted, self._token_bytes)
        headers = headers_of(request)
        if not body.stream:
            unary = [functools.partial(self._generate, spec, headers) for spec in wanted]
            return WholeAnswer(form, unary, request_id)
        streams = [functools.partial(self._generate_stream, spec, headers) for spec in wanted]
        return StreamedAnswer(form, streams, request_id)

    async def _generate(self, spec: pb.GenerationSpec, headers: tuple[tuple[str, str], ...]) -> pb.GenerateResponse:
        return await self._generate_one(pb.GenerateRequest(spec=spec), self._call(headers))

    async def _generate_stream(
        self, spec: pb.GenerationSpec, headers: tuple[tuple[str, str], ...], on_event: OnEvent
    ) -> None:
        await self._generate_streamed(pb.GenerateStreamRequest(spec=spec), replace(self._call(headers), write=on_event))

    async def _models(self, request: Request, request_id: str) -> Answer:
        self._check(request, GENERATION)
        told = await self._model_service.ListModels(pb.ListModelsRequest(), Call())
        return JSONResponse({"object": "list", "data": [self._card(model) for model in told.models]})

    async def _model(self, request: Request, request_id: str) -> Answer:
        self._check(request, GENERATION)
        wanted = pb.GetModelRequest(model=request.path_params["model"])
        told = await self._model_service.GetModel(wanted, Call())
        return JSONResponse(self._card(told.model))

    def _card(self, model: pb.Model) -> dict[str, object]:
        card = {"id": model.name, "object": "model", "created": self._begun, "owned_by": "baton"}
        return card | {"max_model_len": model.max_context_tokens, "capabilities": list(model.capabilities)}

    async def _tokenize(self, request: Request, request_id: str) -> Answer:
        self._check(request, GENERATION)
        _, wanted = await self._read(request, TokenizeBody, specs.tokenize_request)
        told = await self._model_service.Tokenize(wanted, Call())
        tokens = list(told.token_ids)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": told.max_context_tokens})

    async def _detokenize(self, request: Request, request_id: str) -> Answer:
        self._check(request, GENERATION)
        _, wanted = await self._read(request, DetokenizeBody, specs.detokenize_request)
        told = await self._model_service.Detokenize(wanted, Call())
        return JSONResponse({"prompt": told.text})

    async def _metrics(self, request: Request, request_id: str) -> Answer:
        """Where keys are needed, one with the scope admin."""
        self._check(request, STATUS)
        page = b"".join(map(generate_latest, self._registries))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request, request_id: str) -> Answer:
        """The process lives."""
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request, request_id: str) -> Answer:
        """Workers are there to serve."""
        if self._can_serve():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "no prefill or no decode worker is ready"}, status_code=503)

    async def _version(self, request: Request, request_id: str) -> Answer:
        return JSONResponse({"version": version("baton")})

    async def _openapi(self, request: Request, request_id: str) -> Answer:
        return JSONResponse(openapi(version("baton")))

    def _call(self, headers: tuple[tuple[str, str], ...]) -> Call:
        """Raises Unauthenticated, also where the key was revoked while the body came."""
        return Call(principal_of(self._gate.key_of(headers)), headers)

    def _check(self, request: Request, service: str) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        self._gate.check(headers_of(request), service)

    async def _read(self, request: Request, kind: type[Body], convert: Callable[[Body], Wanted]) -> tuple[Body, Wanted]:
        """Reads a body, on a thread if it is long. Raises InvalidRequest, or OutOfRange for one that is too large."""
        data = await read_body(request, self._max_body_bytes, self._stalled_client_s)

        def read() -> tuple[Body, Wanted]:
            body = parse(bytes(data), kind)
            return body, convert(body)

        return read() if len(data) <= INLINE_BYTES else await asyncio.to_thread(read)


async def read_body(request: Request, most_bytes: int, stalled_client_s: float) -> bytearray:
    """Raises OutOfRange for one that is too large, TimeoutError when its client sends no more of it."""
    data = bytearray()
    async for part in parts_of(request, stalled_client_s):
        data += part
        if len(data) > most_bytes:
            raise too_large(most_bytes)
    return data


def too_large(most_bytes: int) -> OutOfRange:
    """Of a body."""
    return OutOfRange(f"the body is larger than {most_bytes} bytes, which is the most taken here")


async def parts_of(request: Request, stalled_client_s: float) -> AsyncGenerator[bytes, None]:
    """Of a body, as they come. Raises TimeoutError when no more of it does."""
    parts = request.stream()
    while True:
        async with asyncio.timeout(stalled_client_s):
            part = await anext(parts, None)
        if part is None:
            return
        yield part


def form_of(body: CompletionBody | ChatBody, wanted: Sequence[pb.GenerationSpec], token_bytes: TokenBytes) -> Form:
    """How the answer looks to a body that asks for `wanted`. Raises InvalidRequest."""
    if body.stream_options is not None and not body.stream:
        raise invalid((FieldViolation("stream_options", "needs stream: true"),))
    return Form(
        is_chat=isinstance(body, ChatBody),
        created=int(time.time()),
        n=1 if body.n is None else body.n,
        wants_logprobs=wanted[0].output.HasField("top_logprobs"),
        includes_usage=body.stream_options is not None and body.stream_options.include_usage,
        token_bytes=token_bytes,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        names=specs.names_of(vars(body)),
    )


def parse(data: bytes, kind: type[Body]) -> Body:
    """A body as it came. Raises InvalidRequest."""
    try:
        found = read_json(data)
    except ValueError as error:
        raise InvalidRequest("the body is not JSON in UTF-8") from error
    return checked(found, kind)


def checked(found: object, kind: type[Body]) -> Body:
    """The JSON of a body. Raises InvalidRequest."""
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise invalid(tuple(_violation(dict(each)) for each in error.errors(include_url=False))) from error


def _violation(error: dict[str, object]) -> FieldViolation:
    """Of pydantic's; the value that was sent is not repeated."""
    path = error["loc"]
    assert isinstance(path, tuple)
    names = [part for part in path if isinstance(part, int) or part in _known_names(path)]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    if error["type"] == "extra_forbidden":
        return FieldViolation(field, "is not a field that is known here; leave it out")
    if error["type"] == "missing":
        return FieldViolation(field, "must be set")
    return FieldViolation(field, str(error["msg"]).removeprefix("Input "))


def _known_names(path: tuple[object, ...]) -> set[object]:
    """pydantic puts the tried type of a union, such as `list[str]`, into a path; those are no names of fields."""
    return {part for part in path if isinstance(part, str) and part.replace("_", "").isalnum() and part not in _TYPES}


_TYPES = {"str", "int", "float", "bool", "list"}


def headers_of(request: Request) -> tuple[tuple[str, str], ...]:
    return tuple(request.headers.items())


def _request_id(request: Request) -> str:
    """The client's, where it can be told back."""
    given = request.headers.get("x-request-id", "")
    is_good = 0 < len(given) <= LONGEST_NAME and given.isascii() and given.isprintable()
    return given if is_good else f"req-{secrets.token_hex(12)}"


def guarded(handle: Handler, names: Mapping[str, str] = MappingProxyType({})) -> Callable[[Request], Awaitable[Answer]]:
    """What a handler raises, as an answer. `names` as in `failure_of`."""

    async def endpoint(request: Request) -> Answer:
        request_id = _request_id(request)
        try:
            _refuse_other_sites(request)
            answer = await handle(request, request_id)
        except BatonError as error:
            return failed(failure_of(error, names), request_id)
        except ClientDisconnect:
            return Response()  # that nobody reads
        except TimeoutError:
            body = body_of("the body did not come in time; send it at once", 408, "timeout")
            return failed(HttpFailure(408, body), request_id)
        except Exception:
            log.exception("%s failed", request.url.path)
            return failed(failure_of(InternalError("the router failed on this request; its log says why")), request_id)
        if isinstance(answer, Response):
            answer.headers["x-request-id"] = request_id
        return answer

    return endpoint


def _refuse_other_sites(request: Request) -> None:
    """Whatever site somebody looks at may have his browser send something to a router that wants no key, though not
    read the answer. Raises PermissionDenied."""
    if request.method != "GET" and request.headers.get("sec-fetch-site") == "cross-site":
        raise PermissionDenied("a browser sends this for another site; ask from a program, or from a page of this one")


async def _not_found(request: Request, error: Exception) -> Response:
    """A path or a method that is not there."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail.lower()}; see /openapi.json for what is served"
    body = body_of(message, error.status_code, "not_found" if error.status_code == 404 else "not_allowed")
    answer = failed(HttpFailure(error.status_code, body), _request_id(request))
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(_methods_at(request)))
    return answer


def _methods_at(request: Request) -> set[str]:
    """Those of every route of this path: of several, Starlette tells the first one's."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route.methods or set() for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return set[str]().union(*found)
