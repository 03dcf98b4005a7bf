"""A scripted router for the client side of `baton`, an address where nobody listens, a folder for cluster.yaml."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_router import ScriptedRouter

from cluster import rpc
from cluster.pb import admin_pb2_grpc, generation_pb2_grpc


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop in a thread for every test here: gRPC shares one poller between all loops of a process."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.run_until_complete(running.shutdown_default_executor())
    running.close()


@pytest.fixture
def router(loop: asyncio.AbstractEventLoop) -> Iterator[ScriptedRouter]:
    scripted = ScriptedRouter()

    async def start() -> Any:
        server, port = rpc.create_server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, server)
        admin_pb2_grpc.add_StatusServiceServicer_to_server(scripted, server)
        await server.start()
        scripted.address = f"127.0.0.1:{port}"
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield scripted
    scripted.go_on.set()
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where cluster.yaml stands, with a model folder `m` beside it."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
