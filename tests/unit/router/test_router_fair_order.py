"""Whose turn it is: classes, tenants by weight, arrival; and that nobody is starved."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.queue.fair_order import LOWER_SHARE, FairOrder

TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def queue(order: FairOrder, entry_id: str, tenant: str = "a", *, priority: int = 0, cost: int = 10) -> None:
    order.add(entry_id, tenant=tenant, weight=TENANTS[tenant], priority=priority, cost=cost)


def serve_all(order: FairOrder) -> list[str]:
    return [order.serve() for _ in range(len(order))]


def test_a_tenants_requests_run_as_they_came() -> None:
    order = FairOrder()
    for index, cost in enumerate((30, 10, 20)):
        queue(order, f"{index}", cost=cost)
    assert list(order.in_order()) == serve_all(order) == ["0", "1", "2"]
    with pytest.raises(KeyError):
        order.first()


def test_a_tenant_that_comes_late_does_not_wait_for_all_of_another() -> None:
    order = FairOrder()
    for index in range(100):
        queue(order, f"a{index}")
    assert [order.serve() for _ in range(3)] == ["a0", "a1", "a2"]
    queue(order, "b0", "b")
    assert order.serve() == "b0" or order.serve() == "b0"


def test_weights_share_the_work_and_not_the_requests() -> None:
    order = FairOrder()
    for index in range(300):
        queue(order, f"a{index}", "a", cost=40)
        queue(order, f"b{index}", "b", cost=10)
    served: Counter[str] = Counter()
    while served.total() < 3000:
        first = order.serve()
        served[first[0]] += 40 if first[0] == "a" else 10
    assert abs(served["a"] / 1.0 - served["b"] / 2.0) <= 40 + 10 / 2.0


def test_the_order_that_is_foretold_is_the_order_of_service() -> None:
    order = FairOrder()
    for index in range(12):
        for tenant, cost in (("a", 10), ("b", 30), ("c", 7)):
            queue(order, f"{tenant}{index}", tenant, cost=cost + index % 3)
    assert list(order.in_order()) == serve_all(order)


def test_who_did_not_wait_has_no_claim_from_that_time() -> None:
    order = FairOrder()
    for index in range(60):
        queue(order, f"a{index}")
    queue(order, "c0", "c", cost=5)
    for _ in range(30):
        order.serve()
    for index in range(1, 20):
        queue(order, f"c{index}", "c")
    turns = [order.serve()[0] for _ in range(15)]
    assert 4 <= turns.count("c") <= 6, "half the weight, a third of the turns"


def test_a_higher_class_goes_first_and_a_lower_one_keeps_its_share() -> None:
    order = FairOrder()
    for index in range(70):
        queue(order, f"low{index}", priority=-1)
        queue(order, f"high{index}", priority=5)
    turns = [order.serve()[:-1][:3] for _ in range(2 * LOWER_SHARE)]
    assert turns[: LOWER_SHARE - 1] == ["hig"] * (LOWER_SHARE - 1) and turns.count("low") == 2


def test_those_that_ran_before_are_at_the_head_in_the_order_of_their_return() -> None:
    order = FairOrder()
    queue(order, "new", priority=10)
    order.add_returned("one", tenant="a", cost=5)
    order.add_returned("two", tenant="a", cost=5)
    assert order.ahead_of("b", 1.0, 10) == 20 and order.of_tenant("a") == (3, 20)
    assert order.num_returned == 2 and order.first(among_returned=False) == "new"
    assert list(order.in_order()) == serve_all(order) == ["one", "two", "new"]
    assert order.cost == 0 and order.of_tenant("a") == (0, 0)


def test_only_what_still_waits_runs_before_a_newcomer() -> None:
    order = FairOrder()
    for index in range(4):
        queue(order, f"{index}", priority=1)
    assert order.ahead_of("b", 1.0, 0) == 40
    order.serve()
    order.remove("3")
    assert order.ahead_of("b", 1.0, 0) == order.cost == 20


def test_who_leaves_without_running_is_not_charged() -> None:
    order = FairOrder()
    for index in range(10):
        queue(order, f"a{index}")
        queue(order, f"b{index}", "b", cost=20)
    for index in range(5):
        order.remove(f"a{index}")
    assert {order.serve(), order.serve()} == {"a5", "b0"}
    assert [entry for entry in order.in_order() if entry[0] == "a"] == ["a6", "a7", "a8", "a9"]


def test_what_cannot_be_queued_is_an_error_of_the_program() -> None:
    order = FairOrder()
    queue(order, "x")
    for entry_id, weight, cost in (("x", 1.0, 1), ("y", 0.0, 1), ("y", float("nan"), 1), ("y", 1.0, 0)):
        with pytest.raises(ValueError, match="cannot queue"):
            order.add(entry_id, tenant="a", weight=weight, priority=0, cost=cost)


events = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "serve", "serve", "remove", "return"]),
        st.sampled_from(sorted(TENANTS)),
        st.integers(-1, 1),
        st.integers(1, 50),
    ),
    max_size=120,
)


@given(events)
@settings(max_examples=200)
def test_what_is_counted_is_what_waits_and_all_of_it_runs_once(story: list[tuple[str, str, int, int]]) -> None:
    order, waiting, num_added = FairOrder(), dict[str, tuple[str, int]](), 0
    for what, tenant, priority, cost in story:
        if what == "add" or (what == "return" and num_added):
            entry_id = f"{num_added}"
            num_added += 1
            waiting[entry_id] = (tenant, cost)
            if what == "add":
                queue(order, entry_id, tenant, priority=priority, cost=cost)
            else:
                order.add_returned(entry_id, tenant=tenant, cost=cost)
        elif what == "serve" and waiting:
            first = order.first()
            assert order.serve() == first
            del waiting[first]
        elif what == "remove" and waiting:
            gone = sorted(waiting)[cost % len(waiting)]
            order.remove(gone)
            del waiting[gone]
        assert len(order) == len(waiting) and order.cost == sum(c for _, c in waiting.values())
        assert sorted(order.in_order()) == sorted(waiting)
        totals: dict[str, list[int]] = defaultdict(list)
        for name, entry_cost in waiting.values():
            totals[name].append(entry_cost)
        for name in TENANTS:
            assert order.of_tenant(name) == (len(totals[name]), sum(totals[name]))
    assert sorted(serve_all(order)) == sorted(waiting)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.lists(st.integers(1, 50), min_size=1, max_size=200))
@settings(max_examples=100)
def test_two_that_both_wait_are_never_further_apart_than_one_request_of_each(a: list[int], b: list[int]) -> None:
    order = FairOrder()
    for name, costs in (("a", a), ("b", b)):
        for index, cost in enumerate(costs):
            queue(order, f"{name}{index}", name, cost=cost)
    served: Counter[str] = Counter()
    left = {"a": len(a), "b": len(b)}
    while all(left.values()):
        first = order.serve()
        name, cost = first[0], (a if first[0] == "a" else b)[int(first[1:])]
        served[name] += cost
        left[name] -= 1
        assert abs(served["a"] / TENANTS["a"] - served["b"] / TENANTS["b"]) <= 50 / TENANTS["a"] + 50 / TENANTS["b"]


@given(
    st.integers(1, 50), st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=300), st.integers(-1, 1)
)
@settings(max_examples=100)
def test_nobody_is_starved_however_many_come_later(cost: int, later: list[tuple[str, int]], priority: int) -> None:
    """The victim's tenant has half the weight, and the others' class is as high or higher."""
    order = FairOrder()
    queue(order, "victim", "c", priority=-1, cost=cost)
    endless = iter([*later, *([("a", 50)] * 2000)])
    work = 0
    for _ in range(5):
        tenant, size = next(endless)
        queue(order, f"{tenant}{size}-{work}-{len(order)}", tenant, priority=max(priority, -1), cost=size)
    for number in range(2000):
        first = order.serve()
        if first == "victim":
            break
        tenant, size = next(endless)
        work += size
        queue(order, f"x{number}", tenant, priority=max(priority, -1), cost=size)
    else:
        raise AssertionError("it never ran")
    assert work <= (LOWER_SHARE - 1) * cost + 50 * LOWER_SHARE + 2 * 50 * (1 + 2)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(-1, 1)), max_size=60), st.integers(0, 1)
)
@example([("a", 1, 0), ("b", 1, 0), ("b", 3, 0)], 0)
@settings(max_examples=300)
def test_what_is_predicted_to_run_before_a_newcomer_is_enough(
    others: list[tuple[str, int, int]], priority: int
) -> None:
    order = FairOrder()
    for index, (tenant, cost, other_priority) in enumerate(others):
        queue(order, f"{index}", tenant, priority=other_priority, cost=cost)
    costs = {f"{index}": cost for index, (_, cost, _) in enumerate(others)}
    predicted = order.ahead_of("a", TENANTS["a"], priority)
    queue(order, "newcomer", "a", priority=priority, cost=10)
    before = 0
    while (first := order.serve()) != "newcomer":
        before += costs[first]
    assert before <= predicted + 1e-6
