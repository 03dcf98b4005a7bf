"""The cluster.yaml that a plan means."""

from __future__ import annotations

import json

from simulate.planner import DevicePlan, PlanQuestion, RolePlan

_NOT_SERVED = "# This model is planned for, not served yet."
_NOT_REPEATED = (
    "# Attention that several devices of a worker repeat is planned for, not served yet: it is sliced over all of them."
)


def config_text(question: PlanQuestion, plan: DevicePlan, model_path: str) -> str:
    """A file for `baton serve --config` and `ray up`, whose part of Ray names no machines yet."""
    memory, goal = question.memory, question.goal
    shape, is_gpu = memory.shape, memory.device.is_gpu
    kv_dtype = memory.kv_dtype if memory.kv_dtype in ("int8", "fp8") else "auto"
    layouts = [role.option.layout for role in (plan.prefill, plan.decode) if role is not None]
    repeats = any(layout.tp_size < layout.num_devices for layout in layouts)
    lines = [
        f"# {shape.name} on {plan.num_devices} {memory.device.name}: {question.load.rate:g} requests a second, prompts "
        f"of {question.load.mean_prompt:.0f} and outputs of {question.load.mean_output:.0f} tokens on the mean.",
        *([] if shape.is_served else [_NOT_SERVED]),
        *([_NOT_REPEATED] if repeats else []),
        f"cluster_name: {json.dumps('baton')}",
        "metadata:",
        "  serving:",
        "    model:",
        f"      path: {json.dumps(model_path)}",
        f"      quantization: {memory.quantization if shape.quantization == 'none' else 'none'}",
        f"      max_model_len: {min(shape.max_position_embeddings, memory.context)}",
        "    roles:",
        f"      prefill: {_role(plan.prefill, shape.latent is not None)}",
        f"      decode: {_role(plan.decode, shape.latent is not None)}",
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


def _role(plan: RolePlan | None, keeps_latents: bool) -> str:
    """Latents are split where the plan repeats attention, so that the worker has no copies of them, either."""
    if plan is None:
        return "{devices: 0, tensor_parallel: 1, min_workers: 0}"
    layout = plan.option.layout
    sizes = f"devices: {plan.num_devices}, tensor_parallel: {layout.num_devices}"
    experts = f", expert_parallel: {layout.ep_size}" if layout.ep_size > 1 else ""
    split = ", split_latents: true" if keeps_latents and layout.tp_size < layout.num_devices else ""
    return f"{{{sizes}{experts}{split}, min_workers: 1}}"
