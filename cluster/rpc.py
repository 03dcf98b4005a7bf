"""gRPC as every Baton process uses it: where servers may listen, channel options, and how errors cross the wire.

An error is always a gRPC status with `google.rpc` details in the `grpc-status-details-bin` trailer (ErrorInfo with our
reason, BadRequest for wrong fields, QuotaFailure for a quota, RetryInfo when a retry helps); `from_rpc_error` turns it
back into the same exception. Knows no service and no message of Baton.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from cluster import errors
from cluster.address import PortSharing, format_address, is_loopback, listen_error
from cluster.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    FieldViolation,
    InternalError,
    NotReachable,
    QuotaExceeded,
)
from cluster.tls import ClientTls, ServerTls, require_tls

__all__ = [
    "DETAILS_KEY",
    "DOMAIN",
    "INTERNAL_MESSAGE_BYTES",
    "PUBLIC_MESSAGE_BYTES",
    "CallGate",
    "OpenChannel",
    "ServerLimits",
    "abort",
    "channel_options",
    "create_blocking_channel",
    "create_channel",
    "create_server",
    "format_address",
    "from_rpc_error",
    "is_loopback",
    "server_options",
    "status_of",
]

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message that a public server accepts by default."""
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message between Baton's own processes, and the largest answer that a client accepts."""

# gRPC clients drop a response whose trailers exceed 8 KiB: the message travels percent-encoded, the details as base64.
_MAX_TEXT_BYTES = 600
_MAX_DETAILS_BYTES = 3000

_PING_EVERY_MS = 10_000
_PING_TIMEOUT_MS = 5_000
"""Until anything has to be heard after a ping, and until its answer: gRPC would wait for that for a minute, and send no
other ping meanwhile."""
_HANDSHAKE_MS = 10_000
"""From a connection to the client's first HTTP/2 settings, TLS included."""
_IDLE_MS = 300_000
"""A connection without a call is closed after so long; gRPC's clients connect again by themselves."""

_BACKOFF = {"maxAttempts": 4, "initialBackoff": "0.05s", "maxBackoff": "0.5s", "backoffMultiplier": 2}
_RETRY = _BACKOFF | {"retryableStatusCodes": ["CANCELLED"]}
_MADE_AGAIN = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": _RETRY}]})
"""A server that closes its port ends a call that comes at that moment, and that it has not begun, with CANCELLED: the
client makes such a call again. Where Baton itself says CANCELLED, it forbids that."""
_NOT_AGAIN = (("grpc-retry-pushback-ms", "-1"),)

ChannelOptions = list[tuple[str, Any]]


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on what the clients of a public server hold."""

    max_connections: int
    """Beyond these, gRPC closes a new one."""
    max_streams: int
    """Calls of one connection at one time; its client keeps further ones back."""


def server_options(
    max_message_bytes: int = PUBLIC_MESSAGE_BYTES,
    limits: ServerLimits | None = None,
    sharing: PortSharing = PortSharing.NONE,
) -> ChannelOptions:
    """A client that vanished is noticed by keepalive, and one that connects and does not speak HTTP/2 is closed."""
    limited = []
    if limits is not None:
        limited = [
            ("grpc.max_allowed_incoming_connections", limits.max_connections),
            ("grpc.max_concurrent_streams", limits.max_streams),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
        ]
    return [
        *limited,
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.so_reuseport", int(sharing is not PortSharing.NONE)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", _PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_EVERY_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(max_message_bytes: int = INTERNAL_MESSAGE_BYTES) -> ChannelOptions:
    """Never through an HTTP proxy; a peer that vanished is noticed within 15 s even while nothing is sent.

    `min_reconnect_backoff_ms` is gRPC's name for how long one attempt to connect may take.
    """
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", _PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
    ]


def create_server(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    insecure: bool = False,
    tls: ServerTls | None = None,
    max_message_bytes: int = PUBLIC_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    limits: ServerLimits | None = None,
    sharing: PortSharing = PortSharing.NONE,
) -> tuple[grpc.aio.Server, int]:
    """A server bound to `host:port` (0: any free port) and the port it got; add services, then `await server.start()`.

    Call it inside the running event loop. Raises ConfigError for an address that is not loopback, without `tls` and not
    allowed by `insecure`; for one that cannot be bound; and for files of `tls` that cannot be used.
    """
    require_tls("listen", host, tls, insecure=insecure)
    credentials = None if tls is None else tls.credentials()
    server = grpc.aio.server(interceptors=interceptors, options=server_options(max_message_bytes, limits, sharing))
    address = format_address(host, port)
    refused = f"cannot listen on {address}: it is in use or not an address of this machine; choose another port or host"
    if sharing is PortSharing.FIRST and port and listen_error(host, port) is not None:
        raise ConfigError(refused)
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise ConfigError(refused) from error
    if bound == 0:
        raise ConfigError(refused)
    return server, bound


def create_channel(
    address: str,
    *,
    tls: ClientTls | None = None,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    is_alone: bool = False,
) -> grpc.aio.Channel:
    """A channel for asyncio code; it connects at first use and again by itself.

    `is_alone`: on a connection of its own. Channels to one address share one otherwise, and with it how long to wait
    before the next attempt after one that failed. Raises ConfigError for files of `tls` that cannot be used.
    """
    options = channel_options(max_message_bytes)
    if is_alone:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options + tls.options)


class OpenChannel(Protocol):
    """Opens channels as `create_channel` does; in a simulated cluster they lead to workers of the same process."""

    def __call__(self, address: str, *, tls: ClientTls | None = None, is_alone: bool = False) -> grpc.aio.Channel: ...


def create_blocking_channel(
    address: str,
    *,
    tls: ClientTls | None = None,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    is_alone: bool = False,
) -> grpc.Channel:
    """A channel for blocking code; see `create_channel`. A call that a server has not begun because it was closing its
    port is made again."""
    options = [*channel_options(max_message_bytes), ("grpc.service_config", _MADE_AGAIN)]
    if is_alone:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options + tls.options)


def status_of(error: BatonError) -> status_pb2.Status:
    """The google.rpc.Status of an error, cut so that it fits into a response's trailers."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        details.append(retry)
    if isinstance(error, QuotaExceeded):
        details.append(_quota_failure(error.violations))
    elif error.violations:
        details.append(_bad_request(error.violations))
    if error.timing is not None:
        details.append(error.timing)
    code: int = _code(error.grpc_code).value[0]
    return status_pb2.Status(code=code, message=_clip(error.message), details=[_pack(detail) for detail in details])


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call with the error's status; never returns."""
    status = status_of(error)
    trailers: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status.SerializeToString()),)
    if error.grpc_code == Cancelled.grpc_code:
        trailers += _NOT_AGAIN
    await context.abort(_code(error.grpc_code), status.message, trailing_metadata=trailers)
    raise AssertionError("abort returned")


def refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """Ends a call of any kind at once: it reads none of the messages that may come."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """The exception that the server aborted with, from an error of a blocking or an asyncio call.

    A peer that could not be reached, or was lost, is NotReachable.
    """
    status = _status_in(error)
    details = _Details.of(status)
    code: str = error.code().name
    message: str = (status.message if status else "") or error.details() or f"the call failed with {code}"
    if details.reason is None and code == "UNAVAILABLE":
        return NotReachable(message)
    kind = _BY_REASON.get((details.reason or "", code)) or _BY_CODE.get(code, InternalError)
    return kind(message, violations=details.violations, retry_after_s=details.retry_after_s)


class CallGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets a call through to its method, or ends it before its message is read."""

    @abstractmethod
    def check_call(self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises BatonError for a call that may not go on; `service` is its full name."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        service, _, method = handler_call_details.method.lstrip("/").rpartition("/")
        try:
            self.check_call(service, method, handler_call_details.invocation_metadata or ())
        except BatonError as error:
            return refusal(error)
        return await continuation(handler_call_details)


def _code(name: str) -> grpc.StatusCode:
    return grpc.StatusCode[name]


def _clip(text: str, limit: int = _MAX_TEXT_BYTES) -> str:
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= limit else data[: limit - 4].decode("utf-8", "ignore") + " …"


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _bad_request(violations: Iterable[FieldViolation]) -> error_details_pb2.BadRequest:
    """Returns as many violations as fit; the first always does."""
    bad = error_details_pb2.BadRequest()
    for violation in violations:
        entry = bad.field_violations.add(field=_clip(violation.field, 200), description=_clip(violation.description))
        if bad.ByteSize() > _MAX_DETAILS_BYTES - _MAX_TEXT_BYTES - 200:
            bad.field_violations.remove(entry)
            break
    return bad


def _quota_failure(violations: Iterable[FieldViolation]) -> error_details_pb2.QuotaFailure:
    """One for each limit, of which there are few."""
    failure = error_details_pb2.QuotaFailure()
    for violation in violations:
        failure.violations.add(subject=_clip(violation.field, 200), description=_clip(violation.description))
    return failure


class _Details:
    """The details of a status, without those of unknown types."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.violations: tuple[FieldViolation, ...] = ()
        self.retry_after_s: float | None = None

    @classmethod
    def of(cls, status: status_pb2.Status | None) -> _Details:
        found = cls()
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        quota = error_details_pb2.QuotaFailure()
        for detail in status.details if status else ():
            if detail.Unpack(info):
                found.reason = info.reason
            elif detail.Unpack(bad):
                found.violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
            elif detail.Unpack(quota):
                found.violations = tuple(FieldViolation(v.subject, v.description) for v in quota.violations)
            elif detail.Unpack(retry):
                found.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        return found


def _status_in(error: grpc.RpcError) -> status_pb2.Status | None:
    """The status in the trailers; None when there is none, or one that is not a google.rpc.Status (a proxy's, say)."""
    trailers: Any = error.trailing_metadata()
    for key, value in trailers or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _kinds() -> list[type[BatonError]]:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, BatonError)]
    return [kind for kind in kinds if kind not in (BatonError, NotReachable)]


_BY_REASON = {(kind.reason, kind.grpc_code): kind for kind in _kinds()}
_BY_CODE = {kind.grpc_code: kind for kind in reversed(_kinds()) if kind.grpc_code != BatonError.grpc_code}
"""The error class for each status code; of several with one code, the first, which says least."""
