"""Where requests go, policy by policy, by what is handed out, what is cached and what workers have measured."""

from __future__ import annotations

import typing
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from candidates import FakeCandidate, named, request_of

from cluster.config.choices import PolicyName
from cluster.step_cost import StepCost
from router.routing.demand import OutputLengths
from router.routing.load_tracker import Charge, LoadTracker, Placement, PlacementKind, RequestLoad
from router.routing.policies import policy_class
from router.routing.policies.interface import Objectives, Policy, RoutingContext
from router.routing.policies.predicted import Predicted
from router.routing.prefix_index import PromptHashes

ROOT = Path(__file__).resolve().parents[3]
POLICIES: tuple[PolicyName, ...] = typing.get_args(PolicyName)
COST = StepCost(fixed_s=0.004, prompt_token_s=0.0002, attended_s=0.0, sequence_s=0.0002, kv_token_s=1e-7)
"""5,000 prompt tokens a second; a step of one sequence takes 4.2 ms."""
SLOW = replace(COST, prompt_token_s=0.002, sequence_s=0.01)


def policy_of(name: PolicyName, loads: LoadTracker | None = None, lengths: OutputLengths | None = None) -> Policy:
    return policy_class(name)(RoutingContext(loads or LoadTracker(), lengths or OutputLengths()))


def workers(*worker_ids: str, cost: StepCost | None = COST) -> list[FakeCandidate]:
    return [FakeCandidate(worker_id, cost) for worker_id in worker_ids]


def place(policy: Policy, loads: LoadTracker, num_prompt_tokens: int, *fleet: list[FakeCandidate]) -> Placement:
    """Chooses, and charges."""
    request = request_of(num_prompt_tokens)
    placement = policy.choose(request, *fleet)
    Charge(loads, placement, request.work)
    return placement


def test_each_policy_that_the_configuration_offers_is_a_file_and_the_docs_describe_it() -> None:
    folder = ROOT / "router" / "routing" / "policies"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "interface"} == set(POLICIES)
    assert len({policy_class(name) for name in POLICIES}) == len(POLICIES)
    page = (ROOT / "docs" / "routing.md").read_text()
    assert all(f"| `{name}` |" in page for name in POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_without_prefill_workers_decode_computes_the_prompt(name: PolicyName) -> None:
    placement = policy_of(name).choose(request_of(10), [], named("d0"))
    assert placement.prefill_id is None
    assert placement.reason == "local prefill on d0: there is no prefill worker"


@pytest.mark.parametrize("name", ["least_loaded", "round_robin"])
def test_equals_share_a_burst_though_nothing_was_heard_meanwhile(name: PolicyName) -> None:
    loads = LoadTracker()
    policy = policy_of(name, loads)
    fleet = workers("p1", "p0"), workers("d1", "d0")
    chosen = [place(policy, loads, 2000, *fleet) for _ in range(8)]
    assert Counter(c.prefill_id for c in chosen) == {"p0": 4, "p1": 4}
    assert Counter(c.decode_id for c in chosen) == {"d0": 4, "d1": 4}


def test_a_burst_of_prompts_leaves_no_worker_idle() -> None:
    loads = LoadTracker()
    policy = policy_of("predicted", loads)
    chosen = [place(policy, loads, 2000, workers("p1", "p0"), workers("d1", "d0")) for _ in range(8)]
    assert Counter(c.computing_id for c in chosen) == {"p0": 3, "p1": 3, "d0": 1, "d1": 1}
    assert Counter(c.decode_id for c in chosen) == {"d0": 4, "d1": 4}


def test_at_random_everybody_is_chosen() -> None:
    policy = policy_of("random")
    chosen = [policy.choose(request_of(10), named("p0", "p1"), named("d0", "d1")) for _ in range(100)]
    assert {c.prefill_id for c in chosen} == {"p0", "p1"} and {c.decode_id for c in chosen} == {"d0", "d1"}


def test_in_turn_a_worker_that_is_gone_is_passed_over() -> None:
    policy = policy_of("round_robin")
    fleets = [named("d0", "d1", "d2")] * 2 + [named("d0", "d2")] * 2
    assert [policy.choose(request_of(1), [], fleet).decode_id for fleet in fleets] == ["d0", "d1", "d2", "d0"]


def test_least_loaded_goes_by_prompt_tokens_and_by_sequences_then_tokens() -> None:
    loads = LoadTracker()
    Charge(loads, Placement("p0", "d0", ""), RequestLoad(1000, 1, 2000))
    Charge(loads, Placement("p1", "d1", ""), RequestLoad(10, 1, 20))
    Charge(loads, Placement("p1", "d2", ""), RequestLoad(10, 3, 13))
    placement = policy_of("least_loaded", loads).choose(request_of(1), named("p0", "p1"), named("d0", "d1", "d2"))
    assert (placement.prefill_id, placement.decode_id) == ("p1", "d1")
    assert placement.reason == "disaggregated: p1 -> d1, least work"


def test_while_nobody_knows_anything_the_least_loaded_are_chosen() -> None:
    placement = policy_of("predicted").choose(request_of(100), named("p0", "p1"), named("d0"))
    assert placement.reason == "disaggregated: p0 -> d0, least work"


def test_a_cached_prefix_is_worth_a_queue_but_not_any() -> None:
    loads = LoadTracker()
    policy = policy_of("predicted", loads)
    prefill = [FakeCandidate("p0", COST), FakeCandidate("p1", COST, cached=3000)]
    decode = [FakeCandidate("d0", COST)]
    Charge(loads, Placement(None, "d0", ""), RequestLoad(10, 1, 100))
    chosen = [place(policy, loads, 4000, prefill, decode).prefill_id for _ in range(5)]
    assert chosen == ["p1", "p1", "p1", "p0", "p1"], "0.2, 0.4, 0.6, then 0.8 s against as much on p0"
    request = request_of(4000, uses_cache=False)
    assert policy_of("predicted").choose(request, prefill, decode).prefill_id != "p1"


def test_the_reason_says_what_was_predicted() -> None:
    loads = LoadTracker()
    Charge(loads, Placement(None, "d0", ""), RequestLoad(10, 1, 100))
    prefill = [FakeCandidate("p0", COST, cached=1000)]
    placement = policy_of("predicted", loads).choose(request_of(2000), prefill, workers("d0"))
    assert placement.reason == ("disaggregated: p0 -> d0, first token predicted after 204 ms, 1000 of 2000 cached")
    assert placement.num_cached_tokens == 1000


def test_a_slow_worker_gets_less() -> None:
    loads = LoadTracker()
    policy = policy_of("predicted", loads)
    prefill = [FakeCandidate("p0", SLOW), FakeCandidate("p1", COST)]
    busy(loads, "d0", 190)  # it has no time for prompts
    chosen = Counter(place(policy, loads, 1000, prefill, workers("d0")).prefill_id for _ in range(22))
    assert chosen["p1"] == 20 and chosen["p0"] == 2


def test_a_worker_that_has_measured_nothing_is_taken_for_as_quick_as_the_others() -> None:
    loads = LoadTracker()
    policy = policy_of("predicted", loads)
    prefill = [FakeCandidate("p0"), FakeCandidate("p1", COST)]
    busy(loads, "d0", 190)  # it has no time for prompts
    chosen = Counter(place(policy, loads, 1000, prefill, workers("d0")).prefill_id for _ in range(10))
    assert chosen == {"p0": 5, "p1": 5}


def test_a_decode_worker_that_has_seen_no_prompt_is_not_taken_for_one_that_computes_them_in_no_time() -> None:
    loads = LoadTracker()
    only_decodes = replace(COST, prompt_token_s=0.0, attended_s=0.0)
    Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(100, 1, 200))
    decode = [FakeCandidate("d0", only_decodes)]
    busy(loads, "d0")
    assert policy_of("predicted", loads).choose(request_of(1000), workers("p0"), decode).prefill_id == "p0"


def test_a_full_decode_worker_is_left_for_a_slower_one_with_room() -> None:
    loads = LoadTracker()
    decode = [FakeCandidate("d0", COST, kv_tokens=1000), FakeCandidate("d1", replace(COST, fixed_s=0.0045))]
    policy = policy_of("predicted", loads)
    assert policy.choose(request_of(100), workers("p0"), decode).decode_id == "d0"
    Charge(loads, Placement("p0", "d0", ""), RequestLoad(100, 1, 1000))
    assert policy.choose(request_of(100), workers("p0"), decode).decode_id == "d1"


def busy(loads: LoadTracker, decode_id: str, num_sequences: int = 4) -> None:
    """Its prompts are computed; it decodes."""
    for _ in range(num_sequences):
        Charge(loads, Placement("elsewhere", decode_id, ""), RequestLoad(50, 1, 150)).prefill_done()


def test_a_short_prompt_is_computed_where_it_decodes_while_prefill_is_busy() -> None:
    loads = LoadTracker()
    busy(loads, "d0")
    Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(5000, 1, 6000))
    short = policy_of("predicted", loads).choose(request_of(100), workers("p0"), workers("d0"))
    assert short.prefill_id is None and short.reason == "local prefill on d0: first token predicted after 28 ms"
    assert short.kind is PlacementKind.LOCAL_SHORT


def test_a_long_prompt_is_computed_beside_what_decodes_when_that_is_sooner_than_a_wait_for_prefill() -> None:
    loads = LoadTracker()
    busy(loads, "d0", 1)  # of 37.5 ms, a step of it takes 4.2 and leaves the rest for prompts
    waiting = Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(2000, 1, 3000))
    long = policy_of("predicted", loads).choose(request_of(1000), workers("p0"), workers("d0"))
    assert long.kind is PlacementKind.LOCAL_BESIDE and "after 230 ms" in long.reason
    waiting.prefill_done()
    assert policy_of("predicted", loads).choose(request_of(1000), workers("p0"), workers("d0")).prefill_id == "p0"
    Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(1000, 1, 3000))
    long = policy_of("predicted", loads).choose(request_of(1000), workers("p0"), workers("d0"))
    assert long.prefill_id == "p0", "0.2 s in the queue, and 0.2 s that nothing stretches"


def test_a_prompt_is_not_computed_where_the_many_that_decode_lose_more_than_it_gains() -> None:
    loads = LoadTracker()
    waiting = Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(2000, 1, 3000))
    policy = Predicted(RoutingContext(loads, objectives=Objectives(ttft_s=10.0)))
    busy(loads, "d0", 4)
    assert policy.choose(request_of(1000), workers("p0"), workers("d0")).prefill_id == "p0", (
        "0.8 s, not to wait for 0.4"
    )
    Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(4000, 1, 5000))
    assert policy.choose(request_of(1000), workers("p0"), workers("d0")).kind is PlacementKind.LOCAL_BESIDE, (
        "nor for 1.2"
    )
    waiting.prefill_done()
    busy(loads, "d0", 4)
    assert policy.choose(request_of(1000), workers("p0"), workers("d0")).prefill_id == "p0"
    late = Predicted(RoutingContext(loads, objectives=Objectives(ttft_s=0.9)))
    assert late.choose(request_of(1000), workers("p0"), workers("d0")).kind is PlacementKind.LOCAL_BESIDE, (
        "which keeps it"
    )


def test_an_idle_decode_worker_computes_a_long_prompt_too_when_prefill_is_busy() -> None:
    loads = LoadTracker()
    Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(5000, 1, 6000))
    placement = policy_of("predicted", loads).choose(request_of(1000), workers("p0"), workers("d0"))
    assert placement.prefill_id is None


def test_expected_output_follows_what_ends() -> None:
    """Long outputs make the quicker decode worker worth waiting for room."""
    loads, lengths = LoadTracker(), OutputLengths()
    policy = policy_of("predicted", loads, lengths)
    lengths.add(1, 1000)
    decode = [FakeCandidate("d0", COST), FakeCandidate("d1", SLOW)]
    busy(loads, "d0", 8)
    placement = policy.choose(request_of(100, most_output=1000), workers("p0"), decode)
    assert placement.decode_id == "d0"


def test_a_choice_looks_at_each_worker_once_however_many_pairs_there_are() -> None:
    asked: Counter[str] = Counter()

    class Asked(FakeCandidate):
        def num_cached_tokens(self, prompt: PromptHashes) -> int:
            asked[self.worker_id] += 1
            return 0

    prefill = [Asked(f"p{i}", COST) for i in range(64)]
    decode = [Asked(f"d{i}", COST) for i in range(64)]
    policy_of("predicted").choose(request_of(1000), prefill, decode)
    assert set(asked.values()) == {1} and len(asked) == 128


def test_objectives_that_change_count_from_the_next_request_on() -> None:
    context = RoutingContext(objectives=Objectives(tpot_s=0.001))
    policy = Predicted(context)
    fleet = workers("p0", cost=SLOW), workers("d0")
    assert policy.choose(request_of(100), *fleet).kind is PlacementKind.DISAGGREGATED
    context.objectives = Objectives(tpot_s=0.1)
    assert policy.choose(request_of(100), *fleet).kind is PlacementKind.LOCAL_SHORT


def test_what_a_worker_learns_counts_from_the_next_choice_on() -> None:
    policy = policy_of("predicted")
    for slow, quick in (("d0", "d1"), ("d1", "d0")):
        decode = [FakeCandidate(slow, SLOW), FakeCandidate(quick, COST)]
        decode.sort(key=lambda worker: worker.worker_id)
        assert policy.choose(request_of(100), workers("p0"), decode).decode_id == quick
