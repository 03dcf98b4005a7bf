"""A load that comes when it comes, whatever becomes of it, and what its clients saw: times, goodput, and every token.

Requests are drawn from a few kinds with fixed prompts; equal requests must have equal outputs, and what a stream tells
must be without a gap or a repeat. Knows an address; starts nothing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster import rpc
from cluster.client import make_spec
from cluster.errors import Overloaded
from cluster.pb import generation_pb2, generation_pb2_grpc

NUM_VARIANTS = 8
"""Prompts of one kind that differ."""


@dataclass(frozen=True)
class Kind:
    """Requests of one size."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Arrival:
    """When a request comes, in seconds from the start, and which it is."""

    at: float
    kind: Kind
    variant: int


@dataclass
class Told:
    """What one client got."""

    arrival: Arrival
    sent_at: float
    """Of the clock of `time.perf_counter`, as the following."""
    token_ids: list[int] = field(default_factory=list)
    told: list[tuple[float, int]] = field(default_factory=list)
    """When each message with tokens came, and how many it held."""
    problem: str = ""
    """Why it did not complete, or what is wrong with what it told."""
    was_refused: bool = False

    @property
    def ttft_s(self) -> float:
        return self.told[0][0] - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; 0 for one token."""
        num_later = len(self.token_ids) - 1
        return (self.told[-1][0] - self.told[0][0]) / num_later if num_later > 0 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Between messages with tokens."""
        return [after - before for (before, _), (after, _) in zip(self.told, self.told[1:], strict=False)]

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        return not self.problem and not self.was_refused and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


def poisson(kinds: Sequence[tuple[Kind, float]], begin_s: float, seconds: float, draw: random.Random) -> list[Arrival]:
    """Independent arrivals of each kind at its rate, in requests a second."""
    arrivals = []
    for kind, rate in kinds:
        at = begin_s
        while rate > 0 and (at := at + draw.expovariate(rate)) < begin_s + seconds:
            arrivals.append(Arrival(at, kind, draw.randrange(NUM_VARIANTS)))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def spec_of(kind: Kind, variant: int) -> generation_pb2.GenerationSpec:
    """Always the same. Half of the variants are greedy, half seeded; nothing of one is another's prefix."""
    draw = random.Random(f"{kind.name} {variant}")
    prompt = draw.choices(range(4, 1000), k=kind.num_prompt_tokens)
    spec = make_spec(
        prompt,
        max_output_tokens=kind.num_output_tokens,
        temperature=0.0 if variant % 2 else 0.8,
        seed=variant,
        ignore_eos=True,
        token_ids=True,
    )
    spec.cache.bypass_prefix_cache = True
    return spec


async def offer(
    address: str, arrivals: Iterable[Arrival], on_end: Callable[[Told], None], *, timeout_s: float = 120.0
) -> list[Told]:
    """Sends each request at its time and returns when all have ended. `on_end` hears of each."""
    begun = time.perf_counter()
    async with rpc.create_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begun + arrival.at - time.perf_counter()))
            tasks.append(group.create_task(_ask(stub, arrival, timeout_s, on_end)))
    return [task.result() for task in tasks]


async def _ask(stub: Any, arrival: Arrival, timeout_s: float, on_end: Callable[[Told], None]) -> Told:
    told = Told(arrival, time.perf_counter())
    request = generation_pb2.GenerateStreamRequest(spec=spec_of(arrival.kind, arrival.variant))
    try:
        async for event in stub.GenerateStream(request, timeout=timeout_s):
            if event.HasField("delta"):
                if event.delta.first_token_index != len(told.token_ids):
                    told.problem = f"token {event.delta.first_token_index} came after {len(told.token_ids)}"
                told.token_ids.extend(event.delta.token_ids)
                told.told.append((time.perf_counter(), event.delta.token_count))
    except grpc.aio.AioRpcError as error:
        failure = rpc.from_rpc_error(error)
        told.was_refused = not told.told and isinstance(failure, Overloaded)
        told.problem = "" if told.was_refused else f"{error.code().name}: {error.details()}"
    else:
        if not told.problem and len(told.token_ids) != arrival.kind.num_output_tokens:
            told.problem = f"{len(told.token_ids)} tokens came, not {arrival.kind.num_output_tokens}"
    on_end(told)
    return told


def problems_of(all_told: Iterable[Told]) -> list[str]:
    """What was lost, repeated or changed: also where two equal requests differ."""
    found = []
    first: dict[tuple[str, int], list[int]] = {}
    for told in all_told:
        name = f"{told.arrival.kind.name} {told.arrival.variant}"
        if told.problem:
            found.append(f"{name}: {told.problem}")
        elif not told.was_refused:
            known = first.setdefault((told.arrival.kind.name, told.arrival.variant), told.token_ids)
            if known != told.token_ids:
                found.append(f"{name}: its output is not that of another request like it")
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True)
class Figures:
    """Of the requests that arrived in one stretch of time."""

    num_requests: int
    goodput: float
    """Requests a second that kept both objectives."""
    kept: float
    """Their share of all."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float


def figures_of(all_told: Sequence[Told], seconds: float, *, ttft_s: float, tpot_s: float) -> Figures:
    ended = [told for told in all_told if told.told and not told.problem]
    num_kept = sum(told.keeps(ttft_s, tpot_s) for told in all_told)
    ttfts = [told.ttft_s for told in ended]
    gaps = [gap for told in ended for gap in told.gaps_s]
    tpots = [told.tpot_s for told in ended]
    return Figures(
        num_requests=len(all_told),
        goodput=round(num_kept / seconds, 3),
        kept=round(num_kept / max(1, len(all_told)), 3),
        ttft_p50_ms=round(1000 * percentile(ttfts, 0.5), 1),
        ttft_p99_ms=round(1000 * percentile(ttfts, 0.99), 1),
        itl_p50_ms=round(1000 * percentile(gaps, 0.5), 2),
        itl_p99_ms=round(1000 * percentile(gaps, 0.99), 2),
        tpot_p50_ms=round(1000 * statistics.median(tpots), 2) if tpots else 0.0,
    )
