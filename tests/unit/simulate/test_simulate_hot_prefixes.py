"""A system prompt that becomes hot is on other prefill workers before many wait for the one that had it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from cluster.config.schema import RouterSection, SloSection
from cluster.step_cost import StepCost
from router.routing import hot_prefixes
from simulate.client import SimRequest
from simulate.curves import LinearCurve
from simulate.wire import WireSpec
from simulate.workload import SharedPrefixes, arrivals, at_rate, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, WorkerSpec

CURVE = LinearCurve(StepCost(5e-3, 5e-5, 0.0, 1e-4, 1e-8))
WORKER = WorkerSpec(
    "",
    "decode",
    CURVE,
    kv_tokens=400_000,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=16_384,
    num_layers=16,
    kv_bytes_per_token=1e5,
    wire=WireSpec(5e9, 1e-4),
)
HOT, LENGTHS, SECONDS, BEGIN_S = 77, uniform(600, 16, 0.3), 8.0, 10.0


def first_token_ms(seed: int) -> tuple[list[float], Cluster]:
    """At 50, 90 and 99 %, of requests for a system prompt of 8,192 tokens whose rate grows from 2 to 50 a second,
    beside eight a second of four others."""
    spec = ClusterSpec.of_ratio(
        3, 3, WORKER, router=RouterSection(http_port=None), fidelity="fast", slo=SloSection(tpot_ms=20.0)
    )
    others = at_rate(random_shapes(144, LENGTHS, seed + 50, SharedPrefixes(4096, 4)), 8.0, 1.0, seed + 50)
    times = arrivals(lambda at: 2 + 48 * min(1.0, at / SECONDS), 1.0, random.Random(seed))
    at = list(itertools.takewhile(lambda at: at < SECONDS, times))
    shapes = random_shapes(len(at), LENGTHS, seed, SharedPrefixes(8192))
    hot = [replace(shape, at=BEGIN_S + s, blocks=(HOT,)) for shape, s in zip(shapes, at, strict=True)]
    cluster = Cluster(spec, seed)
    requests = sorted(map(SimRequest, others + hot), key=lambda request: request.at_s)
    outcomes = [o for o in cluster.run(tuple(requests)).outcomes if o.request.shape.blocks == (HOT,)]
    found = sorted(1000 * o.ttft_s for o in outcomes if o.ttft_s is not None)
    assert len(found) == len(hot)
    return [found[len(found) * share // 100] for share in (50, 90, 99)], cluster


def test_first_tokens_of_a_prompt_that_becomes_hot_come_sooner_where_it_is_copied_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, cluster = first_token_ms(seed=1)
    copies = cluster.dispatchers[0].counters.copies_ahead
    monkeypatch.setattr(hot_prefixes, "MOST_AT_ONCE", 0)
    without, other = first_token_ms(seed=1)
    assert copies.total() and not other.dispatchers[0].counters.copies_ahead
    assert ahead[0] <= 1.02 * without[0] and ahead[1] < 0.95 * without[1] and ahead[2] < 0.6 * without[2], (
        ahead,
        without,
        copies,
    )
