"""A prefix that many prompts begin with is copied between real prefill workers ahead of them; outputs stay equal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL, single_process, token_spec
from test_integration_moves import Told, serving
from waiting import Changes
from workers import Worker, running

from engine.sampling.params import SamplingParams
from router.routing import hot_prefixes
from router.routing.fetch_plan import LONGEST_S, best_fetch
from router.routing.load_tracker import Fetch

NUM_TOKENS = 8


def patient_fetch(*args: Any, **options: Any) -> Fetch | None:
    """The fetch that it would be, which is not given up when it takes longer than computing does on this machine."""
    fetch = best_fetch(*args, **options)
    return None if fetch is None else fetch._replace(limit_s=LONGEST_S)


@pytest.mark.timeout(180)
def test_a_hot_prefix_is_copied_to_a_worker_that_no_request_was_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_prefixes, "HOT_REQUESTS", 1.0)
    monkeypatch.setattr(hot_prefixes, "BUSY_SHARE", 0.0)
    monkeypatch.setattr(hot_prefixes, "best_fetch", patient_fetch)
    draw = random.Random(1)
    shared = draw.choices(range(4, 1000), k=800)
    prompts = [shared + draw.choices(range(4, 1000), k=100) for _ in range(40)]
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)
    expected = single_process(prompts, [params] * len(prompts))
    told, asked = [Told(1, Changes()) for _ in prompts], list[Told]()

    async def scenario(workers: Sequence[Worker]) -> None:
        async with serving(workers) as router:
            dispatcher = router.server.dispatcher
            for one, prompt in zip(told, prompts, strict=True):
                await one.read(router, token_spec(prompt, NUM_TOKENS))
                asked.append(one)
                if dispatcher.counters.copies_ahead and not dispatcher.running.fetches:
                    break
            counters = dispatcher.counters
            assert counters.copies_ahead["share"] and counters.fetches["done"], (
                counters.copies_ahead,
                counters.fetches,
            )

    with running(
        Worker(worker_id="prefill-0", role="prefill", model_path=str(BUNDLED_MODEL)),
        Worker(worker_id="prefill-1", role="prefill", model_path=str(BUNDLED_MODEL)),
        Worker(worker_id="decode-0", role="decode", model_path=str(BUNDLED_MODEL)),
    ) as workers:
        asyncio.run(scenario(workers))
        for got, completions in zip(asked, expected, strict=False):
            assert got.tokens[0] == list(completions[0].token_ids)
