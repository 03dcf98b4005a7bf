"""The page of a plan: one HTML file with its pictures inside, which loads nothing, runs no script, and prints.

`cli/plan_page.html` is its frame; the values are those of `cli.plan_view` and `simulate.plan_series`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cli.plan_view import PlanFindings, as_ms, error_of
from cli.svg import Axis, BarPart, Chart, Point, Tick, number, round_step, stacked_bars, steps
from cluster.text import count_of
from simulate.plan_series import LoadWindow, RatePoint, WindowSplit, by_rate, by_ratio, divisions, over_time
from simulate.planner import DevicePlan, RolePlan

_TEMPLATE = Path(__file__).with_suffix(".html")
_SHARES = Axis("share of the requests", 0.0, 1.0, tuple(Tick(n / 4, f"{25 * n} %") for n in range(5)))
_MOST_NAMES = 12
_HOUR_S, _MINUTE_S = 3600.0, 60.0
_LINES: tuple[tuple[str, str, Callable[[RatePoint], float], float], ...] = (
    ("TTFT", "c-prefill", lambda point: point.ttft_share, 0.7),
    ("TPOT", "c-decode", lambda point: point.tpot_share, 0.45),
    ("both", "c-text", lambda point: point.kept_share, 0.2),
)
"""A name, its colour, its share, and the level at which the name stands beside the line."""


def page_of(findings: PlanFindings, windows: Sequence[LoadWindow], day: str, config: str) -> str:
    """`windows`: parts of a day that `day` describes; `config`: the cluster.yaml that is meant."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    best, question = findings.choice.best, findings.planner.question
    load, asked = findings.asked
    values: dict[str, Any] = {
        "title": f"{question.memory.shape.name} on {question.memory.device.name}",
        "verdict": f"{findings.choice.verdict} {findings.batch_note}".rstrip(),
        "load": load,
        "asked": asked,
        "advice": _advice(findings),
        "tiles": _tiles(findings),
        "names": [name.replace("_", " ") for name in findings.choice.plans],
        "best": findings.best_name.replace("_", " "),
        "rows": findings.rows,
        "ratios": _ratios(findings),
        "rates": _rates(findings),
        "day": day,
        "over_day": _day(findings, windows),
        "memory": _memory(best),
        "sensitivity": [
            (name, as_ms(found.ttft_p90_s), as_ms(found.tpot_p90_s), f"{found.kept_share:.1%}")
            for name, found in findings.sensitivity
        ],
        "config": config,
        "inputs": _inputs(findings),
        "error": error_of(question),
    }
    return template.render(values)


def _workers(role: RolePlan) -> str:
    return f"{count_of(role.num_workers, 'worker')} of {role.option.layout}"


def _advice(findings: PlanFindings) -> str:
    """Returns what to serve on, in a sentence."""
    best = findings.choice.best
    device = findings.planner.question.memory.device.name
    roles = (
        f"{_workers(best.decode)}, each for prompts and outputs"
        if best.prefill is None
        else f"{_workers(best.prefill)} for prompts, {_workers(best.decode)} for outputs"
    )
    return f"Serve it on {best.num_devices} {device}: {roles}."


def _tiles(findings: PlanFindings) -> list[tuple[str, str, str]]:
    """Returns the figures of the best plan: for each a name, a value, and what is asked for."""
    best, question = findings.choice.best, findings.planner.question
    found, goal = best.estimate, question.goal
    most = findings.most_rates[findings.best_name]
    return [
        ("devices", str(best.num_devices), question.memory.device.name),
        ("first token, p90", as_ms(found.ttft_p90_s), f"asked: {1000 * goal.ttft_s:g} ms"),
        ("per token, p90", as_ms(found.tpot_p90_s), f"asked: {1000 * goal.tpot_s:g} ms"),
        ("both in time", f"{found.kept_share:.1%}", f"each asked in {goal.share:.0%}"),
        ("serves at most", f"{number(most)} /s", f"asked: {question.load.rate:g} /s"),
        ("an hour", f"${best.num_devices * question.price_per_hour:,.2f}", f"${question.price_per_hour:g} a device"),
    ]


def _ratios(findings: PlanFindings) -> str:
    """Goodput against the ratio."""
    points = by_ratio(findings.planner, findings.choice)
    rate = findings.planner.question.load.rate
    every = max(1, -(-len(points) // _MOST_NAMES))
    ticks = tuple(Tick(place, point.name) for place, point in enumerate(points) if place % every == 0)
    total = max(point.plan.num_devices for point in points)
    x = Axis(f"workers for prefill : workers for decode, on up to {total} devices", -0.5, len(points) - 0.5, ticks)
    y = Axis.up_to("requests/s at most", 1.08 * max(rate, *(point.most_rate for point in points)))
    about = "; ".join(f"{point.name} serves {number(point.most_rate)}" for point in points)
    chart = Chart("Goodput against the ratio of workers, in requests a second", about, x, y)
    chart.across(rate, f"asked: {rate:g} /s")
    placed = [
        (place, p.most_rate, f"{p.name}: {number(p.most_rate)} requests/s at most on {p.plan.num_devices} devices")
        for place, p in enumerate(points)
    ]
    apart = placed[1:] if points[0].plan.prefill is None else placed
    chart.line([(x, y) for x, y, _ in apart], "c-handoff")
    chart.dots(apart, "c-handoff")
    if len(apart) < len(placed):
        chart.dots(placed[:1], "c-good", 5.5)
        chart.label(*placed[0][:2], "each computes both", "c-good")
    best = max(apart, key=lambda one: one[1])
    chart.label(best[0], best[1], f"{points[int(best[0])].name}, {number(best[1])} /s", "c-handoff", "middle")
    return chart.svg


def _rates(findings: PlanFindings) -> str:
    """Attainment of the best plan against the rate."""
    planner, most = findings.planner, findings.most_rates[findings.best_name]
    question = planner.question
    points = by_rate(planner, findings.choice.best, most)
    x = Axis.up_to("requests a second", points[-1].rate)
    about = f"TTFT and TPOT are each in time in {question.goal.share:.0%} of the requests up to {most:.4g} requests/s"
    chart = Chart("Requests in time against the rate", about, x, _SHARES)
    chart.across(question.goal.share, f"asked: {question.goal.share:.0%}")
    chart.down(question.load.rate, f"{question.load.rate:g} /s")
    lines = [(line, [(point.rate, line[2](point)) for point in points]) for line in _LINES]
    for (name, colour, *_), places in lines:
        chart.line(places, colour)
        chart.dots([(x, y, f"{name} in {y:.1%} at {x:.4g} requests/s") for x, y in places], f"{colour} faint", 3.0)
    for (name, colour, _, level), places in lines:
        chart.label(*_crossing(places, level), name, colour)
    return chart.svg


def _crossing(line: Sequence[Point], level: float) -> Point:
    """Returns the point where a line first falls through a level; its end, if it does not."""
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if y0 >= level > y1:
            return x0 + (y0 - level) / (y0 - y1) * (x1 - x0), level
    return line[-1]


def _day(findings: PlanFindings, windows: Sequence[LoadWindow]) -> dict[str, str] | None:
    """The best division of the devices over a day, and the rate; None: there is one division only, or one window."""
    split, devices = findings.choice.split, findings.choice.num_devices
    if split is None or len(numbers := divisions(split, devices)) < 2 or len(windows) < 2:
        return None
    found = over_time(findings.planner, split, devices, windows)
    return {
        "says": _day_says(found, devices, split),
        "ratio": _best_ratios(found, numbers),
        "rate": _rate(found),
    }


def _day_says(found: Sequence[WindowSplit], devices: int, split: DevicePlan) -> str:
    enough = {n: sum(n in one.enough for one in found) for n in found[0].most_rates}
    fixed = max(enough, key=lambda n: enough[n])
    any_split = sum(bool(one.enough) for one in found)
    lows, highs = min(one.best for one in found), max(one.best for one in found)
    prefill = split.prefill
    assert prefill is not None
    decode = (devices - fixed * prefill.option.layout.num_devices) // split.decode.option.layout.num_devices
    text = f"The best number of prefill workers goes from {lows} to {highs}. " if lows < highs else ""
    name, num = f"{fixed}:{decode}", len(found)
    if enough[fixed] == any_split:
        says = f"One ratio is enough: {name} keeps the objectives in {any_split} of {num} parts"
        return f"{text}{says}{'' if any_split == num else ', and no ratio in the others'}."
    return (
        f"{text}The best fixed ratio, {name}, keeps the objectives in {enough[fixed]} of {num} parts; changing roles "
        f"(rebalance.mode: auto) could keep them in {any_split}."
    )


def _time_axis(found: Sequence[WindowSplit]) -> Axis:
    end_s = found[-1].window.end_s
    unit, name = (_HOUR_S, "hours") if end_s > 3 * _HOUR_S else (_MINUTE_S, "minutes")
    width = 3.0 if end_s == 24 * _HOUR_S else round_step(end_s / unit / 8)
    ticks = tuple(Tick(n * width * unit, number(n * width)) for n in range(int(end_s / unit / width + 1e-9) + 1))
    return Axis(name, 0.0, end_s, ticks)


def _best_ratios(found: Sequence[WindowSplit], numbers: range) -> str:
    x = _time_axis(found)
    y = Axis.up_to("workers for prefill", numbers[-1], min(6, numbers[-1]), is_whole=True)
    some = found[:: max(1, len(found) // 12)]
    about = "; ".join(f"from {number(one.window.begin_s)} s on {one.best}" for one in some)
    chart = Chart("The best number of prefill workers over the day", about, x, y)
    for one in found:
        if one.enough:
            low, high = max(0.0, one.enough[0] - 0.5), min(one.enough[-1] + 0.5, y.high)
            begin, end = one.window.begin_s, one.window.end_s
            chart.band([(begin, low), (end, low)], [(begin, high), (end, high)], "c-good")
    chart.line(steps([(one.window.begin_s, one.window.end_s, one.best) for one in found]), "c-prefill")
    middles = [
        ((one.window.begin_s + one.window.end_s) / 2, one.best, f"{one.best} for prefill serve {one.most_rate:.4g} /s")
        for one in found
    ]
    chart.dots(middles, "c-prefill faint", 3.0)
    return chart.svg


def _rate(found: Sequence[WindowSplit]) -> str:
    x = _time_axis(found)
    y = Axis.up_to("requests/s", max(max(one.window.load.rate, one.most_rate) for one in found), 4)
    chart = Chart("The rate over the day, and what the best ratio serves", "", x, y, 220.0)
    rates = steps([(one.window.begin_s, one.window.end_s, one.window.load.rate) for one in found])
    chart.band([(x, 0.0) for x, _ in rates], rates, "c-queue")
    chart.line(steps([(one.window.begin_s, one.window.end_s, one.most_rate) for one in found]), "c-prefill")
    highest = max(one.most_rate for one in found)
    chart.label(found[0].window.begin_s, highest, "the best ratio serves at most", "c-prefill")
    chart.label(found[0].window.begin_s, found[0].window.load.rate, "asked", "c-text")
    return chart.svg


def _memory(plan: DevicePlan) -> str:
    rows = []
    for name, role in (("prefill", plan.prefill), ("decode" if plan.prefill else "both", plan.decode)):
        if role is None:
            continue
        memory = role.option.memory
        parts = [
            BarPart("weights", memory.weight_bytes / 1e9, "c-handoff"),
            BarPart("reserve", memory.reserved_bytes / 1e9, "c-queue"),
            BarPart("KV", max(0, memory.left_bytes) / 1e9, "c-prefill"),
        ]
        rows.append((f"{name}, {role.option.layout}", parts))
    about = "; ".join(f"{name}: " + ", ".join(f"{p.name} {p.value:.4g} GB" for p in parts) for name, parts in rows)
    return stacked_bars("Memory of one device of each role", about, rows, "GB")


def _inputs(findings: PlanFindings) -> list[tuple[str, str]]:
    question = findings.planner.question
    memory, load, efficiency = question.memory, question.load, question.efficiency
    shape, device, profile = memory.shape, memory.device, question.profile
    curve = (
        f"computed: {efficiency.flops:g} of the peak in products, {efficiency.memory:g} of the memory's bandwidth, "
        f"{efficiency.link:g} of the links"
        if profile is None
        else f"measured, {profile.curve.kind}: {profile.curve.error.num_samples} steps of {profile.worker.model}"
    )
    return [
        ("model", f"{shape.name}, {shape.num_parameters / 1e9:.1f} billion parameters"),
        ("weights", shape.dtype if memory.quantization == "none" else memory.quantization),
        ("KV", memory.kv_dtype),
        ("device", f"{device.name}: {device.source}"),
        ("memory to use", f"{memory.memory_utilization:g} of {device.memory_bytes / 1e9:g} GB"),
        ("steps", curve),
        ("requests/s", f"{load.rate:g}"),
        ("prompts and outputs", f"{load.mean_prompt:,.1f} and {load.mean_output:,.1f} tokens on the mean"),
        ("lengths", f"{len(load.lengths):,} drawn or read" if len(load.lengths) > 1 else "all alike"),
        ("longest request", f"{memory.context:,} tokens"),
        ("batch", f"at most {memory.max_num_batched_tokens:,} tokens a step"),
        ("price", f"${question.price_per_hour:g} an hour of one device"),
    ]
