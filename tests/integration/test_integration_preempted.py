"""Sequences that are preempted, and moved between workers, with tiers below their pools keep their tokens, and come
back with what they had computed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_fleet import metrics_of
from cluster_fixture import BUNDLED_MODEL, single_process, token_spec
from test_integration_moves import Told, name, serving
from waiting import Changes, until_after
from workers import Worker, running

from engine.sampling.params import SamplingParams

BLOCK_BYTES = 16 * 4 * 2 * 4 * 32 * 4  # tokens, layers, k and v, heads, head_dim, float32
POOL, NUM_TOKENS = 544, 200
"""One or two of six sequences have room up to their ends."""
LIMIT_S = 120.0
HOW: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_output_tokens": NUM_TOKENS}
TP_SIZES = (1, 2, 4)
IN_SHORT = {(2, 1)}


def counted(worker: Worker, metric: str, label: str) -> Counter[str]:
    page = metrics_of(worker.info.metrics_address)
    return Counter({dict(has)[label]: int(n) for (of, has), n in page.items() if of == metric})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "tp_sizes",
    [
        pytest.param(sizes, id="{}:{}".format(*sizes), marks=[] if sizes in IN_SHORT else [pytest.mark.battery])
        for sizes in itertools.product(TP_SIZES, TP_SIZES)
    ],
)
def test_what_is_preempted_and_moved_comes_back_from_the_tiers_with_the_tokens_of_one_engine(
    tp_sizes: tuple[int, int], tmp_path: Path
) -> None:
    prompts = [random.Random(seed).choices(range(4, 1000), k=30 + 11 * seed) for seed in range(6)]
    params = [SamplingParams(seed=seed, **HOW) for seed in range(len(prompts))]
    expected = single_process(prompts, params)
    specs = []
    for seed, prompt in enumerate(prompts):
        specs.append(token_spec(prompt, NUM_TOKENS, include_timing=True, temperature=0.9, seed=seed))
        specs[-1].cache.bypass_prefix_cache = seed % 4 == 3
        specs[-1].scheduling.queue_timeout.FromSeconds(int(2 * LIMIT_S))
    changes = Changes()
    told, retried = [Told(1, changes) for _ in prompts], Counter[str]()

    async def scenario(workers: Sequence[Worker]) -> None:
        async with serving(workers) as router:
            dispatcher = router.server.dispatcher
            name(dispatcher, workers, draining="decode-1")
            calls = [asyncio.create_task(t.read(router, s)) for t, s in zip(told, specs, strict=True)]
            await changes.until(lambda: sum(len(t.tokens[0]) >= 8 for t in told) >= 2, LIMIT_S)
            await changes.until(lambda: any(tier.num_hit_tokens for tier in workers[1].stats.tiers), LIMIT_S)
            name(dispatcher, workers, draining="decode-0")
            await until_after(dispatcher.running, "move", lambda: dispatcher.counters.moved, LIMIT_S)
            await asyncio.gather(*calls)
            retried.update(dispatcher.counters.retried)

    common: dict[str, Any] = {
        "model_path": str(BUNDLED_MODEL),
        "metrics_port": 0,
        "kv_cache_tokens": POOL,
        "max_model_len": 512,
        "kv_host_bytes": 40 * BLOCK_BYTES,
        "kv_disk_bytes": 64 << 20,
        "kv_disk_path": str(tmp_path / "kv"),
    }
    prefill_tp, decode_tp = tp_sizes
    with running(
        Worker(worker_id="prefill-0", role="prefill", tp_size=prefill_tp, **common),
        Worker(worker_id="decode-0", role="decode", tp_size=decode_tp, async_steps="on", **common),
        Worker(worker_id="decode-1", role="decode", tp_size=decode_tp, **common),
    ) as workers:
        asyncio.run(scenario(workers))
        for got, completions in zip(told, expected, strict=True):
            assert got.tokens[0] == list(completions[0].token_ids)
        for worker in workers:
            worker.wait_idle()
        preempted = sum(worker.stats.num_preemptions for worker in workers)
        events = sum((counted(w, "baton_kv_tier_events_total", "event") for w in workers[1:]), Counter[str]())
        resumed = sum((counted(w, "baton_resumed_tokens_total", "found") for w in workers[1:]), Counter[str]())
        moves = sum(each.timing.migrations for each in told)
        print(f"{preempted} preempted, {moves} moves, {events}, resumed {resumed}")
        assert preempted and events["failed"] == 0 and events["loaded"] + events["read"] > 0
        is_resumed = resumed.total() > 0 or preempted <= moves  # one that is moved while it loads goes on elsewhere
        assert is_resumed or retried, "those that were preempted have gone on"
