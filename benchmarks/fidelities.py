"""The two fidelities of the simulator: how far they agree, and how fast they are.

    python benchmarks/fidelities.py                                 # 10,000 requests on 16 workers in both
    python benchmarks/fidelities.py --million                       # 1,000,000 requests on 256 workers in the fast one

Seconds are of the processor, and of the clock in parentheses. Progress goes to stderr. The difference of a number is
relative to the full fidelity's; that of goodput is in points of the requests that kept both objectives.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster.config.schema import TransferSection
from simulate.client import RequestOutcome
from simulate.report import RunReport
from simulate.workload import RequestShape, at_rate, lognormal, random_shapes
from simulate.world import Cluster, ClusterSpec, Fidelity, WorkerSpec

EVERY = 10_000
"""Requests between two lines of progress."""
PREFILL_SHARE = 0.625
"""Of the workers: the prompts of this load keep them about as busy as its outputs keep the others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, help="requests a second; 8 for each worker, unless it is given")
    parser.add_argument("--without-cache", action="store_true", help="no prefix cache: no prompts begin alike here")
    parser.add_argument("--only", choices=("full", "fast"), help="one fidelity, and no comparison")
    parser.add_argument("--million", action="store_true", help="1,000,000 requests on 256 workers, in the fast one")
    flags = parser.parse_args()
    if flags.million:
        flags.workers, flags.requests, flags.only = 256, 1_000_000, "fast"
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
    result = Cluster(spec, seed=1).run(shapes, on_end=Progress(len(shapes)).on_end)
    seconds = time.process_time() - begun
    report = RunReport.of(result, spec.slo)
    print(f"{fidelity}: {len(shapes)} requests on {num_prefill}:{num_workers - num_prefill}", end=" ")
    print(f"in {seconds:.1f} s ({result.wall_s:.1f} s), {1000 * seconds / len(shapes):.2f} ms each", end=", ")
    print(f"{result.duration_s / seconds:.1f} times real time, {peak_gb():.1f} GB at most")
    print("\n".join(report.lines()[:-1]), flush=True)
    return report


class Progress:
    """Says on stderr how far a run has come."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_ended = 0
        self._begun = time.process_time(), time.perf_counter()

    def on_end(self, _: RequestOutcome) -> None:
        self._num_ended += 1
        if self._num_ended % EVERY == 0:
            seconds, wall_s = time.process_time() - self._begun[0], time.perf_counter() - self._begun[1]
            print(
                f"{self._num_ended:,} of {self._num_requests:,} in {seconds:.0f} s ({wall_s:.0f} s), "
                f"{1000 * seconds / self._num_ended:.2f} ms each, {peak_gb():.1f} GB",
                file=sys.stderr,
                flush=True,
            )


def peak_gb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


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
