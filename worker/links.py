"""Hand-off links to decode workers: one gRPC stream for each, opened at first use. Lives on the speaking loop.

A link that breaks is forgotten and reported once; the next request opens another. Messages told before the decode
worker has answered wait in the link's queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs

from cluster import rpc
from cluster.errors import BatonError
from cluster.pb import handoff_pb2, handoff_pb2_grpc
from kv_transfer.layout import KvLayout, check_compatible

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Link:
    """One stream to one decode worker."""

    def __init__(self, peer: str, address: str, incarnation: str) -> None:
        self.peer = peer
        self.address = address
        self.incarnation = incarnation
        self.queue: asyncio.Queue[handoff_pb2.SenderMessage | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class Links:
    """All links of a worker. `up`, `heard` and `down` are called on the loop and must return at once."""

    def __init__(
        self,
        hello: handoff_pb2.SenderHello,
        up: Callable[[str, handoff_pb2.ReceiverHello], None],
        heard: Callable[[str, handoff_pb2.ReceiverMessage], None],
        down: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._up, self._heard, self._down = up, heard, down
        self._links: dict[str, Link] = {}

    def open(self, peer: str, address: str, incarnation: str) -> None:
        """Opens the link unless it is open already."""
        if peer not in self._links:
            link = self._links[peer] = Link(peer, address, incarnation)
            link.task = asyncio.create_task(self._run(link), name=f"link {peer}")

    def tell(self, peer: str, message: handoff_pb2.SenderMessage) -> None:
        """Queues a message; dropped when the link is gone, whose end was reported."""
        link = self._links.get(peer)
        if link is not None:
            link.queue.put_nowait(message)

    def close(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None and link.task is not None:
            link.task.cancel()

    async def close_all(self) -> None:
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, link: Link) -> None:
        try:
            async with rpc.create_channel(link.address) as channel:
                await self._converse(link, handoff_pb2_grpc.HandoffServiceStub(channel))
        except (grpc.RpcError, BatonError, TimeoutError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.warning("link to %s at %s is down: %s", link.peer, link.address, reason)
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
            self._down(link.peer)

    async def _converse(self, link: Link, stub: handoff_pb2_grpc.HandoffServiceStub) -> None:
        call = stub.Connect(self._outbound(link))
        first = await asyncio.wait_for(call.read(), CONNECT_TIMEOUT_S)
        if first is EOF or first.WhichOneof("message") != "hello":
            await call.code()
            raise BatonError(f"the decode worker did not greet: {await call.details()}")
        if first.hello.incarnation != link.incarnation:
            raise BatonError("the decode worker was restarted since the router chose it")
        check_compatible(KvLayout.from_proto(self._hello.layout), KvLayout.from_proto(first.hello.layout))
        self._up(link.peer, first.hello)
        while (message := await call.read()) is not EOF:
            self._heard(link.peer, message)

    async def _outbound(self, link: Link) -> AsyncIterator[handoff_pb2.SenderMessage]:
        yield handoff_pb2.SenderMessage(hello=self._hello)
        while (message := await link.queue.get()) is not None:
            yield message
