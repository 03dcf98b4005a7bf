"""The router's HTTP port: uvicorn on a socket that bounds its connections, and gives none of them for ever.

    accepted -> (too many: 503, closed) -> head, in time -> body, at a rate -> answer -> idle, for a time -> closed

Connections count from when they are accepted, before a TLS handshake, until they are closed. The times of a body are
those of who reads it (`router.openai.http`), and so are those of an answer that nobody takes. Knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.address import PlacesPerNetwork, PortSharing, format_address, listen_error, network_of
from cluster.config.schema import RouterSection
from cluster.errors import ConfigError
from cluster.program import Report, raise_file_limit
from cluster.tls import ServerTls, require_tls
from router.openai.errors import HttpFailure

_BACKLOG = 2048
_AT_ONCE = 64
"""So many connections are accepted, or refused, before the event loop does something else."""
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Nothing can be accepted for the moment; connections wait in the backlog."""
_IDLE_S = 75.0
"""A connection without a request is kept for so long: longer than clients keep theirs."""
_SEND_BYTES = 64 * 1024
"""Size of the kernel's buffer for a client that does not read (the kernel doubles it); uvicorn holds as much itself."""
_ABANDONED_S = 1.0
"""After a stream was given up, its connection stays for so long if nothing more is taken from it."""
_GRACE_S = 1
"""Requests are drained before the end; connections get so long to read what was written."""
_RETRY_AFTER_S = 1.0
_OWN_FILES = 512
"""Files and connections of the router itself: workers, stores, logs."""

_MOST_RUNNING = 4096
"""Calls of one connection that may run where the workers alone say how many do."""
_MORE_CALLS = 256
"""Calls of one connection beside those that may run and wait: of other methods, and to be refused by name."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections that are open at one time, and on the calls of one over gRPC."""

    most: int
    most_of_address: int | None = None
    """From one address; None: as many as in all."""
    most_calls: int = _MORE_CALLS

    @classmethod
    def of(cls, wanted: RouterSection, report: Report) -> Self:
        """The limits of a configuration, as far as this process may open files; reports it where they are lower."""
        may_open = raise_file_limit()
        most = min(wanted.max_connections, max(1, (may_open - _OWN_FILES) // 2))
        if most < wanted.max_connections:
            report(
                f"takes {most} connections of each API, not {wanted.max_connections}: this process may open {may_open} "
                "files; raise the hard limit (ulimit -Hn)"
            )
        most_calls = (wanted.max_running_requests or _MOST_RUNNING) + wanted.max_queued_requests + _MORE_CALLS
        return cls(most, wanted.max_connections_per_address, most_calls)


class HttpListener:
    """Lives in one event loop: `start`, then `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        insecure: bool,
        tls: ServerTls | None,
        stalled_client_s: float,
        limits: ConnectionLimits,
        sharing: PortSharing = PortSharing.FIRST,
    ) -> None:
        """Binds; `port` 0: any free one. Raises ConfigError for an address that is refused or cannot be had.

        `stalled_client_s`: a connection whose other end takes nothing for so long is closed, and so is one that does
        not send the head of a request within this time.
        """
        require_tls("serve HTTP", host, tls, insecure=insecure)
        refusal = b"" if tls is not None else _response(_too_many(limits))
        self._socket = _Listener(socket.AF_INET6 if ":" in host else socket.AF_INET, limits, refusal)
        _bind(self._socket, host, port, stalled_client_s, sharing)
        self.address = format_address(host, self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # a client that does not speak HTTP is not logged
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=int(_IDLE_S),
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        logging.getLogger("uvicorn.error").addFilter(_is_event)
        config.ssl = None if tls is None else tls.context()
        protocol: Any = functools.partial(_Connection, head_s=stalled_client_s)
        config.http_protocol_class = protocol
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Clients can connect already; from now on they are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    def close_port(self) -> None:
        """Takes no new connection. Those without a request are closed, the others after their answer."""
        if not self._server.started:
            return
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """Closes a connection whose client owes bytes for too long: the head of a request, or the rest of a body that was
    answered already. uvicorn itself waits for ever once the first byte has come."""

    def __init__(self, *, head_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_s = head_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._clear_deadline()
        else:
            self._set_deadline()

    def _set_deadline(self) -> None:
        """Keeps one that is set: bytes that trickle in do not move it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._head_s, self._give_up)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        has_begun = bool(self.conn.trailing_data[0])
        if has_begun and self.conn.our_state is h11.IDLE:
            message = "the head of the request did not come in time; send it at once"
            self.transport.write(_response(HttpFailure(408, "timeout", message)))
        self.transport.close()


class _Listener(socket.socket):
    """A listening socket that closes at once what exceeds the limits. Accepted connections inherit its options."""

    def __init__(self, family: int, limits: ConnectionLimits, refusal: bytes) -> None:
        """`refusal` is written to a connection before it is closed."""
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once where that is named
        self._limits = limits
        self._refusal = refusal
        self._num_open = 0
        self._places = PlacesPerNetwork(limits.most_of_address)
        self._num_in_row = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError where there is none, and from time to time where there is one: the event loop comes
        back for it, and a flood of connections holds up nothing else."""
        while True:
            self._num_in_row += 1
            if self._num_in_row > _AT_ONCE:
                self._num_in_row = 0
                raise BlockingIOError
            try:
                accepted, address = super().accept()
            except BlockingIOError:
                self._num_in_row = 0
                raise
            except OSError as error:
                if error.errno in _OUT_OF:  # asyncio waits for a second, but first calls this once for each of _BACKLOG
                    self._num_in_row = _AT_ONCE
                raise
            network = network_of(address[0])
            if self._num_open < self._limits.most and self._places.take(network):
                self._num_open += 1
                return _Accepted(accepted, functools.partial(self._forget, network)), address
            self._refuse(accepted)

    def _refuse(self, accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            accepted.setblocking(False)
            accepted.send(self._refusal)
            accepted.shutdown(socket.SHUT_WR)
            accepted.recv(_SEND_BYTES)  # with bytes that nobody has read, closing would take the answer back

    def _forget(self, network: bytes) -> None:
        self._num_open -= 1
        self._places.give_back(network)


class _Accepted(socket.socket):
    """Calls `on_close` once."""

    def __init__(self, accepted: socket.socket, on_close: Callable[[], None]) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        super().close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def _too_many(limits: ConnectionLimits) -> HttpFailure:
    own = "" if limits.most_of_address is None else f", or {limits.most_of_address} of one address"
    message = f"this router has {limits.most} connections{own}, and takes no more; close some, and try again"
    return HttpFailure(503, "too_many_connections", message, retry_after_s=_RETRY_AFTER_S)


def _response(failure: HttpFailure) -> bytes:
    """A whole response, after which the connection is closed."""
    body = json.dumps(failure.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    head = [f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}"]
    head += [f"{name}: {value}" for name, value in (headers | failure.headers).items()]
    return "\r\n".join([*head, "", ""]).encode() + body


def _is_event(record: logging.LogRecord) -> bool:
    """False for a stream whose client was given up: it is left without its end, for uvicorn to close the connection."""
    return "without completing response" not in record.getMessage()


def _bind(listener: socket.socket, host: str, port: int, stalled_client_s: float, sharing: PortSharing) -> None:
    """Has it listen; accepted connections inherit its options. Raises ConfigError, and closes it then."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sharing is not PortSharing.NONE:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (stalled_client_s + _ABANDONED_S)))
    try:
        if sharing is PortSharing.FIRST and port and (error := listen_error(host, port)) is not None:
            raise error
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot serve HTTP on {format_address(host, port)}: it is in use or not an address of this machine; "
            "choose another port (router.http_port or --http-port; 0: any free one) or host"
        ) from error
    listener.setblocking(False)
