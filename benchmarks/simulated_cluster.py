"""What the simulator makes of a load on a real cluster, and by how much that is off.

`benchmarks.timed_cluster` measures. A figure may differ by 5 % where steps are timed, and goodput by 5 points; where
they are computed by 10 %, or twice the standard deviation of the figure over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config.diff import set_values
from cluster.config.load import load_config
from cluster.config.schema import ServingConfig, SloSection
from cluster.step_cost import OVERLAP_TOKENS
from simulate.curves import LinearCurve
from simulate.model_files import find_shape
from simulate.report import RunReport
from simulate.wire import WireSpec
from simulate.worker import WorkerSpec
from simulate.worker_profile import WorkerProfile, profile_in
from simulate.workload import RequestShape, at_rate, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, RunResult

WARM_REQUESTS = 8
WARM_S = 30.0
"""Simulated warm requests have ended by then."""
COMPARED = ("request_throughput", "p50_ttft_ms", "p90_ttft_ms", "p50_tpot_ms", "p90_tpot_ms", "goodput_share")
TIMED_WITHIN, COMPUTED_WITHIN, GOODPUT_WITHIN = 0.05, 0.10, 0.05


@dataclass(frozen=True)
class OfferedLoad:
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

    def warm_shapes(self) -> list[RequestShape]:
        """Requests that come before, all at once, and do not count."""
        return [replace(shape, at=0.0) for shape in self.shapes()[:WARM_REQUESTS]]


@dataclass(frozen=True)
class Machine:
    """What was measured before the loads."""

    message_s: float
    """Of each message on the way to a first token, and of what programs do for it."""
    profile: WorkerProfile | None
    """None where steps are timed."""
    cores: int | None = None
    """Shared by all programs; None: as if each had its own."""

    @classmethod
    def of(cls, document: dict[str, Any]) -> Machine:
        """`document`: as `baton profile` writes it, or the seconds of a message alone."""
        if "steps" not in document:
            return cls(document["message_s"], None, document.get("cores"))
        profile = profile_in(Path("the profile"), document)
        return cls(profile.message_s or 0.0, profile, profile.cores)

    def worker(self, config: ServingConfig) -> WorkerSpec:
        """Each worker, as the simulator takes it."""
        engine, timed, shape = config.engine, config.engine.timed_steps, find_shape(config.model.path)
        spec = WorkerSpec(
            "",
            "decode",
            max_num_seqs=engine.num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            num_layers=shape.num_hidden_layers,
            kv_bytes_per_token=shape.kv_bytes_per_token(1, shape.dtype),
            overlaps=engine.async_steps == "on",
        )
        if self.profile is not None:
            known, curve = self.profile.worker, self.profile.curve.curve
            spec = replace(spec, curve=curve, kv_tokens=known.kv_tokens, max_model_len=known.max_model_len)
            return replace(
                spec, block_size=known.block_size, long_tokens=OVERLAP_TOKENS, num_threads=self.profile.num_threads
            )
        assert engine.kv_cache_tokens is not None and config.model.max_model_len is not None, "timed steps need both"
        return replace(
            spec,
            curve=LinearCurve(timed.cost),
            kv_tokens=engine.kv_cache_tokens,
            max_model_len=config.model.max_model_len,
            num_threads=0,
            wire=WireSpec(1e9 * (timed.transfer_gb_per_s or 1e6), timed.transfer_latency_s),
        )


def configured(file: Path, values: Mapping[str, Any]) -> ServingConfig:
    """The configuration of a file in which these keys are set anew."""
    path = str(values.get("model.path", load_config(file).model.path))
    with tempfile.TemporaryDirectory() as folder:
        edited = Path(folder) / "cluster.yaml"
        text = set_values(file.read_text(encoding="utf-8"), {**values, "model.path": path})
        edited.write_text(text, encoding="utf-8")
        return load_config(edited)


def slowed(config: ServingConfig, slower: float) -> dict[str, Any]:
    """The keys, set anew, with which timed steps, the wire and objectives take so many times longer."""
    timed, slo = config.engine.timed_steps, config.rebalance.slo
    if slower == 1.0:
        return {}
    steps = {f"engine.timed_steps.{name}": slower * value for name, value in vars(timed.cost).items()}
    return steps | {
        "engine.timed_steps.transfer_gb_per_s": (timed.transfer_gb_per_s or 1e6) / slower,
        "rebalance.slo.ttft_ms": slower * slo.ttft_ms,
        "rebalance.slo.tpot_ms": slower * slo.tpot_ms,
    }


def predict(
    split: tuple[int, int],
    config: ServingConfig,
    loads: Sequence[OfferedLoad],
    num_rounds: int,
    machine: Machine,
    *,
    detailed: bool,
) -> list[dict[str, Any]]:
    """The compared figures of each load, as the simulator has them: medians over the rounds. One cluster gets all loads
    one after another, as the real one does: its workers and its router learn from those before."""
    spec = ClusterSpec.of_ratio(
        *split,
        machine.worker(config),
        router=replace(config.router, http_port=None),
        transfer=config.transfer,
        slo=config.rebalance.slo,
        message_s=machine.message_s,
        client_s=machine.message_s,
        cores=machine.cores,
    )
    shapes, parts, at = list[RequestShape](), list[slice](), 0.0
    for load in (load for load in loads for _ in range(num_rounds)):
        shapes += [replace(shape, at=at) for shape in load.warm_shapes()]
        own = [replace(shape, at=at + WARM_S + shape.at) for shape in load.shapes()]
        parts.append(slice(len(shapes), len(shapes) + len(own)))
        shapes, at = shapes + own, own[-1].at + WARM_S
    result = Cluster(spec, loads[0].seed).run(shapes)
    figures = [_figures(result, part, spec.slo, detailed=detailed) for part in parts]
    by_load = [figures[first : first + num_rounds] for first in range(0, len(figures), num_rounds)]
    return [
        rounds[0] | {name: statistics.median(one[name] for one in rounds) for name in COMPARED} for rounds in by_load
    ]


def _figures(result: RunResult, part: slice, slo: SloSection, *, detailed: bool) -> dict[str, Any]:
    """Of the requests of one part of a run."""
    outcomes = result.outcomes[part]
    seconds = max(o.ended_s for o in outcomes) - min(o.request.at_s for o in outcomes)
    found = RunReport.of(replace(result, outcomes=outcomes, duration_s=seconds), slo)
    times = {
        f"p{percent}_{name}_ms": 1000 * spread.by_percentile[percent]
        for name, spread in (("ttft", found.ttft_s), ("tpot", found.tpot_s))
        for percent in (50, 90)
    }
    figures = {"request_throughput": found.requests_per_s, "goodput_share": found.kept_share, **times}
    if not detailed:
        return figures
    return figures | {"ttfts": [o.ttft_s for o in outcomes], "handed": [bool(o.prefill_id) for o in outcomes]}


def judge(found: dict[str, Any], *, detailed: bool) -> None:
    """Simulates the runs of each ratio and compares."""
    config, machine = configured(Path(found["config"]), found["values"]), Machine.of(found["profile"])
    for split, group in itertools.groupby(found["runs"], lambda run: (run["prefill"], run["decode"])):
        runs = list(group)
        loads = [OfferedLoad(**run["load"]) for run in runs]
        predicted = predict(split, config, loads, len(runs[0]["rounds"]), machine, detailed=detailed)
        for run, figures in zip(runs, predicted, strict=True):
            run["predicted"] = figures
            compare(run, TIMED_WITHIN if machine.profile is None else COMPUTED_WITHIN)


def compare(run: dict[str, Any], within: float) -> None:
    """Adds the medians of a run's rounds, by how much they are off what was predicted, and by how much they may be."""
    rounds, predicted = run["rounds"], run["predicted"]
    numbers = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    run |= {name: statistics.median(one[name] for one in rounds) for name in numbers}
    run["details"] = rounds[0].get("details")
    run["allowed"], run["off"] = {}, {}
    for name in COMPARED:
        values = [one[name] for one in rounds]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        if name == "goodput_share":
            run["off"][name], run["allowed"][name] = run[name] - predicted[name], max(GOODPUT_WITHIN, 2 * spread)
        else:
            run["off"][name] = run[name] / predicted[name] - 1
            run["allowed"][name] = within if within == TIMED_WITHIN else max(within, 2 * spread / predicted[name])
    run["differ"] = [name for name in COMPARED if abs(run["off"][name]) > run["allowed"][name]]
