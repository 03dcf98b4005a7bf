"""The page of one process's metrics, over HTTP from threads of its own: where it is, who may read it, for how long.

On loopback everybody on the machine reads it. Beyond, it has TLS, or a key is needed where the cluster has keys. A few
read it at a time, each for some seconds: scrapers come one by one, and nobody holds it up. Knows no metric.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from cluster.address import format_address, is_loopback
from cluster.auth import Metadata
from cluster.errors import BatonError, ConfigError, Unauthenticated
from cluster.site import OwnSite
from cluster.tls import ServerTls, require_tls

_MOST_READERS = 32
_READ_S = 15.0
"""A reader gets so long for all of it: a TLS handshake, its request, and taking the answer."""
_BACKLOG = 128
_AGAIN_S = 0.5
"""Pause after a connection could not be accepted because this process has no file left: it waits in the backlog."""

CheckKey = Callable[[Metadata], None]
"""Raises Unauthenticated or PermissionDenied for a request with these headers."""


class MetricsPage:
    """Serves one registry at `address`, until `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        insecure: bool = False,
        tls: ServerTls | None = None,
        check_key: CheckKey | None = None,
        allowed_hosts: Iterable[str] = (),
        read_s: float = _READ_S,
    ) -> None:
        """`port` 0: any free one. `check_key`: of readers beyond loopback, without TLS. `allowed_hosts` as in
        `router.allowed_hosts`. Raises ConfigError for an address that is refused or not available, and for unusable
        files of `tls`."""
        require_tls("serve metrics", host, tls, insecure=insecure)
        context = None if tls is None else tls.context()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a line per series with its start time, which nobody reads
        is_open = is_loopback(host) or tls is not None
        check = None if is_open else check_key
        site = OwnSite.of(tuple(allowed_hosts), is_protected=tls is not None or check is not None)
        try:
            self._server = _Server(host, port, read_s)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics on {format_address(host, port)}: it is in use or not an address of this "
                "machine; choose another port (0: any free one) or host"
            ) from error
        if context is not None:  # each thread does its own handshake, so that a stalled reader holds up no other
            wrapped = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
            self._server.socket = wrapped
        self._server.set_app(_checked(make_wsgi_app(registry), site, check))
        self.address = format_address(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the listener and its thread; can be called again."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve_beside(
    registry: CollectorRegistry,
    host: str,
    port: int,
    *,
    insecure: bool,
    tls: ServerTls | None,
    check_key: CheckKey | None = None,
    allowed_hosts: Iterable[str] = (),
) -> MetricsPage:
    """Serves the page at `host` where that is loopback, `insecure`, or the page has TLS; else on 127.0.0.1. Raises
    ConfigError."""
    is_open = is_loopback(host) or insecure or tls is not None
    at = host if is_open else "127.0.0.1"
    return MetricsPage(registry, at, port, insecure=insecure, tls=tls, check_key=check_key, allowed_hosts=allowed_hosts)


def _checked(app: Any, site: OwnSite, check_key: CheckKey | None) -> Any:
    """The page for those who may read it."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            site.check(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
            if check_key is not None:
                given = environ.get("HTTP_AUTHORIZATION")
                check_key(() if given is None else (("authorization", given),))
        except BatonError as error:
            status = HTTPStatus.UNAUTHORIZED if isinstance(error, Unauthenticated) else HTTPStatus.FORBIDDEN
            start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error.message}\n".encode()]
        return app(environ, start_response)  # type: ignore[no-any-return]  # a WSGI application

    return answer


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a client's mistake is its own."""


class _Server(ThreadingMixIn, WSGIServer):
    """One thread for each of a few readers."""

    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, host: str, port: int, read_s: float) -> None:
        self._read_s = read_s
        self._places = threading.BoundedSemaphore(_MOST_READERS)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # its caller would try again at once, and for ever
                time.sleep(_AGAIN_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(self._read_s, _cut, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a reader that has left, or speaks no HTTP."""


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
