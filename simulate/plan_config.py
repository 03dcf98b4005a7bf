"""The cluster.yaml that a plan means."""

from __future__ import annotations

import json

from simulate.planner import DevicePlan, PlanQuestion, RolePlan

_NOT_SERVED = "# This model is planned for, not served yet."
_NOT_SPREAD = (
    "# Experts that each device holds whole are planned for, not served yet: they are sliced over all of them."
)


def config_text(question: PlanQuestion, plan: DevicePlan, model_path: str) -> str:
    """A file for `baton serve --config` and `ray up`, whose part of Ray names no machines yet."""
    memory, goal = question.memory, question.goal
    shape, is_gpu = memory.shape, memory.device.is_gpu
    kv_dtype = memory.kv_dtype if memory.kv_dtype in ("int8", "fp8") else "auto"
    spreads = any(role is not None and role.option.layout.ep_size > 1 for role in (plan.prefill, plan.decode))
    lines = [
        f"# {shape.name} on {plan.num_devices} {memory.device.name}: {question.load.rate:g} requests a second, prompts "
        f"of {question.load.mean_prompt:.0f} and outputs of {question.load.mean_output:.0f} tokens on the mean.",
        *([] if shape.is_served else [_NOT_SERVED]),
        *([_NOT_SPREAD] if spreads else []),
        f"cluster_name: {json.dumps('baton')}",
        "metadata:",
        "  serving:",
        "    model:",
        f"      path: {json.dumps(model_path)}",
        f"      quantization: {memory.quantization if shape.quantization == 'none' else 'none'}",
        f"      max_model_len: {min(shape.max_position_embeddings, memory.context)}",
        "    roles:",
        f"      prefill: {_role(plan.prefill)}",
        f"      decode: {_role(plan.decode)}",
        "    engine:",
        f"      device: {'cuda' if is_gpu else 'cpu'}",
        f"      kv_cache_dtype: {kv_dtype}",
        f"      memory_utilization: {memory.memory_utilization:g}",
        f"      max_num_batched_tokens: {memory.max_num_batched_tokens}",
        f"      max_num_seqs: {plan.max_num_seqs}",
        "    rebalance:",
        f"      slo: {{ttft_ms: {1000 * goal.ttft_s:g}, tpot_ms: {1000 * goal.tpot_s:g}}}",
    ]
    return "\n".join(lines) + "\n"


def _role(plan: RolePlan | None) -> str:
    if plan is None:
        return "{devices: 0, tensor_parallel: 1, min_workers: 0}"
    tp_size = plan.option.layout.num_devices
    return f"{{devices: {plan.num_devices}, tensor_parallel: {tp_size}, min_workers: 1}}"
