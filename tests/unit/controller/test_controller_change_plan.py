"""Which steps lead from one split of the workers to another, and which splits are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.schema import ROLES, RoleName
from cluster.errors import FailedPrecondition
from controller.change_plan import (
    OTHER,
    Flip,
    Member,
    Replace,
    Start,
    Step,
    Stop,
    Wanted,
    apply_step,
    plan_ratio,
    ratio_of,
)


def fleet(prefill: int, decode: int, tp_size: int = 1) -> list[Member]:
    counts: dict[RoleName, int] = {"prefill": prefill, "decode": decode}
    return [Member(f"{role}-{n}", role, tp_size) for role, count in counts.items() for n in range(count)]


def split(prefill: int, decode: int, *, least: int = 1) -> dict[RoleName, Wanted]:
    return {"prefill": Wanted(prefill, min_workers=least), "decode": Wanted(decode, min_workers=least)}


def texts(steps: Sequence[Step]) -> list[str]:
    return [str(step) for step in steps]


def test_a_split_of_the_same_workers_is_reached_by_flips_alone() -> None:
    steps = plan_ratio(fleet(1, 3), split(3, 1))
    assert texts(steps) == ["flip decode-1 to prefill", "flip decode-2 to prefill"]


def test_workers_go_back_to_the_role_they_were_started_for() -> None:
    members = fleet(1, 3)
    for step in plan_ratio(members, split(3, 1)):
        members = apply_step(members, step)
    assert texts(plan_ratio(members, split(2, 2))) == ["flip decode-2 to decode"]


def test_nothing_is_planned_where_nothing_differs() -> None:
    assert plan_ratio(fleet(2, 2), split(2, 2)) == ()


def test_a_worker_that_is_down_flips_before_one_that_serves() -> None:
    members = [*fleet(1, 0), Member("decode-0", "decode", 1, is_ready=False), Member("decode-1", "decode", 1)]
    assert plan_ratio(members, split(2, 1)) == (Flip("decode-0", "prefill"),)


def test_more_devices_are_a_start_and_fewer_a_stop() -> None:
    assert plan_ratio(fleet(1, 1), split(1, 2)) == (Start("decode-1", "decode", 1),)
    assert plan_ratio(fleet(1, 2), split(1, 1)) == (Stop("decode-1"),)
    assert plan_ratio(fleet(2, 1), split(1, 1)) == (Stop("prefill-1"),)


def test_another_tensor_parallel_size_is_a_start_before_a_stop() -> None:
    wanted: dict[RoleName, Wanted] = {"prefill": Wanted(1, 1, 1), "decode": Wanted(1, 2, 1)}
    assert plan_ratio(fleet(1, 1), wanted) == (Start("decode-1", "decode", 2), Stop("decode-0"))


def test_devices_that_are_taken_are_freed_first_where_the_minimum_allows() -> None:
    wanted: dict[RoleName, Wanted] = {"prefill": Wanted(1, 1, 1), "decode": Wanted(1, 2, 1)}
    steps = plan_ratio(fleet(1, 2), wanted, max_devices=4)
    assert texts(steps) == ["drain and stop decode-0", "start decode-2 on 2 devices", "drain and stop decode-1"]


def test_a_change_that_takes_more_devices_on_its_way_than_there_are_names_how_many() -> None:
    wanted: dict[RoleName, Wanted] = {"prefill": Wanted(1, 1, 1), "decode": Wanted(1, 2, 1)}
    with pytest.raises(FailedPrecondition, match=r"it takes 4 devices and Ray has 3"):
        plan_ratio(fleet(1, 1), wanted, max_devices=3)


def test_the_last_two_workers_change_places_by_a_start_and_a_stop() -> None:
    members = [Member("prefill-0", "prefill", 1), Member("decode-0", "decode", 2)]
    wanted: dict[RoleName, Wanted] = {"prefill": Wanted(1, 2, 1), "decode": Wanted(1, 1, 1)}
    steps = plan_ratio(members, wanted)
    assert sum(isinstance(step, Flip) for step in steps) == 1
    for step in steps:
        members = apply_step(members, step)
    assert {(m.role, m.tp_size) for m in members} == {("prefill", 2), ("decode", 1)}


def test_a_worker_that_leaves_is_the_one_that_stops() -> None:
    assert plan_ratio(fleet(1, 3), split(1, 2), leaving=["decode-1"]) == (Stop("decode-1"),)


def test_a_worker_that_drains_counts_for_no_role_and_is_stopped() -> None:
    members = [*fleet(1, 1), Member("decode-1", "decode", 1, is_draining=True)]
    assert ratio_of(members) == "1:1"
    assert plan_ratio(members, split(1, 1)) == (Stop("decode-1"),)


def stale(members: Sequence[Member], *roles: RoleName) -> list[Member]:
    return [replace(m, is_stale=m.role in roles) for m in members]


def shown(steps: Sequence[Step]) -> list[str]:
    return [str(step) for step in steps]


def test_workers_with_old_settings_give_way_one_at_a_time_to_new_ones_beside_them() -> None:
    wanted: dict[RoleName, Wanted] = {"prefill": Wanted(1), "decode": Wanted(2, min_workers=2)}
    for max_devices in (None, 4):
        assert shown(plan_ratio(stale(fleet(1, 2), "decode"), wanted, max_devices=max_devices)) == [
            "start decode-2 on 1 device",
            "drain and stop decode-0",
            "start decode-3 on 1 device",
            "drain and stop decode-1",
        ]


def test_where_no_device_is_free_workers_are_replaced_in_their_place_and_each_role_keeps_its_minimum() -> None:
    assert shown(plan_ratio(stale(fleet(1, 2), "decode"), split(1, 2), max_devices=3)) == [
        "drain decode-0 and start it with the new settings",
        "drain decode-1 and start it with the new settings",
    ]


def test_the_other_role_serves_both_while_the_only_worker_of_a_role_is_replaced() -> None:
    assert shown(plan_ratio(stale(fleet(1, 1), *ROLES), split(1, 1), max_devices=2)) == [
        "drain prefill-0 and start it with the new settings; decode workers serve both meanwhile",
        "drain decode-0 and start it with the new settings; prefill workers serve both meanwhile",
    ]


@pytest.mark.parametrize(
    ("members", "wanted"),
    [(fleet(0, 1), {"prefill": Wanted(0), "decode": Wanted(1)}), (fleet(2, 2), split(2, 2, least=2))],
    ids=["nobody stands in", "its role needs it"],
)
def test_where_no_worker_can_be_spared_a_change_of_settings_is_refused(
    members: list[Member], wanted: dict[RoleName, Wanted]
) -> None:
    with pytest.raises(FailedPrecondition, match=r"no worker can be stopped first .*min_workers, or free 1 device$"):
        plan_ratio(stale(members, "decode"), wanted, max_devices=len(members))


def test_a_worker_with_old_settings_is_not_flipped() -> None:
    assert shown(plan_ratio(stale(fleet(1, 2), "decode"), split(2, 1), max_devices=4)) == [
        "start prefill-1 on 1 device",
        "drain and stop decode-0",
        "start decode-2 on 1 device",
        "drain and stop decode-1",
    ]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (split(0, 4), "0 prefill workers cannot be: roles.prefill.min_workers is 1; 1 to 3 of 4 can"),
        (split(4, 0), "0 decode workers cannot be: roles.decode.min_workers is 1; 1 to 3 of 4 can"),
        (split(4, 0, least=0), "0 decode workers cannot be: only decode workers generate tokens; 1 to 4 of 4 can"),
        (split(3, 3), "that takes 6 devices and Ray has 4; ask for 4 at most"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_the_number_that_can(
    wanted: dict[RoleName, Wanted], problem: str
) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        plan_ratio(fleet(1, 3), wanted, max_devices=4)
    assert caught.value.message == problem


def test_a_worker_that_is_not_there_cannot_leave() -> None:
    with pytest.raises(FailedPrecondition, match="no worker decode-9; there are decode-0, prefill-0"):
        plan_ratio(fleet(1, 1), split(1, 1), leaving=["decode-9"])


SIZES = st.sampled_from([1, 2])
ROLE_NAMES: st.SearchStrategy[RoleName] = st.sampled_from(ROLES)


@st.composite
def fleets(draw: st.DrawFn) -> list[Member]:
    """At least one decode worker takes work."""
    kinds = draw(st.lists(st.tuples(ROLE_NAMES, SIZES, st.booleans(), st.booleans(), st.booleans()), max_size=5))
    first = Member("decode-0", "decode", draw(SIZES), is_stale=draw(st.booleans()))
    return [first, *(Member(f"w-{n}", *kind) for n, kind in enumerate(kinds))]


@st.composite
def wants(draw: st.DrawFn) -> dict[RoleName, Wanted]:
    def one(role: RoleName) -> Wanted:
        num_workers = draw(st.integers(int(role == "decode"), 5))
        return Wanted(num_workers, draw(SIZES), draw(st.integers(0, num_workers)))

    return {role: one(role) for role in ROLES}


def count(members: Sequence[Member], role: RoleName) -> int:
    return sum(m.role == role and not m.is_draining for m in members)


def devices(members: Sequence[Member]) -> int:
    return sum(m.tp_size for m in members)


@given(fleets(), wants(), st.one_of(st.none(), st.integers(0, 8)))
def test_every_plan_ends_in_what_is_wanted_and_keeps_every_minimum_on_its_way(
    members: list[Member], wanted: dict[RoleName, Wanted], spare: int | None
) -> None:
    needed = sum(want.num_workers * want.tp_size for want in wanted.values())
    limit = None if spare is None else max(needed, devices(members)) + spare
    try:
        steps = plan_ratio(members, wanted, max_devices=limit)
    except FailedPrecondition:
        assert limit is not None, "without a limit every plan can be met"
        return
    now = members
    for step in steps:
        before, now = now, apply_step(now, step)
        for role, want in wanted.items():
            least = max(want.min_workers, int(role == "decode"))
            assert count(now, role) >= min(least, count(before, role)), f"{step} leaves too few {role} workers"
            if isinstance(step, Replace) and step.role == role:
                meanwhile = count(before, role) - 1
                assert step.is_last == (meanwhile == 0)
                assert meanwhile >= least or (step.is_last and least == 1 and count(before, OTHER[role]))
        assert limit is None or devices(now) <= limit
        assert len({m.worker_id for m in now}) == len(now)
    assert not any(m.is_draining or m.is_stale for m in now)
    for role, want in wanted.items():
        assert [m.tp_size for m in now if m.role == role] == [want.tp_size] * want.num_workers
    assert plan_ratio(now, wanted) == ()


@given(fleets(), wants())
def test_as_many_workers_flip_as_can_unless_both_roles_exchange_some(
    members: list[Member], wanted: dict[RoleName, Wanted]
) -> None:
    """In an exchange one of the two may have to stay until the other has been started."""
    can_flip: dict[RoleName, int] = {}
    for role, want in wanted.items():
        other = wanted["decode" if role == "prefill" else "prefill"]
        free = [m for m in members if not (m.is_draining or m.is_stale) and m.tp_size == want.tp_size]
        own, theirs = ([m for m in free if (m.role == role) is is_own] for is_own in (True, False))
        keep = other.num_workers if want.tp_size == other.tp_size else 0
        missing = want.num_workers - min(want.num_workers, len(own))
        can_flip[role] = min(missing, max(0, len(theirs) - keep))
    flips = [step.role for step in plan_ratio(members, wanted) if isinstance(step, Flip)]
    if not all(can_flip.values()):
        assert {role: flips.count(role) for role in can_flip} == can_flip
