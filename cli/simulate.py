"""`baton simulate` runs a load through a simulated cluster, and says what its clients would see."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cli.bench import LoadOptions
from cli.common import AsJson, outcome
from cli.plan import PlannedDevice
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from simulate.worker_profile import WorkerProfile
    from simulate.world import WorkerSpec

_USUAL_CONTEXT = 4096


@dataclass(frozen=True)
class SimulatedOptions:
    """Options that say what is simulated beside the model and its devices."""

    ratio: Annotated[str, typer.Option(metavar="P:D", help="Workers that prefill and that decode.")] = "1:1"
    ttft_ms: Annotated[float, typer.Option(min=0.001, help="Objective: time to the first token.")] = 500.0
    tpot_ms: Annotated[float, typer.Option(min=0.001, help="Objective: time per token after it.")] = 50.0
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that a worker decodes at a time.")] = 256
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step.")] = 2048

    @property
    def roles(self) -> tuple[int, int]:
        """Raises ConfigError."""
        prefill, colon, decode = self.ratio.partition(":")
        if not (colon and prefill.isdecimal() and decode.isdecimal() and int(decode)):
            raise ConfigError(f"--ratio: {self.ratio!r} is not of the form P:D, with at least 1 decode worker")
        return int(prefill), int(decode)


def simulate(
    device: PlannedDevice,
    load: LoadOptions,
    options: SimulatedOptions,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="A known name such as llama-3.1-8b, a Hugging Face folder, or its config."),
    ],
    as_json: AsJson = False,
) -> None:
    """Run a load through a simulated cluster: the real router and workers, in virtual time."""
    with outcome():
        from cluster.config.schema import SloSection
        from simulate.prediction import PredictionQuestion, predicted_report

        if load.max_concurrency is not None:
            raise ConfigError("--max-concurrency: a simulated load is open; use --request-rate")
        slo = SloSection(options.ttft_ms, options.tpot_ms)
        question = PredictionQuestion(_worker(device, options, model), *options.roles, slo)
        report = predicted_report(question, load.shapes(), load.seed)
        print(json.dumps(report.as_dict()) if as_json else "\n".join(report.lines()))


def _worker(device: PlannedDevice, options: SimulatedOptions, model: str) -> WorkerSpec:
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
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_bytes_per_token=memory.worker_kv_bytes_per_token,
        wire=WireSpec(question.device.nic_bytes_per_s * layout.num_devices),
    )
    if profile is not None:
        return _measured(like, profile)
    check_fits(question, memory)
    return replace(
        like,
        curve=ComputedCurve(question.shape, question.device, layout, question.quantization, question.kv_dtype),
        kv_tokens=memory.num_tokens,
        max_model_len=min(question.shape.max_position_embeddings, memory.num_tokens),
        max_num_seqs=options.max_num_seqs,
    )


def _measured(like: WorkerSpec, profile: WorkerProfile) -> WorkerSpec:
    """The worker whose steps and sizes were measured."""
    measured = profile.worker
    return replace(
        like,
        curve=profile.curve.curve,
        kv_tokens=measured.kv_tokens,
        max_model_len=min(measured.max_model_len, measured.kv_tokens),
        max_num_seqs=measured.max_num_seqs,
        overlaps=measured.device != "cpu",
    )
