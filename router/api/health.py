"""The router's health and reflection services.

Those of the libraries take bytes that are no message for a fault of the server, and their health stops watching for
every client as soon as one of them leaves. Here health is an ordinary service of ours, and reflection reads such bytes
as an empty question, which it answers with an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cluster.errors import NotFound
from router.api.call import Call

HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
_STATUS = health_pb2.HealthCheckResponse


class HealthService:
    """One state for all services of `names`; watchers are sent each change."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._is_serving = False
        self._changed = asyncio.Event()

    def set(self, *, is_serving: bool) -> None:
        if is_serving is not self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, call: Call) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            raise NotFound("no such service here; ask for the health of the whole server with an empty name")
        return _STATUS(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, call: Call) -> None:
        """Runs until the client leaves or the server stops. The protocol lets clients watch services that do not
        exist."""
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                await call.write(_STATUS(status=status))
                sent = status
            await changed.wait()

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(_STATUS.SERVICE_UNKNOWN)
        return int(_STATUS.SERVING if self._is_serving else _STATUS.NOT_SERVING)


def reflection_handler(names: Iterable[str]) -> grpc.GenericRpcHandler:  # type: ignore[type-arg]  # in the stubs only
    """Lists these services, by their full names, and reflection itself."""
    servicer = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME])  # type: ignore[attr-defined]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=_question,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})


def _question(data: bytes) -> reflection_pb2.ServerReflectionRequest:
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()
