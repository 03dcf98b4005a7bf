"""How many requests a second a cluster completes when clients keep it busy. Knows an address; starts nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.open_loop import NUM_VARIANTS, Kind, spec_of
from cluster import rpc
from cluster.pb import generation_pb2, generation_pb2_grpc


def capacity_of(address: str, kinds: Sequence[tuple[Kind, float]], streams: int, seconds: float) -> float:
    """Of these kinds, each with its share of the requests: by the tokens that so many streams get in the second half of
    so much time, since one long output may take all of it."""
    return asyncio.run(_measure(address, kinds, streams, seconds))


async def _measure(address: str, kinds: Sequence[tuple[Kind, float]], streams: int, seconds: float) -> float:
    half, num_done, is_over = time.perf_counter() + seconds / 2, 0.0, asyncio.Event()

    async def keep_asking(stub: Any, number: int) -> None:
        nonlocal num_done
        draw = random.Random(number)
        while not is_over.is_set():
            [kind] = draw.choices([kind for kind, _ in kinds], [share for _, share in kinds])
            spec = spec_of(kind, draw.randrange(NUM_VARIANTS))
            call = stub.GenerateStream(generation_pb2.GenerateStreamRequest(spec=spec))
            async for event in call:
                if is_over.is_set():
                    call.cancel()
                    await call.code()
                    return
                if event.HasField("delta") and time.perf_counter() >= half:
                    num_done += event.delta.token_count / kind.num_output_tokens

    async with rpc.create_channel(address) as channel, asyncio.TaskGroup() as group:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for number in range(streams):
            group.create_task(keep_asking(stub, number))
        await asyncio.sleep(seconds)
        is_over.set()
        measured_s = time.perf_counter() - half
    return num_done / measured_s
