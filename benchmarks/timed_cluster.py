"""A cluster whose steps are timed, at several ratios and loads: what a simulation of the same is held against.

    python benchmarks/timed_cluster.py --json

The cluster of deploy/timed, as `baton serve` starts it, with 1:1, 2:2 and 4:4 workers. At each ratio come five loads
of the kind that `baton bench` sends: Poisson arrivals of prompts and outputs of one mean length each, at shares of the
rate at which the prefill workers would compute the prompts one by one. Each is reported with all that is needed to make
it once more, the cost of the steps among it, and with what the simulator makes of the same load. Exits 1 when a request
failed, or a token was lost or repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.plain_cluster import ROOT
from benchmarks.report import telling_failures
from benchmarks.served_cluster import ServedCluster
from cluster import rpc
from cluster.config.load import load_config
from cluster.config.schema import ServingConfig
from simulate.curves import LinearCurve
from simulate.model_files import find_shape
from simulate.report import RunReport
from simulate.wire import WireSpec
from simulate.worker import WorkerSpec
from simulate.workload import RequestShape, at_rate, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec
from tools.bench.figures import details_of, figures_of
from tools.bench.targets import GrpcTarget
from tools.bench.workload import Sample, make_requests, send_all

CONFIG = ROOT / "deploy" / "timed" / "cluster.yaml"
SHARES = (0.15, 0.3, 0.45, 0.6, 0.75)
VOCAB = 1000
WARM_REQUESTS = 8
TIMEOUT_S = 120.0
COMPARED = ("request_throughput", "p50_ttft_ms", "p90_ttft_ms", "p50_tpot_ms", "p90_tpot_ms", "goodput_share")


@dataclass(frozen=True)
class TimedLoad:
    """Requests as `simulate.workload` draws them: `random_shapes` of `uniform` lengths, `at_rate`."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    spread: float
    rate: float
    seed: int

    def shapes(self) -> list[RequestShape]:
        lengths = uniform(self.num_prompt_tokens, self.num_output_tokens, self.spread)
        return at_rate(random_shapes(self.num_requests, lengths, self.seed), self.rate, 1.0, self.seed)


def loads_at(
    shares: Sequence[float], config: ServingConfig, num_prefill: int, seconds: float, like: TimedLoad
) -> list[TimedLoad]:
    """Of so many seconds each, at shares of what the prefill workers compute one by one. Each has a seed of its own, so
    that it does not find the prompts of the one before in the prefix cache."""
    most = num_prefill / config.engine.timed_steps.cost.of_prompt(like.num_prompt_tokens, 0)
    return [
        replace(like, num_requests=max(10, round(share * most * seconds)), rate=round(share * most, 3), seed=seed)
        for seed, share in zip(itertools.count(like.seed, 2), shares, strict=False)
    ]


async def send(address: str, load: TimedLoad) -> list[Sample]:
    """The samples of a load, after a few requests that do not count."""
    shapes = load.shapes()
    warm = [RequestShape(0.0, shape.num_prompt_tokens, shape.num_output_tokens) for shape in shapes[:WARM_REQUESTS]]
    async with rpc.create_channel(address) as channel:
        target = GrpcTarget(channel, timeout_s=TIMEOUT_S)
        for requests in (make_requests(warm, VOCAB, load.seed + 1), make_requests(shapes, VOCAB, load.seed)):
            samples = await send_all(requests, target.send, most_at_once=None, on_end=lambda _: None)
    return samples


def predict(split: tuple[int, int], config: ServingConfig, load: TimedLoad) -> dict[str, float]:
    """The compared figures, as the simulator has them."""
    engine, timed, slo = config.engine, config.engine.timed_steps, config.rebalance.slo
    shape = find_shape(config.model.path)
    wire = WireSpec(1e9 * (timed.transfer_gb_per_s or 1e6), timed.transfer_latency_s)
    assert engine.kv_cache_tokens is not None and config.model.max_model_len is not None, f"{CONFIG} names both"
    worker = WorkerSpec(
        "",
        "decode",
        LinearCurve(timed.cost),
        kv_tokens=engine.kv_cache_tokens,
        max_num_seqs=engine.num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        num_layers=shape.num_hidden_layers,
        kv_bytes_per_token=shape.kv_bytes_per_token(1, shape.dtype),
        wire=wire,
        overlaps=engine.async_steps == "on",
    )
    router = replace(config.router, http_port=None)
    spec = ClusterSpec.of_ratio(*split, worker, router=router, transfer=config.transfer, slo=slo)
    found = RunReport.of(Cluster(spec, load.seed).run(load.shapes()), slo)
    times = {
        f"p{percent}_{name}_ms": 1000 * spread.by_percentile[percent]
        for name, spread in (("ttft", found.ttft_s), ("tpot", found.tpot_s))
        for percent in (50, 90)
    }
    return {"request_throughput": found.requests_per_s, "goodput_share": found.kept_share, **times}


def measure(
    split: tuple[int, int], config: ServingConfig, loads: Sequence[TimedLoad], *, detailed: bool
) -> list[dict[str, Any]]:
    """One run of each load at a ratio P:D."""
    slo = config.rebalance.slo
    roles = {f"roles.{role}.devices": number for role, number in zip(("prefill", "decode"), split, strict=True)}
    runs = []
    with ServedCluster.running(CONFIG, roles) as cluster:
        for load in loads:
            samples = asyncio.run(send(cluster.address, load))
            seconds = max(s.ended_at for s in samples) - min(s.sent_at for s in samples)
            figures = figures_of(samples, seconds, {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms})
            figures["goodput_share"] = figures["request_goodput"] / figures["request_throughput"] if samples else 0.0
            run = {"prefill": split[0], "decode": split[1], "load": asdict(load), **figures}
            run["predicted"] = predict(split, config, load)
            runs.append(run | ({"details": details_of(samples)} if detailed else {}))
    return runs


def show(runs: list[dict[str, Any]]) -> None:
    table = Table(title="timed steps: measured, predicted")
    for column in ("P:D", "rate/s", "req/s", "TTFT p50 ms", "p90", "TPOT p50 ms", "p90", "in time", "failed"):
        table.add_column(column, justify="right")
    for run in runs:
        cells = [f"{run[key]:.3g}, {run['predicted'][key]:.3g}" for key in COMPARED]
        table.add_row(
            f"{run['prefill']}:{run['decode']}",
            f"{run['load']['rate']:g}",
            *cells,
            str(run["failed"] + run["num_gaps"]),
        )
    Console().print(table)


def main(
    splits: Annotated[str, typer.Option(help="Ratios P:D, with commas between them.")] = "1:1,2:2,4:4",
    shares: Annotated[str, typer.Option(help="Loads, as shares of what the prefill workers compute.")] = ",".join(
        map(str, SHARES)
    ),
    seconds: Annotated[float, typer.Option(min=1, help="Of each load.")] = 30.0,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, on the mean.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an output, on the mean.")] = 32,
    range_ratio: Annotated[float, typer.Option(min=0, max=1, help="Lengths vary by this share.")] = 0.25,
    seed: Annotated[int, typer.Option(help="The same seed makes the same loads.")] = 0,
    detailed: Annotated[bool, typer.Option("--detailed", help="Keep the times of each request.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a cluster whose steps are timed."""
    logging.getLogger("worker").setLevel(logging.ERROR)  # simulated workers say when they are done with one another
    with telling_failures():
        config = load_config(CONFIG)
        like = TimedLoad(0, input_len, output_len, range_ratio, 0.0, seed)
        runs: list[dict[str, Any]] = []
        for text in splits.split(","):
            prefill, decode = map(int, text.split(":"))
            loads = loads_at([float(share) for share in shares.split(",")], config, prefill, seconds, like)
            runs += measure((prefill, decode), config, loads, detailed=detailed)
        found = {
            "timed_steps": asdict(config.engine.timed_steps),
            "engine": {key: getattr(config.engine, key) for key in ("max_num_batched_tokens", "kv_cache_tokens")}
            | {"max_num_seqs": config.engine.num_seqs},
            "slo": asdict(config.rebalance.slo),
            "runs": runs,
        }
        print(json.dumps(found, indent=2)) if as_json else show(runs)
        if any(run["failed"] or run["num_gaps"] for run in runs):
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
