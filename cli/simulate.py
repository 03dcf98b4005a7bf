"""`baton simulate` runs a load through simulated workers, and says what its clients would see.

The workers' steps cost what is computed for a model on a device, or what was measured of one's own engine; they stand
behind Baton's router, or alone (`--bare`), as an engine such as vLLM does.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench import RequestOptions, progress_bar
from cli.common import AsJson, outcome
from cli.plan import PlannedDevice
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config.choices import RebalanceMode
    from simulate.curve_file import FileCurve
    from simulate.worker_profile import WorkerProfile
    from simulate.workload import RequestShape
    from simulate.world import Fidelity, WorkerSpec

_USUAL_CONTEXT = 4096
_USUAL_KV_BYTES = 131072.0
_USUAL_WIRE_GBPS = 200.0


@dataclass(frozen=True)
class SimulatedLoad(RequestOptions):
    """Options of requests that come in virtual time."""

    first_s: Annotated[float, typer.Option(min=0, help="Only the requests of its first seconds.")] = math.inf

    def shapes(self) -> list[RequestShape]:
        from simulate.workload import until

        if not (found := until(super().shapes(), self.first_s)):
            raise ConfigError(f"--first-s: no request comes in the first {self.first_s:g} s; give it more")
        return found


class FidelityName(StrEnum):
    """The fidelity of a simulation: how closely a cluster is simulated."""

    FULL = "full"
    FAST = "fast"


@dataclass(frozen=True)
class SimulatedOptions:
    """Options that say what is simulated beside the model and its devices."""

    ratio: Annotated[
        str | None,
        typer.Option(metavar="P:D", help="Workers that prefill and that decode; default: 1:1, or 0:1 with --bare."),
    ] = None
    steps: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured times of steps, in the place of a model (docs/simulate.md)."),
    ] = None
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV pool of each worker holds; default: what fits.")
    ] = None
    bare: Annotated[
        bool, typer.Option("--bare", help="No router, no costs but the steps: an engine such as vLLM by itself.")
    ] = False
    auto: Annotated[
        bool, typer.Option("--auto", help="mode: auto, by which the controller moves workers between the roles.")
    ] = False
    ttft_ms: Annotated[float, typer.Option(min=0.001, max=1e9, help="Objective: time to the first token.")] = 500.0
    tpot_ms: Annotated[float, typer.Option(min=0.001, max=1e9, help="Objective: time per token after it.")] = 50.0
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that a worker decodes at a time.")] = 256
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step.")] = 2048
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(min=1, max=1e12, help="KV that a hand-off moves; default: the model's, or 131,072.")
    ] = None
    wire_gbps: Annotated[
        float | None,
        typer.Option(
            min=1e-3, max=1e9, help="Gigabits a second that a worker sends, and takes; default: the device's, or 200."
        ),
    ] = None
    cores: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers, router and clients share one machine of so many cores, and wait for one another."
        ),
    ] = None
    fidelity: Annotated[
        FidelityName, typer.Option(help="full: every step and message; fast: steps in which nothing happens in one go.")
    ] = FidelityName.FULL

    @property
    def roles(self) -> tuple[int, int]:
        """Raises ConfigError."""
        ratio = self.ratio or ("0:1" if self.bare else "1:1")
        if not (found := re.fullmatch(r"(\d{1,4}):([1-9]\d{0,3})", ratio)):
            raise ConfigError(f"--ratio: {ratio!r} is not of the form P:D, with at least 1 decode worker")
        return int(found[1]), int(found[2])


def simulate(
    device: PlannedDevice,
    load: SimulatedLoad,
    options: SimulatedOptions,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A known name such as llama-3.1-8b, a Hugging Face folder, or its config."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a load through simulated workers, behind the real router or alone, in virtual time."""
    with outcome():
        from cluster.config.schema import SloSection
        from simulate.prediction import PredictionQuestion, predicted_report

        shapes, roles = load.shapes(), options.roles
        worker, curve = _worker(device, options, model, shapes)
        slo = SloSection(options.ttft_ms, options.tpot_ms)
        if options.auto and options.bare:
            raise ConfigError("--auto: a bare engine has no controller; leave --bare or --auto out")
        fidelity: Fidelity = "fast" if options.fidelity is FidelityName.FAST else "full"
        if options.cores is not None and (options.bare or fidelity == "fast"):
            raise ConfigError("--cores: shared cores need the full fidelity and a router; leave --bare or fast out")
        mode: RebalanceMode = "auto" if options.auto else "fixed"
        profile = device.measured()
        message_s = None if profile is None else profile.message_s
        question = PredictionQuestion(worker, *roles, slo, options.bare, message_s, fidelity, mode, options.cores)
        with progress_bar(len(shapes)) as on_end:
            report = predicted_report(question, shapes, load.seed, on_end)
        if as_json:
            print(json.dumps({"curve": _document(curve), **report.as_dict()}))
            return
        if curve is not None:
            error = curve.error
            print(
                f"curve       {curve.kind}; off by {error.median:.1%} (median) and {error.p90:.1%} (p90) of its steps"
            )
            for note in curve.notes:
                print(f"note        {note}")
        print("\n".join(report.lines()))


def _document(curve: FileCurve | None) -> dict[str, Any]:
    if curve is None:
        return {"kind": "computed"}
    return {"kind": curve.kind, "error_median": curve.error.median, "error_p90": curve.error.p90}


def _worker(
    device: PlannedDevice, options: SimulatedOptions, model: str | None, shapes: Sequence[RequestShape]
) -> tuple[WorkerSpec, FileCurve | None]:
    """A worker, and its curve if it was measured. Raises ConfigError."""
    if (model is None) == (options.steps is None):
        if device.profile is not None and model is None and options.steps is None:
            raise ConfigError(
                "--profile: name its model, too, with --model: a profile does not say how large its KV is"
            )
        raise ConfigError("--model, --steps: name a model to compute the steps of, or a file of measured ones")
    found, curve = _computed(device, options, model) if model is not None else _stepping(options, shapes)
    block = options.block_size
    like = replace(
        found,
        kv_tokens=(options.kv_tokens or found.kv_tokens) // block * block,
        block_size=block,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_bytes_per_token=options.kv_bytes_per_token or found.kv_bytes_per_token,
    )
    if options.wire_gbps is not None:
        like = replace(like, wire=replace(like.wire, bytes_per_s=options.wire_gbps * 1e9 / 8))
    return (replace(like, command_s=0.0, overlaps=False) if options.bare else like), curve


def _stepping(options: SimulatedOptions, shapes: Sequence[RequestShape]) -> tuple[WorkerSpec, FileCurve]:
    """Measured steps of which nothing else is known."""
    from simulate.curve_file import read_curve
    from simulate.wire import WireSpec
    from simulate.world import WorkerSpec

    assert options.steps is not None
    if options.kv_tokens is None:
        raise ConfigError("--steps: say how many tokens the KV pool of a worker holds, too, with --kv-tokens")
    curve = read_curve(options.steps)
    worker = WorkerSpec(
        "",
        "decode",
        curve=curve.curve,
        kv_tokens=options.kv_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max(shape.num_prompt_tokens + shape.num_output_tokens for shape in shapes),
        kv_bytes_per_token=_USUAL_KV_BYTES,
        wire=WireSpec(_USUAL_WIRE_GBPS * 1e9 / 8),
    )
    return worker, curve


def _computed(device: PlannedDevice, options: SimulatedOptions, model: str) -> tuple[WorkerSpec, FileCurve | None]:
    """Raises ConfigError where the model does not fit."""
    from simulate.memory_plan import check_fits, memory_of
    from simulate.model_files import find_shape
    from simulate.roofline import ComputedCurve
    from simulate.shapes import DeviceLayout
    from simulate.wire import WireSpec
    from simulate.world import WorkerSpec

    question, profile = device.question(find_shape(model), _USUAL_CONTEXT), device.measured()
    layout = (
        DeviceLayout(device.tp or 1, device.ep) if profile is None else DeviceLayout(profile.worker.tensor_parallel)
    )
    memory = memory_of(question, layout)
    like = WorkerSpec(
        "",
        "decode",
        kv_bytes_per_token=memory.worker_kv_bytes_per_token,
        wire=WireSpec(question.device.nic_bytes_per_s * layout.num_devices),
    )
    if profile is not None:
        return _measured(like, profile), profile.curve
    check_fits(question, memory)
    computed = replace(
        like,
        curve=ComputedCurve(question.shape, question.device, layout, question.quantization, question.kv_dtype),
        kv_tokens=memory.num_tokens,
        max_model_len=min(question.shape.max_position_embeddings, memory.num_tokens),
        max_num_seqs=options.max_num_seqs,
    )
    return computed, None


def _measured(like: WorkerSpec, profile: WorkerProfile) -> WorkerSpec:
    """The worker whose steps and sizes were measured. On a CPU the engine thread computes short steps itself."""
    from cluster.step_cost import OVERLAP_TOKENS

    measured = profile.worker
    return replace(
        like,
        curve=profile.curve.curve,
        kv_tokens=measured.kv_tokens,
        max_model_len=min(measured.max_model_len, measured.kv_tokens),
        max_num_seqs=measured.max_num_seqs,
        overlaps=measured.device != "cpu",
        long_tokens=OVERLAP_TOKENS if measured.device == "cpu" else 0,
        num_threads=profile.num_threads,
    )
