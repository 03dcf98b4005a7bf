"""Sessions go back to the workers of their last turn, where that costs nothing, and what a placement is called."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from candidates import FakeCandidate, request_of
from wired_router import ManualClock, WiredRouter, run

from cluster.config.choices import PolicyName
from cluster.errors import InvalidRequest
from cluster.pb import worker_pb2
from cluster.step_cost import StepCost
from router.api.call import Principal
from router.routing.load_tracker import Charge, LoadTracker, Placement, PlacementKind, RequestLoad
from router.routing.policies import policy_class
from router.routing.policies.interface import Policy, RoutingContext, SessionKey
from router.routing.policies.predicted import Sessions

COST = StepCost(fixed_s=0.004, prompt_token_s=0.0002, attended_s=0.0, sequence_s=0.0002, kv_token_s=1e-7)
A, B = SessionKey("one", "a"), SessionKey("one", "b")


def workers(*worker_ids: str, cost: StepCost = COST) -> list[FakeCandidate]:
    return [FakeCandidate(worker_id, cost) for worker_id in worker_ids]


PREFILL, DECODE = workers("p0", "p1"), workers("d0", "d1")


def policy_of(loads: LoadTracker | None = None, name: PolicyName = "predicted") -> Policy:
    return policy_class(name)(RoutingContext(loads or LoadTracker()))


def test_a_session_is_known_by_its_tenant_and_its_name() -> None:
    sessions = Sessions()
    sessions.on_placed(A, Placement("p0", "d0", ""))
    sessions.on_placed(None, Placement("p1", "d1", ""))
    assert sessions.home_of(A) == Placement("p0", "d0", "")
    assert sessions.home_of(SessionKey("two", "a")) is None and sessions.home_of(None) is None
    sessions.on_placed(A, Placement(None, "d1", ""))
    assert sessions.home_of(A) == Placement(None, "d1", "") and len(sessions) == 1


def test_only_so_many_sessions_are_kept_and_the_one_that_is_longest_silent_goes() -> None:
    sessions = Sessions(most=2)
    for key in (A, B, A, SessionKey("one", "c")):
        sessions.on_placed(key, Placement("p0", "d0", ""))
    assert sessions.home_of(B) is None and sessions.home_of(A) is not None and len(sessions) == 2


@pytest.mark.parametrize(("lost", "is_kept"), [("p0", False), ("d0", False), ("p1", True)])
def test_with_a_worker_its_sessions_are_forgotten(lost: str, is_kept: bool) -> None:
    sessions = Sessions()
    sessions.on_placed(A, Placement("p0", "d0", ""))
    sessions.on_worker_lost(lost)
    assert (sessions.home_of(A) is not None) is is_kept


def test_among_equals_a_session_goes_where_it_was() -> None:
    policy = policy_of()
    request = request_of(2000, session="s")
    policy.on_placed(request, Placement("p1", "d1", ""))
    chosen = policy.choose(request, PREFILL, DECODE)
    assert (chosen.prefill_id, chosen.decode_id, chosen.kind) == ("p1", "d1", PlacementKind.SESSION)
    assert chosen.reason == "disaggregated: p1 -> d1, first token predicted after 404 ms, where its session is"
    other = policy.choose(request_of(2000, session="t"), PREFILL, DECODE)
    assert (other.prefill_id, other.decode_id, other.kind) == ("p0", "d0", PlacementKind.DISAGGREGATED)
    policy.on_worker_lost("d1")
    assert policy.choose(request, PREFILL, DECODE).prefill_id == "p0"


def test_a_session_that_would_go_there_anyway_decides_nothing() -> None:
    policy = policy_of()
    request = request_of(2000, session="s")
    policy.on_placed(request, Placement("p0", "d0", ""))
    assert policy.choose(request, PREFILL, DECODE).kind is PlacementKind.DISAGGREGATED


def test_a_session_never_beats_what_ends_clearly_sooner() -> None:
    loads = LoadTracker()
    policy = policy_of(loads)
    request = request_of(2000, session="s")
    policy.on_placed(request, Placement("p1", "d1", ""))
    Charge(loads, Placement("p1", "elsewhere", ""), RequestLoad(50, 1, 100))
    assert policy.choose(request, PREFILL, DECODE).prefill_id == "p1", "14 ms of 1 s"
    Charge(loads, Placement("p1", "elsewhere", ""), RequestLoad(1000, 1, 2000))
    assert policy.choose(request, PREFILL, DECODE).prefill_id == "p0"
    cached = [PREFILL[1], replace(PREFILL[0], worker_id="p2", cached=1500)]
    assert policy_of().choose(request, cached, DECODE).prefill_id == "p2"


@pytest.mark.parametrize("name", ["least_loaded", "round_robin"])
def test_other_policies_know_no_sessions(name: PolicyName) -> None:
    policy = policy_of(name=name)
    request = request_of(2000, session="s")
    policy.on_placed(request, Placement("p1", "d1", ""))
    assert policy.choose(request, PREFILL, DECODE).prefill_id == "p0"


def test_the_next_turn_is_computed_where_the_last_answer_was_decoded() -> None:
    """Its blocks are on the decode worker alone: what is left to compute there is short."""
    prefill = [replace(p, cached=1000) for p in PREFILL]
    decode = [DECODE[0], replace(DECODE[1], cached=1900)]
    chosen = policy_of().choose(request_of(2000), prefill, decode)
    assert (chosen.prefill_id, chosen.decode_id, chosen.kind) == (None, "d1", PlacementKind.LOCAL_CACHED)
    assert chosen.num_cached_tokens == 1900


def test_what_the_decode_worker_has_need_not_be_handed_over() -> None:
    """A hand-off that moves half takes half the time, which is worth a slightly busier decode worker."""
    loads = LoadTracker()
    Charge(loads, Placement("elsewhere", "d1", ""), RequestLoad(10, 1, 100))
    decode = [DECODE[0], replace(DECODE[1], cached=2000)]
    policy, request = policy_of(loads), request_of(4000)
    assert policy.choose(request, PREFILL, decode).decode_id == "d0", "while nothing was handed over, it is free"
    policy.on_handoff(Placement("p0", "d0", ""), request.work, exposed_s=0.4)
    chosen = policy.choose(request, PREFILL, decode)
    assert (chosen.decode_id, chosen.num_present_tokens) == ("d1", 2000)
    policy_of(loads).on_handoff(Placement("p0", "d0", "", num_present_tokens=4000), request.work, exposed_s=0.0)


@pytest.mark.parametrize(
    ("num_tokens", "cached", "busy", "kind"),
    [
        (100, 0, "", PlacementKind.LOCAL_SHORT),
        (2000, 1950, "", PlacementKind.LOCAL_CACHED),
        (2000, 0, "p0", PlacementKind.LOCAL_IDLE),
        (2000, 0, "", PlacementKind.DISAGGREGATED),
    ],
)
def test_a_placement_has_a_kind(num_tokens: int, cached: int, busy: str, kind: PlacementKind) -> None:
    loads = LoadTracker()
    if busy:
        Charge(loads, Placement(busy, "elsewhere", ""), RequestLoad(5000, 1, 6000))
    elif kind is PlacementKind.DISAGGREGATED:
        Charge(loads, Placement("elsewhere", "d0", ""), RequestLoad(10, 1, 100))
    else:
        Charge(loads, Placement("p0", "elsewhere", ""), RequestLoad(100, 1, 200))
    decode = [replace(DECODE[0], cached=cached)]
    assert policy_of(loads).choose(request_of(num_tokens), PREFILL[:1], decode).kind is kind


def test_without_a_prefill_worker_that_is_the_kind() -> None:
    for name in get_args(PolicyName):
        assert policy_of(name=name).choose(request_of(10), [], DECODE).kind is PlacementKind.LOCAL_NO_PREFILL


@pytest.mark.parametrize("ttl_s", [0, 60])
def test_workers_are_told_of_a_session_whose_kv_is_to_be_kept(ttl_s: float) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"], session_ttl_s=ttl_s)
        router.submit(session_id="chat", principal=Principal("key", "acme"))
        router.submit()
        of_session, alone = router.workers["d0"].take_admits()
        assert of_session.HasField("session") is bool(ttl_s) and not alone.HasField("session")
        if ttl_s:
            told = worker_pb2.Session(tenant="acme", session_id="chat", ttl_s=60)
            assert of_session.session == told
            first = router.workers["p0"].take_admits()[:1]
            assert all(admit.session == told for admit in first)

    run(scenario)


def test_a_client_may_ask_for_less_than_the_operators_time_and_not_for_more() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, off = WiredRouter(clock, ["d0"], needs_prefill=False, session_ttl_s=600), WiredRouter(clock, ["d0"])
        for seconds in (300, 3600):
            router.submit(retain_s=seconds)
        router.submit(retain_s=300, session_id="chat")
        told = [(admit.session.session_id, admit.session.ttl_s) for admit in router.workers["d0"].take_admits()]
        assert told == [("", 300), ("", 600), ("chat", 600)]
        with pytest.raises(InvalidRequest, match=r"cache\.retain_for: must be between 0 and 86400"):
            router.submit(retain_s=86401)
        off.submit(retain_s=300)
        assert not any(admit.HasField("session") for admit in off.workers["d0"].take_admits())

    run(scenario)
