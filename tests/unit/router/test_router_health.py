"""What every gRPC server offers: health and reflection, asked well and badly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker import pair
from grpc_health.v1 import health_pb2
from router_harness import refusal, running_router

from cluster.errors import InvalidRequest, NotFound

pytestmark = pytest.mark.asyncio

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NO_MESSAGE = (b"\xff" * 9, b"\x0a\x02\xff\xfe", b"\x0a\x05zz")
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def test_bytes_that_are_no_message_are_the_clients_mistake(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        for data in NO_MESSAGE:
            check = router.channel.unary_unary("/grpc.health.v1.Health/Check")
            assert type(await refusal(check(data))) is InvalidRequest
            watching = router.channel.unary_stream("/grpc.health.v1.Health/Watch")(data)
            assert await asyncio.wait_for(watching.code(), 20) is grpc.StatusCode.INVALID_ARGUMENT
            asking = router.channel.stream_stream(REFLECTION)(iter([data]))
            assert b"invalid argument" in await asking.read()
            assert await asking.code() is grpc.StatusCode.OK


async def test_the_health_of_a_service_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        nothing = health_pb2.HealthCheckRequest(service="baton.v2.Nothing")
        assert type(await refusal(router.health.Check(nothing))) is NotFound
        watching = router.health.Watch(health_pb2.HealthCheckRequest(service="baton.v2.Nothing"))
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watching.cancel()


async def test_whoever_watches_goes_on_being_told_when_another_leaves(tmp_path: Path) -> None:
    """The library's own service forgets every watcher with the first that leaves."""
    workers = pair()
    async with running_router(tmp_path, workers) as router:
        request = health_pb2.HealthCheckRequest()

        async def watch() -> Any:
            call = router.health.Watch(request)
            assert (await call.read()).status == SERVING
            return call

        first, second = await watch(), await watch()
        first.cancel()
        await asyncio.wait([asyncio.ensure_future(first.code())], timeout=20)
        await workers[1].stop()
        assert (await asyncio.wait_for(second.read(), 20)).status == NOT_SERVING
        second.cancel()
