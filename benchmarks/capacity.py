"""How many requests of one kind a second a cluster completes when clients keep it busy. Knows an address; starts
nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time

from benchmarks.open_loop import NUM_VARIANTS, Kind, spec_of
from cluster import rpc
from cluster.pb import generation_pb2, generation_pb2_grpc


def capacity_of(address: str, kind: Kind, streams: int, seconds: float) -> float:
    """By the tokens that so many streams get in the second half of so much time, as long outputs take all of it."""
    return asyncio.run(_measure(address, kind, streams, seconds))


async def _measure(address: str, kind: Kind, streams: int, seconds: float) -> float:
    begun = time.perf_counter()
    half, num_tokens = begun + seconds / 2, 0
    async with rpc.create_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def keep_asking(variant: int) -> None:
            nonlocal num_tokens
            spec = spec_of(kind, variant % NUM_VARIANTS)
            while True:
                async for event in stub.GenerateStream(generation_pb2.GenerateStreamRequest(spec=spec)):
                    if event.HasField("delta") and time.perf_counter() >= half:
                        num_tokens += event.delta.token_count

        asking = asyncio.gather(*(keep_asking(variant) for variant in range(streams)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asking, seconds)
        measured_s = time.perf_counter() - half
    return num_tokens / kind.num_output_tokens / measured_s
