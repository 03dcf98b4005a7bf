"""Loads and workers for tests of the split: what requests and steps cost, without a cluster."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.schema import SloSection
from cluster.demand import Demand
from cluster.step_cost import RoleCosts, StepCost
from controller.goodput_model import SplitBounds, WorkerModel

COST = StepCost(fixed_s=0.005, prompt_token_s=0.0005, attended_s=0.0, sequence_s=0.001, kv_token_s=0.0)
"""2,000 prompt tokens a second; 45 sequences take 50 ms a step."""
COSTS = RoleCosts(COST, replace(COST, prompt_token_s=0.0015))
"""A decode worker computes prompts in small pieces, which takes longer."""
WORKER = WorkerModel(COSTS, max_num_seqs=64, kv_tokens=0)
SLO = SloSection(ttft_ms=1000, tpot_ms=50)
FOUR = SplitBounds(num_workers=4)
WINDOW_S = 10.0


def load(rate: float, num_prompt_tokens: int, num_output_tokens: int) -> Demand:
    """Requests of one kind that came over the window."""
    num = rate * WINDOW_S
    return Demand(
        num_arrived=num,
        num_placed=num,
        num_prompt_tokens=num * num_prompt_tokens,
        num_sequences=num,
        num_output_tokens=num * num_output_tokens,
        num_kv_tokens=num * (num_prompt_tokens + num_output_tokens / 2),
    )


PROMPTS, OUTPUTS = load(20, 800, 20), load(20, 40, 300)
