"""`baton plan`: what a model and a load need of devices that are not here yet. `--memory` answers for memory alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, outcome
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from simulate.estimates import OfferedLoad
    from simulate.memory_plan import LayoutMemory, MemoryQuestion
    from simulate.plan_choice import PlanChoice
    from simulate.plan_series import LoadWindow
    from simulate.planner import Planner, PlanQuestion
    from simulate.report import RunReport
    from simulate.shapes import DeviceLayout, ModelShape
    from simulate.worker_profile import WorkerProfile
    from simulate.workload import RequestShape

_USUAL_CONTEXT = 4096
_KV_DTYPES = ("auto", "int8", "fp8")
_QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")
_NUM_DRAWN = 1000
_LONGEST_SHARE = 0.999
"""A worker must hold at least one request as long as this share of them."""


@dataclass(frozen=True)
class PlannedDevice:
    """Options that say on what, and in which form, a model is served."""

    device: Annotated[str, typer.Option(help="a100, h100, h200, b200, mi300x, l40s or cpu.")] = "h100"
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel devices; default: each that works.")] = None
    ep: Annotated[int, typer.Option(min=1, help="Devices over which experts are spread; 1: sliced as TP.")] = 1
    quantization: Annotated[str, typer.Option(help="auto (the checkpoint's), none, fp8, int8 or int4.")] = "auto"
    kv_dtype: Annotated[str, typer.Option(help="auto (what is computed in), int8 or fp8.")] = "auto"
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a request, prompt and output; default: 4096, if allowed, or the load's."),
    ] = None
    memory_utilization: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the memory to use.")] = 0.9
    profile: Annotated[
        Path | None, typer.Option(help="What `baton profile` wrote, in the place of computed steps and pools.")
    ] = None
    reserve_gb: Annotated[
        float | None,
        typer.Option(
            min=0, max=1e6, help="GB of each device beside weights and KV; default: activations and 1 GiB or more."
        ),
    ] = None

    def question(self, shape: ModelShape, usual_context: int) -> MemoryQuestion:
        """Raises ConfigError."""
        from simulate.devices import find_device
        from simulate.memory_plan import MemoryQuestion

        most = shape.max_position_embeddings
        if self.context is not None and self.context > most:
            raise ConfigError(f"--context: {self.context} is more than {shape.name}'s {most}")
        quantization: Any = _one_of("--quantization", self.quantization, _QUANTIZATIONS)
        kv_dtype = _one_of("--kv-dtype", self.kv_dtype, _KV_DTYPES)
        return MemoryQuestion(
            shape,
            find_device(self.device),
            shape.quantization if quantization == "auto" else quantization,
            shape.dtype if kv_dtype == "auto" else kv_dtype,
            self.context or min(most, usual_context),
            self.memory_utilization,
            None if self.reserve_gb is None else int(self.reserve_gb * 1e9),
        )

    def measured(self) -> WorkerProfile | None:
        """Raises ConfigError."""
        from simulate.worker_profile import read_profile

        return None if self.profile is None else read_profile(self.profile)

    def layouts(self) -> tuple[DeviceLayout, ...]:
        """The one that is named; empty: the usual ones."""
        from simulate.shapes import DeviceLayout

        return (DeviceLayout(self.tp or 1, self.ep),) if self.tp is not None or self.ep > 1 else ()


@dataclass(frozen=True)
class PlannedLoad:
    """Options that say what comes: a rate and lengths, or a trace."""

    rate: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, help="Requests a second; default: the trace's, or 1.")
    ] = None
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the mean prompt.")] = 1024
    prompt_p90: Annotated[
        int | None, typer.Option(min=1, help="Tokens that 90 % of the prompts have at most; default: all are alike.")
    ] = None
    output: Annotated[int, typer.Option(min=1, help="Tokens of the mean output.")] = 256
    output_p90: Annotated[
        int | None, typer.Option(min=1, help="Tokens that 90 % of the outputs have at most; default: all are alike.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Lengths, and the mean rate, of a trace instead: CSV or JSON lines.")
    ] = None

    def shapes(self, most_tokens: int) -> list[RequestShape]:
        """The trace, or requests at time 0; those of more than `most_tokens` are cut, where lengths vary. Raises
        ConfigError, for a trace with its row."""
        from simulate import workload

        if self.trace is None and self.prompt + self.output > most_tokens:
            raise ConfigError(
                f"--prompt, --output: {self.prompt:,} and {self.output:,} tokens are more together than the model's "
                f"{most_tokens:,}"
            )
        if self.trace is not None:
            shapes = workload.read_trace(self.trace)
        elif self.prompt_p90 is None and self.output_p90 is None:
            shapes = [workload.RequestShape(0.0, self.prompt, self.output)]
        else:
            prompt, output = (
                (self.prompt, self.prompt_p90 or self.prompt),
                (self.output, self.output_p90 or self.output),
            )
            try:
                drawn = workload.lognormal(prompt, output)
            except ValueError as error:
                raise ConfigError(f"--prompt-p90, --output-p90: {error}") from error
            shapes = workload.random_shapes(_NUM_DRAWN, drawn, seed=0)
        return workload.scaled(shapes, most_tokens=most_tokens)

    def offered(self, shapes: Sequence[RequestShape]) -> OfferedLoad:
        """All of them at the rate that is asked for, or at the trace's. Raises ConfigError where that has none."""
        from simulate.estimates import OfferedLoad

        rate = self.rate or 1.0
        if self.trace is not None and self.rate is None:
            if not shapes[-1].at:
                raise ConfigError(f"{self.trace}: all of its requests come at once; say how many a second with --rate")
            rate = (len(shapes) - 1) / shapes[-1].at
        return OfferedLoad(rate, tuple((shape.num_prompt_tokens, shape.num_output_tokens) for shape in shapes))

    def windows(self, shapes: Sequence[RequestShape]) -> tuple[list[LoadWindow], str]:
        """Parts of the trace, or of a generated day of this load, and which day it is."""
        from simulate.plan_series import windows_of_day, windows_of_trace
        from simulate.workload import DayShape

        if self.trace is not None:
            windows = windows_of_trace(shapes, self.rate)
            return windows, f"Parts of {self.trace.name}, each with the requests that came in it."
        load = self.offered(shapes)
        day = DayShape.with_peak(load.rate)
        return windows_of_day(load, day), (
            f"A generated day: {load.rate:g} requests/s at the peak, 1/{day.peak_to_trough:g} of it at the trough; "
            f"the ratio of prompt to output tokens swings {day.ratio_swing:g}-fold every {day.ratio_period_s / 3600:g} "
            "hours. A trace (--trace) takes its place."
        )


@dataclass(frozen=True)
class PlannedGoal:
    """Options that say what is asked of a plan."""

    ttft_ms: Annotated[float, typer.Option(min=0.1, max=1e9, help="Limit of the time to the first token.")] = 500.0
    tpot_ms: Annotated[float, typer.Option(min=0.1, max=1e9, help="Limit of the time per token after it.")] = 50.0
    share: Annotated[float, typer.Option(min=0.5, max=0.99, help="Share of the requests within each limit.")] = 0.9
    devices: Annotated[int | None, typer.Option(min=1, help="Most devices there may be.")] = None
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=65_536, help="Most sequences that a worker may decode at a time.")
    ] = 256
    price: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Dollars for an hour of one device; default: the table's example."),
    ] = None
    what_if: Annotated[
        str | None, typer.Option(metavar="P:D", help="Compare with so many workers of each role; 0:D: colocated.")
    ] = None
    simulate: Annotated[
        int | None, typer.Option(min=10, metavar="N", help="Run the plans with so many requests in virtual time, too.")
    ] = None
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the cluster.yaml that is meant.")] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures: by ratio, rate and time of day.")
    ] = None

    def workers(self) -> tuple[int, int] | None:
        """Raises ConfigError."""
        if self.what_if is None:
            return None
        if not (found := re.fullmatch(r"(\d{1,4}):(\d{1,4})", self.what_if)) or not int(found[2]):
            raise ConfigError(f"--what-if: {self.what_if!r} is no ratio of workers; write P:D, such as 3:1 or 0:4")
        return int(found[1]), int(found[2])


def plan(
    options: PlannedDevice,
    load: PlannedLoad,
    goal: PlannedGoal,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="A known name such as llama-3.1-70b, a Hugging Face folder, or its config."),
    ],
    memory: Annotated[bool, typer.Option("--memory", help="Only how the memory is shared out.")] = False,
    split_latents: Annotated[
        bool, typer.Option("--split-latents", help="With --memory: each TP device keeps a part of the latents (MLA).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how many devices a model and a load need, in which roles, and what they would do and cost."""
    with outcome():
        from simulate.model_files import find_shape

        shape = find_shape(model)
        if memory:
            question = replace(options.question(shape, _USUAL_CONTEXT), split_latents=split_latents)
            found = _memory(question, options.layouts())
            print(json.dumps(_memory_document(question, found)) if as_json else _render_memory(question, found))
            return
        if split_latents:
            raise ConfigError("--split-latents: what a step exchanges then is not planned for; use it with --memory")
        _plan(shape, options, load, goal, model, as_json)


def _plan(
    shape: ModelShape, options: PlannedDevice, load: PlannedLoad, goal: PlannedGoal, model: str, as_json: bool
) -> None:
    from cli.plan_page import page_of
    from cli.plan_view import PlanFindings, document_of, render
    from simulate.plan_choice import choose
    from simulate.plan_config import config_text
    from simulate.planner import Planner

    ratio, shapes = goal.workers(), load.shapes(shape.max_position_embeddings)
    question = _asked(shape, options, load.offered(shapes), goal)
    planner = Planner(question)
    choice = choose(planner, ratio)
    config = config_text(question, choice.best, model)
    if goal.write is not None:
        _write("--write", goal.write, config)
    reports = _simulated(planner, choice, goal.simulate) if goal.simulate else {}
    findings = PlanFindings(planner, choice, reports)
    if goal.html is not None:
        _write("--html", goal.html, page_of(findings, *load.windows(shapes), config))
    if as_json:
        print(json.dumps(document_of(findings)))
        return
    print(render(findings))
    for file in filter(None, (goal.write, goal.html)):
        print(f"\nwritten: {file}")


def _asked(shape: ModelShape, options: PlannedDevice, offered: OfferedLoad, goal: PlannedGoal) -> PlanQuestion:
    from simulate.placement import LatencyGoal
    from simulate.planner import PlanQuestion

    memory = replace(options.question(shape, offered.longest(_LONGEST_SHARE)), max_num_seqs=goal.max_num_seqs)
    return PlanQuestion(
        memory,
        offered,
        LatencyGoal(goal.ttft_ms / 1000, goal.tpot_ms / 1000, goal.share),
        memory.device.price_per_hour if goal.price is None else goal.price,
        most_devices=goal.devices,
        layouts=options.layouts(),
        profile=options.measured(),
    )


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {file} cannot be written: {error.strerror}") from error


def _simulated(planner: Planner, choice: PlanChoice, num_requests: int) -> dict[str, RunReport]:
    """The runs of all plans that are compared, by the names of plans."""
    import logging

    from simulate.plan_check import simulated

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # pairs that close when a run ends
    try:
        return {name: simulated(planner.question, plan, num_requests) for name, plan in choice.plans.items()}
    finally:
        logging.disable(before)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{option}: {value!r} is unknown; use {', '.join(known)}")
    return value


def _memory(question: MemoryQuestion, layouts: tuple[DeviceLayout, ...]) -> list[LayoutMemory]:
    """Prints the memory of the layout that is named, which must fit, or of the usual ones. Raises ConfigError where
    none fits."""
    from simulate.memory_plan import check_fits, memory_of, usual_layouts

    wanted = layouts or usual_layouts(question.shape, question.device.devices_per_node)
    found = [memory_of(question, one) for one in wanted]
    if not any(one.num_requests for one in found):
        check_fits(question, max(found, key=lambda one: one.left_bytes))
    return found


def _memory_document(question: MemoryQuestion, found: list[LayoutMemory]) -> dict[str, Any]:
    return {
        "model": question.shape.name,
        "parameters": question.shape.num_parameters,
        "active_parameters": question.shape.num_active_parameters,
        "device": question.device.name,
        "memory_bytes": int(question.device.memory_bytes),
        "quantization": question.quantization,
        "kv_dtype": question.kv_dtype,
        "context": question.context,
        "layouts": [one.as_dict() for one in found],
    }


def _render_memory(question: MemoryQuestion, found: list[LayoutMemory]) -> str:
    from cluster.text import format_bytes

    shape, device = question.shape, question.device
    active = f", {shape.num_active_parameters / 1e9:.1f} of them for a token" if shape.experts else ""
    weights = shape.dtype if question.quantization == "none" else question.quantization
    lines = [
        f"{shape.name}: {shape.num_parameters / 1e9:.1f} billion parameters{active}; weights in {weights}, KV in "
        f"{question.kv_dtype}",
        f"{device.name}: {format_bytes(int(device.memory_bytes))} each, {question.memory_utilization:g} of it to use",
        "",
        f"{'layout':<12}{'devices':>8}{'weights':>11}{'in all':>11}{'reserve':>10}{'for KV':>11}{'B/token':>10}"
        f"{'tokens':>12}  requests of {question.context:,}",
    ]
    for one in found:
        left = format_bytes(one.left_bytes) if one.left_bytes >= 0 else f"-{format_bytes(-one.left_bytes)}"
        lines.append(
            f"{one.layout!s:<12}{one.layout.num_devices:>8}{format_bytes(one.weight_bytes):>11}"
            f"{format_bytes(one.all_weight_bytes):>11}{format_bytes(one.reserved_bytes):>10}{left:>11}"
            f"{one.kv_bytes_per_token:>10,}{one.num_tokens:>12,}  {_requests(one)}"
        )
    lines += ["", "weights, reserve, KV and B/token are of each device; in all, tokens and requests of the worker"]
    return "\n".join(lines)


def _requests(one: LayoutMemory) -> str:
    return f"{one.num_requests:,}" if one.num_requests else "does not fit"
