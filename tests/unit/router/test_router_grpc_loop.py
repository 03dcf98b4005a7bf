"""The event loop that hears of many gRPC operations at once."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import Any

import grpc
import pytest

from cluster import rpc
from router import grpc_loop

METHOD = "/test.Echo/Call"
NUM_OPERATIONS = 100


class PollerCompletionQueue:
    """Tells of operations as gRPC's does: a byte for each, of which one is read at a time."""

    def __init__(self) -> None:
        self.done, self._tell = socket.socketpair()
        self.num_in_queue = 0
        self.num_turns = 0

    def operations_done(self, count: int) -> None:
        for _ in range(count):
            self.num_in_queue += 1
            self._tell.send(b"1")

    def handle_events(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.done.recv(1)
        self.num_turns += 1
        self.num_in_queue = 0

    def close(self) -> None:
        self.done.close()
        self._tell.close()


async def answer(request: bytes, _: Any) -> bytes:
    return request


def test_operations_that_are_done_together_take_one_turn() -> None:
    async def run() -> None:
        loop, queue = asyncio.get_running_loop(), PollerCompletionQueue()
        loop.add_reader(queue.done, queue.handle_events, loop)
        for num_done in (NUM_OPERATIONS, 1):
            queue.num_turns = 0
            queue.operations_done(num_done)
            while queue.num_in_queue:
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
            assert queue.num_turns == 1
        loop.remove_reader(queue.done)
        queue.close()

    grpc_loop.run(run())


def test_it_knows_the_handler_of_the_installed_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns = 0
    handle_all = grpc_loop._handle_all

    def counted(*args: Any) -> None:
        nonlocal num_turns
        num_turns += 1
        handle_all(*args)

    async def run() -> None:
        server, port = rpc.create_server()
        call = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Call": call}),))
        await server.start()
        async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
            calls = (channel.unary_unary(METHOD, bytes, bytes)(b"x", timeout=10) for _ in range(NUM_OPERATIONS))
            assert await asyncio.gather(*calls) == [b"x"] * NUM_OPERATIONS
            assert grpc_loop.grpc_threads(), "its thread is known by its name"
        await server.stop(None)

    monkeypatch.setattr(grpc_loop, "_handle_all", counted)
    grpc_loop.run(run())
    assert num_turns > 0


def test_a_thread_that_tells_of_many_operations_gives_way_until_there_are_few() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.native_id is not None
    usual = os.sched_getscheduler(thread.native_id)
    given_way = os.SCHED_BATCH if usual == os.SCHED_OTHER else usual  # another policy is somebody's own
    deference = grpc_loop.Deference([thread.native_id, 2**22 + 1])
    many, policies, are_on = int(2 * grpc_loop.MANY_PER_S * grpc_loop.WINDOW_S), list[int](), list[bool]()
    for now, num_done in ((1.0, 1), (1.05, many), (1.2, many), (1.25, many), (1.4, many), (1.6, 1), (9.0, 2 * many)):
        deference.add(num_done, now)
        policies.append(os.sched_getscheduler(thread.native_id))
        are_on.append(deference.is_on)
    ended.set()
    thread.join()
    assert are_on == [False, False, True, True, True, False, False]
    assert policies == [usual, usual, given_way, given_way, given_way, usual, usual]
