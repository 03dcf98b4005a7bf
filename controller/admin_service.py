"""AdminService: what operators see and change of the whole cluster, on a port of its own in the controller's process.

Translates between messages and the reconfigurer; decides nothing. Errors become gRPC statuses here. Each call of the
WorkerControlService is passed on to the worker that it names, whatever its method.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from cluster import rpc
from cluster.api_keys import Scope
from cluster.auth import Gate, KeyRing
from cluster.config.schema import AdminSection, ServingConfig
from cluster.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReachable,
    Unavailable,
)
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.protocol import ProtocolGate, inside_metadata, spoken
from cluster.text import ROLE_NUMBERS
from cluster.tls import ClientTls, ServerTls
from cluster.token import token_gates
from controller.events import ClusterEvent, EventLog
from controller.reconfigurer import Plan, ProposalResult, Reconfigurer, SaveConfig
from controller.supervisor import Supervisor
from controller.worker_pool import WorkerPool

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_NUM_EVENTS = 20
_WORKER_CALL_S = 20.0
_ANSWER_S = 5.0
"""Of the time that a caller waits, what is left to tell it that a worker does not answer."""
ADMIN: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_WORKER_CONTROL: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["WorkerControlService"]


class AdminBackend(Protocol):
    """The cluster that the service reads and changes: the `Controller`, or a test's stand-in for it."""

    reconfigurer: Reconfigurer
    events: EventLog
    pool: WorkerPool

    @property
    def routers(self) -> Sequence[Supervisor]: ...

    @property
    def config_path(self) -> str:
        """Path of the watched file; empty: none."""
        ...

    @property
    def save(self) -> SaveConfig | None:
        """Writes an accepted change into that file."""
        ...

    @property
    def auto(self) -> admin_pb2.Auto | None:
        """The last decision of `mode: auto`; None in another mode."""
        ...

    @property
    def metrics_address(self) -> str:
        """Address of the controller's metrics page; empty: there is none."""
        ...

    def parse(self, text: str, filename: str) -> ServingConfig:
        """Raises ConfigError."""
        ...

    async def router_status(self) -> admin_pb2.GetStatusResponse | None: ...


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, backend: AdminBackend) -> None:
        self._backend = backend

    async def GetCluster(self, request: admin_pb2.GetClusterRequest, context: Context) -> admin_pb2.GetClusterResponse:
        backend = self._backend
        members = [m for m in backend.pool.members() if not m.is_draining]
        changing = backend.reconfigurer.changing
        return admin_pb2.GetClusterResponse(
            version=backend.reconfigurer.version,
            num_prefill=sum(m.role == "prefill" for m in members),
            num_decode=sum(m.role == "decode" for m in members),
            processes=_processes(backend),
            router=await backend.router_status(),
            changing=None if changing is None else plan_message(changing),
            last_sequence=backend.events.last_sequence,
            config_file=backend.config_path,
            auto=backend.auto,
            metrics_address=backend.metrics_address,
            events=map(event_message, backend.events.newest(_NUM_EVENTS)),
            protocol=spoken(),
        )

    async def SetRoles(self, request: admin_pb2.SetRolesRequest, context: Context) -> admin_pb2.ChangeResponse:
        def change() -> ProposalResult:
            reconfigurer = self._backend.reconfigurer
            return reconfigurer.propose(
                reconfigurer.with_split(request.num_prefill, request.num_decode),
                f"rebalance {request.num_prefill}:{request.num_decode}",
                expected_version=request.expected_version,
                dry_run=request.dry_run,
                save=self._backend.save,
            )

        return await _answered(context, change)

    async def Apply(self, request: admin_pb2.ApplyRequest, context: Context) -> admin_pb2.ChangeResponse:
        def change() -> ProposalResult:
            backend, origin = self._backend, f"apply {request.filename}".rstrip()
            try:
                wanted = backend.parse(request.yaml, request.filename)
            except ConfigError as error:
                backend.reconfigurer.refuse(origin, error.message)
                raise InvalidRequest(error.message) from error
            return backend.reconfigurer.propose(
                backend.reconfigurer.split_kept(wanted),
                origin,
                expected_version=request.expected_version,
                dry_run=request.dry_run,
                save=backend.save,
            )

        return await _answered(context, change)

    async def DrainWorker(self, request: admin_pb2.DrainWorkerRequest, context: Context) -> admin_pb2.ChangeResponse:
        def change() -> ProposalResult:
            reconfigurer = self._backend.reconfigurer
            return reconfigurer.propose(
                reconfigurer.without(request.worker_id),
                f"drain {request.worker_id}",
                expected_version=request.expected_version,
                dry_run=request.dry_run,
                leaving=[request.worker_id],
                save=self._backend.save,
            )

        return await _answered(context, change)

    async def WatchEvents(
        self, request: admin_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ClusterEvent]:
        events = self._backend.events
        since = request.after_sequence if request.HasField("after_sequence") else events.last_sequence
        async for event in events.after(since):
            yield event_message(event)


async def start_admin(
    section: AdminSection,
    backend: AdminBackend,
    keys: KeyRing | None = None,
    tls: ServerTls | None = None,
    *,
    token: str = "",
    to_workers: ClientTls | None = None,
    worker_token: str = "",
) -> tuple[grpc.aio.Server, str]:
    """Listens; the server and its address. Raises ConfigError for one that it may not or cannot have.

    Whoever reaches this port may change the cluster: with a key of the scope `admin` where there are `keys`, else with
    the `token`, if there is one, and with a certificate where `tls` asks for one. The configuration is refused that
    opens it to everybody beyond loopback. `to_workers`, `worker_token`: for calls that are passed on to workers.
    """
    scopes: dict[str, Scope] = {ADMIN: "admin", _WORKER_CONTROL.full_name: "admin"}
    who_may = token_gates(token, "the controller") if keys is None else (Gate(keys, scopes, ()),)
    interceptors = (*who_may, ProtocolGate("the controller", may_be_silent=True))
    server, port = rpc.create_server(
        section.host, section.port, insecure=section.insecure, tls=tls, interceptors=interceptors
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(backend), server)
    server.add_generic_rpc_handlers((worker_control_handler(backend.pool, to_workers, worker_token),))
    await server.start()
    return server, rpc.format_address(section.host, port)


def worker_control_handler(pool: WorkerPool, tls: ClientTls | None, token: str) -> grpc.GenericRpcHandler[Any, Any]:
    """Passes each call on to the worker that its request names, and the worker's answer or error back."""
    methods = {method.name: _pass_on(method, pool, tls, token) for method in _WORKER_CONTROL.methods}
    return grpc.method_handlers_generic_handler(_WORKER_CONTROL.full_name, methods)


def _pass_on(
    method: MethodDescriptor, pool: WorkerPool, tls: ClientTls | None, token: str
) -> grpc.RpcMethodHandler[Any, Any]:
    asked, answered = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))

    async def call(request: Any, context: Context) -> Any:
        left_s = context.time_remaining()
        wait_s = _WORKER_CALL_S if left_s is None else max(left_s - _ANSWER_S, left_s / 2)
        try:
            async with rpc.create_channel(pool.address(request.worker_id), tls=tls) as channel:
                on_worker = channel.unary_unary(
                    f"/{_WORKER_CONTROL.full_name}/{method.name}", asked.SerializeToString, answered.FromString
                )
                return await on_worker(request, timeout=wait_s, metadata=inside_metadata(token))
        except grpc.RpcError as error:
            failure = rpc.from_rpc_error(error)
            if isinstance(failure, NotReachable):
                failure = Unavailable(f"worker {request.worker_id} does not answer: {failure.message}")
            elif isinstance(failure, DeadlineExceeded):
                failure = Unavailable(f"worker {request.worker_id} does not answer within {wait_s:.2g} s")
        except BatonError as error:
            failure = error
        await rpc.abort(context, failure)

    return grpc.unary_unary_rpc_method_handler(call, asked.FromString, answered.SerializeToString)


def plan_message(plan: Plan) -> admin_pb2.Plan:
    return admin_pb2.Plan(origin=plan.origin, changes=plan.changes, steps=map(str, plan.steps), num_done=plan.num_done)


def event_message(event: ClusterEvent) -> admin_pb2.ClusterEvent:
    return admin_pb2.ClusterEvent(
        sequence=event.sequence,
        kind=f"KIND_{event.kind.name}",
        text=event.text,
        version=event.version,
        worker_id=event.worker_id,
        time=event.time,
    )


async def _answered(context: Context, change: Callable[[], ProposalResult]) -> admin_pb2.ChangeResponse:
    try:
        answer = change()
    except BatonError as error:
        failure = error
    except Exception:
        log.exception("a change failed")
        failure = InternalError("the controller failed on this change; its log says why")
    else:
        return admin_pb2.ChangeResponse(
            version=answer.version,
            plan=plan_message(answer.plan),
            after_sequence=answer.after_sequence,
            is_change=answer.is_change,
        )
    await rpc.abort(context, failure)


def _processes(backend: AdminBackend) -> list[admin_pb2.ProcessStatus]:
    workers = []
    for member in backend.pool:
        process = _process(member.supervisor)
        process.role, process.is_draining = ROLE_NUMBERS[member.plan.role], member.is_draining
        process.tp_size = len(member.plan.ranks)
        workers.append(process)
    return [*map(_process, backend.routers), *workers]


def _process(supervisor: Supervisor) -> admin_pb2.ProcessStatus:
    return admin_pb2.ProcessStatus(
        name=supervisor.name,
        state=supervisor.state.value,
        num_starts=supervisor.num_starts,
        why=supervisor.why,
        address=str(supervisor.card.get("address", "")),
        pids=supervisor.card.get("pids", ()),
    )
