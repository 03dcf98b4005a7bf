"""Sizes a rank's KV pool: what is left beside its weights and what the largest step was measured to take.

Every rank of a group comes to the same plan, since they exchange what they have found: the least memory counts, and the
largest step. `engine.memory_plan` does the sum.
"""

from __future__ import annotations

import torch

from cluster.units import format_bytes
from engine.memory import available_bytes
from engine.memory_plan import Activations, MemoryDemand, MemoryPlan, estimate_activations, plan_memory
from engine.model_runner import ModelRunner
from engine.profiling import give_back_heap, measure_activations
from engine.tp import TPGroup

NOT_STARTED = "measured when a worker starts"


def check_memory(demand: MemoryDemand) -> None:
    """Before any weight is read: raises ConfigError for what could not fit if activations took nothing."""
    nothing = Activations(0, is_measured=False, why="")
    plan_memory(demand, free_bytes=available_bytes(demand.device, demand.tp_size), activations=nothing)


def expect_memory(demand: MemoryDemand) -> MemoryPlan:
    """The plan of a worker that would start now, with an estimate of its activations. Raises ConfigError."""
    free = available_bytes(demand.device, demand.tp_size)
    return plan_memory(demand, free_bytes=free, activations=estimate_activations(demand, NOT_STARTED))


def size_pool(demand: MemoryDemand, runner: ModelRunner, tp: TPGroup) -> MemoryPlan:
    """Once the weights are loaded, on every rank of the group at once. Raises ConfigError, on every rank alike."""
    give_back_heap()
    _all_ranks(0, tp, runner.device)  # each has loaded
    left = min(_all_ranks(available_bytes(demand.device, demand.tp_size), tp, runner.device))
    own = measure_activations(runner, demand)
    sizes = _all_ranks(own.size_bytes, tp, runner.device)
    is_measured = all(_all_ranks(own.is_measured, tp, runner.device))
    why = own.why if is_measured or not own.is_measured else "another rank could not measure"
    activations = Activations(max(sizes), is_measured, why)
    return plan_memory(demand, free_bytes=left + demand.weight_bytes, activations=activations)


def memory_line(plan: MemoryPlan) -> str:
    """For the log of a worker that has started."""
    how = "measured" if plan.activations_are_measured else f"estimated: {plan.activations_why}"
    return (
        f"memory of each rank: weights {format_bytes(plan.weight_bytes)}, "
        f"activations {format_bytes(plan.activation_bytes)} ({how}), KV pool {format_bytes(plan.pool_bytes)}, "
        f"of {format_bytes(plan.budget_bytes)}; KV pool: {plan.num_blocks} blocks of {plan.block_size} tokens, "
        f"{plan.kv_bytes_per_token} bytes a token"
    )


def _all_ranks(value: int, tp: TPGroup, device: torch.device) -> list[int]:
    """Every rank's value."""
    values: list[int] = tp.all_gather(torch.tensor([value], dtype=torch.int64, device=device)).tolist()
    return values
