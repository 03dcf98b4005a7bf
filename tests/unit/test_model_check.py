"""The model checker finds nothing in the real machines within small bounds, and finds what is broken on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fetch_ring import RingBounds
from handoff_state import Bounds
from model_check import explore

from cluster.lifecycle import RequestKey
from decode_worker import receiver as receiver_module
from decode_worker.receiver import Incoming, Receiver
from kv_transfer.actions import Actions, Ready
from prefill_worker import sender as sender_module
from prefill_worker.sender import Outgoing, Sender

ONE_FAULT = Bounds("1 fault", num_tokens=2, num_slots=1, num_faults=1)


@pytest.fixture(autouse=True)
def layered_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exploring sets it; afterwards it is as it was."""
    monkeypatch.setattr(sender_module, "MIN_LAYERED_TOKENS", sender_module.MIN_LAYERED_TOKENS)


@pytest.mark.parametrize(
    "bounds",
    [
        ONE_FAULT,
        Bounds("no fault", num_faults=0),
        Bounds("two slots", num_tokens=2, num_faults=1),
        pytest.param(
            Bounds("two attempts", num_attempts=2, num_tokens=1, num_slots=1, num_faults=1, other_sender=True),
            marks=pytest.mark.battery,
        ),
        Bounds("shared pages", num_tokens=2, num_slots=1, num_faults=1, shares_pages=True),
        Bounds("a fetch", num_tokens=2, num_slots=1, num_faults=1, num_kept=2),
    ],
    ids=lambda bounds: bounds.name,
)
def test_every_interleaving_within_small_bounds_keeps_every_rule(bounds: Bounds) -> None:
    result = explore(bounds)
    assert not result.violation, (result.violation, result.trace)
    assert result.num_states > 500 and result.num_ends > 10


@pytest.mark.parametrize("pool_blocks", [1, 2])
def test_two_workers_that_fetch_from_each_other_never_wait_for_each_other(pool_blocks: int) -> None:
    result = explore(RingBounds("mutual", pool_blocks=pool_blocks))
    assert not result.violation, (result.violation, result.trace)
    assert result.num_states > 500


def release_while_gathering(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "is_gathering", property(lambda self: False))


def release_while_landing(patch: pytest.MonkeyPatch) -> None:
    def close(self: Receiver, incoming: Incoming) -> Actions:
        landing, incoming.landing = incoming.landing, {}
        actions = original(self, incoming)
        incoming.landing = landing
        return actions

    original = Receiver._close_if_drained
    patch.setattr(Receiver, "_close_if_drained", close)


def accept_a_commit_with_a_chunk_missing(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Receiver, incoming: Incoming) -> Actions:
        if incoming.commit is None:
            return []
        incoming.advance(receiver_module.ReceiveEvent.COMPLETED)
        del self._incoming[incoming.key]
        return [Ready(incoming.key, ())]

    patch.setattr(Receiver, "_finish_if_complete", finish)


def leave_an_abort_unanswered(patch: pytest.MonkeyPatch) -> None:
    original = Receiver.peer_aborted
    patch.setattr(Receiver, "peer_aborted", lambda self, epoch, key: original(self, epoch, key)[1:])


def grant_a_slot_twice(patch: pytest.MonkeyPatch) -> None:
    original = Receiver._pump

    def pump(self: Receiver, slots: receiver_module.LandingSlots) -> Actions:
        actions = original(self, slots)
        slots.free_slots = set(range(slots.num_slots))
        return actions

    patch.setattr(Receiver, "_pump", pump)


def reuse_the_slot_of_an_offer_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    original = Sender.abort

    def abort(self: Sender, key: RequestKey, reason: str) -> Actions:
        out = self._outgoing.get(key)
        for chunk, stage in out.chunks.values() if out is not None else ():
            if stage is sender_module.ChunkStage.OFFERED:
                self._free_slot(chunk)
        return original(self, key, reason)

    patch.setattr(Sender, "abort", abort)


def send_without_a_grant(patch: pytest.MonkeyPatch) -> None:
    original = Sender.gathered

    def gathered(self: Sender, chunk: sender_module.Chunk) -> Actions:
        return original(self, chunk) + self.granted(chunk.epoch, chunk.key, chunk.index)

    patch.setattr(Sender, "gathered", gathered)


def keep_a_dead_link(patch: pytest.MonkeyPatch) -> None:
    original = Sender.connection_lost

    def connection_lost(self: Sender, epoch: str) -> Actions:
        slots = self._slots.get(epoch)
        actions = original(self, epoch)
        if slots is not None:
            self._slots[epoch] = slots
        return actions

    patch.setattr(Sender, "connection_lost", connection_lost)


def have_a_fetch_wait_for_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Receiver, "refused", lambda self, key, why: [])


def release_shared_pages_like_gathered_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "_is_shared", lambda self, out: False)


def release_shared_pages_of_a_lost_link_at_once(patch: pytest.MonkeyPatch) -> None:
    original = Sender.connection_lost

    def connection_lost(self: Sender, epoch: str) -> Actions:
        return original(self, epoch) + self.connection_closed(epoch)

    patch.setattr(Sender, "connection_lost", connection_lost)


def release_shared_pages_when_the_offer_is_aborted(patch: pytest.MonkeyPatch) -> None:
    original = Sender._is_shared

    def is_shared(self: Sender, out: Outgoing) -> bool:
        return original(self, out) and out.is_live

    patch.setattr(Sender, "_is_shared", is_shared)


SHARED_PAGES = Bounds("shared pages", num_tokens=1, num_slots=1, num_faults=1, shares_pages=True)
TWO_REQUESTS = Bounds("2 requests", num_requests=2, num_tokens=1, num_slots=1, num_faults=1)


@pytest.mark.parametrize(
    ("break_it", "bounds", "found"),
    [
        (release_while_gathering, ONE_FAULT, "while .* may touch them"),
        (release_while_landing, ONE_FAULT, "while .* may touch them"),
        (accept_a_commit_with_a_chunk_missing, ONE_FAULT, "is ready with"),
        (leave_an_abort_unanswered, ONE_FAULT, "not idle at the end"),
        (grant_a_slot_twice, ONE_FAULT, "not idle at the end|would land over"),
        (reuse_the_slot_of_an_offer_after_an_abort, TWO_REQUESTS, "is gathered over|not idle at the end"),
        (send_without_a_grant, ONE_FAULT, "not idle at the end|is sent twice|KeyError"),
        (keep_a_dead_link, TWO_REQUESTS, "link that is down|not idle at the end"),
        (have_a_fetch_wait_for_blocks, RingBounds("mutual"), "holds the pages .* for ever|has no outcome"),
        (release_shared_pages_like_gathered_ones, SHARED_PAGES, "pages that the prefill worker does not hold"),
        (release_shared_pages_of_a_lost_link_at_once, SHARED_PAGES, "pages that the prefill worker does not hold"),
        (release_shared_pages_when_the_offer_is_aborted, SHARED_PAGES, "pages that the prefill worker does not hold"),
    ],
)
def test_a_machine_that_is_broken_on_purpose_is_found_out(
    break_it: Callable[[pytest.MonkeyPatch], None],
    bounds: Bounds | RingBounds,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    result = explore(bounds)
    assert result.trace
    assert re.search(found, result.violation), result.violation
