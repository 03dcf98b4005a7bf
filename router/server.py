"""The router on its sockets: the public server, the control server, health, reflection, and an orderly end.

    start -> serving (health follows the workers) -> drain -> stopped

Owns the wiring of the parts in one event loop. Health is SERVING while a decode worker is ready, and a prefill worker
where one is needed.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from cluster import rpc
from cluster.address import ANY_HOST, parse_address
from cluster.api_keys import Scope
from cluster.auth import Gate
from cluster.errors import ConfigError
from cluster.key_file import KeyFile
from cluster.metrics import LabelledCounter, MetricsPage, serve_beside
from cluster.pb import admin_pb2, generation_pb2
from cluster.program import Report
from cluster.settings import RouterSettings
from cluster.state import Store, open_store
from cluster.tls import internal_tls_of, public_tls_of
from router.api.admin import HEALTH, ControlService, HealthService, StatusService, reflection_handler
from router.api.call import principal_of
from router.api.handlers import service_handler
from router.api.model_service import ModelService
from router.api.served_model import ServedModel
from router.api.service import GenerationService
from router.api.tokenizer import Tokenizer
from router.batches.idle import IdleCapacity
from router.batches.runner import BatchRunner
from router.batches.sqlite_store import SqliteStore
from router.batches.store import BatchStore
from router.observe.controller_link import ControllerLink
from router.observe.metrics import VllmNames
from router.observe.page import StatusPage
from router.observe.tracing import Traces
from router.openai.app import OpenAiApp, principal_for
from router.openai.batches import BatchRoutes
from router.openai.files import FileRoutes, over_store
from router.openai.generating import LineAnswerer
from router.openai.http import Operation
from router.openai.listener import HttpListener
from router.queue.limits import Limits, Objectives
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress
from router.stream.client_stream import MessageRate

GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
STATUS: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["StatusService"]
CONTROL: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["ControlService"]

_SCOPES: dict[str, Scope] = {GENERATION.full_name: "generate", STATUS.full_name: "admin"}
"""That an API key needs for a service; reflection needs a key of any scope, health none."""
_HEALTH_NAMES = ("", GENERATION.full_name)
_LAST_WORDS_S = 1.0
"""After the drain, calls get this long to deliver their last message."""
_TOKENIZER_THREADS = 2
_AROUND_A_BODY = 4096
"""Bytes of a batch's line beside its body."""
_LOOPBACK = "127.0.0.1"
_TRANSPORT_SLACK = 4
"""gRPC takes messages this many times larger than the limit, so that the router can refuse them by name; beyond that
gRPC ends the call itself."""
_MOST_MESSAGE_BYTES = 2**31 - 1


class RouterServer:
    """Lives in one event loop: `start`, then `stop`."""

    def __init__(
        self, settings: RouterSettings, report: Report, store: Store | None = None, traces: Traces | None = None
    ) -> None:
        """Reads the model folder; raises CheckpointError or ConfigError. `store`, `traces`: None for those of the
        settings."""
        folder = Path(settings.model.path)
        self._settings = settings
        self._report = report
        self._workers = [WorkerAddress.parse(text) for text in settings.workers]
        self._model = ServedModel.from_folder(
            folder,
            name=settings.model.name or "",
            max_model_len=settings.model.max_model_len,
            max_num_seqs=settings.engine.max_num_seqs,
        )
        self._tokenizer = Tokenizer.from_folder(folder)
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._tls = public_tls_of(settings.tls)
        self._internal_tls = internal_tls_of(settings.internal_tls)
        self._key_file = KeyFile(settings.auth.keys_file) if settings.auth.keys_file is not None else None
        self.keys = self._key_file.ring if self._key_file is not None else None
        self._gate = Gate(self.keys, _SCOPES, (HEALTH.full_name,))
        self._fleet_changed = asyncio.Event()
        limits = Limits(
            settings.router.max_running_requests,
            settings.router.max_queued_requests,
            settings.router.queue_timeout_s,
            settings.transfer.dead_after_s,
            settings.needs_prefill,
            settings.router.policy,
            Objectives(settings.slo.ttft_ms / 1000, settings.slo.tpot_ms / 1000),
            settings.router.max_running_tokens,
            settings.router.max_queued_tokens,
            settings.router.max_queue_wait_s,
        )
        self.dispatcher = Dispatcher(limits, self._fleet_changed.set)
        self.dispatcher.fleet.tls = None if self._internal_tls is None else self._internal_tls.client
        self._control = ControlService(self.dispatcher, settings)
        self._traces = open_traces(settings, self.dispatcher.metrics.trace_spans) if traces is None else traces
        self.generation = GenerationService(
            self._model,
            self._tokenizer,
            self.dispatcher,
            self._executor,
            MessageRate(settings.router.stream_messages_per_s),
            open_store(settings.state) if store is None else store,
            self._traces,
            resume_window_s=settings.router.resume_window_s,
            stalled_client_timeout_s=settings.router.stalled_client_timeout_s,
        )
        self._models = ModelService(
            self._model, self._tokenizer, self._executor, lambda: self.dispatcher.fleet.weights_revision
        )
        self._batch_store = open_batch_store(settings.router.batch_store)
        self._batch_runner = self._new_batch_runner()
        self._health = HealthService(_HEALTH_NAMES)
        self._servers: list[grpc.aio.Server] = []
        self._metrics_page: MetricsPage | None = None
        self._http: HttpListener | None = None
        self._controller: ControllerLink | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> tuple[str, str]:
        """Listens; returns the public and the control address. Raises ConfigError for one it may not or cannot have."""
        settings = self._settings
        self._serve_metrics()
        public, port = rpc.create_server(
            settings.router.host,
            settings.router.port,
            insecure=settings.router.insecure,
            tls=self._tls,
            max_message_bytes=min(_TRANSPORT_SLACK * settings.router.max_message_bytes, _MOST_MESSAGE_BYTES),
            interceptors=() if self.keys is None else (self._gate,),
        )
        self._servers.append(public)
        control, control_port = rpc.create_server(
            settings.node_host or _LOOPBACK,
            settings.control_port,
            insecure=settings.router.insecure,
            tls=None if self._internal_tls is None else self._internal_tls.server,
            max_message_bytes=rpc.INTERNAL_MESSAGE_BYTES,
        )
        self._servers.append(control)
        address = rpc.format_address(self._told_host, port)
        metrics_address = self._told(self._metrics_page.address) if self._metrics_page is not None else ""
        status = StatusService(
            self.dispatcher,
            self._control,
            model=self._model.name,
            router_address=address,
            metrics_address=metrics_address,
        )
        self._tasks.append(asyncio.create_task(status.keep_time(), name="activity"))
        self._add_public_services(public, status)
        limit = rpc.INTERNAL_MESSAGE_BYTES
        control.add_generic_rpc_handlers(
            (
                service_handler(CONTROL, self._control, max_message_bytes=limit),
                service_handler(STATUS, status, max_message_bytes=limit),
            )
        )
        self._listen_to_http(status)
        self.generation.resumables.start()
        for server in self._servers:
            await server.start()
        self._tasks.append(asyncio.create_task(self._follow_health(), name="health"))
        if self._key_file is not None:
            self._tasks.append(asyncio.create_task(self._key_file.follow(self._executor), name="keys"))
        self.dispatcher.set_workers(self._workers)
        return address, rpc.format_address(settings.node_host or _LOOPBACK, control_port)

    async def stop(self) -> None:
        """Refuses new requests, lets running ones end within the drain's time, and closes everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._health.set(is_serving=False)
        if self.dispatcher.num_running:
            self._report(f"draining {self.dispatcher.num_running} requests")
        await self._batch_runner.stop()
        await self.dispatcher.drain(self._settings.drain_timeout_s)
        await asyncio.gather(*(server.stop(_LAST_WORDS_S) for server in self._servers))
        if self._http is not None:
            await self._http.stop()
        await self._batch_store.close()
        if self._controller is not None:
            await self._controller.close()
        await self.generation.resumables.stop()
        await self.dispatcher.fleet.close()
        await asyncio.to_thread(self._traces.close)
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._metrics_page is not None:
            self._metrics_page.close()

    @property
    def http_address(self) -> str:
        """Empty: there is none."""
        return "" if self._http is None else self._told(self._http.address)

    @property
    def _told_host(self) -> str:
        """Where others reach what listens on every address."""
        settings = self._settings
        return settings.node_host if settings.node_host and settings.router.host in ANY_HOST else settings.router.host

    def _told(self, address: str) -> str:
        host, port = parse_address(address)
        return rpc.format_address(self._told_host if host == self._settings.router.host else host, port)

    def _listen_to_http(self, status: StatusService) -> None:
        settings = self._settings
        if settings.router.http_port is None:
            return
        registry = self.dispatcher.metrics.registry
        inside = None if self._internal_tls is None else self._internal_tls.client
        self._controller = ControllerLink(lambda: self._control.admin_address, inside)
        knows_callers = self.keys is not None or settings.tls.client_ca is not None
        page = StatusPage(
            status.GetStatus,
            status.GetActivity,
            self._controller,
            self._gate,
            host=settings.router.host,
            knows_callers=knows_callers,
        )
        front = OpenAiApp(
            self.generation.Generate,
            self.generation.GenerateStream,
            self._models,
            self._gate,
            self._tokenizer.token_bytes,
            (registry, VllmNames(registry, self._model.name).registry),
            lambda: self.dispatcher.fleet.can_serve,
            max_body_bytes=settings.router.max_message_bytes,
            stalled_client_s=settings.router.stalled_client_timeout_s,
            more_operations=self._batch_operations(),
            more_routes=page.routes,
        )
        self._http = HttpListener(
            front.app,
            settings.router.host,
            settings.router.http_port,
            insecure=settings.router.insecure,
            tls=self._tls,
            stalled_client_s=settings.router.stalled_client_timeout_s,
        )
        self._http.start()
        if not self._has_no_batches:
            self._batch_runner.start()

    def _new_batch_runner(self) -> BatchRunner:
        settings, dispatcher, gate = self._settings.router, self.dispatcher, self._gate
        answerer = LineAnswerer(
            self.generation.Generate,
            lambda key_id: principal_of(gate.key_of_id(key_id)),
            self._tokenizer.token_bytes,
            settings.max_message_bytes,
        )
        return BatchRunner(
            self._batch_store,
            IdleCapacity(lambda num_running: dispatcher.admission.has_spare(num_running, dispatcher.clock())),
            answerer.answer,
            dispatcher.counters.batch_lines,
            most_line_bytes=settings.max_message_bytes + _AROUND_A_BODY,
        )

    def _batch_operations(self) -> list[Operation]:
        settings, store = self._settings.router, self._batch_store
        stalled_client_s = settings.stalled_client_timeout_s
        principal_of_request = functools.partial(principal_for, self._gate)
        files = FileRoutes(
            store, principal_of_request, most_bytes=settings.max_file_bytes, stalled_client_s=stalled_client_s
        )
        batches = BatchRoutes(store, principal_of_request, self._batch_runner.wake, stalled_client_s=stalled_client_s)
        return over_store([*files.operations, *batches.operations], is_refused=self._has_no_batches)

    @property
    def _has_no_batches(self) -> bool:
        """The routers of this cluster share no store."""
        return self._settings.router.batch_store == ""

    def _serve_metrics(self) -> None:
        """With the TLS of the cluster's inside, as workers serve theirs; without it on loopback, unless `insecure`."""
        settings = self._settings
        if settings.metrics_port is not None:
            tls = None if self._internal_tls is None else self._internal_tls.page
            registry, port = self.dispatcher.metrics.registry, settings.metrics_port
            self._metrics_page = serve_beside(
                registry, settings.router.host, port, insecure=settings.router.insecure, tls=tls
            )

    def _add_public_services(self, server: grpc.aio.Server, status: StatusService) -> None:
        limit = self._settings.router.max_message_bytes
        server.add_generic_rpc_handlers(
            (
                service_handler(GENERATION, self.generation, self._models, max_message_bytes=limit, gate=self._gate),
                service_handler(STATUS, status, max_message_bytes=limit),
                service_handler(HEALTH, self._health, max_message_bytes=limit),
                reflection_handler((GENERATION.full_name, STATUS.full_name, HEALTH.full_name)),
            )
        )

    async def _follow_health(self) -> None:
        was_serving = False
        while True:
            await self._fleet_changed.wait()
            self._fleet_changed.clear()
            is_serving = self.dispatcher.fleet.can_serve
            if is_serving != was_serving:
                was_serving = is_serving
                self._health.set(is_serving=is_serving)
                missing = "no prefill or no decode worker" if self._settings.needs_prefill else "no decode worker"
                self._report("serving" if is_serving else f"not serving: {missing} is ready")


def open_traces(settings: RouterSettings, counter: LabelledCounter) -> Traces:
    """The traces that the settings ask for. `counter` gets the outcome of each span. Raises ConfigError where
    OpenTelemetry, which is an extra, is not installed."""
    if settings.router.trace_endpoint is None:
        return Traces()
    try:
        from router.observe.otel import OtelTraces, exporter_to
    except ImportError as error:
        raise ConfigError(
            f"router.trace_endpoint: traces need OpenTelemetry's SDK, and {error.name} is not installed; install Baton "
            "with the extra otel (make setup EXTRAS=dev,otel), or set router.trace_endpoint: null"
        ) from error
    return OtelTraces(exporter_to(settings.router.trace_endpoint), counter, sample=settings.router.trace_sample)


def open_batch_store(where: str | None) -> BatchStore:
    """As `router.batch_store` of the settings has it. Connects, or opens the file, at the first call."""
    if where is not None and where.startswith(("redis://", "rediss://")):
        from router.batches.redis_store import RedisBatchStore

        return RedisBatchStore(where)
    return SqliteStore(where)
