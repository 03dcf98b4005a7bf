"""How near one GPU comes to what it can do, with random weights of a large model: decode against the rate at which it
copies memory, prefill against the rate at which it multiplies matrices; with and without CUDA graphs, in fewer bits.

    python benchmarks/gpu_engine.py --json

Weights are drawn on the device, so that no checkpoint is needed. What cannot run is told with its reason and the rest
goes on. `--device cpu --shape tiny` shows that the program itself works where there is no GPU.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine import Bench, timed
from cluster.errors import BatonError
from cluster.program import ExitCode
from engine.checkpoint import Checkpoint, TensorSlice

BLOCK_SIZE = 256
BATCH_SIZES = [1, 8, 32, 128]
PROMPT_SIZES = [2048, 8192, 32768]


class Shape(StrEnum):
    """Sizes of the model."""

    LARGE = "8B"
    TINY = "tiny"


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHAPES = {Shape.LARGE: (4096, 14336, 32, 32, 8, 128256), Shape.TINY: (64, 128, 2, 4, 2, 512)}

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16, eager": {},
    "bf16": {"graphs": True},
    "bf16, varlen": {"graphs": True, "attention": "varlen"},
    "bf16, flash_attn": {"graphs": True, "attention": "flash_attn"},
    "fp8": {"graphs": True, "quantization": "fp8"},
    "int8": {"graphs": True, "quantization": "int8"},
    "int4": {"graphs": True, "quantization": "int4"},
    "bf16, kv int8": {"kv_cache_dtype": "int8"},
    "bf16, kv fp8": {"kv_cache_dtype": "fp8"},
}


class RandomWeights(Checkpoint):
    """Any tensor that is asked for, of small random values."""

    def __init__(self, folder: Path) -> None:
        self._handles = {}

    def read(self, part: TensorSlice, out: torch.Tensor) -> None:
        out.fill_(1.0) if "norm" in part.name else out.normal_(0.0, 0.02)

    def check_all_read(self, ignored: tuple[str, ...]) -> None:
        """There is no tensor of its own."""


def write_config(shape: Shape, longest: int, folder: Path) -> None:
    *sizes, vocab_size = _SHAPES[shape]
    fields = dict(zip(_SIZES, sizes, strict=True)) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "head_dim": sizes[0] // sizes[3],
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def median_s(work: Callable[[], object], device: torch.device, num_runs: int = 10) -> float:
    """Seconds of one run, each waited for."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        run()
    return statistics.median(timed(run) for _ in range(num_runs))


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written ones counted."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device)


def gemm_rate(device: torch.device, shapes: Sequence[tuple[int, int]], num_rows: int) -> float:
    """Floating-point operations a second of a layer's products in bfloat16."""
    flops, took_s = 0.0, 0.0
    for num_outputs, num_inputs in shapes:
        x, weight = (torch.randn(n, num_inputs, device=device).bfloat16() for n in (num_rows, num_outputs))
        flops += 2.0 * num_rows * num_outputs * num_inputs
        took_s += median_s(lambda x=x, weight=weight: x @ weight.T, device)  # type: ignore[misc]
    return flops / took_s


@dataclass(frozen=True)
class Plan:
    """What is measured of each variant, and where."""

    device: torch.device
    shape: Shape
    batch: list[int]
    prompt: list[int]
    context: int
    chunk: int

    @property
    def copied_bytes(self) -> int:
        return 4 << 30 if self.device.type == "cuda" else 16 << 20

    def load(self, wanted: dict[str, Any]) -> Bench:
        """Raises what ModelRunner raises."""
        wanted = dict(wanted)
        up_to = max(self.batch) if wanted.pop("graphs", False) else 0
        blocks_each = -(-self.context // BLOCK_SIZE)
        sizes = {"chunk": self.chunk, "context": self.context, "block_size": BLOCK_SIZE}
        sizes["max_tokens"] = max(*self.prompt, max(self.batch) * blocks_each * BLOCK_SIZE)
        places = {"device": str(self.device), "dtype": "bfloat16", "graphs_up_to": up_to, "open_weights": RandomWeights}
        with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
            write_config(self.shape, max(*self.prompt, self.context + 1), Path(folder))
            return Bench(Path(folder), **sizes, **places, **wanted)


def measure(bench: Bench, plan: Plan) -> dict[str, Any]:
    """Of one variant."""
    told: dict[str, Any] = {"attention": bench.runner.attention_name, "graphs": bench.runner.graphs_reason}
    told["decode"] = {str(size): measure_decode(bench, plan, size) for size in plan.batch}
    told["prefill"] = {str(size): measure_prefill(bench, plan, size) for size in plan.prompt}
    return told


def measure_decode(bench: Bench, plan: Plan, size: int) -> dict[str, float]:
    """Whole steps, sampling included, and the forward pass alone; the limit is measured right before."""
    bench.decode(size, 3)
    limit = copy_rate(plan.device, plan.copied_bytes)
    num_steps = max(5, int(0.5 / timed(lambda: bench.decode(size, 1))))
    step_s = statistics.median(timed(lambda: bench.decode(size, num_steps)) for _ in range(3)) / num_steps
    step = bench.decode_step([5] * size)
    forward_s = median_s(lambda: bench.runner.forward(step), plan.device)
    return {
        "tok_s": round(size / step_s, 1),
        "step_ms": round(1000 * step_s, 3),
        "forward_ms": round(1000 * forward_s, 3),
        "mbu": float(f"{bench.decode_bytes(size) / step_s / limit:.3g}"),
        "forward_mbu": float(f"{bench.decode_bytes(size) / forward_s / limit:.3g}"),
    }


def measure_prefill(bench: Bench, plan: Plan, size: int) -> dict[str, float]:
    bench.prefill(size)
    limit = gemm_rate(plan.device, bench.gemm_shapes(), min(size, plan.chunk))
    took_s = statistics.median(timed(lambda: bench.prefill(size)) for _ in range(3))
    return {"tok_s": round(size / took_s, 1), "mfu": float(f"{bench.prefill_flops(size) / took_s / limit:.3g}")}


def measure_all(names: Iterable[str], plan: Plan) -> dict[str, Any]:
    """What cannot run becomes its reason."""
    told: dict[str, Any] = {}
    began = time.perf_counter()
    for name in names:
        try:
            told[name] = measure(plan.load(VARIANTS[name]), plan)
        except (BatonError, RuntimeError) as error:
            told[name] = {"error": str(error).partition("\n")[0]}
        gc.collect()
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return told


def _table(title: str, variants: dict[str, Any], part: str, share: str) -> Table:
    table = Table(title=title)
    sizes = next((told[part] for told in variants.values() if part in told), {})
    for column in ("", *(f"{size}: tok/s" for size in sizes)):
        table.add_column(column, justify="right" if column else "left")
    for name, told in variants.items():
        cells = [f"{v['tok_s']:,.0f} ({v[share]:.0%})" for v in told.get(part, {}).values()]
        table.add_row(name, *(cells or [told.get("error", "")]))
    return table


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the program out.")] = "cuda",
    shape: Annotated[Shape, typer.Option(help="Of the model.")] = Shape.LARGE,
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences that decode; repeat it.")] = BATCH_SIZES,
    prompt: Annotated[list[int], typer.Option(min=1, help="Tokens of a prompt; repeat it.")] = PROMPT_SIZES,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each decoding sequence.")] = 1024,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step of prefill.")] = 8192,
    variant: Annotated[list[str] | None, typer.Option(help="A row of the tables; repeat it. Without it: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measures one rank with random weights on a GPU."""
    if unknown := set(variant or ()) - VARIANTS.keys():
        raise typer.BadParameter(f"--variant: {unknown.pop()!r} is unknown; use one of: {'; '.join(VARIANTS)}")
    plan = Plan(torch.device(device), shape, batch, prompt, context, chunk)
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        typer.echo("error: there is no CUDA device here; --device cpu --shape tiny tries the program out", err=True)
        raise typer.Exit(ExitCode.FAILED)
    variants = measure_all(variant or VARIANTS, plan)
    values = {"device": _name(plan.device), "torch": torch.__version__, "shape": shape, "context": context}
    values |= {"copy_gb_s": round(copy_rate(plan.device, plan.copied_bytes) / 1e9, 1), "variants": variants}
    if as_json:
        print(json.dumps(values))
        return
    console = Console()
    console.print(_table(f"decode, {context} tokens of context (share of the copy rate)", variants, "decode", "mbu"))
    console.print(_table("prefill (share of the rate of products in bfloat16)", variants, "prefill", "mfu"))
    for name, told in variants.items():
        console.print(f"{name}: attention {told.get('attention', '-')}; CUDA graphs: {told.get('graphs', '-')}")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    typer.run(main)
