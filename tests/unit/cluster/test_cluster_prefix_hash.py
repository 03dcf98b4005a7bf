"""Names of cached blocks: the same for workers and router, and for one tenant only."""

from __future__ import annotations

import math
import random

import pytest

from cluster.prefix_hash import GROUP, HASH_BYTES, PrefixHashes, block_hashes, key_of, prefix_hashes, root_of


def hashes(token_ids: list[int], block_size: int = 2, salt: bytes = b"") -> list[bytes]:
    return list(prefix_hashes(token_ids, block_size, salt))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)])
def test_only_full_blocks_before_the_last_token_have_one(num_tokens: int, num_blocks: int) -> None:
    assert len(hashes(list(range(num_tokens)))) == num_blocks


def test_prompts_share_hashes_as_far_as_they_share_blocks() -> None:
    first, second = hashes([1, 2, 3, 4, 5, 6, 7]), hashes([1, 2, 3, 4, 9, 6, 7])
    assert first[:2] == second[:2] and first[2] != second[2]


def test_equal_blocks_after_different_ones_differ() -> None:
    assert len({hashes([1, 2, 3, 4, 0])[1], hashes([9, 9, 3, 4, 0])[1], hashes([3, 4, 0])[0]}) == 3


def test_no_hash_is_the_same_under_another_salt_or_for_other_blocks() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 5]
    every = [hashes(tokens, size, salt) for size in (2, 4) for salt in (b"", b"a", b"b", b"x" * 1000, b"x" * 999)]
    assert len({h for each in every for h in each}) == sum(len(each) for each in every)


def test_a_hash_is_fixed_since_workers_and_router_may_be_of_different_releases() -> None:
    (found,) = hashes([1, 2, 300_000], salt=b"tenant")
    assert len(found) == HASH_BYTES
    assert found.hex() == "38950a84af375c7fb3f1fcc07b413ed4"
    assert hashes(list(range(2 * GROUP + 4)), salt=b"tenant")[-1].hex() == "4ae3245303975fb9535f725ada6553ec"


@pytest.mark.parametrize("num_blocks", [1, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 3 * GROUP + 5])
def test_a_groups_end_is_the_hash_of_its_last_block(num_blocks: int) -> None:
    tokens = list(range(2 * num_blocks + 1))
    every = hashes(tokens)
    assert len(every) == num_blocks == len(set(every))
    ends = PrefixHashes(tokens, 2, b"")
    assert ends.num_groups == math.ceil(num_blocks / GROUP)
    for group in random.Random(num_blocks).sample(range(ends.num_groups), ends.num_groups):
        assert ends.end_of_group(group) == every[min((group + 1) * GROUP, num_blocks) - 1]
    for num in random.Random(num_blocks).sample(range(1, num_blocks + 1), num_blocks):
        assert ends.of_first(num) == every[num - 1]


@pytest.mark.parametrize("num_known", [0, 1, GROUP - 1, GROUP])
def test_hashing_goes_on_within_a_group(num_known: int) -> None:
    tokens = list(range(4 * GROUP + 1))
    every = hashes(tokens)
    first = block_hashes(root_of(2), tokens[: 2 * GROUP], 2, key_of(b""), num_known)
    assert list(first) == every[num_known:GROUP]
    rest = block_hashes(every[GROUP - 1], tokens[2 * GROUP : 4 * GROUP], 2, key_of(b""), num_known)
    assert list(rest) == every[GROUP + num_known :]


def test_every_token_before_it_counts_in_a_hash_and_none_behind_it() -> None:
    tokens = list(range(2 * (2 * GROUP + 3) + 1))
    every = hashes(tokens)
    for changed in range(len(tokens)):
        others = hashes([*tokens[:changed], 999, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(every, others, strict=True)] == [i < changed // 2 for i in range(len(every))]
