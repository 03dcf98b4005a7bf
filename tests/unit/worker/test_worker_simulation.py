"""Whole requests through the cores of simulated workers: every delay, every size, every fault, at any moment.

Each run is held to the tokens of the undisturbed one, and to giving everything back (`simulate.judgement`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from crowded_cluster import EVERY_RATE, FAULTS_UNTIL_S, JITTER, Load, crowded, crowded_spec

import prefill_worker.sender
from simulate.faults import LABEL_FAULTS, NETWORK_FAULTS, RATED_FAULTS, WORKER_FAULTS, FaultEvent, FaultPlan
from simulate.world import Cluster, ClusterSpec, SimRequest


@pytest.fixture(autouse=True, scope="module")
def layered_prompts() -> object:
    """Prompts here are short, and yet their last step is sent layer by layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_worker.sender, "MIN_LAYERED_TOKENS", 6)
        yield


def with_workers(spec: ClusterSpec, **values: object) -> ClusterSpec:
    return replace(spec, workers=tuple(replace(worker, **values) for worker in spec.workers))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [(4, 4), (4, 8), (8, 2), (7, 3), (1, 1)])
def test_every_request_gets_the_tokens_of_its_prompt_whatever_the_blocks(seed: int, blocks: tuple[int, int]) -> None:
    spec = with_workers(crowded_spec(1, 1, blocks=blocks, kv_tokens=168), overlaps=seed % 2 == 1)
    outcomes = Cluster(spec, seed).run(Load(20, most_sequences=3).requests(seed), 600).outcomes
    assert all(outcome.is_finished and outcome.num_attempts == 1 for outcome in outcomes)


def test_a_pool_too_small_for_all_preempts_and_loses_nothing() -> None:
    num_preemptions = 0
    for seed in range(8):
        spec = with_workers(crowded_spec(1, 1, kv_tokens=100), overlaps=seed % 2 == 1)
        result = Cluster(spec, seed).run(Load(12, num_output_tokens=20, most_sequences=1).requests(seed), 600)
        assert all(outcome.is_finished for outcome in result.outcomes)
        num_preemptions += sum(worker.num_preemptions for worker in result.workers)
    assert num_preemptions > 1


@pytest.mark.parametrize("seed", range(20))
def test_a_cancel_at_any_moment_frees_everything_and_harms_nobody(seed: int) -> None:
    outcomes = crowded(seed, {}, load=Load(20, num_output_tokens=20, cancels=0.5), kv_tokens=200).run().outcomes
    assert {outcome.state.value for outcome in outcomes} == {"finished", "cancelled"}


@pytest.mark.parametrize("seed", range(4))
def test_workers_keep_no_more_pairs_than_they_may(seed: int) -> None:
    spec = crowded_spec(2, 3)
    router = replace(spec.router, prefix_fetch="off")  # else others send to prefill workers, too
    spec = replace(spec, transfer=replace(spec.transfer, max_pairs=1), router=router)
    cluster = Cluster(spec, seed)
    outcomes = cluster.run(Load(30).requests(seed), 600).outcomes
    assert all(outcome.is_finished for outcome in outcomes)
    assert len({(outcome.prefill_id, outcome.decode_id) for outcome in outcomes}) > 4
    for name in ("prefill-0", "prefill-1"):
        counts = cluster.workers[name].core.handoffs.count_by_state()
        assert sum(counts.values()) == 1, f"{name} has closed those that were idle"


class Damaging(Cluster):
    """Damages one chunk, once the decode worker has 16 tokens of a prompt."""

    def strikes(self, fault: str) -> bool:
        has_enough = fault == "damaged" and self.received >= 16
        if has_enough and not self.num_faults:
            self.count(fault)
            return True
        return False

    @property
    def received(self) -> float:
        """Tokens of KV that the decode worker got, in all layers."""
        worker = self.workers["decode-0"]
        return worker.stats.kv_bytes_received / worker.spec.kv_bytes_per_token


@pytest.mark.parametrize("bypass_prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_second_attempt_is_sent_only_what_the_first_has_not_left(seed: int, bypass_prefix_cache: bool) -> None:
    cluster = Damaging(with_workers(crowded_spec(2, 1), max_num_batched_tokens=8), seed)
    (request, *_) = Load(1, num_prompt_tokens=16).requests(seed)
    shape = replace(request.shape, num_prompt_tokens=40, num_output_tokens=5)
    request = SimRequest(shape, bypass_prefix_cache=bypass_prefix_cache)
    (outcome,) = cluster.run([request], 600).outcomes
    assert outcome.is_finished and outcome.num_attempts == 2 and cluster.num_faults == {"damaged": 1}
    num_again = cluster.received - (40 + 5)
    assert num_again < 16, "only what had landed behind the damaged chunk is sent twice"


@pytest.mark.parametrize(("blocks", "seed"), [((4, 4), 0), ((8, 3), 1), ((4, 4), 3), ((8, 3), 2)])
@pytest.mark.parametrize("fault", LABEL_FAULTS)
def test_what_moves_from_one_decode_worker_to_another_goes_on_with_its_tokens(
    seed: int, fault: str, blocks: tuple[int, int]
) -> None:
    spec = with_workers(crowded_spec(1, 2, blocks=blocks, kv_tokens=4096), overlaps=seed % 2 == 1)
    events = tuple(FaultEvent(at_s, fault, 0.4, f"decode-{number % 2}") for number, at_s in enumerate((0.2, 0.7, 1.2)))
    cluster = Cluster(spec, seed, faults=FaultPlan(events, until_s=2.0))
    outcomes = cluster.run(Load(20, num_output_tokens=100, most_sequences=1).requests(seed), 600).outcomes
    assert all(outcome.is_finished for outcome in outcomes)
    (dispatcher,) = cluster.dispatchers
    assert dispatcher.counters.moved >= 10 and not dispatcher.counters.retried


def test_of_what_moves_only_the_end_is_computed_again() -> None:
    spec = crowded_spec(1, 2, kv_tokens=240)
    (request, *_) = Load(1).requests(1)
    request = SimRequest(replace(request.shape, at=0.0, num_prompt_tokens=30, num_output_tokens=60))
    plan = FaultPlan((FaultEvent(0.2, "worker drained", 5.0, "decode-0"),), until_s=6.0)
    cluster = Cluster(spec, 1, faults=plan)
    (outcome,) = cluster.run([request], 600).outcomes
    (dispatcher,) = cluster.dispatchers
    assert outcome.is_finished and dispatcher.counters.moved == 1
    first, second = (cluster.workers[name].stats for name in ("decode-0", "decode-1"))
    assert first.num_prefill_tokens <= 4, "no more than a block that was not full"
    assert second.num_prefill_tokens == 0 and second.kv_bytes_received > 30 * spec.workers[0].kv_bytes_per_token


@pytest.mark.parametrize("shares_pages", [False, True])
@pytest.mark.parametrize("fault", RATED_FAULTS)
def test_each_fault_of_an_operation_by_itself_strikes_and_leaves_nothing_behind(fault: str, shares_pages: bool) -> None:
    rates = {fault: 0.3 if EVERY_RATE[fault] > 0.01 else 0.03}
    if fault == "landing torn":
        rates["receive failed"] = 0.1
    num_struck = 0
    for seed in range(6):
        num_struck += crowded(seed, rates, shares_pages=shares_pages).run().num_faults.get(fault, 0)
        if num_struck >= 5:
            return
    raise AssertionError(f"it struck {num_struck} times")


@pytest.mark.parametrize("fault", (*WORKER_FAULTS, *LABEL_FAULTS, *NETWORK_FAULTS))
def test_each_fault_of_a_worker_or_a_link_by_itself_leaves_nothing_behind(fault: str) -> None:
    num_struck = 0
    for seed in range(3):
        scenario = crowded(seed, {}, shares_pages=seed % 3 == 0)
        name = scenario.spec.workers[seed % 4].worker_id
        events = tuple(FaultEvent(at_s, fault, 0.3, name, JITTER) for at_s in (0.1, 0.5, 0.9))
        result = replace(scenario, faults=FaultPlan(events, until_s=FAULTS_UNTIL_S)).run()
        num_struck += result.num_faults.get(fault, 0)
    assert num_struck >= 5
