"""What a run is held to after its end: quotas of keys and fairness between tenants, from what became of requests."""

from __future__ import annotations

import pytest

from cluster.api_keys import KeyQuota
from cluster.errors import QuotaExceeded
from cluster.lifecycle import RequestState
from router.queue.quota import UNLIMITED
from simulate.client import RequestOutcome, SimRequest
from simulate.judgement import check_fairness, check_quotas
from simulate.workload import RequestShape


def outcome(
    number: int,
    at_s: float,
    placed_s: float | None,
    over_s: float,
    tenant: str = "a",
    *,
    quota: KeyQuota = UNLIMITED,
    weight: float = 1.0,
    num_prompt: int = 100,
    reason: str = "",
    output_s: list[float] | None = None,
) -> RequestOutcome:
    request = SimRequest(RequestShape(at_s, num_prompt, 10), tenant=tenant, weight=weight, quota=quota)
    state = RequestState.REJECTED if placed_s is None else RequestState.FINISHED
    made = RequestOutcome(number, request, state, reason, placed_s=placed_s, over_s=over_s)
    made.output_s = output_s or []
    return made


def refused(number: int, at_s: float, quota: KeyQuota, **values: int) -> RequestOutcome:
    return outcome(number, at_s, None, at_s, quota=quota, reason=QuotaExceeded.reason, **values)


@pytest.mark.parametrize(
    ("quota", "limit"),
    [
        (KeyQuota(max_concurrent=1), "max_concurrent"),
        (KeyQuota(requests_per_min=1), "requests_per_min"),
        (KeyQuota(prompt_tokens_per_min=150), "prompt_tokens_per_min"),
        (KeyQuota(output_tokens_per_min=2), "output_tokens_per_min"),
    ],
)
def test_a_request_that_was_accepted_beyond_a_quota_is_found_and_one_that_was_refused_for_it_is_not(
    quota: KeyQuota, limit: str
) -> None:
    first = outcome(0, 1.0, 1.0, 5.0, quota=quota, output_s=[1.5, 1.6])
    check_quotas([first, refused(1, 2.0, quota)])
    with pytest.raises(AssertionError, match=f"accepted beyond its quota of {limit}"):
        check_quotas([first, outcome(1, 2.0, 2.0, 5.0, quota=quota)])


def test_a_request_that_was_refused_for_a_quota_that_it_keeps_is_found() -> None:
    quota = KeyQuota(max_concurrent=2, requests_per_min=60)
    first = outcome(0, 1.0, 1.0, 1.5, quota=quota)
    check_quotas([first, outcome(1, 2.0, 2.0, 5.0, quota=quota)])
    with pytest.raises(AssertionError, match="refused for its quota, which it keeps"):
        check_quotas([first, refused(1, 2.0, quota)])


def test_quotas_are_each_keys_own_and_flow_back() -> None:
    quota = KeyQuota(requests_per_min=1)
    first = outcome(0, 1.0, 1.0, 1.5, quota=quota)
    check_quotas([first, outcome(1, 2.0, 2.0, 5.0, "b", quota=quota), outcome(2, 62.0, 62.0, 63.0, quota=quota)])


def served_in(order: str, weights: dict[str, float]) -> list[RequestOutcome]:
    """Requests of tenants, all of which came at once, served one a second in this order."""
    return [
        outcome(number, 0.0, 1.0 + number, 9.0 + number, tenant, weight=weights.get(tenant, 1.0))
        for number, tenant in enumerate(order)
    ]


def test_tenants_that_are_served_in_turn_by_their_weights_are_treated_fairly() -> None:
    check_fairness(served_in("abababababababab", {}))
    check_fairness(served_in("aaabaaabaaabaaab", {"a": 3.0}))


@pytest.mark.parametrize(("order", "weights"), [("aaaaaaaaabbbbbbbbb", {}), ("abababababababababab", {"a": 9.0})])
def test_a_tenant_that_gets_more_than_its_share_is_found(order: str, weights: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="while both waited"):
        check_fairness(served_in(order, weights))
