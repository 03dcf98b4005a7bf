"""The router's way to the controller, for operators who look at its page: each call carries the caller's own key.

The controller names the address itself (`ControlService.SetWorkers`); a router that was started by hand has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import grpc

from cluster import rpc
from cluster.auth import HEADER
from cluster.errors import BatonError, DeadlineExceeded, FailedPrecondition, Unavailable
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.tls import ClientTls
from router.api.admin import ControlService

_LOOK_S = 1.0
"""The page would rather say that the controller does not answer than wait for it."""
_CHANGE_S = 10.0
_FRESH_S = 0.5
"""What it said serves everybody who looks within this time."""

Headers = tuple[tuple[str, str], ...]


class ControllerLink:
    """In one event loop; `close` it there. Errors of calls are BatonErrors."""

    def __init__(self, control: ControlService, tls: ClientTls | None) -> None:
        """`tls`: of the cluster's inside, if it has any."""
        self._control = control
        self._tls = tls
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._asking = asyncio.Lock()
        self._last: tuple[float, admin_pb2.GetClusterResponse | BatonError] | None = None

    @property
    def is_there(self) -> bool:
        return bool(self._control.admin_address)

    async def cluster(self, headers: Headers) -> admin_pb2.GetClusterResponse:
        """For callers who may see it: what another one was told just now, or that nobody answers, is told again."""
        async with self._asking:
            is_same = self._control.admin_address == self._address
            if self._last is None or not is_same or time.monotonic() - self._last[0] > _FRESH_S:
                self._last = None
                answer = await self._ask(headers)
                self._last = (time.monotonic(), answer)
            answer = self._last[1]
        if isinstance(answer, BatonError):
            raise answer
        return answer

    async def _ask(self, headers: Headers) -> admin_pb2.GetClusterResponse | BatonError:
        """An error is returned that has nothing to do with who asks."""
        stub = await self._stub()
        call = stub.GetCluster(admin_pb2.GetClusterRequest(), timeout=_LOOK_S, metadata=_key_of(headers))
        try:
            answer: admin_pb2.GetClusterResponse = await _answer(call)
        except (Unavailable, DeadlineExceeded) as error:
            return error
        return answer

    async def set_roles(self, request: admin_pb2.SetRolesRequest, headers: Headers) -> admin_pb2.ChangeResponse:
        stub = await self._stub()
        answer: admin_pb2.ChangeResponse = await _answer(
            stub.SetRoles(request, timeout=_CHANGE_S, metadata=_key_of(headers))
        )
        self._last = None
        return answer

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    async def _stub(self) -> Any:
        address = self._control.admin_address
        if not address:
            raise FailedPrecondition("this router has no controller; a cluster of `baton serve` has one")
        if address != self._address or self._channel is None:
            before, self._address = self._channel, address
            self._channel = rpc.create_channel(address, tls=self._tls)
            if before is not None:
                await before.close(_CHANGE_S)
        return admin_pb2_grpc.AdminServiceStub(self._channel)


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from error


def _key_of(headers: Headers) -> Headers:
    return tuple((name, value) for name, value in headers if name == HEADER)
