"""What published profiles predict here, beside what their authors published: splitwise-sim, Splitwise and DistServe.

    python benchmarks/published.py example --profile perf_model.csv --trace test_trace.csv
    python benchmarks/published.py pools --profile perf_model.csv --trace AzureLLMInferenceTrace_conv.csv
    python benchmarks/published.py placement --profile profiler-a100-80g.distserve.json --kv max_num_tokens.csv

The files are not part of Baton: perf_model.csv and test_trace.csv are in the repository Mutinifni/splitwise-sim,
DistServe's profile and KV capacities in LLMServe/DistServe below simdistserve/estimators/profile_data, the traces in
Azure/AzurePublicDataset. Nothing is started; the queues of `simulate.pools` are run in virtual time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import typer

from benchmarks.report import tell, telling_failures
from simulate import published, workload
from simulate.placement import Goodput, GroupShape, LatencyGoal, fewest, goodputs, highest_rate, placements
from simulate.pools import PoolSpec, RequestTimes, first_tokens, last_tokens, run_pools
from simulate.published import DistServeCurve, SplitwiseCurve
from simulate.workload import RequestShape

MODEL, TENSOR_PARALLEL = "bloom-176b", 8
KV_BYTES = 70 * 14336 * 2 * 2
"""Of one token: layers, hidden size, keys and values, 16 bits."""
LINK_BYTES_PER_S = 200 * 2**30
KV_TOKENS = int((8 * 80 * 2**30 - 329e9) / KV_BYTES)
"""In eight devices of 80 GiB, beside the weights."""
SLOWDOWNS = ((0.5, 2.0, 1.25, 1.25), (0.9, 3.0, 1.5, 1.5), (0.99, 6.0, 5.0, 5.0))
"""Splitwise's objectives: a percentile, and how often the latency of an idle A100 machine its TTFT, TPOT and end to end
may take."""
PUBLISHED_PLACEMENTS = {"facebook/opt-13b": "2x1; 1x1", "facebook/opt-66b": "4x1; 2x2", "facebook/opt-175b": "3x3; 4x3"}
GOALS = {
    "facebook/opt-13b": LatencyGoal(0.2, 0.1),
    "facebook/opt-66b": LatencyGoal(2.5, 0.15),
    "facebook/opt-175b": LatencyGoal(4.0, 0.2),
}
NODES = {"facebook/opt-13b": (4, 1), "facebook/opt-66b": (8, 1), "facebook/opt-175b": (8, 3)}
"""Devices of a node, and the nodes that the published placement lies on: DistServe's coefficients say nothing of what a
stage costs beside its share of a step, so a pipeline over more nodes always looks better."""
OPT_SIZES = {
    "facebook/opt-13b": (12.6, 40 * 5120),
    "facebook/opt-66b": (65.2, 64 * 9216),
    "facebook/opt-175b": (173.9, 96 * 12288),
}
"""10^9 parameters of the layers, and layers times hidden size, which KV is proportional to."""

app = typer.Typer(help=__doc__, rich_markup_mode=None, add_completion=False)
ProfileFile = Annotated[Path, typer.Option(help="The profile.")]
TraceFile = Annotated[Path, typer.Option(help="The requests.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def transfer_s(num_tokens: int) -> float:
    return num_tokens * KV_BYTES / LINK_BYTES_PER_S


@app.command()
def example(profile: ProfileFile, trace: TraceFile, as_json: AsJson = False) -> None:
    """splitwise-sim's example: its three requests on one H100 machine, and on an H100 and an A100 machine."""
    with telling_failures():
        shapes = workload.read_trace(trace)
        h100, a100 = (PoolSpec(_machine(profile, name)) for name in ("h100-80gb", "a100-80gb"))
        found = {"h100": run_pools(shapes, h100, h100), "h100, a100": run_pools(shapes, h100, a100, transfer_s)}
    rows = {name: [[f"{t.ttft_s:.6f}", f"{t.e2e_s:.6f}"] for t in times] for name, times in found.items()}
    tell(rows, as_json, lambda rows: [print(f"{name}: {row}") for name, row in rows.items()])


def _machine(profile: Path, hardware: str) -> SplitwiseCurve:
    return published.read_splitwise(profile, MODEL, hardware, TENSOR_PARALLEL)


@app.command()
def pools(
    profile: ProfileFile,
    trace: TraceFile,
    machines: Annotated[int, typer.Option(min=2, help="H100 machines in both pools.")] = 40,
    rate: Annotated[float | None, typer.Option(help="Size the pools for this rate instead.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of load at each rate.")] = 200.0,
    as_json: AsJson = False,
) -> None:
    """The pools that serve Splitwise's load best: lengths of a trace, Poisson arrivals."""
    with telling_failures():
        sizing = Sizing(
            _machine(profile, "h100-80gb"), _machine(profile, "a100-80gb"), workload.read_trace(trace), seconds
        )
        if rate is None:
            rate = highest_rate(lambda r: sizing.fits(r, machines), 8.0 * machines)
        prompt, token = sizing.prompt_machines(rate, 4 * machines), sizing.token_machines(rate, 4 * machines)
    found = {"rate": round(rate, 1), "prompt_machines": prompt, "token_machines": token}
    tell(found, as_json, lambda found: print(found))


class Sizing:
    """The fewest machines of each pool; the other pool has no limit meanwhile."""

    def __init__(
        self, h100: SplitwiseCurve, a100: SplitwiseCurve, trace: Sequence[RequestShape], seconds: float
    ) -> None:
        self._h100, self._idle = h100, a100
        self._trace = trace
        self._seconds = seconds

    def fits(self, rate: float, machines: int) -> bool:
        prompt = self.prompt_machines(rate, machines - 1)
        return prompt is not None and self._finish_in_time(self._load(rate), machines - prompt)

    def prompt_machines(self, rate: float, most: int) -> int | None:
        shapes = self._load(rate)
        return fewest(lambda num: self._begin_in_time(shapes, num), most)

    def token_machines(self, rate: float, most: int) -> int | None:
        shapes = self._load(rate)
        return fewest(lambda num: self._finish_in_time(shapes, num), most)

    def _load(self, rate: float) -> list[RequestShape]:
        lengths = workload.empirical(self._trace)
        return workload.at_rate(workload.random_shapes(int(rate * self._seconds), lengths, 0), rate, 1.0, 0)

    def _begin_in_time(self, shapes: Sequence[RequestShape], num: int) -> bool:
        firsts = first_tokens(shapes, self._pool(num))
        ttfts = [
            (first - s.at) / self._idle.prompt_s(s.num_prompt_tokens) for s, first in zip(shapes, firsts, strict=True)
        ]
        return all(np.quantile(ttfts, share) <= most for share, most, _, _ in SLOWDOWNS)

    def _finish_in_time(self, shapes: Sequence[RequestShape], num: int) -> bool:
        """Every prompt begins as it comes."""
        firsts = [s.at + self._h100.prompt_s(s.num_prompt_tokens) for s in shapes]
        handed = [first + transfer_s(s.num_prompt_tokens) for s, first in zip(shapes, firsts, strict=True)]
        ends, idle_s = last_tokens(shapes, handed, self._pool(num)), self._idle.token_s(1)
        tpots, e2es = [], []
        for shape, first, end in zip(shapes, firsts, ends, strict=True):
            times = RequestTimes.of(shape, first, end)
            tpots.append(times.tpot_s / idle_s)
            alone_s = self._idle.prompt_s(shape.num_prompt_tokens) + (shape.num_output_tokens - 1) * idle_s
            e2es.append(times.e2e_s / alone_s)
        return all(
            np.quantile(tpots, share) <= most_tpot and np.quantile(e2es, share) <= most_e2e
            for share, _, most_tpot, most_e2e in SLOWDOWNS
        )

    def _pool(self, num: int) -> PoolSpec:
        return PoolSpec(self._h100, num, max_num_seqs=512, max_num_batched_tokens=2048, kv_tokens=KV_TOKENS)


@app.command()
def placement(
    profile: ProfileFile,
    kv: Annotated[Path, typer.Option(help="max_num_tokens.csv.")],
    model: Annotated[list[str], typer.Option(help="Of OPT.")] = list(GOALS),  # noqa: B006  # typer copies it
    num: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 500,
    fixed: Annotated[bool, typer.Option("--fixed", help="Every request has the mean lengths.")] = False,
    endless_kv: Annotated[
        bool, typer.Option("--endless-kv", help="No decode step is limited by KV, as in DistServe's simulator.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """DistServe's placements: TP x PP of prefill; of decode, with the most requests a second and device in time.

    Prompts have 755 tokens on the mean and outputs 200, as ShareGPT's in the paper; unless --fixed, with 90th
    percentiles of 1,600 and 420 and at most 2,048.
    """
    lengths = workload.uniform(755, 200) if fixed else workload.lognormal((755, 1600), (200, 420), 2048)
    with telling_failures():
        shapes = workload.random_shapes(num, lengths, 0)
        found = {}
        for name in model:
            capacity = published.read_max_num_tokens(kv, name)
            if endless_kv:
                capacity = dict.fromkeys(capacity, 1 << 60)
            found[name] = _best(_curves(profile, name), capacity, name, shapes)
    tell(found, as_json, _show_placements)


def _best(
    curves: Mapping[int, DistServeCurve],
    capacity: Mapping[tuple[int, int], int],
    model: str,
    shapes: Sequence[RequestShape],
) -> dict[str, Any]:
    groups = {
        GroupShape(tp, pp): PoolSpec(curves[tp], num_stages=pp, kv_tokens=most, max_num_batched_tokens=most)
        for (tp, pp), most in capacity.items()
        if tp in curves
    }
    node_devices, nodes = NODES[model]
    candidates = placements(groups, node_devices, range(1, nodes + 1))
    found = goodputs(candidates, groups, lambda r: workload.at_rate(shapes, r, 1.0, 0), GOALS[model], 8.0)
    names = [f"{one.placement.prefill}; {one.placement.decode}" for one in found]
    asked = PUBLISHED_PLACEMENTS[model]
    rank = names.index(asked)
    return {
        "objectives_s": [GOALS[model].ttft_s, GOALS[model].tpot_s],
        "best": [_row(name, one) for name, one in zip(names[:3], found, strict=False)],
        "published": _row(asked, found[rank]) | {"rank": rank + 1},
        "placements": len(found),
    }


def _row(name: str, found: Goodput) -> dict[str, Any]:
    rates = {"rate": round(found.rate, 2), "rate_per_device": round(found.rate_per_device, 3)}
    return {"placement": name, "devices": found.placement.num_devices, **rates}


def _curves(profile: Path, model: str) -> dict[int, DistServeCurve]:
    """By tensor-parallel size. The profile has none of OPT-175B: its coefficients go on from those of 13B and 66B."""
    if model != "facebook/opt-175b":
        sizes = published.tensor_parallel_sizes(profile, model)
        return {size: published.read_distserve(profile, model, size) for size in sizes}
    small, large = (published.read_distserve(profile, f"facebook/opt-{name}", 4) for name in ("13b", "66b"))
    return {size: _larger(curve, small, large) for size, curve in _curves(profile, "facebook/opt-66b").items()}


def _larger(curve: DistServeCurve, small: DistServeCurve, large: DistServeCurve) -> DistServeCurve:
    """OPT-175B for a curve of OPT-66B: what weights cost grows by the power of their number by which it grows from 13B
    to 66B (with TP 4), what attention costs by the size of KV."""
    (n13, _), (n66, kv66), (n175, kv175) = OPT_SIZES.values()

    def grown(value: float, of: Callable[[DistServeCurve], float]) -> float:
        return value * (n175 / n66) ** (math.log(of(large) / of(small)) / math.log(n66 / n13))

    prefill, kv = curve.prefill, kv175 / kv66
    planes = [
        plane._replace(
            fixed_s=grown(plane.fixed_s, lambda c: c.small.fixed_s),
            kv_token_s=plane.kv_token_s * kv,
            sequence_s=grown(plane.sequence_s, lambda c: c.small.sequence_s),
        )
        for plane in (curve.small, curve.large)
    ]
    longer = prefill._replace(
        fixed_s=grown(prefill.fixed_s, lambda c: c.prefill.fixed_s),
        token_s=grown(prefill.token_s, lambda c: c.prefill.token_s),
        square_s=prefill.square_s * kv,
    )
    return replace(curve, prefill=longer, small=planes[0], large=planes[1])


def _show_placements(found: dict[str, Any]) -> None:
    for model, rows in found.items():
        ttft_s, tpot_s = rows["objectives_s"]
        print(f"{model}: TTFT {ttft_s} s, TPOT {tpot_s} s, 90 %; the best of {rows['placements']} placements")
        for row in rows["best"]:
            rates = f"{row['rate']:>6} requests/s, {row['rate_per_device']} each"
            print(f"    {row['placement']:<10} {row['devices']:>2} devices {rates}")
        row = rows["published"]
        print(f"    {row['placement']:<10} published; here number {row['rank']} with {row['rate_per_device']} each")


if __name__ == "__main__":
    app()
