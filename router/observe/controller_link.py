"""The router's connection to the controller, for operators who use its page: each call carries the caller's own key.

The controller sends its address itself (`ControlService.SetWorkers`); a router that was started by hand has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cluster import rpc
from cluster.auth import HEADER
from cluster.errors import BatonError, DeadlineExceeded, FailedPrecondition, Unavailable
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.protocol import inside_metadata
from cluster.tls import ClientTls

_LOOK_S = 1.0
"""The page shows that the controller does not answer rather than wait for it."""
_CHANGE_S = 10.0
_FRESH_S = 0.5
"""A response is reused for this long, whoever asks."""

Headers = tuple[tuple[str, str], ...]


class ControllerLink:
    """Used in one event loop; `close` it there. Errors of calls are BatonErrors."""

    def __init__(self, admin_address: Callable[[], str], tls: ClientTls | None, token: str = "") -> None:
        """`admin_address` returns the controller's, empty: there is none. `tls`, `token`: the cluster's own, if any."""
        self._inside = inside_metadata(token)
        self._admin_address = admin_address
        self._tls = tls
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._asking = asyncio.Lock()
        self._last: tuple[float, admin_pb2.GetClusterResponse | BatonError] | None = None

    @property
    def is_there(self) -> bool:
        return bool(self._admin_address())

    async def cluster(self, headers: Headers) -> admin_pb2.GetClusterResponse:
        """Returns a fresh enough response, or raises the error that stands for one. The caller must be allowed to see
        the cluster: a response to somebody else's key is reused."""
        async with self._asking:
            is_same = self._admin_address() == self._address
            if self._last is None or not is_same or time.monotonic() - self._last[0] > _FRESH_S:
                self._last = None
                response = await self._ask(headers)
                self._last = (time.monotonic(), response)
            response = self._last[1]
        if isinstance(response, BatonError):
            raise response
        return response

    async def _ask(self, headers: Headers) -> admin_pb2.GetClusterResponse | BatonError:
        """Returns an error that does not depend on who asks; raises others."""
        stub = await self._stub()
        call = stub.GetCluster(admin_pb2.GetClusterRequest(), timeout=_LOOK_S, metadata=self._shown(headers))
        try:
            response: admin_pb2.GetClusterResponse = await _response(call)
        except (Unavailable, DeadlineExceeded) as error:
            return error
        return response

    async def set_roles(self, request: admin_pb2.SetRolesRequest, headers: Headers) -> admin_pb2.ChangeResponse:
        stub = await self._stub()
        response: admin_pb2.ChangeResponse = await _response(
            stub.SetRoles(request, timeout=_CHANGE_S, metadata=self._shown(headers))
        )
        self._last = None
        return response

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    def _shown(self, headers: Headers) -> Headers:
        """The caller's own key, and that this is a router of the cluster."""
        return (*((name, value) for name, value in headers if name == HEADER), *self._inside)

    async def _stub(self) -> Any:
        address = self._admin_address()
        if not address:
            raise FailedPrecondition("this router has no controller; a cluster of `baton serve` has one")
        if address != self._address or self._channel is None:
            before, self._address = self._channel, address
            self._channel = rpc.create_channel(address, tls=self._tls)
            if before is not None:
                await before.close(_CHANGE_S)
        return admin_pb2_grpc.AdminServiceStub(self._channel)


async def _response(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from error
