"""The page at `/`: the cluster as one router sees it, for people, and the split of the workers for an admin.

`/` is one file of HTML (`page.html`): it holds no data and needs no key. Once a second it asks for `/api/cluster`, the
documents of StatusService and AdminService, and `/api/roles` changes the split; both need a key with the scope admin
where there are keys. The controller changes the split, with the key of whoever asks, for requests from this page only:
not from another site that the operator's browser shows.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.address import is_loopback
from cluster.auth import Gate
from cluster.errors import BatonError, FieldViolation, InvalidRequest, OutOfRange, PermissionDenied
from cluster.pb import admin_pb2
from cluster.text import to_document
from router.api.call import Call
from router.api.violations import invalid
from router.observe.controller_link import ControllerLink
from router.openai.http import guarded

GetStatus = Callable[[admin_pb2.GetStatusRequest, Call], Awaitable[admin_pb2.GetStatusResponse]]
GetActivity = Callable[[admin_pb2.GetActivityRequest, Call], Awaitable[admin_pb2.GetActivityResponse]]

_STATUS = admin_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_NOT_STORED = {"cache-control": "no-store"}
_MOST_WORKERS = 99_999
_MOST_BODY_BYTES = 4096
_BODY_S = 5.0
_MOST_NUMBER = 2**63


class RolesBody(BaseModel):
    """The wanted number of workers of each role."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefill: int = Field(ge=0, le=_MOST_WORKERS)
    decode: int = Field(ge=0, le=_MOST_WORKERS)
    dry_run: bool
    """Plans and changes nothing."""
    expected_version: int = Field(default=0, ge=0, lt=_MOST_NUMBER)
    """0: whatever is current."""


class StatusPage:
    """`routes` are for the router's HTTP app."""

    def __init__(
        self,
        get_status: GetStatus,
        get_activity: GetActivity,
        controller: ControllerLink,
        gate: Gate,
        *,
        host: str,
        knows_callers: bool,
    ) -> None:
        """`host`: where HTTP listens. `knows_callers`: by a key or a certificate, so that not everybody is an admin."""
        self._get_status = get_status
        self._get_activity = get_activity
        self._controller = controller
        self._gate = gate
        self._knows_callers = knows_callers
        self._can_be_trusted = knows_callers or is_loopback(host)
        self._body, self._headers = load_page()
        self.routes = [
            Route("/", guarded(self._page), methods=["GET"]),
            Route("/api/cluster", guarded(self._cluster), methods=["GET"]),
            Route("/api/roles", guarded(self._set_roles), methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        return Response(self._body, headers=self._headers)

    async def _cluster(self, request: Request) -> Response:
        """`life`, `second` and `request` of the query name what the page has already."""
        self._check(request)
        query = request.query_params
        since = admin_pb2.GetActivityRequest(
            life=query.get("life", "")[:64],
            after_second=_number(query, "second"),
            after_request=_number(query, "request"),
        )
        status = await self._get_status(admin_pb2.GetStatusRequest(), Call())
        activity = await self._get_activity(since, Call())
        why_not = self._why_not()
        controller, problem = await self._ask_controller(request)
        document = {
            "version": version("baton"),
            "time": time.time(),
            "status": to_document(status),
            "activity": to_document(activity),
            "controller": controller,
            "change": {"may": not (why_not or problem), "why": why_not or problem},
        }
        return JSONResponse(document, headers=_NOT_STORED)

    async def _ask_controller(self, request: Request) -> tuple[dict[str, Any] | None, str]:
        """Returns what the controller reports, or why it does not; neither without a controller."""
        if not self._controller.is_there:
            return None, ""
        try:
            document = to_document(await self._controller.cluster(tuple(request.headers.items())))
        except BatonError as error:
            return None, f"the controller does not answer: {error.message}"
        del document["router"]  # the status of one router, which need not be this one
        return document, ""

    async def _set_roles(self, request: Request) -> Response:
        self._check(request)
        why_not = self._why_not()
        if why_not:
            raise PermissionDenied(why_not)
        self._refuse_other_sites(request)
        body = await _read(request)
        wanted = admin_pb2.SetRolesRequest(
            num_prefill=body.prefill,
            num_decode=body.decode,
            dry_run=body.dry_run,
            expected_version=body.expected_version,
        )
        response = await self._controller.set_roles(wanted, tuple(request.headers.items()))
        return JSONResponse(to_document(response), headers=_NOT_STORED)

    def _check(self, request: Request) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        self._gate.check(tuple(request.headers.items()), _STATUS)

    def _why_not(self) -> str:
        """Why the split cannot be changed here; empty: it can."""
        if not self._controller.is_there:
            return "This router was started without a controller, which changes splits; `baton serve` starts one."
        if not self._can_be_trusted:
            return (
                "Everybody who reaches this address could change the cluster; set auth.keys_file or tls.client_ca to "
                "change the split here, or use `baton rebalance`."
            )
        return ""

    def _refuse_other_sites(self, request: Request) -> None:
        """Raises PermissionDenied for a request that a browser sends for another site. Where there are no keys, a name
        that somebody has pointed at this machine is another site as well."""
        headers = request.headers
        host = headers.get("host", "")
        origin = headers.get("origin")
        is_foreign = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") or (
            origin is not None and origin.partition("://")[2] != host
        )
        if is_foreign:
            raise PermissionDenied("the split is changed from this router's own page only, not from another site")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise InvalidRequest("the body must be application/json")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not self._knows_callers and not is_loopback(name):
            raise PermissionDenied(
                f"without API keys the split is changed at a loopback address only, such as 127.0.0.1, not at {host!r}"
            )


def load_page() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers. Their policy lets a browser run the page's own script and style, by their
    digests, and nothing else, and talk to this router only."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    digests = {kind: _digest(content) for kind, content in _INLINE.findall(text)}
    policy = (
        "default-src 'none'",
        f"script-src 'sha256-{digests['script']}'",
        f"style-src 'sha256-{digests['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return text.encode(), headers


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _number(query: Any, name: str) -> int:
    """Reads a number of the query, 0 where there is none. Raises InvalidRequest."""
    text = query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise invalid((FieldViolation(name, "must be a whole number"),))
    return int(text)


async def _read(request: Request) -> RolesBody:
    """Raises InvalidRequest, OutOfRange, or TimeoutError for a client that stops sending."""
    data = bytearray()
    async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
            data += part
            if len(data) > _MOST_BODY_BYTES:
                raise OutOfRange(f"the body is larger than {_MOST_BODY_BYTES} bytes")
    try:
        return RolesBody.model_validate_json(bytes(data))
    except ValidationError as error:
        wrong = [(".".join(map(str, each["loc"])) or "body", each["msg"]) for each in error.errors(include_url=False)]
        raise invalid(tuple(FieldViolation(field, message) for field, message in wrong)) from error
