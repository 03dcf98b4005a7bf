"""A TCP port in front of another, which holds what passes for a time, or until it is told to go on."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

_MOST_BYTES = 65536


class Relay:
    """Lives in one event loop. What has come leaves after a delay between `least_s` and `most_s`, in its order."""

    def __init__(self, target: str, least_s: float = 0.0, most_s: float = 0.0, host: str = "127.0.0.1") -> None:
        """`host`: where it listens."""
        self._target = target.rpartition(":")[::2]
        self._delay_s = least_s, most_s
        self._host = host
        self._may_go, self._may_come = asyncio.Event(), asyncio.Event()
        self.release()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_bytes_held = 0

    async def listen(self) -> str:
        self._server = await asyncio.start_server(self._meet, self._host, 0)
        return f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    def hold(self, only_there: bool = False) -> None:
        """From now on both sides hear nothing, or only the target does not; the connections stay up."""
        self._may_go.clear()
        if not only_there:
            self._may_come.clear()

    def release(self) -> None:
        self._may_go.set()
        self._may_come.set()

    def reset(self) -> None:
        """Ends every connection with a RST."""
        for writer in self._writers:
            if writer.is_closing():
                continue
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(self._target[0], int(self._target[1]))
        except OSError:  # nobody is there
            writer.transport.abort()
            return
        self._writers += [writer, there_writer]
        ways = ((reader, there_writer, self._may_go), (there_reader, writer, self._may_come))
        for source, target, may_pass in ways:
            late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for work in (self._take(source, late), self._pass(late, target, may_pass)):
                self._tasks.add(asyncio.create_task(work))

    async def _take(self, source: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Notes when each part may leave. An empty one is the end."""
        clock, due, is_open = asyncio.get_running_loop().time, 0.0, True
        while is_open:
            try:
                data = await source.read(_MOST_BYTES)
            except OSError:
                data = b""
            due, is_open = max(due, clock() + random.uniform(*self._delay_s)), bool(data)
            late.put_nowait((due, data))

    async def _pass(
        self, late: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter, may_pass: asyncio.Event
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await late.get()
            if (left_s := due - clock()) > 0:
                await asyncio.sleep(left_s)
            if not may_pass.is_set():
                self.num_bytes_held += len(data)
                await may_pass.wait()
            if not data:
                target.close()
                return
            target.write(data)


@asynccontextmanager
async def relayed(address: str) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay(address)
    try:
        yield relay, await relay.listen()
    finally:
        await relay.close()


@contextmanager
def delayed(addresses: Iterable[str], least_s: float, most_s: float) -> Iterator[list[str]]:
    """Relays in front of these addresses, on a thread of their own; where each is reached."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="relays", daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def listen() -> list[str]:
        found = []
        for address in addresses:
            relay = Relay(address, least_s, most_s)
            found.append(await relay.listen())
            stack.push_async_callback(relay.close)
        return found

    try:
        yield asyncio.run_coroutine_threadsafe(listen(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
