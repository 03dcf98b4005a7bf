"""The controller's word to the router, and the router's to the controller.

The router is told the complete set of workers, with the version, the needs and the objectives of the configuration,
until it has heard them; what it says of its workers is how a step is verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.rpc import create_channel
from cluster.supervisor import State, Supervisor
from cluster.tls import ClientTls

logger = logging.getLogger(__name__)

CALL_S = 5.0
LOOK_EVERY_S = 0.05


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
        return self._router.state is State.READY

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
            except grpc.RpcError as error:
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
        except grpc.RpcError as error:
            logger.info("the router does not answer: %s", error)
            return None

    async def demand(self) -> list[admin_pb2.GetDemandResponse]:
        """What clients have asked for lately; nothing while the router does not answer."""
        if not self.is_up:
            return []
        try:
            control = admin_pb2_grpc.ControlServiceStub(await self._channel("control_address"))
            return [await control.GetDemand(admin_pb2.GetDemandRequest(), timeout=CALL_S)]
        except grpc.RpcError as error:
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
