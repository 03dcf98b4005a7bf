"""The fast fidelity of the simulator: what clients see agrees with the full one, at a fraction of the work."""

from __future__ import annotations

import pytest

from cluster.step_cost import StepCost
from simulate.client import SimRequest
from simulate.curves import LinearCurve
from simulate.engine_thread import SimulatedInbox
from simulate.faults import FaultPlan
from simulate.report import RunReport
from simulate.runs import StepRun
from simulate.worker import SimulatedWorker
from simulate.workload import RequestShape, SharedPrefixes, at_rate, lognormal, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, Fidelity, RunResult, WorkerSpec

CURVE = LinearCurve(StepCost(8e-3, 6e-5, 1e-9, 1e-4, 1e-7))


def load(num: int, rate: float) -> list[RequestShape]:
    shapes = random_shapes(num, lognormal((500, 900), (40, 80)), 1, SharedPrefixes(64, num=3))
    return at_rate(shapes, rate, 1.0, 1)


def run(
    fidelity: Fidelity, prefill: int, decode: int, requests: list[RequestShape], kv_tokens: int = 65536
) -> RunResult:
    worker = WorkerSpec("", "decode", CURVE, kv_tokens=kv_tokens)
    spec = ClusterSpec.of_ratio(prefill, decode, worker, fidelity=fidelity)
    return Cluster(spec, 1, keeps_trace=True).run(requests, limit_s=600)


@pytest.mark.parametrize(("prefill", "decode", "rate"), [(2, 2, 12.0), (0, 3, 6.0)])
def test_both_fidelities_show_the_same_latencies_and_goodput(prefill: int, decode: int, rate: float) -> None:
    requests = load(180, rate)
    results = [run(fidelity, prefill, decode, requests) for fidelity in ("full", "fast")]
    full, fast = (RunReport.of(result, ClusterSpec(()).slo) for result in results)
    assert fast.outcomes == full.outcomes == {"finished": 180}
    assert fast.requests_per_s == pytest.approx(full.requests_per_s, rel=0.01)
    for one, other in ((full.ttft_s, fast.ttft_s), (full.tpot_s, fast.tpot_s), (full.e2e_s, fast.e2e_s)):
        for percent in (50, 90):
            assert other.by_percentile[percent] == pytest.approx(one.by_percentile[percent], rel=0.01)
    assert fast.kept_share == pytest.approx(full.kept_share, abs=0.01)
    assert results[1].num_calls < results[0].num_calls / 3


@pytest.mark.parametrize(("prefill", "most_s"), [(0, 1e-9), (1, 1e-5)])
def test_a_request_that_joins_a_run_of_steps_begins_with_the_step_in_which_it_would(
    prefill: int, most_s: float
) -> None:
    requests = [RequestShape(0.11 * i + 0.003 * (i % 3), 200 + 497 * i % 900, 20 + i) for i in range(12)]
    full, fast = (run(fidelity, prefill, 1, requests).outcomes for fidelity in ("full", "fast"))
    for one, other in zip(full, fast, strict=True):
        assert other.first_token_s == pytest.approx(one.first_token_s, abs=most_s)
        assert other.last_token_s == pytest.approx(one.last_token_s, abs=most_s)


def test_a_run_is_cut_at_the_end_of_the_step_under_way() -> None:
    run = StepRun(begun_at=1.0, first_s=0.1, growth_s=0.01, num_steps=4)
    assert run.seconds == pytest.approx(0.46)
    assert run.cut(1.15) and run.num_steps == 2
    assert run.begun_at + run.seconds == pytest.approx(1.21)
    assert not run.cut(1.2) and run.num_steps == 2


def test_a_small_pool_preempts_in_the_fast_fidelity_too() -> None:
    requests = at_rate(random_shapes(40, uniform(60, 300, 0.8), 1), 100.0, 1.0, 1)
    results = [run(fidelity, 1, 1, requests, kv_tokens=1024) for fidelity in ("full", "fast")]
    assert all(outcome.is_finished for result in results for outcome in result.outcomes)
    full, fast = (sum(worker.num_preemptions for worker in result.workers) for result in results)
    assert full > 0 and fast > 0


def test_a_client_that_leaves_and_an_output_that_ends_early_are_simulated_fast() -> None:
    shapes = load(40, 20.0)
    requests = [
        SimRequest(shape, max_output_tokens=1000, leaves_after_s=0.3 if number % 4 == 0 else None)
        for number, shape in enumerate(shapes)
    ]
    spec = ClusterSpec.of_ratio(1, 1, WorkerSpec("", "decode", CURVE), fidelity="fast")
    outcomes = Cluster(spec, 1).run(requests).outcomes
    assert {outcome.state.value for outcome in outcomes} == {"finished", "cancelled"}
    ended = [outcome for outcome in outcomes if outcome.is_finished]
    assert all(outcome.num_tokens == outcome.request.num_output_tokens for outcome in ended)


@pytest.mark.parametrize("kv_tokens", [65536, 4096])
def test_an_engine_thread_without_idle_turns_does_the_same_in_fewer_calls(
    kv_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the small pool prompts wait for blocks, and sequences are preempted."""
    requests = load(150, 14.0)
    direct = run("fast", 2, 2, requests, kv_tokens)
    monkeypatch.setattr(SimulatedWorker, "_make_inbox", lambda worker: SimulatedInbox(worker._wake))
    by_turns = run("fast", 2, 2, requests, kv_tokens)
    assert direct.outcomes == by_turns.outcomes
    assert (direct.workers, direct.trace) == (by_turns.workers, by_turns.trace)
    assert direct.num_calls < 0.9 * by_turns.num_calls


def test_the_fast_fidelity_runs_twice_in_the_same_way() -> None:
    first, second = (run("fast", 2, 2, load(60, 30.0)).trace for _ in range(2))
    assert first == second and len(first) > 100


def test_faults_are_refused_in_the_fast_fidelity() -> None:
    with pytest.raises(ValueError, match="need the full fidelity"):
        Cluster(ClusterSpec.of_ratio(1, 1, fidelity="fast"), faults=FaultPlan())


def test_outlines_of_prompts_begin_alike_where_prompts_do() -> None:
    one, other, alone = RequestShape(0, 200, 1, (7, 8), 64), RequestShape(0, 150, 1, (7, 9), 64), RequestShape(0, 99, 1)
    outlines = [shape.outline(number) for number, shape in enumerate((one, other, alone))]
    assert list(map(len, outlines)) == [200, 150, 99]
    assert outlines[0][:64] == outlines[1][:64] and outlines[0][64:80] != outlines[1][64:80]
    assert outlines[2][:16] != outlines[0][:16] and one.outline(5)[128:144] != outlines[0][128:144]


def test_a_prompt_is_handed_over_in_one_chunk_and_in_as_many_bytes_as_in_the_full_fidelity() -> None:
    requests = [RequestShape(0.5 * i, 700, 4) for i in range(4)]
    full, fast = (run(fidelity, 1, 1, requests) for fidelity in ("full", "fast"))
    moved, moved_fast = (sum(use.kv_bytes_sent for use in result.workers) for result in (full, fast))
    assert moved_fast == pytest.approx(moved, rel=1e-6) and moved > 0
