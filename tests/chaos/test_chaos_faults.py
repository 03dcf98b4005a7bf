"""A thousand requests while one transfer in twenty fails on purpose and three clients in ten leave.

Two prefill and two decode workers behind a router; one of the prefill workers hands over through shared memory, the
other through sockets. Every request ends; who stays gets what one process alone would have generated.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from chaos_fleet import FAST, Fleet, Measured
from chaos_reference import Reference
from chaos_states import WORKERS, prompt_of

from cluster.errors import Cancelled

pytestmark = pytest.mark.battery

NUM_REQUESTS = 1000
NUM_AT_ONCE = 24
CANCELLED_SHARE = 0.3
FAULT_SHARE = 0.05
NUM_PROMPTS = 40
OUTPUT_TOKENS = 8
BYPASS_SHARE = 0.8
"""Requests that use no prefix cache, so that every one of them has something to hand over."""


@dataclass(frozen=True)
class Plan:
    """What one client does."""

    prompt: tuple[int, ...]
    bypasses_cache: bool
    leaves_after: int | None
    """Events it waits for before it leaves; None: it stays."""


def plans() -> list[Plan]:
    draw = random.Random(3)
    prompts = [tuple(prompt_of(40_000 + i, draw.randrange(40, 200))) for i in range(NUM_PROMPTS)]
    return [
        Plan(
            prompt=draw.choice(prompts),
            bypasses_cache=draw.random() < BYPASS_SHARE,
            leaves_after=draw.randrange(6) if draw.random() < CANCELLED_SHARE else None,
        )
        for _ in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def faulty(measured: Measured) -> Iterator[Fleet]:
    workers = {
        "prefill-0": {"transport": "shm"},
        "prefill-1": {"transport": "gloo"},
        "decode-0": {},
        "decode-1": {},
    }
    with Fleet(workers, {**WORKERS, **FAST, "transfer_faults": FAULT_SHARE}, measured) as fleet:
        yield fleet


def run(fleet: Fleet, plan: Plan, reference: Reference) -> str:
    """How it ended, in a word."""
    stream = fleet.submit(list(plan.prompt), OUTPUT_TOKENS, bypass_prefix_cache=plan.bypasses_cache)
    if plan.leaves_after is not None:
        stream.wait_for_events(plan.leaves_after)
        stream.cancel()
    stream.join()
    if isinstance(stream.error, Cancelled) and plan.leaves_after is not None:
        return "cancelled"
    if stream.error is not None:
        return f"{type(stream.error).__name__}: {stream.error}"
    assert stream.token_ids() == reference(list(plan.prompt), OUTPUT_TOKENS)
    return "finished"


def test_a_thousand_requests_survive_failing_transfers_and_leaving_clients(faulty: Fleet, reference: Reference) -> None:
    todo = plans()
    for plan in todo:
        reference(list(plan.prompt), OUTPUT_TOKENS)
    begin = time.monotonic()
    with ThreadPoolExecutor(NUM_AT_ONCE) as clients:
        ends = Counter(clients.map(lambda plan: run(faulty, plan, reference), todo))
    faulty.settle()
    said = "".join(rank.stderr() for worker in faulty.workers.values() for rank in worker.ranks)
    injected = Counter(re.findall("injected: ([a-z]+)", said))
    failures, damaged = (
        sum(worker.count("baton_kv_transfer_failures_total", **labels) for worker in faulty.workers.values())
        for labels in ({}, {"reason": "corrupt"})
    )
    took_s = time.monotonic() - begin
    print(f"{dict(ends)} in {took_s:.1f} s; injected: {dict(injected)}; {failures:.0f} hand-offs failed")
    num_staying = sum(plan.leaves_after is None for plan in todo)
    assert set(injected) == {"corrupt", "fail", "close", "delay"}
    assert failures > 0 and damaged > 0
    assert set(ends) == {"finished", "cancelled"}
    assert ends["finished"] >= num_staying
    assert ends["cancelled"] > NUM_REQUESTS * CANCELLED_SHARE / 2
