"""Which group holds which experts, and how they change places: without weights."""

from __future__ import annotations

from random import Random

import pytest

from engine.expert_placement import busiest_over_mean, even_groups, imbalance, rounds_to
from engine.models.experts import ExpertsConfig


def random_placement(random: Random, num_experts: int, num_groups: int) -> list[list[int]]:
    each, more = divmod(num_experts, num_groups)
    experts = random.sample(range(num_experts), num_experts)
    return [[experts.pop() for _ in range(each + (group < more))] for group in range(num_groups)]


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 8])
def test_experts_change_places_one_by_one_until_each_is_in_its_group(num_groups: int) -> None:
    for seed in range(100):
        random = Random(seed)
        before = random_placement(random, random.randrange(num_groups, 40), num_groups)
        goal = [set(held) for held in random_placement(random, sum(map(len, before)), num_groups)]
        rounds, after = rounds_to(goal, before)
        now = [list(held) for held in before]
        for moves in rounds:
            sent = {group: now[group][move.slot] for group, move in moves.items()}
            for group, move in moves.items():
                assert moves[move.source].destination == group, "what one sends nobody expects"
                now[group][move.slot] = sent[move.source]
        assert now == after
        assert [set(held) for held in after] == goal
        assert sum(map(len, rounds)) == sum(len(set(old) - new) for old, new in zip(before, goal, strict=True))


def test_groups_keep_their_sizes_and_a_skewed_load_becomes_even() -> None:
    """Shares as of a Zipf law, whose busiest expert has less than a group's mean."""
    for num_experts, num_groups in ((16, 2), (32, 4), (30, 4), (256, 8)):
        loads = [10_000 // (n + 3) for n in range(num_experts)]
        before = ExpertsConfig((True,), num_experts, 2, 64, True, num_groups=num_groups).first_placement
        assert imbalance(loads, before) > 1.4
        groups = even_groups(loads, before)
        assert [len(group) for group in groups] == [len(held) for held in before]
        assert set().union(*groups) == set(range(num_experts))
        assert imbalance(loads, groups) < 1.07, (num_experts, num_groups)


def test_the_hottest_experts_part_and_the_others_stay() -> None:
    slices = [[0, 1, 2], [3, 4, 5]]
    groups = even_groups([90, 80, 1, 1, 1, 1], slices)
    assert [len(group & {0, 1}) for group in groups] == [1, 1]
    assert sum(len(set(old) & new) for old, new in zip(slices, groups, strict=True)) == 4, "more moves than needed"
    assert rounds_to([set(held) for held in slices], slices) == ([], slices)


def test_no_load_is_even() -> None:
    assert busiest_over_mean([0, 0]) == 1
    assert busiest_over_mean([4, 0, 0, 0]) == 4
    assert imbalance([3, 1, 0, 0], [[0, 1], [2, 3]]) == 2
