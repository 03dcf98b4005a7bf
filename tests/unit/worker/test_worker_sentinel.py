"""Short lives in tiny pools, under every fault at once: nobody ever reads what is not his.

Every read and write of KV is checked (`simulate.watched_pages`), in simulated workers. Each way of freeing, sharing or
reading too early that is tried in this file is found out: the check can fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from crowded_cluster import Load, crowded

import prefill_worker.sender
from cluster import prefix_hash
from cluster.lifecycle import RequestKey
from decode_worker.receiver import Incoming, ReceiveEvent, Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.kv.block_manager import BlockManager
from kv_transfer.actions import Actions, Chunk, Fail, ReleasePages
from prefill_worker.sender import Outgoing, Sender
from simulate.faults import RATED_FAULTS
from simulate.virtual_loop import Stuck
from worker.decode_role import DecodeRole
from worker.handoff_connection import HandoffConnection
from worker.prefill_role import PrefillRole

SEEDS = [pytest.param(range(6), id="short"), pytest.param(range(1000, 1400), id="long", marks=pytest.mark.battery)]


@pytest.fixture(autouse=True)
def layered_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short, and yet their last step is sent layer by layer."""
    monkeypatch.setattr(prefill_worker.sender, "MIN_LAYERED_TOKENS", 6)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("shares_pages", [False, True])
def test_requests_read_nothing_that_is_not_theirs(seeds: range, shares_pages: bool) -> None:
    faults: Counter[str] = Counter()
    num_cached = num_preempted = num_retried = num_finished = num_requests = 0
    for seed in seeds:
        result = crowded(seed, shares_pages=shares_pages, has_events=True).run()
        faults.update(result.num_faults)
        num_requests += len(result.outcomes)
        num_finished += sum(outcome.is_finished for outcome in result.outcomes)
        num_cached += sum(outcome.num_cached_tokens for outcome in result.outcomes)
        num_retried += sum(outcome.num_attempts > 1 for outcome in result.outcomes)
        num_preempted += sum(worker.num_preemptions for worker in result.workers)
    rare = [name for name in RATED_FAULTS if faults[name] < len(seeds) // 4]
    assert not rare, "every fault has taken effect, often"
    assert num_finished > num_requests / 2
    assert num_cached > num_requests and num_retried > num_requests / 20 and num_preempted > len(seeds)


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


def give_shared_pages_back_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "_is_shared", lambda self, out: False)


def give_shared_pages_of_a_lost_link_back_before_it_is_closed(patch: pytest.MonkeyPatch) -> None:
    original = Sender.connection_lost

    def connection_lost(self: Sender, epoch: str, *reason: object) -> list[object]:
        return original(self, epoch, *reason) + self.connection_closed(epoch)  # type: ignore[arg-type]

    patch.setattr(Sender, "connection_lost", connection_lost)


OF_SHARED_PAGES = [
    give_shared_pages_back_before_they_are_read,
    give_shared_pages_of_a_lost_link_back_before_it_is_closed,
]
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
    *OF_SHARED_PAGES,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_code_that_is_broken_so_is_found_out(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, Stuck)) as found:
        for seed in range(60):
            crowded(seed, load=Load(cancels=0.3), shares_pages=mutate in OF_SHARED_PAGES, has_events=True).run()
    print(seed, found.value)
