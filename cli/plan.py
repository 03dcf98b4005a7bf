"""`baton plan`: what a model needs of devices that are not here yet. `--memory` answers for their memory alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, outcome
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from simulate.memory_plan import LayoutMemory, MemoryQuestion

_USUAL_CONTEXT = 4096
_KV_DTYPES = ("auto", "int8", "fp8")
_QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")


@dataclass(frozen=True)
class PlannedDevice:
    """Options that say on what, and in which form, a model is served."""

    device: Annotated[str, typer.Option(help="a100, h100, h200, b200, mi300x, l40s or cpu.")] = "h100"
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel devices; default: each that works.")] = None
    ep: Annotated[int, typer.Option(min=1, help="Devices over which experts are spread; 1: sliced as TP.")] = 1
    quantization: Annotated[str, typer.Option(help="auto (the checkpoint's), none, fp8, int8 or int4.")] = "auto"
    kv_dtype: Annotated[str, typer.Option(help="auto (what is computed in), int8 or fp8.")] = "auto"
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a request, prompt and output; default: 4096, if allowed.")
    ] = None
    memory_utilization: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the memory to use.")] = 0.9
    reserve_gb: Annotated[
        float | None,
        typer.Option(min=0, help="GB of each device beside weights and KV; default: activations and 1 GiB or more."),
    ] = None

    def question(self, model: str) -> MemoryQuestion:
        """Raises ConfigError or CheckpointError."""
        from simulate.devices import find_device
        from simulate.memory_plan import MemoryQuestion
        from simulate.model_files import find_shape

        shape = find_shape(model)
        most = shape.max_position_embeddings
        if self.context is not None and self.context > most:
            raise ConfigError(f"--context: {self.context} is more than {shape.name}'s {most}")
        return MemoryQuestion(
            shape,
            find_device(self.device),
            shape.quantization if self.quantization == "auto" else _one_of("--quantization", self.quantization),
            shape.dtype if self.kv_dtype == "auto" else _kv_dtype(self.kv_dtype),
            self.context or min(most, _USUAL_CONTEXT),
            self.memory_utilization,
            None if self.reserve_gb is None else int(self.reserve_gb * 1e9),
        )


def plan(
    options: PlannedDevice,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="A known name such as llama-3.1-70b, a Hugging Face folder, or its config."),
    ],
    memory: Annotated[bool, typer.Option("--memory", help="Only how the memory is shared out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model needs of devices that are not here yet."""
    with outcome():
        question = options.question(model)
        found = _memory(question, options.tp, options.ep)
        print(json.dumps(_document(question, found)) if as_json else _render(question, found))


def _one_of(option: str, value: str) -> Any:
    if value not in _QUANTIZATIONS:
        raise ConfigError(f"{option}: {value!r} is unknown; use {', '.join(_QUANTIZATIONS)}")
    return value


def _kv_dtype(value: str) -> str:
    if value not in _KV_DTYPES:
        raise ConfigError(f"--kv-dtype: {value!r} is unknown; use {', '.join(_KV_DTYPES)}")
    return value


def _memory(question: MemoryQuestion, tp: int | None, ep: int) -> list[LayoutMemory]:
    """Of the layout that is named, which must fit, or of the usual ones. Raises ConfigError where none fits."""
    from simulate.memory_plan import check_fits, memory_of, usual_layouts
    from simulate.shapes import DeviceLayout

    if tp is not None or ep > 1:
        found = memory_of(question, DeviceLayout(tp or 1, ep))
        check_fits(question, found)
        return [found]
    all_found = [memory_of(question, one) for one in usual_layouts(question.shape, question.device.devices_per_node)]
    if not any(found.num_requests for found in all_found):
        check_fits(question, max(all_found, key=lambda found: found.left_bytes))
    return all_found


def _document(question: MemoryQuestion, found: list[LayoutMemory]) -> dict[str, Any]:
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


def _render(question: MemoryQuestion, found: list[LayoutMemory]) -> str:
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
