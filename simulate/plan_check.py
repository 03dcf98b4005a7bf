"""Runs a plan's workers in virtual time, behind a real router, under the load that it was made for."""

from __future__ import annotations

import random
from dataclasses import replace

from cluster.config.schema import SloSection
from simulate.planner import DevicePlan, PlanQuestion, RolePlan
from simulate.report import RunReport
from simulate.wire import WireSpec
from simulate.worker import WorkerSpec
from simulate.workload import RequestShape, at_rate
from simulate.world import Cluster, ClusterSpec


def simulated(question: PlanQuestion, plan: DevicePlan, num_requests: int, seed: int = 0) -> RunReport:
    """So many requests with lengths of the load, at its rate, as a Poisson process."""
    draw = random.Random(f"{seed} lengths")
    shapes = [RequestShape(0.0, *draw.choice(question.load.lengths)) for _ in range(num_requests)]
    longest = max(shape.num_prompt_tokens + shape.num_output_tokens for shape in shapes)
    workers = [
        replace(_spec(question, plan, role, longest), worker_id=f"{name}-{number}", role=name)
        for name, role in (("prefill", plan.prefill), ("decode", plan.decode))
        if role is not None
        for number in range(role.num_workers)
    ]
    goal = question.goal
    slo = SloSection(ttft_ms=1000 * goal.ttft_s, tpot_ms=1000 * goal.tpot_s)
    cluster = Cluster(ClusterSpec(tuple(workers), slo=slo), seed)
    return RunReport.of(cluster.run(at_rate(shapes, question.load.rate, 1.0, seed)), slo)


def _spec(question: PlanQuestion, plan: DevicePlan, role: RolePlan, longest: int) -> WorkerSpec:
    memory, option = question.memory, role.option
    cards = option.layout.tp_size * memory.device.nic_bytes_per_s * question.efficiency.memory
    return WorkerSpec(
        "",
        "decode",
        curve=option.curve,
        kv_tokens=option.memory.num_tokens,
        block_size=memory.block_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        max_model_len=max(longest + memory.block_size, memory.context),
        kv_bytes_per_token=memory.shape.kv_bytes_per_token(1, memory.kv_dtype),
        wire=WireSpec(bytes_per_s=cards),
    )
