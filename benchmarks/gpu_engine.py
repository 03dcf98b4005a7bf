"""How near one GPU comes to what it can do, with random weights of a large model: parts of `benchmarks.gpu`.

    python -m benchmarks.gpu_engine {ceilings,graphs,speed} --device cuda

Decode is held against the rate at which the device copies memory, prefill against the rate at which it multiplies
matrices, both measured right before. Weights are drawn on the device, so that no checkpoint is needed. On the CPU the
model is tiny and the figures mean nothing.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import statistics
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import Bench, sample_next, timed
from benchmarks.gpu_part import Clock, attempt, found, run_named
from engine.checkpoint import Checkpoint, TensorSlice
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.step_input import SequenceSlice, build_step

ROOT = Path(__file__).resolve().parent.parent
LARGEST_BLOCK = 256
LARGE, TINY = (4096, 14336, 32, 32, 8, 128256), (64, 128, 2, 4, 2, 512)
"""Sizes of an 8B model, and of one to try the program out with: `_SIZES`, and the vocabulary."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"graphs": True},
    "fp8": {"graphs": True, "quantization": "fp8"},
    "bf16, deterministic": {"graphs": True, "deterministic": True},
    "int8": {"graphs": True, "quantization": "int8"},
    "int4": {"graphs": True, "quantization": "int4"},
    "bf16, kv int8": {"graphs": True, "kv_cache_dtype": "int8"},
    "bf16, kv fp8": {"graphs": True, "kv_cache_dtype": "fp8"},
    "bf16, flash_attn": {"graphs": True, "attention": "flash_attn"},
    "bf16, varlen": {"graphs": True, "attention": "varlen"},
}
"""In the order in which they are measured while there is time."""
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filtered": {"top_k": 50, "top_p": 0.95},
    "penalised": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "scored": {"top_logprobs": 5},
}
"""Rows whose sampling is timed."""
VARIANT_S = 12.0
"""A variant is not begun with less time than this."""
NOT_HERE = {"ray"}
"""Dependencies of Baton that neither a worker nor a router by hand needs."""


class RandomWeights(Checkpoint):
    """Any tensor that is asked for, of small random values."""

    def __init__(self, folder: Path) -> None:
        """Opens nothing, and has no tensor of its own that could be left over."""
        self._unread = set()

    def close(self) -> None:
        """Nothing is open."""

    def read(self, part: TensorSlice, out: torch.Tensor) -> None:
        out.fill_(1.0) if "norm" in part.name else out.normal_(0.0, 0.02)


@dataclass(frozen=True)
class Plan:
    """The sizes that are measured on a device."""

    device: torch.device
    sizes: tuple[int, ...] = LARGE
    batch: tuple[int, ...] = (1, 8, 32, 128)
    prompt: tuple[int, ...] = (2048, 8192, 32768)
    context: int = 1024
    """Tokens of each decoding sequence."""
    chunk: int = 8192
    copied_bytes: int = 4 << 30

    @classmethod
    def on(cls, device: str) -> Plan:
        if device != "cpu":
            return cls(torch.device(device))
        return cls(torch.device("cpu"), TINY, (1, 3), (300,), context=300, chunk=200, copied_bytes=16 << 20)

    def load(self, wanted: dict[str, Any]) -> Bench:
        """The same weights each time. Raises what ModelRunner raises."""
        wanted = dict(wanted)
        up_to = max(self.batch) if wanted.pop("graphs", False) else 0
        most = max(*self.prompt, max(self.batch) * (self.context + LARGEST_BLOCK))
        sizes = {"chunk": self.chunk, "context": self.context, "max_tokens": most, "block_size": None}
        places = {"device": str(self.device), "dtype": "bfloat16", "graphs_up_to": up_to, "open_weights": RandomWeights}
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
            self.write_config(max(*self.prompt, self.context + 1), Path(folder))
            return Bench(Path(folder), **sizes, **places, **wanted)

    def write_config(self, longest: int, folder: Path) -> None:
        *sizes, vocab_size = self.sizes
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

    def gemm_shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of a layer's products."""
        hidden, inner, _, num_heads, num_kv_heads, _ = self.sizes
        kv = hidden // num_heads * num_kv_heads
        return [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]

    def forget(self) -> None:
        """Gives back what the last model held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Memory of the device that is in use, by whomever."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


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


# The parts


def ceilings(device: str, clock: Clock) -> None:
    """Versions, and what the machine can do at best."""
    plan = Plan.on(device)
    found("versions", **_versions(plan.device))
    attempt("copy", lambda: {"gb_s": round(copy_rate(plan.device, plan.copied_bytes) / 1e9, 1)})
    for rows in (max(plan.batch), plan.chunk):
        rate = f"products of {rows} rows"
        attempt(rate, lambda rows=rows: {"tflops": _tflops(gemm_rate(plan.device, plan.gemm_shapes(), rows))})  # type: ignore[misc]
    if missing := missing_packages():
        found("packages", missing=" ".join(missing), remedy=f"pip install {' '.join(missing)}")


def graphs(device: str, clock: Clock) -> None:
    """Steps of the same weights by graphs and launched one by one: logits, times, memory."""
    plan = Plan.on(device)
    logits: dict[str, dict[int, torch.Tensor]] = {}
    times: dict[str, dict[int, float]] = {}
    used: dict[str, int] = {}
    reason = ""
    for name, wanted in (("eager", {}), ("graphs", {"graphs": True})):
        plan.forget()
        before = plan.used_bytes()
        bench = plan.load(wanted)
        used[name] = plan.used_bytes() - before
        steps = {size: bench.decode_step([5] * size) for size in plan.batch}
        logits[name] = {size: bench.runner.forward(step).float().cpu() for size, step in steps.items()}
        times[name] = {
            size: median_s(lambda step=step, bench=bench: bench.runner.forward(step), plan.device)  # type: ignore[misc]
            for size, step in steps.items()
        }
        found(f"{name}: memory", gb=round(used[name] / 1e9, 3), kv_gb=round(bench.runner.kv.nbytes / 1e9, 3))
        reason = bench.runner.graphs_reason
        del bench
    found("graphs: more memory", gb=round((used["graphs"] - used["eager"]) / 1e9, 3), graphs=reason)
    if device != "cpu" and "sizes of decode steps" not in reason:
        found("graphs", error=f"no step became a graph: {reason}")
    for size in plan.batch:
        eager, replayed = logits["eager"][size], logits["graphs"][size]
        values: dict[str, Any] = {
            "eager_ms": round(1000 * times["eager"][size], 3),
            "graph_ms": round(1000 * times["graphs"][size], 3),
            "difference": float(f"{(eager - replayed).abs().max():.3g}"),
            "of_largest": float(f"{eager.abs().max():.3g}"),
        }
        if not values["difference"] <= 0.02 * values["of_largest"]:
            values["error"] = "a replayed step differs from an eager one by more than 2 % of the largest logit"
        found(f"step of {size}", **values)


def speed(device: str, clock: Clock) -> None:
    """Decode and prefill of each variant while there is time, and the kernels of one step."""
    plan = Plan.on(device)
    for name, wanted in VARIANTS.items():
        if name != "bf16" and clock.left_s < VARIANT_S:
            found(name, not_run=f"{clock.left_s:.0f} s were left")
            continue
        try:
            bench = plan.load(wanted)
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            # What is asked for and not installed is no fault of Baton's; that bf16 does not run would be one.
            found(name, **{"error" if name == "bf16" else "not_run": f"{type(error).__name__}: {line}"})
            continue
        found(name, attention=bench.runner.attention_name, graphs=bench.runner.graphs_reason)
        for size in plan.batch:
            attempt(f"{name}: decode of {size}", lambda size=size, bench=bench: measure_decode(bench, plan, size))  # type: ignore[misc]
        for size in plan.prompt if name == "bf16" else plan.prompt[:1]:
            attempt(f"{name}: prefill of {size}", lambda size=size, bench=bench: measure_prefill(bench, plan, size))  # type: ignore[misc]
        if wanted.get("deterministic"):
            attempt(f"{name}: bits", lambda bench=bench: compare_bits(bench, plan))  # type: ignore[misc]
        if name == "bf16":
            for size in plan.batch:
                attempt(f"sampling of {size}", lambda size=size: measure_sampling(plan, size))  # type: ignore[misc]
            attempt("kernels of one step", lambda bench=bench: profile_step(bench, plan))  # type: ignore[misc]
        del bench
        plan.forget()


def compare_bits(bench: Bench, plan: Plan) -> dict[str, Any]:
    """Logits of one sequence: beside others, and generated token by token instead of computed at once."""
    beside = [bench.runner.forward(bench.decode_step([5] * size))[0].clone() for size in plan.batch]
    block_size, ids = bench.runner.block_size, tuple(range(3, 3 + min(plan.context, plan.chunk)))
    table = tuple(range(-(-plan.context // block_size)))

    def last_logits(*ends: int) -> torch.Tensor:
        logits = torch.empty(0)
        for start, end in zip((0, *ends), (*ends, len(ids)), strict=True):
            logits = bench.runner.forward(build_step([SequenceSlice(ids[start:end], start, table, True)], block_size))
        return logits[0].clone()

    at_once, generated = last_logits(), last_logits(len(ids) // 2, *range(len(ids) - 8, len(ids)))
    differing = {
        "beside_others": sum(not torch.equal(logits, beside[0]) for logits in beside),
        "generated": int((at_once != generated).sum()),
    }
    return differing | ({"error": "a token's logits are not the same in any step"} if any(differing.values()) else {})


def measure_decode(bench: Bench, plan: Plan, size: int) -> dict[str, Any]:
    """Whole steps, sampling included, as a worker launches them and one by one, and the forward pass alone; the limit
    is measured right before."""
    bench.decode(size, 3)
    limit = copy_rate(plan.device, plan.copied_bytes)
    num_steps = max(5, int(0.5 / timed(lambda: bench.decode(size, 1))))

    def seconds(overlaps: bool) -> float:
        return statistics.median(timed(lambda: bench.decode(size, num_steps, overlaps)) for _ in range(3)) / num_steps

    step_s, one_by_one_s = seconds(True), seconds(False)
    same = bench.decode(size, 5, True) == bench.decode(size, 5)
    step = bench.decode_step([5] * size)
    forward_s = median_s(lambda: bench.runner.forward(step), plan.device)
    return {
        "tok_s": round(size / step_s, 1),
        "step_ms": round(1000 * step_s, 3),
        "one_by_one_ms": round(1000 * one_by_one_s, 3),
        "forward_ms": round(1000 * forward_s, 3),
        "mbu": float(f"{bench.decode_bytes(size) / step_s / limit:.3g}"),
        "forward_mbu": float(f"{bench.decode_bytes(size) / forward_s / limit:.3g}"),
    } | ({} if same else {"error": "steps that overlap lead to other tokens than steps one by one"})


def measure_prefill(bench: Bench, plan: Plan, size: int) -> dict[str, float]:
    """A prompt to its first token; the limit is measured right before."""
    bench.prefill(size)
    limit = gemm_rate(plan.device, bench.gemm_shapes(), min(size, plan.chunk))
    took_s = statistics.median(timed(lambda: bench.prefill(size)) for _ in range(3))
    return {
        "ms": round(1000 * took_s, 1),
        "tok_s": round(size / took_s, 1),
        "mfu": float(f"{bench.prefill_flops(size) / took_s / limit:.3g}"),
    }


def measure_sampling(plan: Plan, size: int) -> dict[str, float]:
    """Microseconds of one choice of tokens with its reading, by Baton's kernels and in plain torch."""
    logits, found_us = torch.randn((size, plan.sizes[-1]), device=plan.device) * 3, {}
    for name, fields in SAMPLED.items():
        for by, kernels in (("us", "auto"), ("torch_us", "torch")):
            sampler = Sampler(plan.sizes[-1], kernels)
            rows = [SampleRow(SamplingParams(seed=i, **fields), 0, (1, 2, 3), []) for i in range(size)]
            took_s = median_s(lambda: sample_next(sampler, logits, rows), plan.device)  # noqa: B023
            found_us[f"{name}_{by}"] = round(1e6 * took_s, 1)
    return found_us


def profile_step(bench: Bench, plan: Plan) -> dict[str, Any]:
    """The kernels of one whole decode step that take longest, copies included; on the CPU, the operations."""
    is_cuda = plan.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if is_cuda else [])]
    size = plan.batch[-2]
    bench.decode(size, 2)
    with torch.profiler.profile(activities=activities) as profile:
        bench.decode(size, 1)
        if is_cuda:
            torch.cuda.synchronize(plan.device)

    def of(event: Any) -> float:
        return float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)

    events = profile.key_averages()
    kernels = [e for e in events if of(e) > 0 and (not is_cuda or e.device_type == torch.autograd.DeviceType.CUDA)]
    kernels.sort(key=of, reverse=True)
    rows = [{"kernel": e.key[:80], "calls": e.count, "us": round(of(e), 1)} for e in kernels[:20]]
    waits = sum(e.count for e in events if re.fullmatch(r"cuda(Stream|Device|Event)Synchronize", e.key))
    launches = sum(e.count for e in events if re.match(r"cu(da)?(LaunchKernel|GraphLaunch)", e.key))
    total = {"us": round(sum(map(of, kernels)), 1), "kernels": sum(e.count for e in kernels)}
    return {"sequences": size, **total, "launches": launches, "synchronisations": waits, "rows": rows}


def missing_packages() -> list[str]:
    """What Baton depends on and this machine has not, but what no process by hand needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[\[<>=]", text)[0] for text in project["dependencies"]} - NOT_HERE
    return sorted(name for name in names if _version(name) == "")


def _versions(device: torch.device) -> dict[str, Any]:
    told: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    told |= {name: _version(name) or "none" for name in ("triton", "grpcio", "protobuf", "transformers", "numpy")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        told |= {
            "gpu": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "gpus": torch.cuda.device_count(),
        }
    return told


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _tflops(rate: float) -> float:
    return float(f"{rate / 1e12:.4g}")


if __name__ == "__main__":
    run_named({"ceilings": ceilings, "graphs": graphs, "speed": speed})
