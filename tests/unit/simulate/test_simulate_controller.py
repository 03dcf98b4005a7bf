"""The controller in virtual time: workers change roles by the real reconfigurer and router, each time alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config.schema import AutoSection, SloSection
from cluster.step_cost import StepCost
from controller.supervisor import GiveUp, RestartPolicy
from simulate.controller import ControllerSpec, SplitSince
from simulate.curves import LinearCurve
from simulate.faults import FaultEvent, FaultPlan
from simulate.workload import RequestShape, at_rate, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, RunResult, WorkerSpec

WORKER = WorkerSpec("", "decode", LinearCurve(StepCost(10e-3, 5e-4, 0.0, 2e-3, 0.0)), max_num_seqs=64)
"""A prompt of 800 tokens takes 0.4 s; a step of 20 sequences 50 ms."""
SLO = SloSection(ttft_ms=2000, tpot_ms=60)
AUTO = ControllerSpec(auto=AutoSection(confirm_s=2, cooldown_s=2, dwell_s=8))


def prompts(at: float, seconds: float, rate: float = 7.0) -> list[RequestShape]:
    return phase(800, 4, at, seconds, rate)


def outputs(at: float, seconds: float, rate: float = 12.0) -> list[RequestShape]:
    return phase(16, 80, at, seconds, rate)


def phase(num_prompt: int, num_output: int, at: float, seconds: float, rate: float) -> list[RequestShape]:
    shapes = random_shapes(round(seconds * rate), uniform(num_prompt, num_output), seed=1)
    return [replace(shape, at=at + shape.at) for shape in at_rate(shapes, rate, 1.0, seed=1)]


def run(load: list[RequestShape], split: tuple[int, int], controller: ControllerSpec = AUTO) -> RunResult:
    spec = ClusterSpec.of_ratio(*split, WORKER, slo=SLO, controller=controller)
    return Cluster(spec, seed=1, keeps_trace=True).run(load, limit_s=600)


def test_auto_moves_workers_when_the_load_turns_and_every_request_keeps_its_tokens() -> None:
    result = run([*prompts(0.0, 20.0), *outputs(20.0, 20.0)], (2, 2))
    assert result.splits[0] == SplitSince(0.0, 2, 2)
    at_the_turn = [split for split in result.splits if split.at_s < 20][-1]
    assert at_the_turn.num_prefill == 3, result.splits
    assert 20 < result.splits[-1].at_s < 40 and result.splits[-1].num_prefill < 3, result.splits
    assert all(outcome.is_finished for outcome in result.outcomes)
    flipped = {f"{each.prefill_id} {each.decode_id}".count("decode-") == 2 for each in result.outcomes}
    assert flipped == {True, False}, "no decode worker has computed a prompt for another"
    assert any("controller auto: mode auto: moves: 3:1" in line for line in result.trace)


def test_the_same_seed_gives_the_same_run_with_a_controller_too() -> None:
    one, two = (run(prompts(0.0, 10.0), (1, 3)) for _ in range(2))
    assert one.trace == two.trace and len(one.splits) > 1


def test_a_fixed_split_stays_and_serves_as_without_a_controller() -> None:
    load = outputs(0.0, 5.0)
    fixed = run(load, (2, 2), replace(AUTO, mode="fixed"))
    alone = Cluster(ClusterSpec.of_ratio(2, 2, WORKER, slo=SLO), seed=1).run(load)
    assert fixed.splits == (SplitSince(0.0, 2, 2),)
    assert [o.last_token_s for o in fixed.outcomes] == [o.last_token_s for o in alone.outcomes]


def test_workers_are_added_and_taken_away_again() -> None:
    auto = replace(AUTO.auto, max_devices=5, release_after_s=5)
    result = run([*prompts(0.0, 20.0, 8.0), *prompts(20.0, 40.0, 0.5)], (3, 1), replace(AUTO, auto=auto))
    sizes = [split.num_prefill + split.num_decode for split in result.splits]
    assert max(sizes) == 5 and sizes[-1] == 4, result.splits
    assert all(outcome.is_finished for outcome in result.outcomes)


def test_a_controller_that_dies_is_followed_by_one_that_brings_back_what_has_died_meanwhile() -> None:
    controller = replace(AUTO, launch_s=0.5)
    spec = replace(ClusterSpec.of_ratio(2, 2, WORKER, slo=SLO, controller=controller), is_watched=True)
    events = (
        FaultEvent(3.0, "controller died", 4.0, "decode-0"),
        FaultEvent(4.0, "worker died", 1.0, "decode-0"),
        FaultEvent(12.0, "controller stopped", 3.0, "decode-0"),
        FaultEvent(12.5, "worker died", 1.0, "prefill-1"),
    )
    cluster = Cluster(spec, seed=1, faults=FaultPlan(events, until_s=16.0), keeps_trace=True)
    result = cluster.run([*prompts(0.0, 20.0, 5.0), *outputs(20.0, 20.0, 8.0)], limit_s=600)
    assert all(outcome.is_finished for outcome in result.outcomes)
    assert result.num_faults == {"controller died": 1, "worker died": 2, "controller stopped": 1}
    assert cluster.controller is not None and cluster.controller.saved.life == 2
    for name, since in (("decode-0", 7.0), ("prefill-1", 15.0)):
        ready = [float(line.split()[0]) - 1 for line in result.trace if f"controller: {name} is ready" in line]
        assert any(since < at_s < since + 3 for at_s in ready), (name, ready)
    assert {worker.is_dead for worker in cluster.workers.values()} == {False}


def test_a_worker_that_is_not_brought_back_is_found() -> None:
    spec = ClusterSpec.of_ratio(1, 2, WORKER, slo=SLO, controller=replace(AUTO, mode="fixed"))
    plan = FaultPlan((FaultEvent(1.0, "worker died", 1.0, "decode-0"),), until_s=2.0)
    cluster = Cluster(spec, seed=1, faults=plan)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="not brought back decode-0"):
        patch.setattr(RestartPolicy, "ended", lambda self, now, why, is_mistake=False: GiveUp(why, is_mistake))
        cluster.run(outputs(0.0, 3.0, 2.0), limit_s=600)
