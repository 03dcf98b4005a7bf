"""The router's HTTP side: OpenAI's API, files and batches with the runner that works on them, the status page.

    start -> stop_batches (before the drain): no line runs any more -> close: no client is answered any more

Assembles the routes, and has uvicorn serve them in the router's event loop. Where the settings name no HTTP port,
nothing of it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.address import format_address
from cluster.auth import Gate
from cluster.errors import ConfigError
from cluster.settings import RouterSettings
from cluster.tls import ServerTls, require_tls
from router.api.call import principal_of
from router.api.model_service import ModelService
from router.api.tokenizer import Tokenizer
from router.batches.idle import IdleCapacity
from router.batches.runner import BatchRunner
from router.batches.sqlite_store import SqliteStore
from router.batches.store import BatchStore
from router.observe.metrics import VllmNames
from router.openai.app import OpenAiApp, principal_for
from router.openai.batches import BatchRoutes
from router.openai.files import FileRoutes, over_store
from router.openai.generating import Generate, GenerateStream, LineAnswerer
from router.openai.http import Operation
from router.routing.dispatcher import Dispatcher

_AROUND_A_BODY = 4096
"""Bytes of a batch's line beside its body."""
_BACKLOG = 2048
_IDLE_S = 75.0
"""A connection without a request is kept for so long: longer than clients keep theirs."""
_SEND_BYTES = 64 * 1024
"""Size of the kernel's buffer for a client that does not read (the kernel doubles it); uvicorn holds as much itself."""
_ABANDONED_S = 1.0
"""After a stream was given up, its connection stays for so long if nothing more is taken from it."""
_GRACE_S = 1
"""Requests are drained before the end; connections get so long to read what was written."""


class HttpServer:
    """Lives in one event loop: `start`, `stop_batches`, then `close`."""

    def __init__(
        self,
        settings: RouterSettings,
        gate: Gate,
        tls: ServerTls | None,
        dispatcher: Dispatcher,
        registry: CollectorRegistry,
        tokenizer: Tokenizer,
        models: ModelService,
        generate: Generate,
        generate_stream: GenerateStream,
    ) -> None:
        self._settings = settings.router
        self._gate = gate
        self._tls = tls
        self._dispatcher = dispatcher
        self._registry = registry
        self._tokenizer = tokenizer
        self._models = models
        self._generate = generate
        self._generate_stream = generate_stream
        self._listener: HttpListener | None = None
        self._batch_store = open_batch_store(self._settings.batch_store)
        self._batch_runner = self._new_batch_runner()

    @property
    def address(self) -> str:
        """Empty: it does not listen."""
        return "" if self._listener is None else self._listener.address

    def start(self, model_name: str, page_routes: Sequence[Route]) -> None:
        """Raises ConfigError for an address that is refused or in use."""
        settings, registry = self._settings, self._registry
        if settings.http_port is None:
            return
        app = OpenAiApp(
            self._generate,
            self._generate_stream,
            self._models,
            self._gate,
            self._tokenizer.token_bytes,
            (registry, VllmNames(registry, model_name).registry),
            lambda: self._dispatcher.fleet.can_serve,
            max_body_bytes=settings.max_message_bytes,
            stalled_client_s=settings.stalled_client_timeout_s,
            more_operations=self._batch_operations(),
            more_routes=page_routes,
        )
        self._listener = HttpListener(
            app.app,
            settings.host,
            settings.http_port,
            insecure=settings.insecure,
            tls=self._tls,
            stalled_client_s=settings.stalled_client_timeout_s,
        )
        self._listener.start()
        if not self._has_no_batches:
            self._batch_runner.start()

    async def stop_batches(self) -> None:
        await self._batch_runner.stop()

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.stop()
        await self._batch_store.close()

    @property
    def _has_no_batches(self) -> bool:
        """The routers of this cluster share no store."""
        return self._settings.batch_store == ""

    def _new_batch_runner(self) -> BatchRunner:
        dispatcher, gate, most_bytes = self._dispatcher, self._gate, self._settings.max_message_bytes
        answerer = LineAnswerer(
            self._generate, lambda key_id: principal_of(gate.key_of_id(key_id)), self._tokenizer.token_bytes, most_bytes
        )
        return BatchRunner(
            self._batch_store,
            IdleCapacity(lambda num_running: dispatcher.admission.has_spare(num_running, dispatcher.clock())),
            answerer.answer,
            dispatcher.counters.batch_lines,
            most_line_bytes=most_bytes + _AROUND_A_BODY,
        )

    def _batch_operations(self) -> list[Operation]:
        store, stalled_client_s = self._batch_store, self._settings.stalled_client_timeout_s
        principal = functools.partial(principal_for, self._gate)
        most_bytes = self._settings.max_file_bytes
        files = FileRoutes(store, principal, most_bytes=most_bytes, stalled_client_s=stalled_client_s)
        batches = BatchRoutes(store, principal, self._batch_runner.wake, stalled_client_s=stalled_client_s)
        return over_store([*files.operations, *batches.operations], is_refused=self._has_no_batches)


def open_batch_store(where: str | None) -> BatchStore:
    """As `router.batch_store` of the settings has it. Connects, or opens the file, at the first call."""
    if where is not None and where.startswith(("redis://", "rediss://")):
        from router.batches.redis_store import RedisBatchStore

        return RedisBatchStore(where)
    return SqliteStore(where)


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
