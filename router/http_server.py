"""The router's HTTP side: OpenAI's API, files and batches with the runner that works on them, responses that run in the
background, the status page.

    start -> stop_batches: no line runs any more -> close_port: no connection is taken -> the drain -> close

Assembles the routes, and serves them in the router's event loop (`router.http_listener`). Where the settings name no
HTTP port, nothing of it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from starlette.routing import Route

from cluster.auth import Gate
from cluster.settings import RouterSettings
from cluster.site import OwnSite
from cluster.tls import ServerTls
from router.anthropic.app import MessageRoutes
from router.api.call import principal_of
from router.api.model_service import ModelService
from router.api.tokenizer import Tokenizer
from router.batches.idle import IdleCapacity
from router.batches.runner import BatchRunner
from router.batches.sqlite_store import SqliteStore
from router.batches.store import BatchStore
from router.http_listener import ConnectionLimits, HttpListener
from router.observe.metrics import VllmNames
from router.openai.app import OpenAiApp
from router.openai.batches import BatchRoutes
from router.openai.files import FileRoutes, over_store
from router.openai.generating import Generate, GenerateStream, LineAnswerer, OtherLines
from router.openai.http import Operation, Reception
from router.responses.background import BackgroundRuns, Cancel
from router.responses.call import ResponseReader, names_in
from router.responses.routes import ResponseRoutes
from router.responses.store import ResponseStore
from router.routing.dispatcher import Dispatcher

_AROUND_A_BODY = 4096
"""Bytes of a batch's line beside its body."""


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
        cancel: Cancel,
        site: OwnSite,
    ) -> None:
        self._settings = settings.router
        self._sharing = settings.port_sharing
        self._gate = gate
        most_bytes, stalled_client_s = self._settings.max_message_bytes, self._settings.stalled_client_timeout_s
        self._reception = Reception(gate, most_bytes, stalled_client_s)
        self._tls = tls
        self._dispatcher = dispatcher
        self._registry = registry
        self._tokenizer = tokenizer
        self._models = models
        self._generate = generate
        self._generate_stream = generate_stream
        self._cancel = cancel
        self._site = site
        self._listener: HttpListener | None = None
        self._batch_store = open_batch_store(self._settings.batch_store)
        responses = None if self._has_no_batches else ResponseStore(self._batch_store)
        self._response_reader = ResponseReader(responses, models.GetModel, models.Tokenize, tokenizer.token_bytes)
        self._response_runs = None if responses is None else self._new_response_runs(responses)
        self._response_routes = ResponseRoutes(
            self._reception, self._response_reader, generate, generate_stream, responses, self._response_runs
        )
        self._batch_runner = self._new_batch_runner()

    @property
    def address(self) -> str:
        """Empty: it does not listen."""
        return "" if self._listener is None else self._listener.address

    def start(self, model_name: str, page_routes: Sequence[Route], limits: ConnectionLimits) -> None:
        """Raises ConfigError for an address that is refused or in use."""
        settings, registry = self._settings, self._registry
        if settings.http_port is None:
            return
        messages = MessageRoutes(self._generate, self._generate_stream, self._models, self._reception)
        app = OpenAiApp(
            self._generate,
            self._generate_stream,
            self._models,
            self._reception,
            self._tokenizer.token_bytes,
            (registry, VllmNames(registry, model_name).registry),
            lambda: self._dispatcher.fleet.can_serve,
            site=self._site,
            more_operations=[
                *messages.operations,
                *self._batch_operations(),
                *self._response_operations(),
            ],
            more_routes=page_routes,
        )
        self._listener = HttpListener(
            app.app,
            settings.host,
            settings.http_port,
            insecure=settings.insecure,
            tls=self._tls,
            stalled_client_s=settings.stalled_client_timeout_s,
            limits=limits,
            sharing=self._sharing,
        )
        self._listener.start()
        if not self._has_no_batches:
            self._batch_runner.start()
        if self._response_runs is not None:
            self._response_runs.watch(lambda: self._dispatcher.fleet.can_serve)

    async def stop_batches(self) -> None:
        """Leaves batches, and responses that the drain cuts off, to other routers."""
        if self._response_runs is not None:
            self._response_runs.stop()
        await self._batch_runner.stop()

    def close_port(self) -> None:
        """Takes no new connection; requests that have come are still answered."""
        if self._listener is not None:
            self._listener.close_port()

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.stop()
        if self._response_runs is not None:
            await self._response_runs.close()
        await self._batch_store.close()

    @property
    def _has_no_batches(self) -> bool:
        """The routers of this cluster share no store."""
        return self._settings.batch_store == ""

    def _new_batch_runner(self) -> BatchRunner:
        dispatcher, gate, most_bytes = self._dispatcher, self._gate, self._settings.max_message_bytes
        answerer = LineAnswerer(
            self._generate,
            lambda key_id: principal_of(gate.key_of_id(key_id)),
            self._tokenizer.token_bytes,
            most_bytes,
            {"/v1/responses": OtherLines(self._response_routes.answer_line, names_in)},
        )
        return BatchRunner(
            self._batch_store,
            IdleCapacity(lambda num_running: dispatcher.admission.has_spare(num_running, dispatcher.clock())),
            answerer.answer,
            dispatcher.counters.batch_lines,
            most_line_bytes=most_bytes + _AROUND_A_BODY,
        )

    def _new_response_runs(self, responses: ResponseStore) -> BackgroundRuns:
        gate = self._gate
        return BackgroundRuns(
            responses,
            self._response_reader,
            self._generate_stream,
            self._cancel,
            lambda key_id: principal_of(gate.key_of_id(key_id)),
        )

    def _response_operations(self) -> list[Operation]:
        routes = self._response_routes
        kept = over_store(routes.kept_operations, is_refused=self._has_no_batches)
        return [*over_store(routes.operations, is_refused=False), *kept]

    def _batch_operations(self) -> list[Operation]:
        store, principal = self._batch_store, self._reception.principal
        stalled_client_s, most_bytes = self._reception.stalled_client_s, self._settings.max_file_bytes
        files = FileRoutes(store, principal, most_bytes=most_bytes, stalled_client_s=stalled_client_s)
        batches = BatchRoutes(store, principal, self._batch_runner.wake, stalled_client_s=stalled_client_s)
        return over_store([*files.operations, *batches.operations], is_refused=self._has_no_batches)


def open_batch_store(where: str | None) -> BatchStore:
    """Returns the store that `router.batch_store` of the settings names. Connects, or opens the file, at the first
    call."""
    if where is not None and where.startswith(("redis://", "rediss://")):
        from router.batches.redis_store import RedisBatchStore

        return RedisBatchStore(where)
    return SqliteStore(where)
