"""The controller's word to the routers, and the routers' to the controller.

A router is told the complete set of workers, with the version, the needs and the objectives of the configuration,
until it has heard them; what it says of its workers is how a step is verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from cluster.errors import BatonError
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.rpc import create_channel
from cluster.tls import ClientTls
from controller.supervisor import Supervisor, SupervisorState

logger = logging.getLogger(__name__)

CALL_S = 5.0
LOOK_EVERY_S = 0.05
_READY = admin_pb2.WorkerStatus.STATE_READY
_UNHEARD = (grpc.RpcError, BatonError, OSError)
"""What a call may end with that is tried again later; a certificate that cannot be read now is among it."""
_ADDED = (
    *("num_queued", "max_queued", "num_running", "num_finished"),
    *("num_cancelled", "num_failed", "num_rejected", "num_orphaned"),
)


class RouterLink:
    """`compose` makes what the router is told, anew for each attempt. `tls`: of the cluster's inside, if it has any."""

    def __init__(
        self, router: Supervisor, compose: Callable[[], admin_pb2.SetWorkersRequest], tls: ClientTls | None = None
    ) -> None:
        self._router = router
        self._compose = compose
        self._tls = tls
        self._telling = asyncio.Lock()
        self._channels: dict[str, tuple[tuple[int, str], grpc.aio.Channel]] = {}

    @property
    def is_up(self) -> bool:
        return self._router.state is SupervisorState.READY

    async def tell(self) -> None:
        """Returns when the router has heard how things are; waits for one that is down."""
        while not await self.try_to_tell():
            await asyncio.sleep(LOOK_EVERY_S)

    async def try_to_tell(self) -> bool:
        """Once; False when it did not hear."""
        async with self._telling:
            if not self.is_up:
                return False
            try:
                control = admin_pb2_grpc.ControlServiceStub(await self._channel("control_address"))
                await control.SetWorkers(self._compose(), timeout=CALL_S)
            except _UNHEARD as error:
                logger.info("the router has not heard of its workers yet: %s", error)
                return False
        return True

    async def status(self) -> admin_pb2.GetStatusResponse | None:
        """What the router says; None when it does not answer."""
        if not self.is_up:
            return None
        try:
            stub = admin_pb2_grpc.StatusServiceStub(await self._channel("control_address"))
            answer: admin_pb2.GetStatusResponse = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_S)
            return answer
        except _UNHEARD as error:
            logger.info("the router does not answer: %s", error)
            return None

    async def demand(self) -> list[admin_pb2.GetDemandResponse]:
        """What clients have asked for lately; nothing while the router does not answer."""
        if not self.is_up:
            return []
        try:
            control = admin_pb2_grpc.ControlServiceStub(await self._channel("control_address"))
            return [await control.GetDemand(admin_pb2.GetDemandRequest(), timeout=CALL_S)]
        except _UNHEARD as error:
            logger.info("the router does not say what is asked of it: %s", error)
            return []

    async def close(self) -> None:
        """Ends what is under way."""
        for _, channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    async def _channel(self, name: str) -> grpc.aio.Channel:
        """To that address of the router's present life."""
        address = str(self._router.card[name])
        life = (self._router.num_starts, address)
        known = self._channels.get(name)
        if known is not None and known[0] == life:
            return known[1]
        channel = create_channel(address, tls=self._tls)
        self._channels[name] = (life, channel)
        if known is not None:
            await known[1].close(CALL_S)
        return channel


class RouterLinks:
    """Several routers as one: told the same, and what they say taken together."""

    def __init__(self, links: Sequence[RouterLink]) -> None:
        self._links = links

    @property
    def is_up(self) -> bool:
        return any(link.is_up for link in self._links)

    @property
    def are_all_up(self) -> bool:
        return all(link.is_up for link in self._links)

    async def tell(self) -> None:
        """Returns when every router that is up has heard how things are; waits while none is. One that comes up later
        is told then."""
        while not await self.try_to_tell():
            await asyncio.sleep(LOOK_EVERY_S)

    async def try_to_tell(self) -> bool:
        """Once; False when one that is up did not hear, or none is."""
        up = [link for link in self._links if link.is_up]
        return bool(up) and all(await asyncio.gather(*(link.try_to_tell() for link in up)))

    async def status(self) -> admin_pb2.GetStatusResponse | None:
        """None when none is up, or one that is does not answer."""
        answers = await asyncio.gather(*(link.status() for link in self._links if link.is_up))
        known = [answer for answer in answers if answer is not None]
        return merged(known) if known and len(known) == len(answers) else None

    async def demand(self) -> list[admin_pb2.GetDemandResponse]:
        """Of each router that answers."""
        return [one for of_one in await asyncio.gather(*(link.demand() for link in self._links)) for one in of_one]

    async def close(self) -> None:
        """Ends what is under way."""
        await asyncio.gather(*(link.close() for link in self._links))


def merged(answers: Sequence[admin_pb2.GetStatusResponse]) -> admin_pb2.GetStatusResponse:
    """Of at least one router. A worker is what all of them see in it; requests are added up."""
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
    whole.num_requests = sum(view.num_requests for view in known if view.state == _READY)
    return whole
