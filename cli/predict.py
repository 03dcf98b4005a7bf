"""`baton predict`: the latencies of an engine, or of a cluster of them, from measured times of its steps."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, outcome

if TYPE_CHECKING:
    from simulate.curve_file import FileCurve
    from simulate.prediction import PredictionQuestion
    from simulate.report import RunReport
    from simulate.workload import RequestShape


@dataclass(frozen=True)
class PredictedLoad:
    """Options that say which requests come, and when."""

    requests: Annotated[Path, typer.Option(metavar="FILE", help="A trace: CSV, or Mooncake's JSON lines.")]
    num: Annotated[int | None, typer.Option(min=1, help="The first requests of it; default: all.")] = None
    speed: Annotated[float, typer.Option(min=1e-6, help="Play it so many times faster.")] = 1.0
    first_s: Annotated[float, typer.Option(min=0, help="Its first seconds alone, at that speed.")] = math.inf
    seed: Annotated[int, typer.Option(help="The same seed makes the same run.")] = 0

    def shapes(self) -> list[RequestShape]:
        from simulate.workload import read_trace, scaled, until

        return until(scaled(read_trace(self.requests, self.num), self.speed), self.first_s)


@dataclass(frozen=True)
class PredictedWorkers:
    """Options that describe the workers."""

    curve: Annotated[Path, typer.Option(metavar="FILE", help="Seconds of a step: CSV or JSON (docs/predict.md).")]
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the KV pool of each worker holds.")]
    workers: Annotated[str, typer.Option(metavar="P:D", help="Workers for prefill and for decode.")] = "0:1"
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 256
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16
    kv_bytes_per_token: Annotated[float, typer.Option(min=1, help="KV that a hand-off moves.")] = 131072.0
    wire_gbps: Annotated[float, typer.Option(min=1e-3, help="Gigabits a second that a worker sends, and takes.")] = (
        200.0
    )
    bare: Annotated[
        bool, typer.Option("--bare", help="No router, no costs but the steps: an engine such as vLLM by itself.")
    ] = False
    ttft_ms: Annotated[float, typer.Option(min=1e-3, help="Objective of the first token.")] = 500.0
    tpot_ms: Annotated[float, typer.Option(min=1e-3, help="Objective of each token after it.")] = 50.0

    def question(self, found: FileCurve, longest: int) -> PredictionQuestion:
        """`longest`: tokens of the longest request."""
        from cluster.config.schema import SloSection
        from simulate.prediction import PredictionQuestion
        from simulate.wire import WireSpec
        from simulate.worker import WorkerSpec

        ratio = re.fullmatch(r"(\d{1,4}):([1-9]\d{0,3})", self.workers)
        if ratio is None:
            raise typer.BadParameter(f"--workers must be P:D, with at least 1 for decode (got {self.workers})")
        worker = WorkerSpec(
            "",
            "decode",
            curve=found.curve,
            kv_tokens=self.kv_tokens // self.block_size * self.block_size,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=longest,
            kv_bytes_per_token=self.kv_bytes_per_token,
            wire=WireSpec(self.wire_gbps * 1e9 / 8),
            command_s=0.0 if self.bare else WorkerSpec.command_s,
            overlaps=not self.bare,
        )
        slo = SloSection(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)
        return PredictionQuestion(worker, int(ratio[1]), int(ratio[2]), slo, self.bare)


def predict(load: PredictedLoad, workers: PredictedWorkers, as_json: AsJson = False) -> None:
    """Predict latencies from measured steps: a load runs through workers in virtual time."""
    with outcome():
        from simulate.curve_file import read_curve
        from simulate.prediction import predicted_report

        found, shapes = read_curve(workers.curve), load.shapes()
        longest = max((shape.num_prompt_tokens + shape.num_output_tokens for shape in shapes), default=1)
        report = predicted_report(workers.question(found, longest), shapes, load.seed)
        if as_json:
            print(json.dumps(_document(report, found), indent=2))
            return
        error = found.error
        print(f"curve       {found.kind}; off by {error.median:.1%} (median) and {error.p90:.1%} (p90) of its steps")
        print("\n".join(report.lines()))


def _document(report: RunReport, found: FileCurve) -> dict[str, Any]:
    curve = {"kind": found.kind, "error_median": found.error.median, "error_p90": found.error.p90}
    return {"curve": curve, **report.as_dict()}
