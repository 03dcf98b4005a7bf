"""The two fidelities of the simulator: how far they agree, and how fast they are.

    python benchmarks/fidelities.py                                 # 10,000 requests on 16 workers in both
    python benchmarks/fidelities.py --workers 256 --requests 1000000 --rate 2000 --only fast

Seconds are of the processor. The difference of a number is relative to the full fidelity's; that of goodput is in
points of the requests that kept both objectives.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster.config.schema import TransferSection
from simulate.report import RunReport
from simulate.workload import RequestShape, at_rate, lognormal, random_shapes
from simulate.world import Cluster, ClusterSpec, Fidelity, WorkerSpec

PREFILL_SHARE = 0.625
"""Of the workers: the prompts of this load keep them about as busy as its outputs keep the others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, help="requests a second; 8 for each worker, unless it is given")
    parser.add_argument("--without-cache", action="store_true", help="no prefix cache: no prompts begin alike here")
    parser.add_argument("--only", choices=("full", "fast"), help="one fidelity, and no comparison")
    flags = parser.parse_args()
    rate = flags.rate or 8.0 * flags.workers
    shapes = at_rate(random_shapes(flags.requests, lognormal((500, 1000), (150, 300), 8000), seed=1), rate, 1.0, seed=1)
    fidelities: tuple[Fidelity, ...] = (flags.only,) if flags.only else ("full", "fast")
    worker = WorkerSpec("", "decode", enable_prefix_cache=not flags.without_cache)
    reports = [measured(fidelity, flags.workers, worker, shapes) for fidelity in fidelities]
    if len(reports) == 2:
        compare(*reports)


def measured(fidelity: Fidelity, num_workers: int, worker: WorkerSpec, shapes: list[RequestShape]) -> RunReport:
    num_prefill = round(PREFILL_SHARE * num_workers)
    transfer = TransferSection(max_pairs=num_workers)
    spec = ClusterSpec.of_ratio(num_prefill, num_workers - num_prefill, worker, transfer=transfer, fidelity=fidelity)
    begun = time.process_time()
    result = Cluster(spec, seed=1).run(shapes)
    seconds = time.process_time() - begun
    report = RunReport.of(result, spec.slo)
    print(f"{fidelity}: {len(shapes)} requests on {num_prefill}:{num_workers - num_prefill} in {seconds:.1f} s", end="")
    print(f", {1000 * seconds / len(shapes):.2f} ms each, {result.duration_s / seconds:.1f} times real time")
    print("\n".join(report.lines()[:-1]), flush=True)
    return report


def compare(full: RunReport, fast: RunReport) -> None:
    pairs = {"requests/s": (full.requests_per_s, fast.requests_per_s)}
    pairs["output tokens/s"] = full.output_tokens_per_s, fast.output_tokens_per_s
    for name, one, other in (("TTFT", full.ttft_s, fast.ttft_s), ("TPOT", full.tpot_s, fast.tpot_s)):
        for percent in (50, 90, 99):
            pairs[f"{name} p{percent}"] = one.by_percentile[percent], other.by_percentile[percent]
    for name, (before, after) in pairs.items():
        print(f"{name:<16}{100 * (after / before - 1):+.2f} %")
    print(f"{'goodput':<16}{100 * (fast.kept_share - full.kept_share):+.2f} points")


if __name__ == "__main__":
    main()
