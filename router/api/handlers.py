"""Makes gRPC handlers of a service: safe decoding before each method, a typed status after a failed one.

Owns the boundary where bytes turn into messages and exceptions into statuses; nothing else in the router touches a
context's status. protobuf by itself silently keeps the last of two exclusive fields, and refuses text that is not UTF-8
without naming the field. Here both become field violations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from cluster import rpc
from cluster.address import PlacesPerNetwork, network_of
from cluster.auth import Gate
from cluster.errors import BatonError, FieldViolation, Overloaded
from router.api.call import INLINE_BYTES, Call, ClientStalled, principal_of
from router.api.violations import MOST_FOUND, invalid
from router.stream.failures import router_failed

log = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 1.0
"""A client that does not read is not waited for any longer to take its status."""
_RETRY_AFTER_S = 1.0
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 20_000
"""A scan ends after this many fields, so that a hostile message delays nobody else's request."""

Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Call], Awaitable[Message | None]]


class CallsPerAddress:
    """Bounds the calls that one address has at one time, however many connections it makes. `most` None: not."""

    def __init__(self, most: int | None) -> None:
        self._places = PlacesPerNetwork(most)

    def take(self, peer: str) -> bytes:
        """Takes a place for one call, and returns the network for `give_back`. Raises Overloaded.

        `peer` as gRPC names it: ipv4:HOST:PORT.
        """
        network = _network_of(peer.rpartition(":")[0])
        if not self._places.take(network):
            what = f"this address has {self._places.most} calls, and may have no more at one time"
            raise Overloaded(f"{what} (router.max_connections_per_address)", retry_after_s=_RETRY_AFTER_S)
        return network

    def give_back(self, network: bytes) -> None:
        self._places.give_back(network)


@lru_cache(maxsize=4096)
def _network_of(peer_host: str) -> bytes:
    """The network of `ipv4:HOST`. Cached: parsing an address takes longer than the rest of a place's accounting."""
    return network_of(unquote(peer_host.partition(":")[2]))


def service_handler(
    service: ServiceDescriptor,
    *servicers: object,
    max_message_bytes: int,
    gate: Gate | None = None,
    calls: CallsPerAddress | None = None,
) -> grpc.GenericRpcHandler[Any, Any]:
    """Handlers for every method of `service`, each an async method with the same name of one of `servicers`.

    A unary method returns its response; a streaming one writes to the call and returns None. Both may raise BatonError.
    `gate`: says whose call it is; without it that is anyone's. `calls`: None for no bound.
    """
    calls = calls or CallsPerAddress(None)
    names = {name: servicer for servicer in servicers for name in vars(type(servicer))}
    methods = {
        method.name: _method_handler(method, getattr(names[method.name], method.name), max_message_bytes, gate, calls)
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _method_handler(
    method: MethodDescriptor, implementation: Method, max_bytes: int, gate: Gate | None, calls: CallsPerAddress
) -> Any:
    request = message_factory.GetMessageClass(method.input_type)
    response = message_factory.GetMessageClass(method.output_type)
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    guarded: Any = _guarded(method.full_name, implementation, gate, calls)
    return make(
        guarded, request_deserializer=decoder(request, max_bytes), response_serializer=response.SerializeToString
    )


def _guarded(
    name: str, implementation: Method, gate: Gate | None, calls: CallsPerAddress
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def run(request: Message | Malformed, context: Context) -> Message | None:
        try:
            if isinstance(request, Malformed):
                raise invalid(request.violations)
            metadata = context.invocation_metadata() or ()
            principal = principal_of(None if gate is None else gate.key_of(metadata))
            network = calls.take(context.peer())
            try:
                return await implementation(request, Call(principal, metadata, _countdown(context), context.write))
            finally:
                calls.give_back(network)
        except BatonError as error:
            failure = error
        except Exception:
            log.exception("%s failed", name)
            failure = router_failed()
        if not isinstance(failure, ClientStalled):
            await rpc.abort(context, failure)
        with contextlib.suppress(TimeoutError):  # gRPC keeps the status for when the client reads
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                await rpc.abort(context, failure)
        return None

    return run


def _countdown(context: Context) -> Callable[[], float | None]:
    """Time left for a call. gRPC's own goes by the wall clock, which may be set meanwhile."""
    left_s, began_at = context.time_remaining(), time.monotonic()
    return lambda: None if left_s is None else max(0.0, began_at + left_s - time.monotonic())


@dataclass(frozen=True)
class Malformed:
    """Bytes that are not a request."""

    violations: tuple[FieldViolation, ...]


def decoder(kind: type[Message], max_bytes: int) -> Callable[[bytes], Message | Malformed]:
    """A request deserializer that never raises. More than `max_bytes` are refused unread."""
    descriptor: Any = kind.DESCRIPTOR

    def decode(data: bytes) -> Message | Malformed:
        if len(data) > max_bytes:
            too_large = f"a message of {len(data)} bytes is too large: at most {max_bytes} are accepted"
            return Malformed((FieldViolation("request", too_large),))
        message: Message | None = None
        with contextlib.suppress(DecodeError):
            message = kind.FromString(data)
        if message is not None and len(data) <= INLINE_BYTES and message.SerializeToString() == data:
            return message  # nothing was dropped, so no two fields exclude each other: quicker to see than by a scan
        doubled = tuple(islice(_Scan(data, for_text=False).violations(descriptor), MOST_FOUND))
        if doubled:
            return Malformed(doubled)
        if message is not None:
            return message
        found = tuple(islice(_Scan(data, for_text=True).violations(descriptor), MOST_FOUND))
        unreadable = FieldViolation("request", f"its bytes are not a {descriptor.full_name}")
        return Malformed(found or (unreadable,))

    return decode


class _Scan:
    """One walk over the wire format, led by descriptors. Bytes it cannot follow end it: the parser judges those."""

    def __init__(self, data: bytes, *, for_text: bool) -> None:
        self._data = data
        self._for_text = for_text
        self._fields_left = _MOST_FIELDS

    def violations(self, descriptor: Descriptor) -> Iterator[FieldViolation]:
        try:
            yield from self._message(descriptor, 0, len(self._data), "")
        except IndexError:
            return

    def _message(self, descriptor: Descriptor, at: int, end: int, path: str) -> Iterator[FieldViolation]:
        """Raises IndexError where the bytes cannot be followed."""
        chosen: dict[str, str] = {}
        counts: dict[str, int] = {}
        while at < end and self._fields_left:
            self._fields_left -= 1
            tag, at = self._varint(at)
            start, at = self._value(tag & 7, at, end)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is None:
                continue
            name = f"{path}.{field.name}" if path else field.name
            if field.is_repeated:
                counts[name] = index = counts.get(name, -1) + 1
                name = f"{name}[{index}]"
            if field.containing_oneof is not None:
                other = chosen.setdefault(field.containing_oneof.name, name)
                if other != name:
                    yield FieldViolation(name, f"excludes {other}: set exactly one of them")
            yield from self._inside(field, start, at, name)

    def _inside(self, field: FieldDescriptor, start: int, end: int, name: str) -> Iterator[FieldViolation]:
        if field.type == FieldDescriptor.TYPE_STRING:
            if self._for_text and not _is_utf8(self._data[start:end]):
                yield FieldViolation(name, "is not valid UTF-8")
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            is_ours = field.message_type.file.package.startswith("baton.") and not _is_map_entry(field)
            if is_ours:
                yield from self._message(field.message_type, start, end, name)
            elif self._for_text:  # a Struct, say: the client knows it as one value
                for found in self._message(field.message_type, start, end, name):
                    yield FieldViolation(name, found.description)

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                raise IndexError("a varint has at most ten bytes")

    def _value(self, wire_type: int, at: int, end: int) -> tuple[int, int]:
        """(where the value's content starts, where it ends)."""
        if wire_type == _VARINT:
            start, stop = at, self._varint(at)[1]
        elif wire_type == _BYTES:
            length, start = self._varint(at)
            stop = start + length
        elif wire_type in (_FIXED64, _FIXED32):
            start, stop = at, at + (8 if wire_type == _FIXED64 else 4)
        else:
            raise IndexError(f"wire type {wire_type} is not used here")
        if stop > end:
            raise IndexError("a field ends behind its message")
        return start, stop


def _is_map_entry(field: FieldDescriptor) -> bool:
    return bool(field.message_type.GetOptions().map_entry)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
