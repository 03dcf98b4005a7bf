"""HTTP requests of every route: read and checked, answered, and refused in OpenAI's way; and the routes themselves.

An `Operation` declares one method of a path once: its handler, and what /openapi.json says of it. Knows no handler.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.auth import HEADER, Gate
from cluster.errors import BatonError, FieldViolation, InvalidRequest, OutOfRange, PermissionDenied
from cluster.pb import generation_pb2 as pb
from cluster.site import OwnSite
from router.api.call import INLINE_BYTES, LONGEST_NAME, Call, Principal, principal_of, run_aside
from router.api.violations import MOST_FOUND, invalid, shown
from router.openai.answers import ErrorAnswer
from router.openai.bodies import MOST_LEVELS, read_json
from router.openai.errors import HttpFailure, failure_of
from router.stream.failures import router_failed

log = logging.getLogger(__name__)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Answer = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Request], Awaitable[Answer]]

EVERY = (403, 500)
NEEDS_KEY = (401, *EVERY)
CALLS = (400, *NEEDS_KEY, 503)
"""Statuses of an operation that reaches the service or the store."""
HAS_BODY = (*CALLS, 408)
GENERATES = (*HAS_BODY, 404, 409, 429, 499, 504)
LEAST_BYTES_PER_S = 16 * 1024
"""A body that comes more slowly, once it has had a while, is given up."""
JSON, TEXT, EVENTS, BYTES = "application/json", "text/plain", "text/event-stream", "application/octet-stream"
GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


@dataclass(frozen=True)
class Dialect:
    """What is peculiar to one API."""

    failure: Callable[[HttpFailure, str], HttpFailure]
    """A failure as this API tells it; takes the id of its request."""
    error: Any
    """Type of the body of such a failure."""
    has_named_events: bool = False
    """Events of a stream are named by their type, and the last one says that it is; else `[DONE]` follows it."""


OPENAI = Dialect(lambda failure, request_id: failure, ErrorAnswer)


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handle: Handler
    summary: str
    failures: tuple[int, ...]
    """Statuses that are answered with an error of the dialect."""
    answer: Any = None
    """Type of what is answered with 200; None: it is no JSON."""
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    chunk: Any = None
    """Type of what 200 streams, where the client asks for a stream; None: there is no stream."""
    media_type: str = JSON
    """The media type of the answer 200."""
    body_media_type: str = JSON
    others: Mapping[int, Any] = field(default_factory=dict)
    """Further answers than an error, by status."""
    names: Mapping[str, str] = field(default_factory=dict)
    """This client's names for fields of the .proto, as `failure_of` takes them."""
    dialect: Dialect = OPENAI
    can_resume: bool = False
    """A stream may be resumed by the id of its last event."""
    header: str = ""
    """Takes only requests that have this header, which another operation of the method and path would take."""


def routes_of(operations: Iterable[Operation]) -> list[Route]:
    """One route for all methods of a path, so that the refusal of another method names each."""
    by_path: dict[str, dict[str, dict[str, Handler]]] = {}
    for each in operations:
        by_header = by_path.setdefault(each.path, {}).setdefault(each.method, {})
        by_header[each.header] = guarded(each.handle, each.names, each.dialect)
    return [Route(path, _choose(endpoints), methods=list(endpoints)) for path, endpoints in by_path.items()]


def _choose(endpoints: Mapping[str, Mapping[str, Handler]]) -> Handler:
    """`endpoints` by method and header."""

    async def endpoint(request: Request) -> Answer:
        by_header = endpoints["GET" if request.method == "HEAD" else request.method]
        return await by_header[next((name for name in by_header if name in request.headers), "")](request)

    return endpoint


def new_app(operations: Sequence[Operation], more_routes: Sequence[Route], site: OwnSite) -> ASGIApp:
    """The application of all operations and routes, for requests that no other site has a browser send. What reaches
    none of them is refused as the API is told whose path it begins with."""
    dialects = {each.path: each.dialect for each in operations if each.dialect is not OPENAI}

    def refusal(request: Request, failure: HttpFailure) -> JSONResponse:
        path, request_id = request.url.path, _request_id(request)
        of_path = (dialect for own, dialect in dialects.items() if f"{path}/".startswith(f"{own}/"))
        return failed(next(of_path, OPENAI).failure(failure, request_id), request_id)

    async def not_found(request: Request, error: Exception) -> Response:
        """Refuses a path or a method that does not exist."""
        assert isinstance(error, HTTPException)
        reached = f"{request.method} {request.url.path[:200]}"
        said = f"{reached}: {error.detail.lower()}; see /openapi.json for what is served"
        code = "not_found" if error.status_code == 404 else "not_allowed"
        answer = refusal(request, HttpFailure(error.status_code, code, said))
        for name, value in (error.headers or {}).items():
            answer.headers[name] = ", ".join(sorted(value.split(", "))) if name.lower() == "allow" else value
        return answer

    app = Starlette(routes=[*routes_of(operations), *more_routes], exception_handlers={HTTPException: not_found})

    async def checked_app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            site.check(request.headers.get("host"), request.headers.get("origin"))
            _refuse_other_sites(request)
        except PermissionDenied as error:
            await refusal(request, failure_of(error))(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked_app


def _refuse_other_sites(request: Request) -> None:
    """Some browsers say which site asks where they send no Origin. Raises PermissionDenied."""
    if request.method != "GET" and request.headers.get("sec-fetch-site") == "cross-site":
        raise PermissionDenied("a browser sends this for another site; ask from a program, or from a page of this one")


def guarded(handle: Handler, names: Mapping[str, str] | None = None, dialect: Dialect = OPENAI) -> Handler:
    """Turns what a handler raises into an answer. `names` as in `failure_of`; a handler may set `request.state.names`
    once it knows the body."""

    async def endpoint(request: Request) -> Answer:
        request.state.request_id = request_id = _request_id(request)
        request.state.names = names or {}
        try:
            answer = await handle(request)
        except HttpFailure as error:
            failure = error
        except BatonError as error:
            failure = failure_of(error, request.state.names)
        except ClientDisconnect:
            return Response()  # that nobody reads
        except TimeoutError:
            failure = HttpFailure(408, "timeout", "the body did not come in time; send it at once")
        except Exception:
            log.exception("%s failed", request.url.path)
            failure = failure_of(router_failed())
        else:
            if isinstance(answer, Response):
                answer.headers.update(id_headers(request_id))
            return answer
        return failed(dialect.failure(failure, request_id), request_id)

    return endpoint


def failed(failure: HttpFailure, request_id: str) -> JSONResponse:
    headers = failure.headers | id_headers(request_id)
    return JSONResponse(failure.body, status_code=failure.status, headers=headers)


def id_headers(request_id: str) -> dict[str, str]:
    """The request's id as OpenAI's clients read it, and as Anthropic's do."""
    return {"x-request-id": request_id, "request-id": request_id}


def _request_id(request: Request) -> str:
    """The client's own, where it can be sent back."""
    given = request.headers.get("x-request-id", "")
    is_good = 0 < len(given) <= LONGEST_NAME and given.isascii() and given.isprintable()
    return given if is_good else f"req-{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Reception:
    """Takes calls in: whose they are, and what is in their bodies."""

    gate: Gate
    max_body_bytes: int
    stalled_client_s: float
    """A client that sends nothing more of its body for so long is given up."""

    def check(self, request: Request, service: str = GENERATION) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        self.gate.check(_headers_of(request), service)

    def call(self, request: Request) -> Call:
        """Raises Unauthenticated, also for a key that was revoked since it was checked."""
        headers = _headers_of(request)
        return Call(principal_of(self.gate.key_of(headers)), headers)

    def principal(self, request: Request) -> Principal:
        """The client of a checked request. Raises Unauthenticated or PermissionDenied."""
        self.check(request)
        return self.call(request).principal

    async def read(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Reads a body, on a thread if it is long. Raises OutOfRange for one that is too large, and what `read_body`
        raises."""
        data = await read_body(request, self.max_body_bytes, self.stalled_client_s)
        return await run_aside(len(data) > INLINE_BYTES, lambda: read(data))


def _headers_of(request: Request) -> tuple[tuple[str, str], ...]:
    """With a key that came as Anthropic's clients send it where all others do."""
    headers, key = request.headers, request.headers.get("x-api-key")
    given = tuple(headers.items())
    return given if key is None or HEADER in headers else (*given, (HEADER, f"Bearer {key}"))


async def read_body(request: Request, most_bytes: int, stalled_client_s: float) -> bytes:
    """Raises InvalidRequest for a body that is compressed, OutOfRange for one that is too large, or says that it is
    going to be, TimeoutError when its client sends no more of it."""
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        raise InvalidRequest(f"the body is encoded as {encoding[:40]!r}; send it as it is, without Content-Encoding")
    if int(request.headers.get("content-length") or 0) > most_bytes:
        raise too_large(most_bytes)
    data = bytearray()
    async for part in parts_of(request, stalled_client_s):
        data += part
        if len(data) > most_bytes:
            raise too_large(most_bytes)
    return bytes(data)


def too_large(most_bytes: int) -> OutOfRange:
    return OutOfRange(f"the body is larger than {most_bytes} bytes, which is the most taken here")


async def parts_of(request: Request, stalled_client_s: float) -> AsyncGenerator[bytes, None]:
    """The parts of a body as they come. Raises TimeoutError when no more of it comes, or it comes more slowly than
    LEAST_BYTES_PER_S."""
    parts, now = request.stream(), asyncio.get_running_loop().time
    until = now() + stalled_client_s
    while True:
        async with asyncio.timeout_at(min(until, now() + stalled_client_s)):
            part = await anext(parts, None)
        if part is None:
            return
        until += len(part) / LEAST_BYTES_PER_S
        yield part


def json_of(data: bytes) -> object:
    """The JSON of a body. Raises InvalidRequest."""
    try:
        return read_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8, or nests deeper than {MOST_LEVELS} levels") from error


def parse(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequest."""
    return checked(json_of(data), kind)


def checked_texts(found: Mapping[str, object], kind: type[Body]) -> Body:
    """The fields of a query or a form, in which numbers are texts, as `kind`. Raises InvalidRequest."""
    fields = kind.model_fields.items()
    numbers = {each.alias or name for name, each in fields if int in (each.annotation, *get_args(each.annotation))}
    return checked({name: _number(value) if name in numbers else value for name, value in found.items()}, kind)


def _number(value: object) -> object:
    is_number = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
    return int(str(value)) if is_number else value


def checked(found: object, kind: type[Body]) -> Body:
    """Returns what a client sent, as `kind`. Raises InvalidRequest."""
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        found = [dict(each) for each in error.errors(include_url=False)]
        # Another field may be missing for the sake of one that is not known; of the kinds that a field may have, the
        # one that was meant has another fault than its kind.
        found.sort(key=lambda each: (each["type"] != "extra_forbidden", str(each["type"]).endswith("_type")))
        raise invalid(tuple(map(_violation, found[:MOST_FOUND]))) from error


def _violation(error: dict[str, Any]) -> FieldViolation:
    """An error of pydantic; texts that were sent are not repeated."""
    path = error["loc"]
    names = [part for part in path if isinstance(part, int) or _is_field(part)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")[:_LONGEST_PATH]
    name = name or "body"
    if error["type"] == "extra_forbidden":
        return FieldViolation(name, "is not a field that is known here; leave it out")
    if error["type"] == "missing":
        return FieldViolation(name, "must be set")
    if error["type"] == "is_instance_of":
        return FieldViolation(name, "must be a file, with a file name")
    if error["type"] in _BOUNDS:
        words, bound = _BOUNDS[error["type"]]
        return FieldViolation(name, f"must be {words} {error['ctx'][bound]} (got {shown(error['input'])})")
    if error["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return FieldViolation(name, "must be an object")
    return FieldViolation(name, str(error["msg"]).removeprefix("Input "))


def _is_field(part: object) -> bool:
    """pydantic puts the tried type of a union, such as `list[str]`, into a path; those are no names of fields."""
    return isinstance(part, str) and bool(_NAME.fullmatch(part)) and part.partition("[")[0] not in _TYPES


_NAME = re.compile(r"\w+(\[\w+\])?")
_TYPES = {"str", "int", "float", "bool", "list"}
_BOUNDS = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
_LONGEST_PATH = 256
