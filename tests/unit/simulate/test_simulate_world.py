"""A cluster in virtual time: the same run for the same seed, the tokens of the undisturbed run, sensible times."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.choices import PrefixFetchName
from cluster.config.schema import RouterSection
from cluster.lifecycle import RequestState
from cluster.step_cost import StepCost
from simulate.client import SimRequest
from simulate.curves import LinearCurve
from simulate.report import RunReport
from simulate.virtual_loop import Stuck, VirtualLoop
from simulate.wire import Flow, Flows, Lane, WireSpec
from simulate.workload import RequestShape, SharedPrefixes, at_rate, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, RunResult, WorkerSpec

ROOT = Path(__file__).resolve().parents[3]
STEP = LinearCurve(StepCost(10e-3, 1e-4, 0.0, 0.0, 0.0))
"""10 ms, and 0.1 ms for each token of a prompt."""


def load(num: int, rate: float, seed: int = 1) -> list[SimRequest]:
    """Some share the beginning of their prompts, of two tenants; half say no more than that they may be long."""
    shapes = random_shapes(num, uniform(200, 12, 0.9), seed, SharedPrefixes(64, num=3))
    return [
        SimRequest(shape, max_output_tokens=64 if number % 2 else None, tenant="ab"[number % 3 == 0])
        for number, shape in enumerate(at_rate(shapes, rate, 1.0, seed))
    ]


def run(spec: ClusterSpec, num: int = 40, rate: float = 40.0, seed: int = 1) -> RunResult:
    return Cluster(spec, seed, keeps_trace=True).run(load(num, rate, seed), limit_s=600)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (0, 2)])
def test_every_request_finishes_with_the_tokens_of_the_undisturbed_run(
    prefill: int, decode: int, overlaps: bool
) -> None:
    spec = ClusterSpec.of_ratio(prefill, decode, WorkerSpec("", "decode", kv_tokens=8192, overlaps=overlaps))
    result = run(spec)
    assert [outcome.state for outcome in result.outcomes] == [RequestState.FINISHED] * 40
    assert any(outcome.prefill_id for outcome in result.outcomes) == bool(prefill)


def test_a_small_pool_preempts_and_still_ends_everything() -> None:
    worker = WorkerSpec("", "decode", kv_tokens=1024, max_model_len=1024, curve=STEP)
    result = run(ClusterSpec.of_ratio(1, 1, worker), num=60, rate=200)
    assert all(outcome.is_finished for outcome in result.outcomes)


def test_the_same_seed_gives_the_same_run_whatever_the_hashes_of_its_process() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/unit/simulate')\n"
        "from test_simulate_world import *\n"
        "print('\\n'.join(run(ClusterSpec.of_ratio(2, 2)).trace))"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert traces[0].count("finished") == 40 and " step " in traces[0]


def test_an_idle_cluster_takes_what_its_curve_and_its_wire_say() -> None:
    worker = WorkerSpec("", "decode", curve=STEP, max_num_batched_tokens=256)
    router = RouterSection(http_port=None, policy="least_loaded")
    spec = ClusterSpec.of_ratio(1, 1, worker, message_s=0.0, router=router)
    shapes = at_rate(random_shapes(20, uniform(256, 11), 3), 1.0, 1e9, 3)
    fast, slow = (
        Cluster(replace(spec, workers=tuple(replace(w, wire=wire) for w in spec.workers))).run(shapes)
        for wire in (WireSpec(1e12, 0.0), WireSpec(1e9, 0.0))
    )
    seconds = 256 * worker.kv_bytes_per_token / 1e9
    for quick, late in zip(fast.outcomes[1:], slow.outcomes[1:], strict=True):
        assert quick.ttft_s == pytest.approx(10e-3 + 256e-4, abs=2e-3)
        assert quick.tpot_s == pytest.approx(10e-3, abs=1e-3)
        assert late.prefill_id and quick.ttft_s is not None and late.ttft_s == pytest.approx(quick.ttft_s, abs=1e-3)
        # A quarter of the layers travels while the next one is computed; the last has nothing to hide behind.
        assert late.e2e_s - quick.e2e_s == pytest.approx(seconds / 4, abs=2e-4)


def test_a_first_token_takes_six_messages_where_it_is_handed_over() -> None:
    worker = WorkerSpec("", "decode", curve=STEP, command_s=0.0, wire=WireSpec(1e15, 0.0))
    router = RouterSection(http_port=None, policy="least_loaded")
    shapes = at_rate(random_shapes(10, uniform(256, 11), 3), 1.0, 1e9, 3)
    for prefill, num_messages in ((1, 6), (0, 4)):
        spec = ClusterSpec.of_ratio(prefill, 1, worker, router=router, message_s=0.0)
        quick, late = (
            Cluster(replace(spec, message_s=seconds, client_s=seconds)).run(shapes).outcomes[-1]
            for seconds in (0.0, 2e-3)
        )
        assert quick.ttft_s is not None and late.ttft_s == pytest.approx(quick.ttft_s + num_messages * 2e-3)
        assert late.tpot_s == pytest.approx(quick.tpot_s, abs=1e-3)


def test_a_worker_that_computes_on_its_engine_thread_takes_nothing_in_meanwhile() -> None:
    """So a prompt waits for a step of the decode worker before its blocks are reserved."""
    slow = LinearCurve(StepCost(50e-3, 0.0, 0.0, 0.0, 0.0))
    spec = ClusterSpec.of_ratio(1, 1, WorkerSpec("", "decode", curve=slow), message_s=0.0)
    spec = replace(spec, router=RouterSection(http_port=None, policy="least_loaded"))
    shapes = [RequestShape(0.0, 100, 40), RequestShape(1.01, 100, 2)]
    waits = []
    for long_tokens in (0, 64):
        workers = tuple(replace(worker, long_tokens=long_tokens) for worker in spec.workers)
        waits.append(Cluster(replace(spec, workers=workers)).run(shapes).outcomes[1].ttft_s)
    assert waits[0] == pytest.approx(50e-3, abs=2e-3) and 55e-3 < waits[1] < 101e-3


def test_a_worker_that_computes_on_its_engine_thread_tells_tokens_no_more_often_than_it_may() -> None:
    """Steps of 1 ms: four tokens in a message, where a worker that waits for its device tells each at once."""
    quick = LinearCurve(StepCost(1e-3, 0.0, 0.0, 0.0, 0.0))
    num_calls = []
    for long_tokens in (0, 64):
        worker = WorkerSpec("", "decode", curve=quick, overlaps=False, long_tokens=long_tokens)
        result = Cluster(ClusterSpec.of_ratio(0, 1, worker)).run([RequestShape(0.0, 100, 1000)])
        assert result.outcomes[0].tpot_s == pytest.approx(1e-3, rel=0.01)
        num_calls.append(result.num_calls)
    assert num_calls[1] < 0.7 * num_calls[0]


def test_what_a_run_leaves_behind_is_cancelled_in_the_order_in_which_it_began() -> None:
    """asyncio's own set of tasks orders them by their addresses."""
    loop, ends = VirtualLoop(), list[int]()  # type: ignore[abstract]  # as the world's

    async def wait(number: int) -> None:
        try:
            await loop.create_future()
        finally:
            ends.append(number)

    async def main() -> None:
        tasks = [loop.create_task(wait(number)) for number in range(200)]
        loop.call_soon(tasks.clear)
        await asyncio.sleep(1.0)

    loop.run(main())
    assert ends == list(range(200))


def test_threads_share_cores_and_none_is_faster_than_one_core() -> None:
    loop = VirtualLoop()  # type: ignore[abstract]  # as the world's
    flows, cores, ends = Flows(loop), Lane(2, most=1.0), dict[str, float]()

    async def main() -> None:
        def compute(name: str, seconds: float, num_threads: int = 1) -> Flow:
            return flows.begin((cores,), seconds, num_threads, lambda: ends.update({name: loop.time()}))

        compute("alone", 1.0)
        await asyncio.sleep(1.0)
        compute("two threads", 1.0, 2)
        late = compute("cancelled", 9.0)
        await asyncio.sleep(0.75)  # three threads on two cores: half a second of each thread has passed
        flows.cancel(late)
        await asyncio.sleep(1.0)

    loop.run(main())
    assert ends == {"alone": 1.0, "two threads": pytest.approx(2.25)}


def test_steps_and_messages_wait_for_the_cores_that_they_share() -> None:
    """With cores for all of them nothing waits; on one core a first token waits for the steps of the other worker."""
    worker = WorkerSpec("", "decode", curve=STEP, long_tokens=64)
    router = RouterSection(http_port=None, policy="least_loaded")
    alone = ClusterSpec.of_ratio(1, 1, worker, router=router, message_s=1e-3, client_s=1e-3)
    shapes = at_rate(random_shapes(30, uniform(256, 32, 0.3), 4), 4.0, 1.0, 4)
    own, many, one = (Cluster(replace(alone, cores=cores), seed=4).run(shapes) for cores in (None, 64, 1))
    for mine, theirs in zip(own.outcomes, many.outcomes, strict=True):
        assert theirs.ttft_s == pytest.approx(mine.ttft_s, abs=1e-2)  # one step of the other worker, more or less
    ttfts, tpots = (
        [statistics.median(getattr(o, name) for o in result.outcomes) for result in (own, many, one)]
        for name in ("ttft_s", "tpot_s")
    )
    assert ttfts[1] == pytest.approx(ttfts[0], rel=0.02) and tpots[1] == pytest.approx(tpots[0], rel=0.02)
    assert ttfts[2] > 1.2 * ttfts[0] and tpots[2] > 1.1 * tpots[0]
    busy_s = sum(use.busy_s for use in one.workers)
    assert busy_s > 1.1 * sum(use.busy_s for use in own.workers)


def test_a_step_of_several_threads_takes_as_many_cores() -> None:
    shapes = [RequestShape(0.0, 256, 40)]
    worker, router = WorkerSpec("", "decode", curve=STEP), RouterSection(http_port=None)
    e2es = []
    for num_threads in (1, 2, 4, 0):
        spec = ClusterSpec.of_ratio(0, 1, replace(worker, num_threads=num_threads), router=router, cores=2)
        (outcome,) = Cluster(replace(spec, message_s=1e-9, client_s=1e-9)).run(shapes).outcomes
        e2es.append(outcome.e2e_s)
    assert e2es == pytest.approx([e2es[0], e2es[0], 2 * e2es[0], e2es[0]], rel=1e-3)


def test_a_worker_that_may_use_a_part_of_a_core_takes_as_much_longer() -> None:
    shapes = [RequestShape(0.0, 256, 40)]
    router = RouterSection(http_port=None)
    spec = ClusterSpec.of_ratio(0, 1, WorkerSpec("", "decode", curve=STEP), router=router, cores=2, message_s=1e-9)
    (whole,) = Cluster(spec).run(shapes).outcomes
    workers = tuple(replace(worker, core_share=0.4) for worker in spec.workers)
    (part,) = Cluster(replace(spec, workers=workers)).run(shapes).outcomes
    assert part.e2e_s == pytest.approx(2.5 * whole.e2e_s, rel=1e-3)


def test_what_shared_cores_cannot_be_had_with_is_refused() -> None:
    spec = ClusterSpec.of_ratio(1, 1, cores=2)
    for other in (replace(spec, fidelity="fast"), replace(spec, num_routers=1)):
        with pytest.raises(ValueError, match="shared cores need the full fidelity"):
            Cluster(other)


def test_a_report_says_what_clients_saw() -> None:
    spec = ClusterSpec.of_ratio(1, 1)
    report = RunReport.of(run(spec), spec.slo)
    assert report.outcomes == {"finished": 40}
    assert 0 < report.ttft_s.by_percentile[50] <= report.ttft_s.by_percentile[99] < 1
    assert report.kept_share == 1.0 and report.goodput_per_s == pytest.approx(report.requests_per_s)
    assert 0 < report.utilization["prefill"] < 1 and 0 < report.utilization["decode"] < 1
    assert any(line.startswith("TTFT") for line in report.lines())


def test_a_run_that_cannot_end_in_time_says_when_it_stood_still() -> None:
    with pytest.raises(Stuck, match=r"its limit is 1\.010 s"):
        Cluster(ClusterSpec.of_ratio(1, 1)).run(load(5, 10), limit_s=0.01)


@pytest.mark.parametrize("how", ["off", "always"])
def test_a_turn_fetches_the_answer_before_it_from_the_worker_that_decoded_it(how: PrefixFetchName) -> None:
    router = RouterSection(http_port=None, policy="least_loaded", prefix_fetch=how)
    first = SimRequest(RequestShape(0.0, 200, 61, (1,), 200))
    second = SimRequest(RequestShape(5.0, 300, 20, (2,), 300), turn_before=first)
    cluster = Cluster(ClusterSpec.of_ratio(1, 1, router=router))
    result = cluster.run([first, second])
    (dispatcher,) = cluster.dispatchers
    assert all(outcome.is_finished for outcome in result.outcomes)
    num_cached, fetches = result.outcomes[1].num_cached_tokens, dict(dispatcher.counters.fetches)
    assert (num_cached, fetches) == ((192, {}) if how == "off" else (256, {"done": 1}))
