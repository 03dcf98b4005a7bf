"""The receiving machine: what it asks for after each event, what it drops, and what it never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from decode_worker.receiver import TABLE, Incoming, ReceiveEvent, Receiver, ReceiveState
from kv_transfer.actions import Actions, Chunk, Fail, Land, Ready, ReleasePages, Reserve, SendMessage

KEY, OTHER, AGAIN = RequestKey("a", 1), RequestKey("b", 1), RequestKey("a", 2)
CHUNK_TOKENS = 8
Failed = worker_pb2.Failed


def told(actions: Actions) -> list[str]:
    return [a.message.WhichOneof("message") or "" for a in actions if isinstance(a, SendMessage)]


def landings(actions: Actions) -> list[Chunk]:
    return [a.chunk for a in actions if isinstance(a, Land)]


def failures(actions: Actions) -> list[Fail]:
    return [a for a in actions if isinstance(a, Fail)]


def offer(
    index: int, start: int, end: int, slot: int | None = None, key: RequestKey = KEY, layers: tuple[int, int] = (0, 1)
) -> handoff_pb2.Chunk:
    return handoff_pb2.Chunk(
        key=key.to_proto(),
        index=index,
        slot=index if slot is None else slot,
        token_start=start,
        token_end=end,
        layer_start=layers[0],
        layer_end=layers[1],
    )


def commit(num_chunks: int, key: RequestKey = KEY) -> handoff_pb2.Commit:
    first = handoff_pb2.FirstToken(sequence_index=0, token_id=3)
    return handoff_pb2.Commit(key=key.to_proto(), num_chunks=num_chunks, first_tokens=[first])


def linked(num_slots: int = 2, num_layers: int = 1) -> Receiver:
    receiver = Receiver(num_layers)
    assert receiver.connection_called("e", CHUNK_TOKENS, num_slots) == []
    assert receiver.connection_open("e") == []
    return receiver


def receiving(num_slots: int = 2, num_tokens: int = 16, cached: int = 0, num_layers: int = 1) -> Receiver:
    receiver = linked(num_slots, num_layers)
    assert receiver.announce(KEY, num_tokens) == []
    assert receiver.opened("e", KEY) == [Reserve(KEY)]
    assert told(receiver.reserved(KEY, cached)) == ["reserved"]
    return receiver


def landing(num_tokens: int = 16) -> tuple[Receiver, Chunk]:
    """A receiver with one chunk granted."""
    receiver = receiving(num_tokens=num_tokens)
    actions = receiver.offered("e", offer(0, 0, 8))
    assert told(actions) == ["grant"]
    (chunk,) = landings(actions)
    return receiver, chunk


# The table


def test_every_state_can_be_left_but_those_that_are_over() -> None:
    assert set(TABLE) == set(ReceiveState)
    for state, moves in TABLE.items():
        assert (not moves) == (state in (ReceiveState.READY, ReceiveState.CLOSED))
    assert set(TABLE[ReceiveState.CLOSING].values()) == {ReceiveState.CLOSED}


@pytest.mark.parametrize("state", ReceiveState)
@pytest.mark.parametrize("event", ReceiveEvent)
def test_advance_follows_the_table_and_changes_nothing_else(state: ReceiveState, event: ReceiveEvent) -> None:
    incoming = Incoming(KEY, 8, 1, state=state)
    expected = TABLE[state].get(event)
    assert incoming.advance(event) is (expected is not None)
    assert incoming.state is (expected or state)


# Reserving


def test_a_reservation_needs_both_the_router_and_the_prefill_worker_in_either_order() -> None:
    receiver = linked()
    assert receiver.opened("e", KEY) == []
    assert receiver._opened == {KEY: "e"}
    assert receiver.announce(KEY, 16) == [Reserve(KEY)]
    receiver = linked()
    assert receiver.announce(KEY, 16) == []
    assert receiver.opened("e", KEY) == [Reserve(KEY)]


def test_reserved_says_what_is_here_already() -> None:
    receiver = linked()
    receiver.announce(KEY, 16)
    receiver.opened("e", KEY)
    (tell,) = receiver.reserved(KEY, 8)
    assert isinstance(tell, SendMessage) and tell.message.reserved.num_cached_tokens == 8


def test_a_reservation_that_comes_after_the_end_is_passed_over() -> None:
    receiver, chunk = landing()
    receiver.cancel(KEY, "cancelled")
    assert receiver.reserved(KEY, 0) == []
    assert receiver.landed(chunk) == [ReleasePages(KEY, 8)]


def test_an_open_whose_link_went_down_before_the_announcement_counts_no_more() -> None:
    receiver = linked()
    receiver.opened("e", KEY)
    receiver.connection_lost("e")
    assert receiver.announce(KEY, 16) == []
    receiver.cancel(KEY, "cancelled")
    receiver.check_idle()


def test_an_open_that_was_taken_back_before_the_announcement_counts_no_more() -> None:
    receiver = linked()
    receiver.opened("e", KEY)
    assert told(receiver.peer_aborted("e", KEY)) == ["abort"]
    assert receiver.announce(KEY, 16) == []


# Granting and landing


def test_a_chunk_lands_in_the_slot_it_was_offered_from_and_is_granted_only_while_that_is_free() -> None:
    receiver = receiving(num_slots=2)
    (first,) = landings(receiver.offered("e", offer(0, 0, 8, slot=1)))
    assert first.slot == 1
    assert receiver.offered("e", offer(1, 8, 16, slot=1)) == []
    actions = receiver.landed(first)
    assert told(actions) == ["grant"]
    assert landings(actions)[0].slot == 1


def test_an_offer_whose_slot_is_free_does_not_wait_behind_one_whose_slot_is_not() -> None:
    receiver = receiving(num_slots=2, num_tokens=24)
    receiver.offered("e", offer(0, 0, 8, slot=0))
    assert receiver.offered("e", offer(1, 8, 16, slot=0)) == []
    assert told(receiver.offered("e", offer(2, 16, 24, slot=1))) == ["grant"]


def test_land_comes_before_its_grant() -> None:
    receiver = receiving()
    land, grant = receiver.offered("e", offer(0, 0, 8))
    assert isinstance(land, Land) and isinstance(grant, SendMessage) and grant.message.grant.chunk_index == 0


def test_a_pair_that_is_not_open_gets_no_grant_until_it_is() -> None:
    receiver = Receiver(1)
    receiver.connection_called("e", CHUNK_TOKENS, 2)
    receiver.announce(KEY, 8)
    receiver.opened("e", KEY)
    receiver.reserved(KEY, 0)
    assert receiver.offered("e", offer(0, 0, 8)) == []
    assert told(receiver.connection_open("e")) == ["grant"]


def test_slots_are_the_links_own() -> None:
    receiver = receiving(num_slots=1)
    receiver.offered("e", offer(0, 0, 8))
    receiver.connection_called("f", CHUNK_TOKENS, 1)
    receiver.connection_open("f")
    receiver.announce(OTHER, 8)
    receiver.opened("f", OTHER)
    receiver.reserved(OTHER, 0)
    assert told(receiver.offered("f", offer(0, 0, 8, key=OTHER))) == ["grant"]
    assert receiver.count_stages() == {"posted": 2, "free": 0}


# Ready


def test_decoding_starts_when_everything_landed_and_was_committed() -> None:
    receiver = receiving(cached=8)
    (chunk,) = landings(receiver.offered("e", offer(0, 8, 16)))
    assert receiver.committed("e", commit(1)) == []
    actions = receiver.landed(chunk)
    assert told(actions) == ["committed"]
    ready = actions[-1]
    assert isinstance(ready, Ready) and ready.first_tokens[0].token_id == 3
    assert KEY not in receiver
    receiver.check_idle()


def test_a_commit_after_the_last_landing_ends_it_too_and_counts_once() -> None:
    receiver, chunk = landing(num_tokens=8)
    assert receiver.landed(chunk) == []
    assert told(receiver.committed("e", commit(1))) == ["committed"]
    assert receiver.committed("e", commit(1)) == []
    receiver.check_idle()


def test_a_prompt_that_was_here_whole_is_ready_at_the_commit() -> None:
    receiver = receiving(cached=16)
    assert told(receiver.committed("e", commit(0))) == ["committed"]


def test_chunks_of_some_layers_count_as_tokens_only_once_all_layers_are_here() -> None:
    receiver = receiving(num_slots=4, num_tokens=8, num_layers=3)
    parts = [offer(0, 0, 8, layers=(0, 1)), offer(1, 0, 8, layers=(1, 3))]
    chunks = [landings(receiver.offered("e", part))[0] for part in parts]
    receiver.landed(chunks[1])
    actions = receiver.connection_lost("e")
    assert actions == []
    (failed,) = failures(receiver.landed(chunks[0], error="the pair was closed"))
    assert failed.num_kept_tokens == 0

    receiver = receiving(num_slots=4, num_tokens=8, num_layers=3)
    for part in parts:
        receiver.landed(landings(receiver.offered("e", part))[0])
    (failed,) = failures(receiver.connection_lost("e"))
    assert failed.num_kept_tokens == 8


@pytest.mark.parametrize(
    ("parts", "num_chunks", "covered"),
    [
        ([(0, 8)], 1, "8 of 16"),
        ([(8, 16)], 1, "0 of 16"),
        ([(0, 8), (0, 8)], 2, "8 of 16"),
        ([(0, 8), (4, 12), (12, 16)], 3, "16 of 16"),
    ],
)
def test_a_commit_that_leaves_a_gap_or_covers_a_cell_twice_fails_the_request(
    parts: list[tuple[int, int]], num_chunks: int, covered: str
) -> None:
    receiver = receiving(num_slots=4)
    for index, (start, end) in enumerate(parts):
        receiver.landed(landings(receiver.offered("e", offer(index, start, end)))[0])
    actions = receiver.committed("e", commit(num_chunks))
    (failed,) = failures(actions)
    assert covered in failed.message and told(actions) == ["abort"]
    assert any(isinstance(a, ReleasePages) for a in actions)
    receiver.check_idle()


# Ends


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
    assert told(receiver.opened("f", KEY)) == ["abort"]
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
    assert receiver.opened("f", AGAIN) == [Reserve(AGAIN)]
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
