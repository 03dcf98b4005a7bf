"""Scenarios from seeds: a small cluster, a load and faults, each drawn from one number.

Everything is small, so that pools run full, slots are few, prompts are cut into many chunks and requests meet the
faults. `run` raises whatever went wrong; docs/simulate.md says how to go on from there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from cluster.api_keys import KeyQuota
from cluster.config.choices import PolicyName, PrefixFetchName
from cluster.config.schema import AutoSection, RouterSection, TransferSection
from cluster.step_cost import StepCost
from router.queue.quota import UNLIMITED
from simulate.client import SimRequest
from simulate.controller import ControllerSpec
from simulate.curves import LinearCurve
from simulate.faults import FaultPlan
from simulate.wire import WireSpec
from simulate.workload import RequestShape, SharedPrefixes, at_rate, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, RunResult, WorkerSpec

POLICIES: tuple[PolicyName, ...] = ("predicted", "predicted", "least_loaded", "round_robin", "random")
FETCHES: tuple[PrefixFetchName, ...] = ("auto", "always", "always")
LIMIT_S = 600.0
"""Virtual seconds by which every request has ended."""
FAULTS_UNTIL_S = 12.0


@dataclass(frozen=True)
class Scenario:
    """The run that one seed means."""

    seed: int
    spec: ClusterSpec
    requests: tuple[SimRequest, ...]
    faults: FaultPlan

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(f"scenario {seed}")
        spec = _random_spec(rng)
        fetch = random.Random(f"scenario {seed} fetches").choice(FETCHES)
        spec = replace(spec, router=replace(spec.router, prefix_fetch=fetch))
        names = [worker.worker_id for worker in spec.workers]
        faults = FaultPlan.random(
            rng, names, FAULTS_UNTIL_S, has_routers=spec.num_routers > 0, has_controller=spec.controller is not None
        )
        of_tiers = random.Random(f"tiers {seed}")
        has_tiers = of_tiers.random() < 0.5
        load = _random_load(rng, seed, num_prefixes=of_tiers.randint(6, 16) if has_tiers else 0)
        if has_tiers:
            spec = _with_tiers(spec, of_tiers)
            faults = replace(faults, rates={**faults.rates, "copy failed": of_tiers.choice((0.0, 0.05))})
        return cls(seed, spec, (*load, *_conversations(seed)), faults)

    def run(self, *, keeps_trace: bool = False) -> RunResult:
        """Raises AssertionError, Stuck, or whatever ended the run."""
        cluster = Cluster(self.spec, self.seed, faults=self.faults, keeps_trace=keeps_trace)
        return cluster.run(self.requests, LIMIT_S)


def _random_spec(rng: random.Random) -> ClusterSpec:
    cost = StepCost(rng.uniform(2e-3, 20e-3), rng.uniform(1e-5, 2e-4), 0.0, 1e-4, 1e-7)
    overlaps, num_layers = rng.random() < 0.5, rng.choice((1, 3, 4))
    transports = rng.choice((("gloo",), ("shm_pages", "gloo")))
    workers = []
    for role, count in (("prefill", rng.randint(0, 3)), ("decode", rng.randint(1, 3))):
        block_size = rng.choice((3, 8, 16, 32))
        workers += [
            WorkerSpec(
                f"{role}-{number}",
                role,
                LinearCurve(cost),
                kv_tokens=rng.choice((768, 2048, 8192)),
                block_size=block_size,
                max_num_seqs=rng.choice((4, 16, 64)),
                max_num_batched_tokens=rng.choice((64, 256, 1024)),
                max_model_len=512,
                num_layers=num_layers,
                wire=WireSpec(rng.choice((1e8, 1e10)), 1e-5),
                transports=transports,
                overlaps=overlaps,
            )
            for number in range(count)
        ]
    transfer = TransferSection(
        chunk_tokens=rng.choice((16, 64, 256)),
        num_slots=rng.randint(1, 4),
        max_pairs=rng.choice((1, 2, 16)),
        timeout_s=rng.choice((0.1, 1.0, 5.0)),
    )
    router = RouterSection(
        http_port=None,
        policy=rng.choice(POLICIES),
        queue_timeout_s=rng.choice((5.0, 60.0)),
        resume_window_s=rng.choice((1.0, 5.0)),
        max_running_requests=rng.choice((None, None, 3, 8)),
    )
    jitter = rng.choice((0.0, 0.0, 1.0, 10.0))
    num_routers = rng.choice((0, 0, 1, 2, 3))
    controller = None
    if not num_routers and rng.random() < 0.6:
        num_prefill = sum(worker.role == "prefill" for worker in workers)
        controller = ControllerSpec(
            rng.choice(("auto", "auto", "fixed")),
            AutoSection(confirm_s=1.0, cooldown_s=1.0, dwell_s=2.0),
            min_prefill=min(num_prefill, rng.randint(0, 1)),
            launch_s=rng.choice((0.1, 1.0)),
        )
    return ClusterSpec(
        tuple(workers),
        router,
        transfer,
        jitter=jitter,
        controller=controller,
        num_routers=num_routers,
        is_watched=True,
    )


def _with_tiers(spec: ClusterSpec, rng: random.Random) -> ClusterSpec:
    """Gives workers small pools, and most of them host memory for what those evict."""
    workers = [
        replace(
            worker,
            kv_tokens=rng.choice((576, 768, worker.kv_tokens)),
            tier_blocks=rng.choice((0, 8, 64, 64, 512)),
            disk_blocks=rng.choice((0, 32, 512)),
            tier_bytes_per_s=rng.choice((2e10, 1e9)),
        )
        for worker in spec.workers
    ]
    return replace(spec, workers=tuple(workers))


def _random_quota(rng: random.Random) -> KeyQuota:
    """Draws the quota of an API key; mostly none."""
    if rng.random() < 0.8:
        return UNLIMITED
    return KeyQuota(
        requests_per_min=rng.choice((None, 5, 15)),
        prompt_tokens_per_min=rng.choice((None, 400, 2000)),
        output_tokens_per_min=rng.choice((None, 50, 300)),
        max_concurrent=rng.choice((None, 1, 3)),
    )


def _conversations(seed: int) -> tuple[SimRequest, ...]:
    """Turns that begin with the prompt and the answer before them, some of them while that is under way."""
    rng, turns = random.Random(f"{seed} conversations"), list[SimRequest]()
    for number in range(rng.randint(0, 3)):
        before, at_s, num_prompt = None, rng.uniform(0.0, 5.0), 0
        for turn in range(rng.randint(2, 4)):
            num_prompt += rng.randint(10, 50) if turn else rng.randint(30, 150)
            num_output, name = rng.randint(5, 35), 1000 + 10 * number + turn
            shape = RequestShape(at_s, num_prompt, num_output, (name,), num_prompt)
            before = SimRequest(shape, turn_before=before)
            turns.append(before)
            num_prompt, at_s = num_prompt + num_output, at_s + rng.uniform(0.3, 3.0)
    return tuple(turns)


def _random_load(rng: random.Random, seed: int, num_prefixes: int = 0) -> tuple[SimRequest, ...]:
    """`num_prefixes`: those that prompts begin with, so many that pools evict some before they come again; 0: few."""
    prefixes = SharedPrefixes(rng.choice((0, 40, 100)), num=rng.randint(1, 4))
    if num_prefixes:
        prefixes = SharedPrefixes(100, num=num_prefixes)
    shapes = random_shapes(rng.randint(10, 50), uniform(120, 20, 0.95), seed, prefixes)
    weights = {"": 1.0, "a": 1.0, "b": rng.choice((1.0, 3.0))}
    quotas = {"": UNLIMITED, "a": _random_quota(rng), "b": _random_quota(rng)}
    has_priorities, shares = rng.random() < 0.3, rng.choice(((1, 1, 1), (1, 8, 1)))
    requests = []
    for shape in at_rate(shapes, rng.choice((3.0, 10.0, 50.0)), 1.0, seed):
        (tenant,) = rng.choices(("", "a", "b"), shares)
        requests.append(
            SimRequest(
                shape,
                max_output_tokens=rng.choice((None, 100)),
                tenant=tenant,
                weight=weights[tenant],
                quota=quotas[tenant],
                priority=rng.choice((0, 0, 5, -5)) if has_priorities else 0,
                leaves_after_s=rng.uniform(0.0, 2.0) if rng.random() < 0.1 else None,
                pause_s=rng.choice((0.0, 0.0, 0.0, 0.3)),
                time_left_s=rng.uniform(0.1, 10.0) if rng.random() < 0.1 else None,
                n=rng.choice((1, 1, 1, 1, 2, 3)),
                stop=f"{rng.randrange(100):02d}" if rng.random() < 0.2 else "",
                may_resume=rng.random() < 0.7,
                bypass_prefix_cache=rng.random() < 0.1,
                returns_after_s=rng.uniform(0.0, 3.0) if rng.random() < 0.5 else None,
            )
        )
    return tuple(requests)
