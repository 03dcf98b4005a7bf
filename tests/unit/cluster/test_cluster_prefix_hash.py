"""Names of cached blocks: the same for workers and router, and for one tenant only."""

from __future__ import annotations

import pytest

from cluster.prefix_hash import HASH_BYTES, extend, key_of, prefix_hashes


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
    assert found == extend(b"", [1, 2], key_of(b"tenant")) and len(found) == HASH_BYTES
    assert found.hex() == "890dbc0cbdb28a7b1d80a91685e30ebc"


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 34, 64, 65, 100])
def test_a_long_prompts_hashes_are_those_of_its_blocks_one_after_another(num_tokens: int) -> None:
    """However many blocks are written at once."""
    tokens, parent, expected = list(range(num_tokens)), b"", []
    for end in range(2, num_tokens, 2):
        parent = extend(parent, tokens[end - 2 : end], key_of(b""))
        expected.append(parent)
    assert hashes(tokens) == expected
