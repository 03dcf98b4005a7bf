"""The receiving machine when a hand-off ends early: what it drops, what it keeps, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from receiving import (
    AGAIN,
    CHUNK_TOKENS,
    KEY,
    Failed,
    commit,
    failures,
    landing,
    landings,
    linked,
    offer,
    receiving,
    told,
)

from cluster.pb import handoff_pb2
from decode_worker.receiver import Receiver
from kv_transfer.actions import Actions, Fail, ReleasePages, Reserve

ENDS: dict[str, Callable[[Receiver], Actions]] = {
    "cancel": lambda receiver: receiver.cancel(KEY, "cancelled"),
    "abort": lambda receiver: receiver.peer_aborted("e", KEY),
    "connection lost": lambda receiver: receiver.connection_lost("e"),
}


@pytest.mark.parametrize("end", ENDS)
def test_pages_are_kept_until_what_was_granted_has_landed(end: str) -> None:
    receiver, chunk = landing()
    assert not any(isinstance(a, ReleasePages) for a in ENDS[end](receiver))
    assert KEY in receiver
    actions = receiver.landed(chunk)
    assert actions[-1] == ReleasePages(KEY, 8), "what landed whole may be kept"
    assert bool(failures(actions)) == (end == "connection lost"), (
        "the router knows of its own cancel, and the sender tells"
    )
    receiver.check_idle()


@pytest.mark.parametrize("end", ENDS)
def test_what_was_offered_and_not_granted_is_dropped(end: str) -> None:
    receiver = receiving(num_slots=1, num_tokens=24)
    (chunk,) = landings(receiver.offered("e", offer(0, 0, 8, slot=0)))
    receiver.offered("e", offer(1, 8, 16, slot=0))
    ENDS[end](receiver)
    assert landings(receiver.landed(chunk)) == []
    receiver.check_idle()


def test_a_cancel_is_told_to_a_sender_that_has_opened_and_to_nobody_before() -> None:
    receiver = linked()
    receiver.announce(KEY, 16)
    assert receiver.cancel(KEY, "cancelled") == [ReleasePages(KEY)]
    assert receiver.cancel(KEY, "cancelled") == []
    assert told(receiving().cancel(KEY, "cancelled")) == ["abort"]


def test_a_lost_peer_fails_what_it_had_not_handed_over_with_what_landed_from_the_beginning_on() -> None:
    receiver = receiving(num_slots=4, num_tokens=32)
    for index, (start, end) in enumerate([(0, 8), (16, 24)]):
        receiver.landed(landings(receiver.offered("e", offer(index, start, end)))[0])
    actions = receiver.connection_lost("e", Failed.REASON_TRANSFER_FAILED, "silent")
    assert actions == [Fail(KEY, Failed.REASON_TRANSFER_FAILED, "silent", 8), ReleasePages(KEY, 8)]
    assert receiver.connection_lost("e") == []
    receiver.check_idle()


def test_a_landing_after_its_link_is_down_returns_no_slot() -> None:
    receiver, chunk = landing()
    receiver.connection_lost("e")
    assert receiver.landed(chunk, error="the pair was closed")
    assert receiver.count_stages() == {"posted": 0, "free": 0}


@pytest.mark.parametrize("reason", [Failed.REASON_TRANSFER_FAILED, Failed.REASON_CORRUPT])
def test_a_failed_landing_fails_the_request_and_what_it_was_to_bring_is_not_kept(reason: Failed.Reason) -> None:
    receiver, chunk = landing()
    actions = receiver.landed(chunk, error="the digest differs", reason=reason)
    assert told(actions) == ["abort"]
    assert failures(actions) == [Fail(KEY, reason, "the digest differs", 0)]
    assert actions[-1] == ReleasePages(KEY, 0)
    receiver.check_idle()


def test_a_failure_with_another_chunk_granted_is_told_when_that_has_drained() -> None:
    receiver = receiving()
    first, second = (landings(receiver.offered("e", offer(i, 8 * i, 8 * i + 8)))[0] for i in range(2))
    assert not failures(receiver.landed(first, error="lost"))
    actions = receiver.landed(second)
    assert [f.num_kept_tokens for f in failures(actions)] == [0]
    assert actions[-1] == ReleasePages(KEY, 0)


def test_an_abort_is_always_answered() -> None:
    assert told(linked().peer_aborted("e", KEY)) == ["abort"]
    receiver, chunk = landing()
    assert told(receiver.peer_aborted("e", KEY)) == ["abort"]
    assert told(receiver.peer_aborted("e", KEY)) == ["abort"], "also while the first drains"
    receiver.landed(chunk)
    assert told(receiver.peer_aborted("e", KEY)) == ["abort"]


@pytest.mark.parametrize(
    "bad",
    [
        offer(0, 8, 24),
        offer(0, 8, 8),
        offer(0, 16, 8),
        offer(0, 0, 16),
        offer(0, 0, 8, slot=2),
        offer(0, 0, 4, layers=(0, 2)),
        offer(0, 0, 8, layers=(0, 0)),
    ],
    ids=["beyond the prompt", "empty", "backwards", "too large", "no such slot", "no such layer", "no layers"],
)
def test_an_offer_that_was_not_reserved_is_refused(bad: handoff_pb2.Chunk) -> None:
    receiver = receiving()
    actions = receiver.offered("e", bad)
    assert failures(actions) and told(actions) == ["abort"] and not landings(actions)
    assert failures(receiving(cached=8).offered("e", offer(0, 0, 8))), "it is here already"


def test_a_chunk_offered_twice_is_refused_while_the_first_waits_or_lands() -> None:
    receiver = receiving(num_slots=1)
    receiver.offered("e", offer(0, 0, 8, slot=0))
    assert told(receiver.offered("e", offer(0, 0, 8, slot=0))) == ["abort"]


def test_another_link_or_attempt_cannot_speak_for_the_hand_off() -> None:
    receiver = receiving()
    receiver.connection_called("f", CHUNK_TOKENS, 2)
    receiver.connection_open("f")
    assert receiver.offered("f", offer(0, 0, 8)) == []
    assert receiver.offered("e", offer(0, 0, 8, key=AGAIN)) == []
    assert receiver.committed("f", commit(0)) == []
    assert receiver.committed("e", commit(0, key=AGAIN)) == []
    assert told(receiver.opened("f", KEY, 16)) == ["abort"]
    assert told(receiver.peer_aborted("f", KEY)) == ["abort"]
    assert receiver.connection_lost("f") == []
    assert KEY in receiver
    assert told(receiver.offered("e", offer(0, 0, 8))) == ["grant"]


def test_a_second_attempt_is_not_touched_by_what_is_left_of_the_first() -> None:
    receiver, chunk = landing()
    receiver.connection_lost("e")
    receiver.connection_called("f", CHUNK_TOKENS, 2)
    receiver.connection_open("f")
    receiver.announce(AGAIN, 16)
    assert receiver.opened("f", AGAIN, 16) == [Reserve(AGAIN)]
    receiver.reserved(AGAIN, 8)
    assert [f.key for f in failures(receiver.landed(chunk, error="the pair was closed"))] == [KEY]
    (again,) = landings(receiver.offered("f", offer(0, 8, 16, key=AGAIN)))
    receiver.landed(again)
    assert told(receiver.committed("f", commit(1, key=AGAIN))) == ["committed"]
    receiver.check_idle()


def test_what_comes_after_the_end_is_dropped() -> None:
    receiver = receiving(cached=16)
    receiver.committed("e", commit(0))
    assert receiver.offered("e", offer(0, 0, 8)) == []
    assert receiver.committed("e", commit(0)) == []
    assert receiver.cancel(KEY, "cancelled") == []
    receiver.check_idle()
