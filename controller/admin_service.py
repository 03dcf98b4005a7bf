"""AdminService: what operators see and change of the whole cluster, on a port of its own in the controller's process.

Translates between messages and the door; decides nothing. Errors become gRPC statuses here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc

from cluster import rpc
from cluster.auth import Gate, KeyRing
from cluster.config import AdminSection, ServingConfig
from cluster.errors import BatonError, ConfigError, InternalError, InvalidRequest
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.tls import ServerTls
from controller.event_log import ClusterEvent, EventLog
from controller.reconfigurer import Keep, Plan, ProposalResult, Reconfigurer
from controller.supervisor import Supervisor
from controller.worker_pool import ROLE_NUMBERS, WorkerPool

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_TOLD_EVENTS = 20
_NAME: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class Desk(Protocol):
    """What the service reads and changes; the controller."""

    door: Reconfigurer
    events: EventLog
    crew: WorkerPool

    @property
    def routers(self) -> Sequence[Supervisor]: ...

    @property
    def config_path(self) -> str:
        """Of the file that is watched; empty: none."""
        ...

    @property
    def keep(self) -> Keep | None:
        """Writes an accepted change into that file."""
        ...

    @property
    def auto(self) -> admin_pb2.Auto | None:
        """What `mode: auto` makes of the load; None in another mode."""
        ...

    @property
    def metrics_address(self) -> str:
        """Of the controller's page; empty: there is none."""
        ...

    def parse(self, text: str, filename: str) -> ServingConfig:
        """Raises ConfigError."""
        ...

    async def router_status(self) -> admin_pb2.GetStatusResponse | None: ...


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GetCluster(self, request: admin_pb2.GetClusterRequest, context: Context) -> admin_pb2.GetClusterResponse:
        desk = self._desk
        members = [m for m in desk.crew.members() if not m.is_draining]
        changing = desk.door.changing
        return admin_pb2.GetClusterResponse(
            version=desk.door.version,
            num_prefill=sum(m.role == "prefill" for m in members),
            num_decode=sum(m.role == "decode" for m in members),
            processes=_processes(desk),
            router=await desk.router_status(),
            changing=None if changing is None else plan_message(changing),
            last_sequence=desk.events.last_sequence,
            config_file=desk.config_path,
            auto=desk.auto,
            metrics_address=desk.metrics_address,
            events=map(event_message, desk.events.newest(_TOLD_EVENTS)),
        )

    async def SetRoles(self, request: admin_pb2.SetRolesRequest, context: Context) -> admin_pb2.ChangeResponse:
        def change() -> ProposalResult:
            door = self._desk.door
            return door.propose(
                door.with_split(request.num_prefill, request.num_decode),
                f"rebalance {request.num_prefill}:{request.num_decode}",
                expected_version=request.expected_version,
                dry_run=request.dry_run,
                keep=self._desk.keep,
            )

        return await _answered(context, change)

    async def Apply(self, request: admin_pb2.ApplyRequest, context: Context) -> admin_pb2.ChangeResponse:
        def change() -> ProposalResult:
            desk, origin = self._desk, f"apply {request.filename}".rstrip()
            try:
                wanted = desk.parse(request.yaml, request.filename)
            except ConfigError as error:
                desk.door.refuse(origin, error.message)
                raise InvalidRequest(error.message) from error
            return desk.door.propose(
                desk.door.split_kept(wanted),
                origin,
                expected_version=request.expected_version,
                dry_run=request.dry_run,
                keep=desk.keep,
            )

        return await _answered(context, change)

    async def DrainWorker(self, request: admin_pb2.DrainWorkerRequest, context: Context) -> admin_pb2.ChangeResponse:
        def change() -> ProposalResult:
            door = self._desk.door
            return door.propose(
                door.without(request.worker_id),
                f"drain {request.worker_id}",
                expected_version=request.expected_version,
                dry_run=request.dry_run,
                leaving=[request.worker_id],
                keep=self._desk.keep,
            )

        return await _answered(context, change)

    async def WatchEvents(
        self, request: admin_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ClusterEvent]:
        events = self._desk.events
        since = request.after_sequence if request.HasField("after_sequence") else events.last_sequence
        async for event in events.after(since):
            yield event_message(event)


async def start_admin(
    section: AdminSection, desk: Desk, keys: KeyRing | None = None, tls: ServerTls | None = None
) -> tuple[grpc.aio.Server, str]:
    """Listens; the server and its address. Raises ConfigError for one that it may not or cannot have.

    Whoever reaches this port may change the cluster, with a key of the scope `admin` where there are `keys`, and a
    certificate where `tls` asks for one. The configuration is refused that opens it to everybody beyond loopback.
    """
    interceptors = () if keys is None else (Gate(keys, {_NAME: "admin"}, ()),)
    server, port = rpc.create_server(
        section.host, section.port, insecure=section.insecure, tls=tls, interceptors=interceptors
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(desk), server)
    await server.start()
    return server, rpc.format_address(section.host, port)


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


def _processes(desk: Desk) -> list[admin_pb2.ProcessStatus]:
    workers = []
    for member in desk.crew:
        process = _process(member.supervisor)
        process.role, process.is_draining = ROLE_NUMBERS[member.plan.role], member.is_draining
        process.tp_size = len(member.plan.ranks)
        workers.append(process)
    return [*map(_process, desk.routers), *workers]


def _process(supervisor: Supervisor) -> admin_pb2.ProcessStatus:
    return admin_pb2.ProcessStatus(
        name=supervisor.name,
        state=supervisor.state.value,
        num_starts=supervisor.num_starts,
        why=supervisor.why,
        address=str(supervisor.card.get("address", "")),
        pids=supervisor.card.get("pids", ()),
    )
