"""The router as a program: an event loop on a thread of its own, and in it the router on its sockets.

    create -> prepare -> start (reads the model folder) -> wait; stop from any thread drains and ends it

RouterServer wires the parts together: the public server, the control server, HTTP, metrics, health and reflection.
Health is SERVING while a decode worker is ready, and a prefill worker where one is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from cluster import rpc
from cluster.address import ANY_HOST, parse_address
from cluster.api_keys import Scope
from cluster.auth import Gate, KeyFile
from cluster.errors import ConfigError, Unavailable
from cluster.file_store import open_store
from cluster.metrics import LabelledCounter
from cluster.metrics_page import MetricsPage, serve_beside
from cluster.pb import admin_pb2, generation_pb2
from cluster.program import Report
from cluster.protocol import inside_gates
from cluster.settings import RouterSettings
from cluster.site import OwnSite
from cluster.state import Store
from cluster.tls import internal_tls_of, public_tls_of
from router import grpc_loop
from router.api.control_service import ControlService, StatusService
from router.api.handlers import CallsPerAddress, service_handler
from router.api.health import HEALTH, HealthService, reflection_handler
from router.api.model_service import ModelService
from router.api.served_model import ServedModel
from router.api.service import GenerationService
from router.api.tokenizer import Tokenizer
from router.collector import spare_long_lived
from router.http_listener import ConnectionLimits
from router.http_server import HttpServer
from router.observe.activity import Activity
from router.observe.controller_link import ControllerLink
from router.observe.metrics import RouterMetrics
from router.observe.page import StatusPage
from router.observe.tracing import Traces
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress
from router.stream.client_stream import MessageRate

GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
STATUS: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["StatusService"]
CONTROL: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["ControlService"]

_SCOPES: dict[str, Scope] = {GENERATION.full_name: "generate", STATUS.full_name: "admin"}
"""Scope that an API key needs for a service; reflection needs a key of any scope, health none."""
_HEALTH_NAMES = ("", GENERATION.full_name)
_GRACE_S = 1.0
"""After the drain, calls get this long to deliver their last message."""
_ARRIVING_S = 0.1
"""When no new connection is taken any more, calls that have come get so long to be accepted."""
_CONNECT_S = 20.0
"""Seconds that a successor may take to connect to a worker of each role that is needed."""
_BESIDE_OTHERS_S = 2.0
"""A router that others share their ports with listens after so long, connected or not."""
_TOKENIZER_THREADS = 2
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
            max_num_seqs=settings.engine.num_seqs,
        )
        self._tokenizer = Tokenizer.from_folder(folder, settings.model.chat_template)
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._tls = public_tls_of(settings.tls)
        self._internal_tls = internal_tls_of(settings.internal_tls)
        self._key_file = KeyFile(settings.auth.keys_file) if settings.auth.keys_file is not None else None
        self.keys = self._key_file.ring if self._key_file is not None else None
        self._gate = Gate(self.keys, _SCOPES, (HEALTH.full_name,))
        self._fleet_changed = asyncio.Event()
        self.dispatcher = Dispatcher(settings, self._fleet_changed.set)
        self.dispatcher.fleet.tls = None if self._internal_tls is None else self._internal_tls.client
        self.dispatcher.fleet.token = settings.cluster_token
        self._activity = Activity()
        self.metrics = self._observe()
        self._control = ControlService(self.dispatcher, settings)
        self._traces = open_traces(settings, self.metrics.trace_spans) if traces is None else traces
        self.generation = self._new_generation(open_store(settings.state) if store is None else store)
        self._models = ModelService(
            self._model,
            self._tokenizer,
            self._executor,
            lambda: self.dispatcher.fleet.weights_revision,
            self.dispatcher.waiting,
            self.generation.forms.capabilities,
        )
        self._http = self._new_http()
        self._health = HealthService(_HEALTH_NAMES)
        self._servers: list[grpc.aio.Server] = []
        self._metrics_page: MetricsPage | None = None
        self._controller: ControllerLink | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _observe(self) -> RouterMetrics:
        """Makes the metrics, which follow every request as the activity does."""
        dispatcher = self.dispatcher
        metrics = RouterMetrics(
            dispatcher.counters, dispatcher.fleet, lambda: dispatcher.num_queued, lambda: dispatcher.num_running
        )
        dispatcher.observers += [metrics, self._activity]
        dispatcher.running.observe(metrics.decided, metrics.fetched)
        return metrics

    def _new_generation(self, store: Store) -> GenerationService:
        return GenerationService(
            self._model,
            self._tokenizer,
            self.dispatcher,
            self._executor,
            MessageRate(self._settings.router.stream_messages_per_s),
            store,
            self._traces,
            self._settings,
        )

    def _new_http(self) -> HttpServer:
        is_protected = self.keys is not None or self._tls is not None
        return HttpServer(
            self._settings,
            self._gate,
            self._tls,
            self.dispatcher,
            self.metrics.registry,
            self._tokenizer,
            self._models,
            self.generation.Generate,
            self.generation.GenerateStream,
            self.generation.CancelGeneration,
            OwnSite.of(self._settings.router.allowed_hosts, is_protected=is_protected),
        )

    async def start(self) -> tuple[str, str]:
        """Listens; returns the public and the control address. Raises ConfigError for one it may not or cannot have."""
        settings, limits = self._settings, ConnectionLimits.of(self._settings.router, self._report)
        if settings.is_successor:
            await self._connect(_CONNECT_S)
        elif settings.shares_ports and settings.workers:
            with contextlib.suppress(Unavailable):
                await self._connect(_BESIDE_OTHERS_S)
        self._serve_metrics()
        public, port = rpc.create_server(
            settings.router.host,
            settings.router.port,
            insecure=settings.router.insecure,
            tls=self._tls,
            max_message_bytes=min(_TRANSPORT_SLACK * settings.router.max_message_bytes, _MOST_MESSAGE_BYTES),
            interceptors=() if self.keys is None else (self._gate,),
            limits=rpc.ServerLimits(limits.most, limits.most_calls),
            sharing=settings.port_sharing,
        )
        self._servers.append(public)
        control, control_port = rpc.create_server(
            settings.node_host or _LOOPBACK,
            settings.control_port,
            insecure=settings.router.insecure,
            tls=None if self._internal_tls is None else self._internal_tls.server,
            max_message_bytes=rpc.INTERNAL_MESSAGE_BYTES,
            interceptors=inside_gates(settings.cluster_token, "the router"),
        )
        self._servers.append(control)
        address = rpc.format_address(self._reachable_host, port)
        metrics_address = self._reachable(self._metrics_page.address) if self._metrics_page is not None else ""
        status = StatusService(
            self.dispatcher,
            self._control,
            self._activity,
            model=self._model.name,
            router_address=address,
            metrics_address=metrics_address,
        )
        self._tasks.append(asyncio.create_task(status.keep_time(), name="activity"))
        self._add_public_services(public, status)
        limit = rpc.INTERNAL_MESSAGE_BYTES
        inside = (CONTROL, self._control), (STATUS, status)
        control.add_generic_rpc_handlers([service_handler(*each, max_message_bytes=limit) for each in inside])
        self._http.start(self._model.name, self._new_page(status).routes, limits)
        self.generation.resumables.start()
        for server in self._servers:
            await server.start()
        self._tasks.append(asyncio.create_task(self._follow_health(), name="health"))
        if self._key_file is not None:
            self._tasks.append(asyncio.create_task(self._key_file.follow(), name="keys"))
        self.dispatcher.set_workers(self._workers)
        return address, rpc.format_address(settings.node_host or _LOOPBACK, control_port)

    async def _connect(self, limit_s: float) -> None:
        """Connects to the workers first, so that no client waits for that. Raises Unavailable."""
        self.dispatcher.set_workers(self._workers)
        try:
            async with asyncio.timeout(limit_s):
                while not self.dispatcher.fleet.can_serve:
                    self._fleet_changed.clear()
                    await self._fleet_changed.wait()
        except TimeoutError:
            raise Unavailable(f"it was connected to too few workers after {limit_s:g} s to take over") from None
        self._fleet_changed.set()

    async def stop(self) -> None:
        """Takes no new connection, lets running requests end within the drain's time, and closes everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._health.set(is_serving=False)
        if self.dispatcher.num_running:
            self._report(f"draining {self.dispatcher.num_running} requests")
        drain_s = self._control.drain_timeout_s
        await self._http.stop_batches()
        self._http.close_port()
        leaving = [asyncio.create_task(server.stop(drain_s + _GRACE_S)) for server in self._servers[:1]]
        await asyncio.sleep(min(_ARRIVING_S, drain_s))
        await self.dispatcher.drain(drain_s)
        await asyncio.gather(*leaving, *(server.stop(_GRACE_S) for server in self._servers))
        await self._http.close()
        if self._controller is not None:
            await self._controller.close()
        await self.generation.stop()
        await self.dispatcher.fleet.close()
        await asyncio.to_thread(self._traces.close)
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._metrics_page is not None:
            self._metrics_page.close()

    @property
    def http_address(self) -> str:
        """Empty: there is none."""
        return self._reachable(self._http.address) if self._http.address else ""

    @property
    def _reachable_host(self) -> str:
        """Host at which others reach a listener on every address."""
        settings = self._settings
        return settings.node_host if settings.node_host and settings.router.host in ANY_HOST else settings.router.host

    def _reachable(self, address: str) -> str:
        host, port = parse_address(address)
        return rpc.format_address(self._reachable_host if host == self._settings.router.host else host, port)

    def _new_page(self, status: StatusService) -> StatusPage:
        settings = self._settings
        inside = None if self._internal_tls is None else self._internal_tls.client
        self._controller = ControllerLink(lambda: self._control.admin_address, inside, self._settings.cluster_token)
        return StatusPage(
            status.GetStatus,
            status.GetActivity,
            self._controller,
            self._gate,
            host=settings.router.host,
            knows_callers=self.keys is not None or settings.tls.client_ca is not None,
        )

    def _serve_metrics(self) -> None:
        """With the TLS of the cluster's inside, as workers serve theirs; without it on loopback, unless `insecure`."""
        settings = self._settings
        if settings.metrics_port is not None:
            tls = None if self._internal_tls is None else self._internal_tls.page
            registry, port = self.metrics.registry, settings.metrics_port
            self._metrics_page = serve_beside(
                registry,
                settings.router.host,
                port,
                insecure=settings.router.insecure,
                tls=tls,
                check_key=lambda metadata: self._gate.check(metadata, STATUS.full_name),
                allowed_hosts=settings.router.allowed_hosts,
            )

    def _add_public_services(self, server: grpc.aio.Server, status: StatusService) -> None:
        limit = self._settings.router.max_message_bytes
        calls = CallsPerAddress(self._settings.router.max_connections_per_address)
        server.add_generic_rpc_handlers(
            (
                service_handler(
                    GENERATION, self.generation, self._models, max_message_bytes=limit, gate=self._gate, calls=calls
                ),
                service_handler(STATUS, status, max_message_bytes=limit, calls=calls),
                service_handler(HEALTH, self._health, max_message_bytes=limit, calls=calls),
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


def create(settings_json: str, report: Report) -> RouterProgram:
    """Raises TypeError for a setting that does not exist."""
    return RouterProgram(RouterSettings.from_json(settings_json), report)


class RouterProgram:
    """One router. A failed start has ended it; `wait` then returns at once."""

    def __init__(self, settings: RouterSettings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._card: Future[str] = Future()
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_stopping = threading.Event()

    def prepare(self) -> str:
        return "{}"

    def start(self) -> str:
        """Blocks until clients can connect; raises CheckpointError or ConfigError."""
        threading.Thread(target=self._run, name="router", daemon=True).start()
        return self._card.result()

    def wait(self) -> None:
        self._ended.result()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._loop is not None and self._stop is not None and not self._ended.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended since
                self._loop.call_soon_threadsafe(self._stop.set)

    def _run(self) -> None:
        try:
            grpc_loop.run(self._serve())
        except BaseException as error:
            if not self._card.done():
                self._card.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = RouterServer(self._settings, self._report)
        sparing = asyncio.create_task(spare_long_lived(lambda: server.dispatcher.fleet.num_workers))
        try:
            address, control_address = await server.start()
            card = {"address": address, "control_address": control_address, "pid": os.getpid()}
            self._card.set_result(json.dumps(card | {"http_address": server.http_address}))
            if not self._is_stopping.is_set():
                await self._stop.wait()
        finally:
            sparing.cancel()
            await server.stop()


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
