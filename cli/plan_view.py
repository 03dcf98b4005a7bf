"""What `baton plan` found, as text for people and as a JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cluster.text import count_of
from simulate.planner import DevicePlan, PlanChoice, Planner, PlanQuestion, RolePlan
from simulate.report import RunReport

_RATES = (0.5, 0.8, 1.0, 1.25, 1.5)
_WIDTH = 26


def render(planner: Planner, choice: PlanChoice, reports: Mapping[str, RunReport]) -> str:
    """The question, the plans side by side, the verdict, and what becomes of the best one under other loads."""
    question = planner.question
    load, goal, memory = question.load, question.goal, question.memory
    shown = choice.plans
    best = next(name for name, plan in shown.items() if plan is choice.best)
    most = {name: planner.most_rate(plan) for name, plan in shown.items()}
    rows = [
        f"{label:<22}" + "".join(f"{text(question, plan):<{_WIDTH}}" for plan in shown.values())
        for label, text in _ROWS
    ]
    return "\n".join(
        [
            f"{memory.shape.name} on {memory.device.name}: {load.rate:g} requests/s, prompts of "
            f"{load.mean_prompt:,.0f} and outputs of {load.mean_output:,.0f} tokens on the mean",
            f"asked: first token within {1000 * goal.ttft_s:g} ms, {1000 * goal.tpot_s:g} ms per token, each in "
            f"{goal.share:.0%} of the requests",
            "",
            f"{'':<22}" + "".join(f"{name.replace('_', ' '):<{_WIDTH}}" for name in shown),
            *[row.rstrip() for row in rows],
            f"{'serves at most':<22}"
            + "".join(f"{f'{most[name]:.2f} requests/s':<{_WIDTH}}" for name in shown).rstrip(),
            *(_simulated(reports) if reports else []),
            "",
            choice.verdict,
            "",
            f"{best} at other rates:",
            *_sensitivity(planner, choice.best),
            "",
            _error(question),
            "latencies are estimates for steady arrivals without bursts or cached prompts (docs/plan.md).",
        ]
    )


def _error(question: PlanQuestion) -> str:
    if question.profile is None:
        return "Steps are computed from shape and device: within 4 % (median) and 21 % (p90) of published ones;"
    error = question.profile.curve.error
    return f"Steps are those of the profile; its curve is off by {error.median:.0%} (median) and {error.p90:.0%} (p90);"


def _simulated(reports: Mapping[str, RunReport]) -> list[str]:
    """Rows of what a run in virtual time showed of each plan."""

    def row(label: str, text: Callable[[RunReport], str]) -> str:
        return (f"{label:<22}" + "".join(f"{text(report):<{_WIDTH}}" for report in reports.values())).rstrip()

    number = next(iter(reports.values())).num_requests
    return [
        f"simulated, {number} requests",
        row("  TTFT p50 / p90", lambda r: _pair(r.ttft_s.by_percentile[50], r.ttft_s.by_percentile[90])),
        row("  TPOT p50 / p90", lambda r: _pair(r.tpot_s.by_percentile[50], r.tpot_s.by_percentile[90])),
        row("  both in time", lambda r: f"{r.kept_share:.1%}"),
    ]


def _role(plan: RolePlan | None) -> str:
    return "–" if plan is None else f"{count_of(plan.num_workers, 'worker')} of {plan.option.layout}"


def _pair(low_s: float, high_s: float) -> str:
    return "overloaded" if math.isinf(low_s) else f"{1000 * low_s:.4g} / {_ms(high_s)}"


def _ms(seconds: float) -> str:
    return "overloaded" if math.isinf(seconds) else f"{1000 * seconds:.4g} ms"


def _running(plan: DevicePlan) -> str:
    num = plan.estimate.num_running
    return f"{plan.max_num_seqs}, {'overloaded' if math.isinf(num) else f'{num:.0f} on the mean'}"


def _dollars(question: PlanQuestion, plan: DevicePlan, tokens: float) -> float:
    """For a million of so many tokens of each request."""
    return plan.num_devices * question.price_per_hour / 3600 / (question.load.rate * tokens) * 1e6


def _cost(question: PlanQuestion, plan: DevicePlan) -> str:
    load = question.load
    if math.isinf(plan.estimate.num_running):
        return "–"
    every = _dollars(question, plan, load.mean_prompt + load.mean_output)
    return f"${_dollars(question, plan, load.mean_output):.2f} output, ${every:.2f} all"


def _memory(question: PlanQuestion, role: RolePlan | None) -> str:
    if role is None:
        return "–"
    memory = role.option.memory
    return f"{memory.weight_bytes / 1e9:.1f} + {memory.left_bytes / 1e9:.1f} GB KV"


_ROWS: tuple[tuple[str, Callable[[PlanQuestion, DevicePlan], str]], ...] = (
    ("devices", lambda q, p: str(p.num_devices)),
    ("prefill", lambda q, p: _role(p.prefill)),
    ("decode", lambda q, p: _role(p.decode)),
    ("TTFT p50 / p90", lambda q, p: _pair(p.estimate.ttft_p50_s, p.estimate.ttft_p90_s)),
    ("TPOT p50 / p90", lambda q, p: _pair(p.estimate.tpot_p50_s, p.estimate.tpot_p90_s)),
    ("both in time", lambda q, p: f"{p.estimate.kept_share:.1%}"),
    ("goodput", lambda q, p: f"{q.load.rate * p.estimate.kept_share:.2f} requests/s"),
    ("prefill memory", lambda q, p: _memory(q, p.prefill)),
    ("decode memory", lambda q, p: _memory(q, p.decode)),
    ("max_num_seqs", lambda q, p: _running(p)),
    ("hand-off", lambda q, p: f"{1000 * p.transfer_s:.1f} ms" if p.prefill else "–"),
    ("an hour", lambda q, p: f"${p.num_devices * q.price_per_hour:,.2f}"),
    ("a million tokens", _cost),
)


def _sensitivity(planner: Planner, plan: DevicePlan) -> list[str]:
    lines = [f"{'requests/s':>12}{'TTFT p90':>14}{'TPOT p90':>14}{'both in time':>14}"]
    for factor in _RATES:
        other = planner.at_rate(factor * planner.question.load.rate)
        found = other.of_workers(plan.prefill, plan.decode).estimate
        times = f"{_ms(found.ttft_p90_s):>14}{_ms(found.tpot_p90_s):>14}"
        lines.append(f"{other.question.load.rate:>12.4g}{times}{found.kept_share:>14.1%}")
    return lines


def document_of(planner: Planner, choice: PlanChoice, reports: Mapping[str, RunReport]) -> dict[str, Any]:
    """Keys are added, never changed."""
    question = planner.question
    load, goal, memory = question.load, question.goal, question.memory
    return {
        "model": memory.shape.name,
        "device": memory.device.name,
        "rate": load.rate,
        "mean_prompt_tokens": load.mean_prompt,
        "mean_output_tokens": load.mean_output,
        "ttft_ms": 1000 * goal.ttft_s,
        "tpot_ms": 1000 * goal.tpot_s,
        "share": goal.share,
        "disaggregate": choice.best.prefill is not None,
        "verdict": choice.verdict,
        "simulated": {name: _run_document(report) for name, report in reports.items()},
        "disaggregated": _plan_document(planner, choice.split),
        "colocated": None if choice.colocated is None else _plan_document(planner, choice.colocated),
        "what_if": None if choice.what_if is None else _plan_document(planner, choice.what_if),
    }


def _plan_document(planner: Planner, plan: DevicePlan) -> dict[str, Any]:
    question = planner.question
    found, load = plan.estimate, question.load
    times = {"ttft_p50_ms": found.ttft_p50_s, "ttft_p90_ms": found.ttft_p90_s}
    times |= {"tpot_p50_ms": found.tpot_p50_s, "tpot_p90_ms": found.tpot_p90_s}
    return {
        "devices": plan.num_devices,
        "prefill": None if plan.prefill is None else _role_document(plan.prefill),
        "decode": _role_document(plan.decode),
        **{name: None if math.isinf(seconds) else 1000 * seconds for name, seconds in times.items()},
        "kept_share": found.kept_share,
        "goodput": load.rate * found.kept_share,
        "most_rate": planner.most_rate(plan),
        "max_num_seqs": plan.max_num_seqs,
        "handoff_ms": 1000 * plan.transfer_s,
        "dollars_per_hour": plan.num_devices * question.price_per_hour,
        "dollars_per_million_output_tokens": _dollars(question, plan, load.mean_output),
        "dollars_per_million_tokens": _dollars(question, plan, load.mean_prompt + load.mean_output),
    }


def _run_document(report: RunReport) -> dict[str, Any]:
    times = {f"ttft_p{p}_ms": 1000 * report.ttft_s.by_percentile[p] for p in (50, 90)}
    times |= {f"tpot_p{p}_ms": 1000 * report.tpot_s.by_percentile[p] for p in (50, 90)}
    return {"requests": report.num_requests, **times, "kept_share": report.kept_share}


def _role_document(role: RolePlan) -> dict[str, Any]:
    return {"workers": role.num_workers, **role.option.memory.as_dict(), "devices": role.num_devices}
