"""The clients of benchmarks/overload.py, in a process of their own: at a rate or so many at a time, or such that read
nothing.

They speak gRPC with neither the client library of Baton nor what offers the load of `baton bench`, since at ten times a
cluster's capacity most of what a client does is to be refused: requests are serialized once, and what is checked of an
answer is that its tokens come without a gap and are those of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster import rpc
from cluster.pb import generation_pb2 as pb

METHOD = "/baton.v1.GenerationService/GenerateStream"
DEAF = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
"""Options of a client whose flow-control window is small and stays so."""
STREAMS_PER_DEAF_CHANNEL = 50
GIVE_UP_S = 120.0


@dataclass
class Outcome:
    """One request; times in seconds, from the beginning of the phase or of the request."""

    sent_at: float
    took_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float = 0.0
    queue_s: float = 0.0
    """That it waited in the router's queue, as the router says."""
    tokens: list[int] = field(default_factory=list)
    number: int = 0
    code: str = "OK"
    reason: str = ""
    has_retry: bool = False
    problem: str = ""
    """What is wrong with what was told."""


@dataclass
class Phase:
    """What came of one phase. `cpu_s`: of this process in it, in `wall_s`."""

    outcomes: list[Outcome]
    cpu_s: float
    wall_s: float


def at_rate(address: str, specs: list[bytes], rate: float, seconds: float, seed: int) -> Phase:
    """Requests at random instants, so many a second on average, whatever becomes of those before."""
    draw = random.Random(seed)
    instants, at = [], draw.expovariate(rate)
    while at < seconds:
        instants.append(at)
        at += draw.expovariate(rate)

    async def send(call: Any, begun: float) -> list[Outcome]:
        tasks = []
        for number, instant in enumerate(instants):
            await asyncio.sleep(max(0.0, begun + instant - time.perf_counter()))
            tasks.append(asyncio.create_task(_ask(call, specs, number, begun)))
        return list(await asyncio.gather(*tasks))

    return asyncio.run(_measure(address, send))


def at_a_time(address: str, specs: list[bytes], streams: int, seconds: float) -> Phase:
    """So many clients, each of which asks again when it has been answered, until the time is over."""

    async def send(call: Any, begun: float) -> list[Outcome]:
        ended: list[Outcome] = []

        async def keep_asking(first: int) -> None:
            number = first
            while time.perf_counter() < begun + seconds:
                ended.append(await _ask(call, specs, number, begun))
                number += streams

        await asyncio.gather(*(keep_asking(first) for first in range(streams)))
        return ended

    return asyncio.run(_measure(address, send))


def each_once(address: str, specs: list[bytes], streams: int) -> Phase:
    """Every one of them, so many at a time."""

    async def send(call: Any, begun: float) -> list[Outcome]:
        room = asyncio.Semaphore(streams)

        async def ask(number: int) -> Outcome:
            async with room:
                return await _ask(call, specs, number, begun)

        return list(await asyncio.gather(*map(ask, range(len(specs)))))

    return asyncio.run(_measure(address, send))


def deaf(address: str, spec: bytes, num_clients: int, seconds: float) -> dict[str, int]:
    """Clients that read nothing for so long, and then what is there: how the calls ended, by their reasons."""

    async def run() -> dict[str, int]:
        count = -(-num_clients // STREAMS_PER_DEAF_CHANNEL)
        channels = [grpc.aio.insecure_channel(address, options=DEAF) for _ in range(count)]
        calls = [channels[i % count].unary_stream(METHOD)(spec) for i in range(num_clients)]
        await asyncio.sleep(seconds)
        ends: dict[str, int] = {}
        for call in calls:
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    async for _ in call:
                        pass
                end = "completed"
            except grpc.aio.AioRpcError as error:
                end = reason_of(error)[0] or error.code().name
            ends[end] = ends.get(end, 0) + 1
        await asyncio.gather(*(channel.close() for channel in channels))
        return ends

    return asyncio.run(run())


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, bool]:
    """The reason in a status, and whether it says when to try again."""
    from google.rpc import error_details_pb2, status_pb2

    for key, value in error.trailing_metadata() or ():
        if key == rpc.DETAILS_KEY:
            assert isinstance(value, bytes)
            info, reason, has_retry = error_details_pb2.ErrorInfo(), "", False
            for detail in status_pb2.Status.FromString(value).details:
                has_retry |= detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
                reason = info.reason if detail.Unpack(info) else reason
            return reason, has_retry
    return "", False


async def _measure(address: str, send: Any) -> Phase:
    async with rpc.create_channel(address) as channel:
        await channel.channel_ready()
        call = channel.unary_stream(METHOD)
        begun, cpu = time.perf_counter(), _cpu_s()
        outcomes = await send(call, begun)
        return Phase(outcomes, _cpu_s() - cpu, time.perf_counter() - begun)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _ask(call: Any, specs: list[bytes], number: int, begun: float) -> Outcome:
    """Never raises: what goes wrong is the outcome."""
    sent = time.perf_counter()
    outcome, last = Outcome(sent - begun, number=number % len(specs)), sent
    is_complete = False
    try:
        async for data in call(specs[outcome.number], timeout=GIVE_UP_S):
            event = pb.GenerateStreamResponse.FromString(data)
            if event.HasField("delta"):
                last = time.perf_counter()
                if outcome.ttft_s is None:
                    outcome.ttft_s = last - sent
                if event.delta.first_token_index != len(outcome.tokens):
                    outcome.problem = f"token {event.delta.first_token_index} came, {len(outcome.tokens)} was next"
                outcome.tokens.extend(event.delta.token_ids)
            elif event.HasField("completed"):
                is_complete, outcome.queue_s = True, event.completed.timing.queue.ToNanoseconds() / 1e9
    except grpc.aio.AioRpcError as error:
        outcome.code = error.code().name
        outcome.reason, outcome.has_retry = reason_of(error)
    else:
        outcome.problem = outcome.problem or ("" if is_complete else "it ended without Completed")
    outcome.took_s = time.perf_counter() - sent
    if outcome.ttft_s is not None and len(outcome.tokens) > 1:
        outcome.tpot_s = (last - sent - outcome.ttft_s) / (len(outcome.tokens) - 1)
    return outcome
