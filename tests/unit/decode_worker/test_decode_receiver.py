"""The receiving machine: what it asks for after each event, and what it never does."""

from __future__ import annotations

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2
from decode_worker.receiver import Receiver
from kv_transfer.actions import Action, Fail, Land, Ready, ReleasePages, Reserve, Tell

KEY = RequestKey("a", 1)


def told(actions: list[Action]) -> list[str]:
    return [a.message.WhichOneof("message") or "" for a in actions if isinstance(a, Tell)]


def offer(index: int, start: int, end: int) -> handoff_pb2.Offer:
    return handoff_pb2.Offer(key=KEY.to_proto(), chunk_index=index, token_start=start, token_end=end)


def commit(num_chunks: int) -> handoff_pb2.Commit:
    first = handoff_pb2.FirstToken(sequence_index=0, token_id=3)
    return handoff_pb2.Commit(key=KEY.to_proto(), num_chunks=num_chunks, first_tokens=[first])


def reserved(num_slots: int = 2, num_tokens: int = 16, cached: int = 0) -> Receiver:
    receiver = Receiver(num_slots, chunk_tokens=8)
    receiver.peer_ready("p")
    receiver.announce(KEY, num_tokens)
    assert receiver.opened("p", KEY) == [Reserve(KEY)]
    assert told(receiver.reserved(KEY, cached)) == ["reserved"]
    return receiver


def test_a_reservation_needs_both_the_router_and_the_prefill_worker_in_either_order() -> None:
    receiver = Receiver(2, 8)
    assert receiver.opened("p", KEY) == []
    assert receiver.announce(KEY, 16) == [Reserve(KEY)]


def test_a_chunk_is_granted_only_with_a_free_slot() -> None:
    receiver = reserved(num_slots=1)
    assert told(receiver.offered("p", offer(0, 0, 8))) == ["grant"]
    assert receiver.offered("p", offer(1, 8, 16)) == []
    assert told(receiver.landed(KEY, 0, 8)) == ["grant"]


def test_a_pair_that_is_not_up_gets_no_grant() -> None:
    receiver = Receiver(2, 8)
    receiver.announce(KEY, 8)
    receiver.opened("p", KEY)
    receiver.reserved(KEY, 0)
    assert receiver.offered("p", offer(0, 0, 8)) == []
    assert told(receiver.peer_ready("p")) == ["grant"]


def test_decoding_starts_when_everything_landed_and_was_committed() -> None:
    receiver = reserved(cached=8)
    receiver.offered("p", offer(0, 8, 16))
    assert receiver.committed("p", commit(1)) == []
    actions = receiver.landed(KEY, 0, 8)
    assert told(actions) == ["committed"]
    assert isinstance(actions[-1], Ready) and actions[-1].first_tokens[0].token_id == 3
    receiver.check_idle(2)


def test_a_commit_that_leaves_a_gap_fails_the_request() -> None:
    receiver = reserved()
    receiver.offered("p", offer(0, 0, 8))
    receiver.landed(KEY, 0, 8)
    actions = receiver.committed("p", commit(1))
    assert any(isinstance(a, Fail) and "8 of 16" in a.message for a in actions)
    assert ReleasePages(KEY) in actions


def test_a_cancel_keeps_the_pages_until_the_granted_chunk_has_landed() -> None:
    receiver = reserved()
    (land, _) = receiver.offered("p", offer(0, 0, 8))
    assert isinstance(land, Land)
    actions = receiver.cancel(KEY, "cancelled")
    assert told(actions) == ["abort"] and ReleasePages(KEY) not in actions
    assert receiver.landed(KEY, 0, 8) == [ReleasePages(KEY)]
    receiver.check_idle(2)


def test_a_lost_peer_fails_what_it_had_not_handed_over() -> None:
    receiver = reserved()
    actions = receiver.peer_lost("p")
    assert [type(a) for a in actions] == [Fail, ReleasePages]
    receiver.check_idle(2)


def test_an_abort_is_always_answered() -> None:
    receiver = Receiver(2, 8)
    assert told(receiver.peer_aborted("p", KEY)) == ["abort"]


def test_a_failed_transfer_fails_the_request_and_returns_the_slot() -> None:
    receiver = reserved()
    receiver.offered("p", offer(0, 0, 8))
    actions = receiver.landed(KEY, 0, 8, error="the peer is gone")
    assert any(isinstance(a, Fail) for a in actions) and ReleasePages(KEY) in actions
    receiver.check_idle(2)


def test_a_range_outside_the_reservation_is_refused() -> None:
    for bad in (offer(0, 8, 24), offer(0, 8, 8), offer(0, 0, 16)):
        receiver = reserved()
        assert any(isinstance(a, Fail) for a in receiver.offered("p", bad))


def test_another_peer_cannot_speak_for_the_request() -> None:
    receiver = reserved()
    assert receiver.offered("stranger", offer(0, 0, 8)) == []
    assert receiver.committed("stranger", commit(0)) == []
    assert told(receiver.opened("stranger", KEY)) == ["abort"]
    assert told(receiver.peer_aborted("stranger", KEY)) == ["abort"]
    assert KEY in receiver
