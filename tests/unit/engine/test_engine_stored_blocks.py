"""A pool and host memory above a store, by example."""

from __future__ import annotations

import pytest

from cluster import prefix_hash
from cluster.config.choices import KvStorePolicyName
from engine.kv.kv_tier import MoveKind, TierKey
from engine.kv.stored_blocks import StoredBlocks

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def make(policy: KvStorePolicyName, num_blocks: int = 16) -> StoredBlocks:
    return StoredBlocks(num_blocks, 2, num_slots=16, num_ahead=num_blocks, policy=policy)


def keys_of(tokens: list[int], salt: bytes = b"") -> list[TierKey]:
    return [(0, digest) for digest in prefix_hash.prefix_hashes([*tokens, 0], 2, salt)]


def come(manager: StoredBlocks, tokens: list[int], salt: bytes = b"") -> None:
    """A prompt comes, is computed, and goes."""
    table = manager.match_prefix(tokens, salt)
    assert manager.have_arrived(table)
    manager.count_hits(table, manager.where_found(table))
    table = table + manager.allocate(-(-len(tokens) // 2) - len(table))
    manager.publish(tokens, table, salt, len(tokens))
    manager.release(table)


def settle(manager: StoredBlocks, error: str = "") -> list[TierKey]:
    """Every move that is wanted begins and ends, pushes with the error; what was to be pushed."""
    pushed = list[TierKey]()
    while moves := manager.take_moves():
        for move in moves:
            is_push = move.kind is MoveKind.PUSH
            manager.moved(move, error if is_push else "")
            pushed += move.keys if is_push else ()
        manager.check()
    return pushed


@pytest.mark.parametrize("policy", ["reused", "all", "evicted"])
def test_what_a_request_keeps_for_itself_alone_is_never_pushed(policy: KvStorePolicyName) -> None:
    manager, salt = make(policy), prefix_hash.PRIVATE + b"attempts of r"
    for _ in range(2):  # and resumes
        come(manager, PROMPT, salt)
        come(manager, PROMPT)
    manager.put_by()
    assert sorted(settle(manager)) == sorted(keys_of(PROMPT)[:3])


def test_a_beginning_that_the_store_has_lost_is_pushed_again() -> None:
    manager = make("reused")
    keys = keys_of(PROMPT)[:3]
    manager.learn(keys[1:])
    come(manager, PROMPT)
    come(manager, PROMPT)
    assert settle(manager) == keys[:1]
    come(manager, PROMPT)
    assert settle(manager) == []


def test_what_others_have_deleted_is_not_fetched_and_is_pushed_again() -> None:
    manager, keys = make("all"), keys_of(PROMPT)[:3]
    manager.learn(keys)
    assert manager.to_look_up(PROMPT, b"") == [[key] for key in keys], "what is known may be gone"
    manager.learn(keys[:1], keys[1:])
    assert list(manager.store) == keys[:1]
    manager.learn([], keys)
    come(manager, PROMPT)
    assert settle(manager) == keys and manager.counts.failed == 0
    assert manager.to_look_up(PROMPT, b"") == [], "the pool has all"


def test_a_push_that_failed_is_made_once_the_store_answers_again() -> None:
    manager = make("reused", num_blocks=64)
    for _ in range(2):
        come(manager, PROMPT)
    keys = settle(manager, "the store is silent")
    assert keys == keys_of(PROMPT)[:3] and settle(manager) == []
    manager.learn([])
    assert settle(manager) == keys and settle(manager) == []
