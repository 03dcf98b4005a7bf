"""The socket of the HTTP API, served by uvicorn in the router's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from cluster.address import format_address
from cluster.errors import ConfigError
from cluster.tls import ServerTls, require_tls

_BACKLOG = 2048
_IDLE_S = 75.0
"""A connection without a request is kept for so long: longer than clients keep theirs."""
_SEND_BYTES = 64 * 1024
"""Size of the kernel's buffer for a client that does not read (the kernel doubles it); uvicorn holds as much itself."""
_ABANDONED_S = 1.0
"""After a stream was given up, its connection stays for so long if nothing more is taken from it."""
_GRACE_S = 1
"""Requests are drained before the end; connections get so long to read what was written."""


def _is_event(record: logging.LogRecord) -> bool:
    """False for a stream whose client was given up: it is left without its end, for uvicorn to close the connection."""
    return "without completing response" not in record.getMessage()


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Lives in one event loop: `start`, then `stop`."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, insecure: bool, tls: ServerTls | None, stalled_client_s: float
    ) -> None:
        """Binds; `port` 0: any free one. Raises ConfigError for an address that is refused or cannot be had.

        `stalled_client_s`: a connection whose other end takes nothing for so long is closed.
        """
        require_tls("serve HTTP", host, tls, insecure=insecure)
        self._socket = _bind(host, port, stalled_client_s)
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
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Clients can connect already; from now on they are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def _bind(host: str, port: int, stalled_client_s: float) -> socket.socket:
    """A listening socket; accepted connections inherit its options."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (stalled_client_s + _ABANDONED_S)))
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot serve HTTP on {format_address(host, port)}: it is in use or not an address of this machine; "
            "choose another port (router.http_port or --http-port; 0: any free one) or host"
        ) from error
    listener.setblocking(False)
    return listener
