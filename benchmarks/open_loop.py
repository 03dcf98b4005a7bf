"""Requests of a few kinds with fixed prompts, offered as `baton bench` does, and what it does not look at: equal
requests must have equal outputs, and what a stream tells must be whole.

Knows an address; starts nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.progress import Progress

from cluster import rpc
from cluster.pb import generation_pb2
from simulate import workload
from tools.bench import figures
from tools.bench.targets import GrpcTarget
from tools.bench.workload import Sample, send_all
from tools.client import make_spec

NUM_VARIANTS = 8
"""Prompts of one kind that differ."""
SETTLE_S = 120.0
"""That a request may take."""


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


@dataclass(kw_only=True)
class ArrivalSample(Sample):
    """The sample of one arrival. `error` also names output that is wrong."""

    arrival: Arrival


def poisson(kinds: Sequence[tuple[Kind, float]], begin_s: float, seconds: float, draw: random.Random) -> list[Arrival]:
    """Independent arrivals of each kind at its rate, in requests a second."""
    found = []
    for kind, rate in kinds:
        times = workload.arrivals(rate, 1.0, draw) if rate > 0 else ()
        for at in itertools.takewhile(lambda at: at < seconds, times):
            found.append(Arrival(begin_s + at, kind, draw.randrange(NUM_VARIANTS)))
    return sorted(found, key=lambda arrival: arrival.at)


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


def offer(address: str, arrivals: Sequence[Arrival], name: str, progress: Progress) -> list[ArrivalSample]:
    """Sends each request at its time and returns when all have ended; a bar shows how many have."""
    bar = progress.add_task(name, total=len(arrivals))
    try:
        return asyncio.run(_offer(address, arrivals, lambda _: progress.advance(bar)))
    finally:
        progress.remove_task(bar)


async def _offer(
    address: str, arrivals: Sequence[Arrival], on_end: Callable[[ArrivalSample], None]
) -> list[ArrivalSample]:
    async with rpc.create_channel(address) as channel:
        target = GrpcTarget(channel, timeout_s=SETTLE_S)

        async def send(arrival: Arrival, sent_at: float) -> ArrivalSample:
            sample = ArrivalSample(arrival.kind.num_prompt_tokens, sent_at, arrival=arrival)
            await target.stream(spec_of(arrival.kind, arrival.variant), sample)
            sample.error = sample.error or _wrong(sample)
            return sample

        return await send_all(arrivals, send, most_at_once=None, on_end=on_end)


def _wrong(sample: ArrivalSample) -> str:
    if sample.num_gaps:
        return f"{sample.num_gaps} messages did not follow upon those before"
    wanted = sample.arrival.kind.num_output_tokens
    return "" if len(sample.token_ids) == wanted else f"{len(sample.token_ids)} tokens came, not {wanted}"


def problems_of(samples: Iterable[ArrivalSample]) -> list[str]:
    """What was lost, repeated or changed: also where two equal requests differ."""
    found = []
    first: dict[tuple[str, int], list[int]] = {}
    for sample in samples:
        name = f"{sample.arrival.kind.name} {sample.arrival.variant}"
        if sample.is_complete:
            known = first.setdefault((sample.arrival.kind.name, sample.arrival.variant), sample.token_ids)
            if known != sample.token_ids:
                found.append(f"{name}: its output is not that of another request like it")
        elif sample.message_times or not sample.was_refused:
            found.append(f"{name}: {sample.error}")
    return found


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


def figures_of(samples: Sequence[ArrivalSample], seconds: float, *, ttft_s: float, tpot_s: float) -> Figures:
    found = figures.figures_of(samples, seconds, {"ttft": 1000 * ttft_s, "tpot": 1000 * tpot_s})
    return Figures(
        num_requests=len(samples),
        goodput=round(found["request_goodput"], 3),
        kept=round(found["request_goodput"] * seconds / max(1, len(samples)), 3),
        ttft_p50_ms=round(found["median_ttft_ms"], 1),
        ttft_p99_ms=round(found["p99_ttft_ms"], 1),
        itl_p50_ms=round(found["median_itl_ms"], 2),
        itl_p99_ms=round(found["p99_itl_ms"], 2),
        tpot_p50_ms=round(found["median_tpot_ms"], 2),
    )
