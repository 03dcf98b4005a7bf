"""The controller's calls to the routers.

Every router gets the complete set of workers, with the version, the needs and the run-time settings of the
configuration; an update is repeated until it arrives. A router's status is how a step of a change is verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from cluster.errors import BatonError
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.protocol import inside_metadata
from cluster.rpc import OpenChannel, create_channel
from cluster.tls import ClientTls
from controller.supervisor import Supervisor, SupervisorState

logger = logging.getLogger(__name__)

CALL_S = 5.0
LOOK_EVERY_S = 0.05
_READY = admin_pb2.WorkerStatus.STATE_READY
_RETRIED = (grpc.RpcError, BatonError, OSError)
"""Errors after which a call is tried again later, such as a certificate that cannot be read now."""
_ADDED = (
    *("num_queued", "max_queued", "num_running", "num_finished"),
    *("num_cancelled", "num_failed", "num_rejected", "num_orphaned"),
)


class RouterLink:
    """Calls one router. `compose` makes the update, anew for each attempt. `tls`, `token`: of the cluster's inside, if
    any. `open_channel` leads to the router."""

    def __init__(
        self,
        router: Supervisor,
        compose: Callable[[], admin_pb2.SetWorkersRequest],
        tls: ClientTls | None = None,
        token: str = "",
        open_channel: OpenChannel = create_channel,
    ) -> None:
        self._router = router
        self._open_channel = open_channel
        self._compose = compose
        self._tls = tls
        self._metadata = inside_metadata(token)
        self._updating = asyncio.Lock()
        self._channels: dict[str, tuple[tuple[int, str], grpc.aio.Channel]] = {}

    @property
    def is_up(self) -> bool:
        return self._router.state is SupervisorState.READY

    async def try_to_update(self) -> bool:
        """Sends the update once; False when it did not arrive."""
        async with self._updating:
            if not self.is_up:
                return False
            try:
                control = admin_pb2_grpc.ControlServiceStub(await self._channel("control_address"))
                await control.SetWorkers(self._compose(), timeout=CALL_S, metadata=self._metadata)
            except _RETRIED as error:
                logger.info("the router did not get its workers: %s", error)
                return False
        return True

    async def status(self) -> admin_pb2.GetStatusResponse | None:
        """The router's status; None when it does not answer."""
        if not self.is_up:
            return None
        try:
            stub = admin_pb2_grpc.StatusServiceStub(await self._channel("control_address"))
            answer: admin_pb2.GetStatusResponse = await stub.GetStatus(
                admin_pb2.GetStatusRequest(), timeout=CALL_S, metadata=self._metadata
            )
            return answer
        except _RETRIED as error:
            logger.info("the router does not answer: %s", error)
            return None

    async def demand(self) -> list[admin_pb2.GetDemandResponse]:
        """The recent demand of clients; empty while the router does not answer."""
        if not self.is_up:
            return []
        try:
            control = admin_pb2_grpc.ControlServiceStub(await self._channel("control_address"))
            return [await control.GetDemand(admin_pb2.GetDemandRequest(), timeout=CALL_S, metadata=self._metadata)]
        except _RETRIED as error:
            logger.info("the router does not report its demand: %s", error)
            return []

    async def close(self) -> None:
        """Ends the calls under way."""
        for _, channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    async def _channel(self, name: str) -> grpc.aio.Channel:
        """A channel to that address of the router's present life."""
        address = str(self._router.card[name])
        life = (self._router.num_starts, address)
        known = self._channels.get(name)
        if known is not None and known[0] == life:
            return known[1]
        channel = self._open_channel(address, tls=self._tls)
        self._channels[name] = (life, channel)
        if known is not None:
            await known[1].close(CALL_S)
        return channel


class RouterLinks:
    """Several routers as one: all get the same updates, and their reports are taken together."""

    def __init__(self) -> None:
        self._links: list[RouterLink] = []

    def add(self, link: RouterLink) -> None:
        self._links.append(link)

    async def remove(self, link: RouterLink) -> None:
        """Takes it out, if it is in, and ends its calls under way."""
        if link in self._links:
            self._links.remove(link)
        await link.close()

    @property
    def is_up(self) -> bool:
        return any(link.is_up for link in self._links)

    @property
    def are_all_up(self) -> bool:
        return all(link.is_up for link in self._links)

    async def update(self) -> None:
        """Returns when every router that is up has the update; waits while none is up. One that comes up later gets it
        then."""
        while not await self.try_to_update():
            await asyncio.sleep(LOOK_EVERY_S)

    async def try_to_update(self) -> bool:
        """Sends the update once; False when a router that is up did not get it, or none is up."""
        up = [link for link in self._links if link.is_up]
        return bool(up) and all(await asyncio.gather(*(link.try_to_update() for link in up)))

    async def status(self) -> admin_pb2.GetStatusResponse | None:
        """None when none is up, or one that is does not answer."""
        answers = await asyncio.gather(*(link.status() for link in self._links if link.is_up))
        known = [answer for answer in answers if answer is not None]
        return merged(known) if known and len(known) == len(answers) else None

    async def demand(self) -> list[admin_pb2.GetDemandResponse]:
        """One report from each router that answers."""
        return [one for of_one in await asyncio.gather(*(link.demand() for link in self._links)) for one in of_one]

    async def close(self) -> None:
        """Ends the calls under way."""
        await asyncio.gather(*(link.close() for link in self._links))


def merged(answers: Sequence[admin_pb2.GetStatusResponse]) -> admin_pb2.GetStatusResponse:
    """One status from those of at least one router. A worker is what all of them see in it; requests add up."""
    whole = admin_pb2.GetStatusResponse()
    whole.CopyFrom(answers[0])
    whole.config_version = min(answer.config_version for answer in answers)
    seen = [{worker.worker_id: worker for worker in answer.workers} for answer in answers]
    del whole.workers[:]
    whole.workers.extend(
        _seen_by_all([of_one.get(worker_id) for of_one in seen])
        for worker_id in dict.fromkeys(worker_id for of_one in seen for worker_id in of_one)
    )
    for answer in answers[1:]:
        for name in _ADDED:
            setattr(whole.router, name, getattr(whole.router, name) + getattr(answer.router, name))
    return whole


def _seen_by_all(views: Sequence[admin_pb2.WorkerStatus | None]) -> admin_pb2.WorkerStatus:
    """One worker, as each router sees it; None: it does not know it yet. A router that does not reach it has nothing on
    it, whatever it last counted there."""
    known = [view for view in views if view is not None]
    whole = admin_pb2.WorkerStatus()
    whole.CopyFrom(known[0])
    if len(known) < len(views):
        whole.state = admin_pb2.WorkerStatus.STATE_CONNECTING
    whole.state = next((view.state for view in known if view.state != _READY), whole.state)
    if any(view.role != whole.role for view in known):
        whole.role = worker_pb2.ROLE_UNSPECIFIED
    whole.is_draining = any(view.is_draining for view in known)
    whole.is_slow = any(view.is_slow for view in known)
    whole.num_requests = sum(view.num_requests for view in known if view.state == _READY)
    return whole
