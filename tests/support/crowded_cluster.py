"""Small simulated clusters in which everything is scarce: pools hold two or three requests, blocks a few tokens.

Messages, steps and transfers take up to `JITTER` times longer than usual: so nearly every order of things comes up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.config.schema import RouterSection, TransferSection
from cluster.step_cost import StepCost
from simulate.client import SimRequest
from simulate.curves import LinearCurve
from simulate.faults import RATED_FAULTS, FaultPlan
from simulate.scenario import Scenario
from simulate.wire import WireSpec
from simulate.workload import SharedPrefixes, at_rate, random_shapes, uniform
from simulate.world import ClusterSpec, WorkerSpec

JITTER = 10.0
FAULTS_UNTIL_S = 1.5
EVERY_RATE = {**dict.fromkeys(RATED_FAULTS, 0.01), "landing torn": 0.5, "link refused": 0.05, "pair did not open": 0.05}
CURVE = LinearCurve(StepCost(1e-3, 1e-4, 0.0, 1e-4, 1e-6))


def crowded_spec(
    num_prefill: int = 2,
    num_decode: int = 2,
    *,
    blocks: tuple[int, int] = (4, 4),
    kv_tokens: int = 80,
    shares_pages: bool = False,
) -> ClusterSpec:
    """`blocks`: tokens of a block in either role. `kv_tokens`: of a pool, and most of one request."""
    worker = WorkerSpec(
        "",
        "decode",
        CURVE,
        kv_tokens=kv_tokens,
        max_num_seqs=16,
        max_num_batched_tokens=24,
        max_model_len=kv_tokens,
        num_layers=3,
        kv_bytes_per_token=1e5,
        wire=WireSpec(3e8, 1e-5),
        command_s=1e-3,
        transports=("shm_pages", "gloo") if shares_pages else ("gloo",),
    )
    transfer = TransferSection(chunk_tokens=8, num_slots=2, max_pairs=4, timeout_s=0.1)
    router = RouterSection(http_port=None, policy="round_robin", queue_timeout_s=60.0)
    spec = ClusterSpec.of_ratio(
        num_prefill, num_decode, worker, router=router, transfer=transfer, jitter=JITTER, is_watched=True
    )
    sizes = {"prefill": blocks[0], "decode": blocks[1]}
    return replace(spec, workers=tuple(replace(w, block_size=sizes[w.role]) for w in spec.workers))


@dataclass(frozen=True)
class Load:
    """Requests that come faster than they can be served; some share their beginnings, under one of two salts."""

    num_requests: int = 40
    num_prompt_tokens: int = 16
    """On average, up to twice as many."""
    num_output_tokens: int = 6
    most_sequences: int = 2
    cancels: float = 0.0
    """Share of the requests that are cancelled."""

    def requests(self, seed: int) -> tuple[SimRequest, ...]:
        rng = random.Random(f"crowd {seed}")
        shapes = random_shapes(
            self.num_requests,
            uniform(self.num_prompt_tokens, self.num_output_tokens, 0.95),
            seed,
            SharedPrefixes(rng.choice((0, 6, 13)), num=2),
        )
        return tuple(
            SimRequest(
                shape,
                max_output_tokens=rng.choice((None, 2 * self.num_output_tokens)),
                tenant=rng.choice("ab"),
                leaves_after_s=rng.uniform(0.0, 0.5) if rng.random() < self.cancels else None,
                n=rng.choice((1, 1, self.most_sequences)),
                bypass_prefix_cache=rng.random() < 0.15,
            )
            for shape in at_rate(shapes, 100.0, 1.0, seed)
        )


def crowded(
    seed: int,
    rates: Mapping[str, float] | None = None,
    *,
    load: Load = Load(cancels=0.1),
    kv_tokens: int = 80,
    shares_pages: bool = False,
    has_events: bool = False,
) -> Scenario:
    """Steps overlap where the seed is odd. `rates`: of faults, every one if None; `has_events`: workers and links fail
    as a whole, too."""
    spec = crowded_spec(kv_tokens=kv_tokens, shares_pages=shares_pages)
    spec = replace(spec, workers=tuple(replace(w, overlaps=seed % 2 == 1) for w in spec.workers))
    faults = FaultPlan()
    if has_events:
        names = [worker.worker_id for worker in spec.workers]
        faults = FaultPlan.random(random.Random(f"crowd {seed}"), names, FAULTS_UNTIL_S)
    faults = replace(faults, rates=EVERY_RATE if rates is None else rates, until_s=FAULTS_UNTIL_S)
    return Scenario(seed, spec, load.requests(seed), faults)
