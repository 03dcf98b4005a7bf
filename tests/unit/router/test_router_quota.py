"""Quotas of API keys: what is charged when, and how long the wait is that a client is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api_keys import KeyQuota
from router.api.call import ANYONE, Principal
from router.queue.quota import Quotas, TokenBucket


def principal(**limits: int) -> Principal:
    return Principal(key_id="k1", tenant="t", quota=KeyQuota(**limits))


def test_a_key_without_limits_is_never_stopped() -> None:
    quotas = Quotas()
    for _ in range(1000):
        assert quotas.exceeded(ANYONE, 10**6, 0.0) is None
        quotas.begin(ANYONE, 10**6, 0.0)


def test_a_minutes_requests_may_come_at_once_and_the_next_waits_for_its_share_of_a_minute() -> None:
    quotas, who = Quotas(), principal(requests_per_min=6)
    for _ in range(6):
        assert quotas.exceeded(who, 1, 100.0) is None
        quotas.begin(who, 1, 100.0)
    exceeded = quotas.exceeded(who, 1, 104.0)
    assert exceeded is not None and exceeded.limit == "requests_per_min" and exceeded.wait_s == pytest.approx(6.0)
    assert quotas.exceeded(who, 1, 104.0 + exceeded.wait_s + 1e-6) is None


def test_asking_charges_nothing() -> None:
    quotas, who = Quotas(), principal(requests_per_min=1, prompt_tokens_per_min=10)
    for _ in range(5):
        assert quotas.exceeded(who, 10, 0.0) is None


def test_a_prompt_waits_until_its_tokens_are_there() -> None:
    quotas, who = Quotas(), principal(prompt_tokens_per_min=600)
    quotas.begin(who, 500, 0.0)
    assert quotas.exceeded(who, 100, 0.0) is None
    exceeded = quotas.exceeded(who, 300, 0.0)
    assert (
        exceeded is not None and exceeded.wait_s == pytest.approx(20.0) and "600 prompt tokens" in exceeded.description
    )


def test_a_prompt_of_more_than_a_minutes_worth_never_passes_and_waiting_is_not_advised() -> None:
    exceeded = Quotas().exceeded(principal(prompt_tokens_per_min=600), 601, 0.0)
    assert exceeded is not None and exceeded.wait_s is None and "601" in exceeded.description


def test_output_is_charged_as_it_comes_and_a_key_in_debt_waits_until_it_has_recovered() -> None:
    quotas, who = Quotas(), principal(output_tokens_per_min=60)
    quotas.begin(who, 5, 0.0)
    quotas.add_output(who, 60 + 30, 0.0)
    exceeded = quotas.exceeded(who, 5, 0.0)
    assert exceeded is not None and exceeded.limit == "output_tokens_per_min"
    assert exceeded.wait_s == pytest.approx(31.0)
    assert quotas.exceeded(who, 5, 31.1) is None


def test_output_at_the_allowed_rate_leaves_a_key_free() -> None:
    quotas, who = Quotas(), principal(output_tokens_per_min=60)
    quotas.begin(who, 5, 0.0)
    for second in range(300):
        quotas.add_output(who, 1, float(second))
    assert quotas.exceeded(who, 5, 300.0) is None


def test_so_many_requests_may_be_live_and_one_that_ends_makes_room() -> None:
    quotas, who = Quotas(), principal(max_concurrent=2)
    for _ in range(2):
        assert quotas.exceeded(who, 1, 0.0) is None
        quotas.begin(who, 1, 0.0)
    exceeded = quotas.exceeded(who, 1, 0.0)
    assert exceeded is not None and exceeded.limit == "max_concurrent" and "2" in exceeded.description
    quotas.end(who)
    assert quotas.exceeded(who, 1, 0.0) is None


@pytest.mark.parametrize("limit", ["requests_per_min", "prompt_tokens_per_min", "output_tokens_per_min"])
def test_a_limit_of_nothing_allows_nothing(limit: str) -> None:
    exceeded = Quotas().exceeded(principal(**{limit: 0}), 1, 0.0)
    assert exceeded is not None and exceeded.limit == limit and exceeded.wait_s is None


def test_a_limit_that_changes_keeps_what_was_used() -> None:
    quotas = Quotas()
    for _ in range(6):
        quotas.begin(principal(requests_per_min=6), 1, 0.0)
    more, less = principal(requests_per_min=12), principal(requests_per_min=3)
    assert quotas.exceeded(more, 1, 0.0) is None
    exceeded = quotas.exceeded(less, 1, 0.0)
    assert exceeded is not None and exceeded.wait_s == pytest.approx(4 / 3 * 60)


def test_keys_do_not_share() -> None:
    quotas, who = Quotas(), principal(requests_per_min=1)
    quotas.begin(who, 1, 0.0)
    other = Principal(key_id="k2", tenant="t", quota=who.quota)
    assert quotas.exceeded(who, 1, 0.0) is not None and quotas.exceeded(other, 1, 0.0) is None


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50)), max_size=100))
def test_never_more_passes_than_a_minutes_worth_and_what_time_brought(
    per_min: int, asks: list[tuple[float, int]]
) -> None:
    bucket, now, passed = TokenBucket(per_min, 0.0), 0.0, 0
    for gap_s, amount in asks:
        now += gap_s
        wait_s = bucket.wait_s(amount, now)
        if amount <= per_min and wait_s > 0:
            assert bucket.wait_s(amount, now + wait_s + 1e-6) == 0
            now += wait_s + 1e-6
        if amount <= per_min:
            bucket.take(amount, now)
            passed += amount
        assert passed <= per_min + now * per_min / 60 + 1e-3
