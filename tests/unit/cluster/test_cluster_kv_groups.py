"""Which layers share a block."""

from __future__ import annotations

import pytest

from cluster.kv_groups import KvGroup, all_layers, group_layers, num_rows


def test_layers_of_one_kind_are_one_group() -> None:
    assert group_layers([None] * 3) == all_layers(3) == (KvGroup((0, 1, 2)),)
    assert group_layers([7, 7]) == (KvGroup((0, 1), 7),)


def test_layers_of_each_kind_are_dealt_out_to_groups_as_large_as_the_rarest_kind() -> None:
    windows = [None if layer % 6 == 5 else 512 for layer in range(26)]
    groups = group_layers(windows)
    assert groups[0] == KvGroup((5, 11, 17, 23))
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 3, 3] and num_rows(groups) == 4
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))
    assert all(group.window == 512 for group in groups[1:])
    assert max(group.layers[0] for group in groups) == 6, "the first rows are the first layers"


@pytest.mark.parametrize(("window", "first"), [(None, 0), (1, 10), (2, 9), (10, 1), (11, 0), (99, 0)])
def test_the_next_token_sees_itself_and_those_before_it_in_the_window(window: int | None, first: int) -> None:
    assert KvGroup((0,), window).first_seen(10) == first
