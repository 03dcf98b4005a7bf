"""How a service of ours becomes gRPC handlers: safe decoding before each method, a typed status after a failed one.

Owns the boundary where exceptions turn into statuses; nothing else in the router touches a context's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from cluster import rpc
from cluster.errors import BatonError, InternalError, Overloaded
from router.api.message_parser import Malformed, decoder
from router.api.violations import invalid

log = logging.getLogger(__name__)

_FAREWELL_S = 1.0
"""A client that does not read is not waited for any longer to take its status."""


class ClientStalled(Overloaded):
    """The client does not take what is written to it."""

    reason = "CLIENT_STALLED"


Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Message | None]]


def service_handler(
    service: ServiceDescriptor, servicer: object, *, max_message_bytes: int
) -> grpc.GenericRpcHandler[Any, Any]:
    """Handlers for every method of `service`, each an async method of `servicer` with the same name.

    A unary method returns its response; a streaming one writes to the context and returns None. Both may raise
    BatonError.
    """
    methods = {
        method.name: _method_handler(method, getattr(servicer, method.name), max_message_bytes)
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _method_handler(method: MethodDescriptor, implementation: Method, max_message_bytes: int) -> Any:
    request = message_factory.GetMessageClass(method.input_type)
    response = message_factory.GetMessageClass(method.output_type)
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    guarded: Any = _guarded(method.full_name, implementation)
    decode = decoder(request, max_message_bytes)
    return make(guarded, request_deserializer=decode, response_serializer=response.SerializeToString)


def _guarded(name: str, implementation: Method) -> Method:
    async def call(request: Message | Malformed, context: Context) -> Message | None:
        try:
            if isinstance(request, Malformed):
                raise invalid(request.violations)
            return await implementation(request, context)
        except BatonError as error:
            failure = error
        except Exception:
            log.exception("%s failed", name)
            failure = InternalError("the router failed on this request; its log says why")
        if not isinstance(failure, ClientStalled):
            await rpc.abort(context, failure)
        with contextlib.suppress(TimeoutError):  # gRPC keeps the status for when the client reads
            async with asyncio.timeout(_FAREWELL_S):
                await rpc.abort(context, failure)
        return None

    return call
