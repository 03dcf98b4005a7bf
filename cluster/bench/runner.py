"""Offers a load: each request at its time, or as many at once as may be; and waits until all have ended.

Without a bound on how many are under way, a request is timed from when it should have been sent: where the client
itself is late, that counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.bench.samples import Sample
from cluster.bench.workload import Ask


class Target(Protocol):
    """A server. `send` fills the sample in and raises nothing that the server did."""

    async def send(self, prompt: list[int], num_output_tokens: int, sample: Sample) -> None: ...


async def offer(
    target: Target,
    asks: Sequence[Ask],
    *,
    vocab: int,
    seed: int,
    most_at_once: int | None,
    on_end: Callable[[Sample], None],
) -> list[Sample]:
    """`most_at_once`: requests under way; None: however many come. `on_end` hears of each."""
    room = asyncio.Semaphore(most_at_once or len(asks))
    prompts = [ask.prompt(vocab, seed, number) for number, ask in enumerate(asks)]
    begun = time.perf_counter()

    async def one(ask: Ask, prompt: list[int]) -> Sample:
        async with room:
            sent_at = begun + ask.at if most_at_once is None else time.perf_counter()
            sample = Sample(len(prompt), sent_at)
            await target.send(prompt, ask.num_output_tokens, sample)
            sample.ended_at = time.perf_counter()
        on_end(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = []
        for ask, prompt in zip(asks, prompts, strict=True):
            await asyncio.sleep(max(0.0, begun + ask.at - time.perf_counter()))
            tasks.append(group.create_task(one(ask, prompt)))
    return [task.result() for task in tasks]
