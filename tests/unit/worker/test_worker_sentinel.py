"""Thousands of short lives in tiny pools, under every fault at once: nobody ever reads what is not his.

Blocks are poisoned when they become free, every cell carries its owner's mark, and every read and write is checked
(`simulated_pages`). Run with `-s` to see what befell the requests. Each way of freeing, sharing or reading too early
that is tried at the end of this file sets the alarm off: the check can fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from simulated_load import EVERY_FAULT, Load
from simulated_pages import Alarm
from simulation import World

import prefill_worker.sender
from cluster import prefix_hash
from cluster.lifecycle import RequestKey
from decode_worker.receiver import Incoming, ReceiveEvent, Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.kv.block_manager import BlockManager
from engine.sequence import Request
from kv_transfer.actions import Actions, Chunk, Fail, ReleasePages
from prefill_worker.sender import Outgoing, Sender
from worker.decode_role import DecodeRole
from worker.handoff_connection import HandoffConnection
from worker.prefill_role import PrefillRole

PER_WORLD = 1_000
WORLDS = [pytest.param(3, id="short"), pytest.param(10, id="long", marks=pytest.mark.battery)]


@pytest.fixture(autouse=True)
def layered_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short, and yet their last step is sent layer by layer."""
    monkeypatch.setattr(prefill_worker.sender, "MIN_LAYERED_TOKENS", 6)


def tiny_cluster(seed: int) -> World:
    """Two workers of each role; a pool holds two or three of the larger requests; answers are overdue after 20 ms.
    Steps overlap in every other one."""
    world = World(seed, EVERY_FAULT, overlaps=seed % 2 == 1)
    for i in range(2):
        world.add(f"prefill-{i}", 14, 4, transfer_timeout_s=0.02)
        world.add(f"decode-{i}", 20, 4, transfer_timeout_s=0.02)
    return world


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_worlds", WORLDS)
def test_thousands_of_requests_read_nothing_that_is_not_theirs(num_worlds: int) -> None:
    num_requests = num_worlds * PER_WORLD
    counts: Counter[str] = Counter()
    for seed in range(num_worlds):
        world = tiny_cluster(seed)
        Load(PER_WORLD, cancels=0.03, num_stop_tokens=5).carry(world)
        counts.update(world.counts)
    print(*(f"{name:<32} {count:>9,}" for name, count in sorted(counts.items())), sep="\n")

    assert sum(counts[f"request {outcome}"] for outcome in ("done", "cancelled", "failed")) == num_requests
    assert counts["request done"] > num_requests / 3
    rare = {name: counts[name] for name in EVERY_FAULT if counts[name] < 3 * num_worlds}
    assert not rare, "every fault has taken effect, often"
    for effect in ("retried", "prefilled locally", "landings torn", "link retired: timeout", "heard again"):
        assert counts[effect] >= num_worlds, effect
    assert counts["cells shared"] > 100 * num_worlds, "some read an equal prefix that another request had written"
    assert counts["blocks poisoned"] > num_worlds * 4 * 20, "every pool went round many times"


# It can fail


def free_blocks_while_a_step_uses_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "begin_step", lambda self: None)
    patch.setattr(BlockManager, "end_step", lambda self: None)


def free_blocks_that_the_step_behind_uses(patch: pytest.MonkeyPatch) -> None:
    begin, end = BlockManager.begin_step, BlockManager.end_step
    patch.setattr(BlockManager, "begin_step", lambda self: None if self._released_in_steps else begin(self))
    patch.setattr(BlockManager, "end_step", lambda self: end(self) if self._released_in_steps else None)


def free_blocks_while_a_gather_reads_them(patch: pytest.MonkeyPatch) -> None:
    release = Sender._release_pages

    def release_at_once(self: Sender, out: Outgoing) -> Actions:
        if out.is_live or not out.holds_pages:
            return release(self, out)
        out.holds_pages = False
        return [ReleasePages(out.key), *release(self, out)]

    patch.setattr(Sender, "_release_pages", release_at_once)


def free_blocks_while_a_chunk_lands_in_them(patch: pytest.MonkeyPatch) -> None:
    landed = Receiver.landed

    def close_at_once(self: Receiver, incoming: Incoming) -> Actions:
        if not incoming.advance(ReceiveEvent.DRAINED):
            return []
        del self._incoming[incoming.key]
        failed: Actions = [] if incoming.failure is None else [Fail(incoming.key, *incoming.failure, 0)]
        return [*failed, ReleasePages(incoming.key, 0)]

    def landed_late(self: Receiver, chunk: Chunk, error: str = "", *reason: int) -> Actions:
        return landed(self, chunk, error, *reason) if chunk.key in self._incoming else []  # type: ignore[arg-type]

    patch.setattr(Receiver, "_close_if_drained", close_at_once)
    patch.setattr(Receiver, "landed", landed_late)


def read_layers_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    launching = PrefillRole.step_launching
    patch.setattr(PrefillRole, "step_launching", lambda self, planned, step: launching(self, planned, step - 1))


def keep_more_than_has_landed(patch: pytest.MonkeyPatch) -> None:
    furthest = property(lambda self: max([self.num_cached_tokens, *(r.token_end for r in self.landed)]))
    patch.setattr(Incoming, "num_whole_tokens", furthest)


def take_a_failed_landing_for_a_good_one(patch: pytest.MonkeyPatch) -> None:
    landed = DecodeRole._landed
    patch.setattr(DecodeRole, "_landed", lambda self, chunk, error, reason: landed(self, chunk, "", reason))
    patch.setattr(HandoffConnection, "_retire_on", lambda self, error, kind: None)


def reuse_an_offered_slot_at_the_abort(patch: pytest.MonkeyPatch) -> None:
    abort = Sender.abort

    def abort_at_once(self: Sender, key: RequestKey, reason: str) -> Actions:
        actions = abort(self, key, reason)
        out = self._outgoing.get(key)
        return actions + (self._drop_offers(out) if out is not None else [])

    patch.setattr(Sender, "abort", abort_at_once)


def forget_the_copies_of_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    take = DecodeScheduler.take_copies

    def drop(self: DecodeScheduler) -> list[tuple[int, int]]:
        self.copied(take(self))
        return []

    patch.setattr(DecodeScheduler, "take_copies", drop)


def share_prefixes_between_tenants(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_hash, "key_of", lambda salt: b"one for all")


def share_what_bypasses_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "private_salt", property(lambda self: self.cache_salt))


MUTATIONS = [
    free_blocks_while_a_step_uses_them,
    free_blocks_that_the_step_behind_uses,
    free_blocks_while_a_gather_reads_them,
    free_blocks_while_a_chunk_lands_in_them,
    read_layers_before_they_are_written,
    keep_more_than_has_landed,
    take_a_failed_landing_for_a_good_one,
    reuse_an_offered_slot_at_the_abort,
    forget_the_copies_of_shared_blocks,
    share_prefixes_between_tenants,
    share_what_bypasses_the_cache,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_alarm_goes_off_when_the_code_is_broken_so(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Alarm) as alarm:
        for seed in range(20):
            Load(100, cancels=0.03, num_stop_tokens=5).carry(tiny_cluster(seed))
    print(alarm.value)
