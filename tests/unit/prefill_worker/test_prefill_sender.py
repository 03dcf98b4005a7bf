"""The sending machine: what it asks for after each event, and what it never does."""

from __future__ import annotations

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2
from kv_transfer.actions import Action, BeginPrefill, Fail, Gather, ReleasePages, Tell, Transmit
from prefill_worker.sender import Sender

KEY = RequestKey("a", 1)
OTHER = RequestKey("b", 1)
FIRST = [handoff_pb2.FirstToken(sequence_index=0, token_id=7)]


def told(actions: list[Action]) -> list[str]:
    return [a.message.WhichOneof("message") or "" for a in actions if isinstance(a, Tell)]


def opened(num_slots: int = 2, num_tokens: int = 20, cached: int = 0) -> Sender:
    sender = Sender(num_slots, chunk_tokens=8)
    sender.peer_ready("d", 8)
    assert told(sender.open(KEY, "d", num_tokens)) == ["open"]
    assert sender.reserved(KEY, cached) == [BeginPrefill(KEY)]
    return sender


def test_a_computed_range_is_cut_into_chunks_that_fit_the_slots() -> None:
    sender = opened(num_slots=4)
    ranges = [(a.token_start, a.token_end) for a in sender.computed(KEY, 20) if isinstance(a, Gather)]
    assert ranges == [(0, 8), (8, 16), (16, 20)]


def test_chunks_are_no_larger_than_the_receivers_slots() -> None:
    sender = Sender(4, chunk_tokens=8)
    sender.peer_ready("d", 5)
    sender.open(KEY, "d", 10)
    sender.reserved(KEY, 0)
    assert [a.token_end for a in sender.computed(KEY, 10) if isinstance(a, Gather)] == [5, 10]


def test_what_the_receiver_already_has_is_not_sent() -> None:
    sender = opened(cached=16)
    (gather,) = sender.computed(KEY, 20)
    assert isinstance(gather, Gather) and (gather.token_start, gather.token_end) == (16, 20)


def test_nothing_is_gathered_before_the_pair_is_up() -> None:
    sender = Sender(2, chunk_tokens=8)
    sender.open(KEY, "d", 8)
    sender.reserved(KEY, 0)
    assert sender.computed(KEY, 8) == []
    assert any(isinstance(a, Gather) for a in sender.peer_ready("d", 8))


def test_a_third_chunk_waits_for_a_slot() -> None:
    sender = opened(num_slots=2)
    assert len(sender.computed(KEY, 20)) == 2
    sender.gathered(KEY, 0)
    assert sender.granted(KEY, 0) == [Transmit(KEY, "d", 0, 1, 8)]
    (third,) = sender.sent(KEY, 0)
    assert isinstance(third, Gather) and third.token_start == 16


def test_commit_follows_the_last_offer_and_pages_go_back_at_the_last_gather() -> None:
    sender = opened(num_slots=4, num_tokens=16)
    sender.computed(KEY, 16)
    assert sender.commit(KEY, FIRST) == []
    assert told(sender.gathered(KEY, 0)) == ["offer"]
    last = sender.gathered(KEY, 1)
    assert told(last) == ["offer", "commit"]
    assert ReleasePages(KEY) in last


def test_a_grant_after_an_abort_is_still_sent() -> None:
    sender = opened()
    sender.computed(KEY, 8)
    sender.gathered(KEY, 0)
    assert told(sender.abort(KEY, "cancelled")) == ["abort"]
    assert sender.granted(KEY, 0) == [Transmit(KEY, "d", 0, 1, 8)]
    sender.peer_aborted(KEY)
    assert sender.num_free_slots == 1
    sender.sent(KEY, 0)
    sender.check_idle(2)


def test_an_offered_slot_returns_when_the_receiver_answers_the_abort() -> None:
    sender = opened()
    sender.computed(KEY, 8)
    sender.gathered(KEY, 0)
    sender.abort(KEY, "cancelled")
    assert sender.num_free_slots == 1
    sender.peer_aborted(KEY)
    sender.check_idle(2)


def test_pages_are_not_released_while_a_gather_reads_them() -> None:
    sender = opened()
    sender.computed(KEY, 8)
    assert ReleasePages(KEY) not in sender.abort(KEY, "cancelled")
    assert ReleasePages(KEY) in sender.gathered(KEY, 0)


def test_a_lost_peer_fails_its_requests_only() -> None:
    sender = opened()
    sender.peer_ready("e", 8)
    sender.open(OTHER, "e", 8)
    sender.reserved(OTHER, 0)
    failed = [a.key for a in sender.peer_lost("d") if isinstance(a, Fail)]
    assert failed == [KEY]
    assert OTHER in sender and KEY not in sender
    assert sender.computed(OTHER, 8)


def test_late_and_unknown_messages_are_dropped() -> None:
    sender = opened()
    for actions in (sender.granted(OTHER, 0), sender.granted(KEY, 5), sender.committed(KEY), sender.reserved(OTHER, 0)):
        assert actions == []
