"""How many requests of one kind a second a cluster completes when clients keep it busy. Knows an address; starts
nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.open_loop import NUM_VARIANTS, Kind, spec_of
from cluster import rpc
from cluster.pb import generation_pb2, generation_pb2_grpc


def capacity_of(address: str, kind: Kind, streams: int, seconds: float) -> float:
    """By the tokens that so many streams get in the second half of so much time, as long outputs take all of it."""
    return asyncio.run(_measure(address, kind, streams, seconds))


async def _measure(address: str, kind: Kind, streams: int, seconds: float) -> float:
    half, num_tokens, is_over = time.perf_counter() + seconds / 2, 0, asyncio.Event()

    async def keep_asking(stub: Any, variant: int) -> None:
        nonlocal num_tokens
        request = generation_pb2.GenerateStreamRequest(spec=spec_of(kind, variant % NUM_VARIANTS))
        while not is_over.is_set():
            call = stub.GenerateStream(request)
            async for event in call:
                if is_over.is_set():
                    call.cancel()
                    await call.code()
                    return
                if event.HasField("delta") and time.perf_counter() >= half:
                    num_tokens += event.delta.token_count

    async with rpc.create_channel(address) as channel, asyncio.TaskGroup() as group:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for variant in range(streams):
            group.create_task(keep_asking(stub, variant))
        await asyncio.sleep(seconds)
        is_over.set()
        measured_s = time.perf_counter() - half
    return num_tokens / kind.num_output_tokens / measured_s
