"""The paths of the page: `/`, and under `/api` what it shows and what it asks for.

`/` holds no data and asks nobody who they are. `/api` wants a key with the scope admin where there are keys. The split
is changed by an admin only, from this page only: not by another site that the operator's browser happens to show.
"""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.address import is_loopback
from cluster.auth import Gate
from cluster.errors import BatonError, FieldViolation, InvalidRequest, OutOfRange, PermissionDenied
from cluster.pb import admin_pb2
from router.api.admin import StatusService
from router.api.call import Call
from router.api.violations import invalid
from router.observe.page import document
from router.observe.page.controller_link import ControllerLink
from router.observe.page.html import load_page
from router.openai.http import guarded

_STATUS = admin_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
_MOST_WORKERS = 99_999
_MOST_BODY_BYTES = 4096
_BODY_S = 5.0
_MOST_NUMBER = 2**63


class RolesBody(BaseModel):
    """How many workers each role shall have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefill: int = Field(ge=0, le=_MOST_WORKERS)
    decode: int = Field(ge=0, le=_MOST_WORKERS)
    dry_run: bool
    """Plans and changes nothing."""
    expected_version: int = Field(default=0, ge=0, lt=_MOST_NUMBER)
    """0: whatever is current."""


class StatusPage:
    """`routes` are for the HTTP door."""

    def __init__(
        self, status: StatusService, controller: ControllerLink, gate: Gate, *, host: str, knows_callers: bool
    ) -> None:
        """`host`: where HTTP listens. `knows_callers`: by a key or a certificate, so that not everybody is an admin."""
        self._status = status
        self._controller = controller
        self._gate = gate
        self._is_open = not knows_callers
        self._is_closed_door = knows_callers or is_loopback(host)
        self._body, self._headers = load_page()
        self.routes = [
            Route("/", guarded(self._page), methods=["GET"]),
            Route("/api/cluster", guarded(self._cluster), methods=["GET"]),
            Route("/api/roles", guarded(self._set_roles), methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        return Response(self._body, headers=self._headers)

    async def _cluster(self, request: Request) -> Response:
        """`life`, `second` and `request` of the query name what the page has: the rest is told."""
        self._check(request)
        query = request.query_params
        since = admin_pb2.GetActivityRequest(
            life=query.get("life", "")[:64],
            after_second=_number(query, "second"),
            after_request=_number(query, "request"),
        )
        status = await self._status.GetStatus(admin_pb2.GetStatusRequest(), Call())
        activity = await self._status.GetActivity(since, Call())
        why_not = self._why_not()
        controller, problem = await self._ask_controller(request)
        told = {
            "version": version("baton"),
            "time": time.time(),
            "router": document.router_part(status),
            "workers": document.workers_part(status, activity.rates),
            "activity": document.activity_part(activity),
            "controller": controller,
            "change": {"may": not (why_not or problem), "why": why_not or problem},
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})

    async def _ask_controller(self, request: Request) -> tuple[document.Json | None, str]:
        """What it says, or why it says nothing; neither without a controller."""
        if not self._controller.is_there:
            return None, ""
        try:
            return document.controller_part(await self._controller.cluster(tuple(request.headers.items()))), ""
        except BatonError as error:
            return None, f"the controller does not answer: {error.message}"

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
        answer = await self._controller.set_roles(wanted, tuple(request.headers.items()))
        return JSONResponse(document.change_part(answer), headers={"cache-control": "no-store"})

    def _check(self, request: Request) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        self._gate.check(tuple(request.headers.items()), _STATUS)

    def _why_not(self) -> str:
        """The split cannot be changed here; empty: it can."""
        if not self._controller.is_there:
            return "This router was started without a controller, which changes splits; `baton serve` starts one."
        if not self._is_closed_door:
            return (
                "Everybody who reaches this address could change the cluster; set auth.keys_file or tls.client_ca to "
                "change the split here, or use `baton rebalance`."
            )
        return ""

    def _refuse_other_sites(self, request: Request) -> None:
        """A browser says which site a request comes from; where there are no keys, a name that somebody has pointed at
        this machine is another site, too. Raises PermissionDenied."""
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
        if self._is_open and not is_loopback(name):
            raise PermissionDenied(
                f"without API keys the split is changed at a loopback address only, such as 127.0.0.1, not at {host!r}"
            )


def _number(query: Any, name: str) -> int:
    """Of the query; 0 where there is none. Raises InvalidRequest."""
    text = query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise invalid((FieldViolation(name, "must be a whole number"),))
    return int(text)


async def _read(request: Request) -> RolesBody:
    """Raises InvalidRequest, OutOfRange, or TimeoutError for a client that does not send on."""
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
