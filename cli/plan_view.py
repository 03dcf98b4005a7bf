"""Renders what `baton plan` found, as text for people and as a JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cluster.text import count_of
from simulate.estimates import LatencyEstimate
from simulate.plan_choice import PlanChoice
from simulate.plan_series import other_loads
from simulate.planner import DevicePlan, Planner, PlanQuestion, RolePlan
from simulate.report import RunReport

_WIDTH = 26
_NAMES = 30


@dataclass(frozen=True)
class PlanFindings:
    """The question, the plans that were compared, and what else is known of the plans, by their names."""

    planner: Planner
    choice: PlanChoice
    reports: Mapping[str, RunReport]
    """Runs in virtual time; empty: none was asked for."""

    @cached_property
    def most_rates(self) -> Mapping[str, float]:
        """The highest rate at which each plan keeps the objectives."""
        return {name: self.planner.most_rate(plan) for name, plan in self.choice.plans.items()}

    @property
    def best_name(self) -> str:
        return next(name for name, plan in self.choice.plans.items() if plan is self.choice.best)

    @property
    def asked(self) -> tuple[str, str]:
        """The load and the objectives as text."""
        question = self.planner.question
        load, goal, memory = question.load, question.goal, question.memory
        return (
            f"{memory.shape.name} on {memory.device.name}: {load.rate:g} requests/s, prompts of "
            f"{load.mean_prompt:,.0f} and outputs of {load.mean_output:,.0f} tokens on the mean",
            f"asked: first token within {1000 * goal.ttft_s:g} ms, {1000 * goal.tpot_s:g} ms per token, each in "
            f"{goal.share:.0%} of the requests",
        )

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """A label, and a cell for each plan."""
        question, shown = self.planner.question, self.choice.plans
        rows = [(label, [text(question, plan) for plan in shown.values()]) for label, text in _ROWS]
        rows.append(("serves at most", [f"{self.most_rates[name]:.2f} requests/s" for name in shown]))
        return rows + (_simulated(self.reports) if self.reports else [])

    @property
    def batch_note(self) -> str:
        """Says where a larger batch would fit; empty: nowhere, or the worker was measured."""
        question = self.planner.question
        if question.profile is not None:
            return ""
        most, tpot_s = question.memory.max_num_seqs, question.goal.tpot_s
        larger = [p for p in self.choice.plans.values() if p.decode.option.takes_batch(2 * most, question.load, tpot_s)]
        if not larger:
            return ""
        return (
            f"A worker decodes {most} sequences at a time at most, though {2 * most} would fit into its memory and "
            f"{1000 * tpot_s:g} ms per token: --max-num-seqs {2 * most} plans for them."
        )

    @property
    def sensitivity(self) -> list[tuple[str, LatencyEstimate]]:
        """The latencies of the best plan under other loads, by the names of the loads."""
        loads = other_loads(self.planner.question.load)
        return [(name, self.planner.under(load, self.choice.best)[1].estimate) for name, load in loads]


def render(findings: PlanFindings) -> str:
    """The question, the plans side by side, the verdict, and what becomes of the best one under other loads."""
    heads = "".join(f"{name.replace('_', ' '):<{_WIDTH}}" for name in findings.choice.plans)
    rows = [f"{label:<22}" + "".join(f"{cell:<{_WIDTH}}" for cell in cells) for label, cells in findings.rows]
    others = [
        f"{name:<{_NAMES}}{as_ms(found.ttft_p90_s):>14}{as_ms(found.tpot_p90_s):>14}{found.kept_share:>14.1%}"
        for name, found in findings.sensitivity
    ]
    return "\n".join(
        [
            *findings.asked,
            "",
            f"{'':<22}{heads}",
            *[row.rstrip() for row in rows],
            "",
            findings.choice.verdict,
            *filter(None, [findings.batch_note]),
            "",
            f"{f'{findings.best_name} under':<{_NAMES}}{'TTFT p90':>14}{'TPOT p90':>14}{'both in time':>14}",
            *others,
            "",
            error_of(findings.planner.question),
            "latencies are estimates for steady arrivals without bursts or cached prompts (docs/plan.md).",
        ]
    )


def error_of(question: PlanQuestion) -> str:
    if question.profile is None:
        return "Steps are computed from shape and device: within 4 % (median) and 21 % (p90) of published ones;"
    error = question.profile.curve.error
    return f"Steps are those of the profile; its curve is off by {error.median:.0%} (median) and {error.p90:.0%} (p90);"


def _simulated(reports: Mapping[str, RunReport]) -> list[tuple[str, list[str]]]:
    """Rows of what a run in virtual time showed of each plan."""
    runs = reports.values()
    return [
        ("simulated", [f"{run.num_requests} requests" for run in runs]),
        ("  TTFT p50 / p90", [_pair(run.ttft_s.by_percentile[50], run.ttft_s.by_percentile[90]) for run in runs]),
        ("  TPOT p50 / p90", [_pair(run.tpot_s.by_percentile[50], run.tpot_s.by_percentile[90]) for run in runs]),
        ("  both in time", [f"{run.kept_share:.1%}" for run in runs]),
    ]


def _role(plan: RolePlan | None) -> str:
    return "–" if plan is None else f"{count_of(plan.num_workers, 'worker')} of {plan.option.layout}"


def _pair(low_s: float, high_s: float) -> str:
    return f"{1000 * low_s:.4g} / {as_ms(high_s)}" if math.isfinite(low_s) else as_ms(low_s)


def as_ms(seconds: float) -> str:
    """Infinite: nothing is in time; NaN: nothing was measured, such as times per token of outputs with one."""
    if math.isnan(seconds):
        return "–"
    return "overloaded" if math.isinf(seconds) else f"{1000 * seconds:.4g} ms"


def _running(plan: DevicePlan) -> str:
    num = plan.estimate.num_running
    return f"{plan.max_num_seqs}, {'overloaded' if math.isinf(num) else f'{num:.0f} on the mean'}"


def _dollars(question: PlanQuestion, plan: DevicePlan, tokens: float) -> float:
    """Returns the price of a million tokens in dollars, where each request has so many of them."""
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


def document_of(findings: PlanFindings) -> dict[str, Any]:
    """Keys are added, never changed."""
    question, choice, reports = findings.planner.question, findings.choice, findings.reports
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
        "batch_note": findings.batch_note,
        "simulated": {name: _run_document(report) for name, report in reports.items()},
        **{name: _plan_document(findings, name) for name in ("disaggregated", "colocated", "what_if")},
    }


def _plan_document(findings: PlanFindings, name: str) -> dict[str, Any] | None:
    """None: there is no such plan."""
    question, plan = findings.planner.question, findings.choice.plans.get(name)
    if plan is None:
        return None
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
        "most_rate": findings.most_rates[name],
        "max_num_seqs": plan.max_num_seqs,
        "handoff_ms": 1000 * plan.transfer_s,
        "dollars_per_hour": plan.num_devices * question.price_per_hour,
        "dollars_per_million_output_tokens": _dollars(question, plan, load.mean_output),
        "dollars_per_million_tokens": _dollars(question, plan, load.mean_prompt + load.mean_output),
    }


def _run_document(report: RunReport) -> dict[str, Any]:
    times = {f"ttft_p{p}_ms": 1000 * report.ttft_s.by_percentile[p] for p in (50, 90)}
    times |= {f"tpot_p{p}_ms": 1000 * report.tpot_s.by_percentile[p] for p in (50, 90)}
    told = {name: value if math.isfinite(value) else None for name, value in times.items()}
    return {"requests": report.num_requests, **told, "kept_share": report.kept_share}


def _role_document(role: RolePlan) -> dict[str, Any]:
    return {"workers": role.num_workers, **role.option.memory.as_dict(), "devices": role.num_devices}
