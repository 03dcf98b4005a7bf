"""The receiving machine: its table, and what it asks for after each event until a hand-off is ready."""

from __future__ import annotations

import pytest
from receiving import CHUNK_TOKENS, KEY, OTHER, commit, failures, landing, landings, linked, offer, receiving, told

from cluster.kv_groups import KvGroup, all_layers
from decode_worker.receiver import TABLE, Incoming, ReceiveEvent, Receiver, ReceiveState
from kv_transfer.actions import Land, Ready, ReleasePages, Reserve, SendMessage

# The table


def test_every_state_can_be_left_but_those_that_are_over() -> None:
    assert set(TABLE) == set(ReceiveState)
    for state, moves in TABLE.items():
        assert (not moves) == (state in (ReceiveState.READY, ReceiveState.CLOSED))
    assert set(TABLE[ReceiveState.CLOSING].values()) == {ReceiveState.CLOSED}


@pytest.mark.parametrize("state", ReceiveState)
@pytest.mark.parametrize("event", ReceiveEvent)
def test_advance_follows_the_table_and_changes_nothing_else(state: ReceiveState, event: ReceiveEvent) -> None:
    incoming = Incoming(KEY, 8, all_layers(1), state=state)
    expected = TABLE[state].get(event)
    assert incoming.advance(event) is (expected is not None)
    assert incoming.state is (expected or state)


# Reserving


def test_a_reservation_needs_both_the_router_and_the_prefill_worker_in_either_order() -> None:
    receiver = linked()
    assert receiver.opened("e", KEY, 16) == []
    assert receiver._opened == {KEY: ("e", 16)}
    assert receiver.announce(KEY, 16) == [Reserve(KEY)]
    receiver = linked()
    assert receiver.announce(KEY, 16) == []
    assert receiver.opened("e", KEY, 16) == [Reserve(KEY)]


def test_reserved_says_what_is_here_already() -> None:
    receiver = linked()
    receiver.announce(KEY, 16)
    receiver.opened("e", KEY, 16)
    (tell,) = receiver.reserved(KEY, 8)
    assert isinstance(tell, SendMessage) and tell.message.reserved.num_cached_tokens == 8


def test_a_reservation_that_comes_after_the_end_is_passed_over() -> None:
    receiver, chunk = landing()
    receiver.cancel(KEY, "cancelled")
    assert receiver.reserved(KEY, 0) == []
    assert receiver.landed(chunk) == [ReleasePages(KEY, 8)]


def test_an_open_whose_link_went_down_before_the_announcement_counts_no_more() -> None:
    receiver = linked()
    receiver.opened("e", KEY, 16)
    receiver.connection_lost("e")
    assert receiver.announce(KEY, 16) == []
    receiver.cancel(KEY, "cancelled")
    receiver.check_idle()


def test_an_open_that_was_taken_back_before_the_announcement_counts_no_more() -> None:
    receiver = linked()
    receiver.opened("e", KEY, 16)
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
    receiver = Receiver(all_layers(1))
    receiver.connection_called("e", CHUNK_TOKENS, 2)
    receiver.announce(KEY, 8)
    receiver.opened("e", KEY, 16)
    receiver.reserved(KEY, 0)
    assert receiver.offered("e", offer(0, 0, 8)) == []
    assert told(receiver.connection_open("e")) == ["grant"]


def test_slots_are_the_links_own() -> None:
    receiver = receiving(num_slots=1)
    receiver.offered("e", offer(0, 0, 8))
    receiver.connection_called("f", CHUNK_TOKENS, 1)
    receiver.connection_open("f")
    receiver.announce(OTHER, 8)
    receiver.opened("f", OTHER, 8)
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


def test_of_a_window_only_what_the_next_token_sees_must_land() -> None:
    receiver = Receiver((KvGroup((0,)), KvGroup((1,), window=6)))
    receiver.connection_called("e", 2 * CHUNK_TOKENS, 4)
    receiver.connection_open("e")
    receiver.announce(KEY, 16)
    receiver.opened("e", KEY, 16)
    receiver.reserved(KEY, 0)
    window = offer(1, 11, 16)
    window.group = 1
    for part in (offer(0, 0, 16), window):
        receiver.landed(landings(receiver.offered("e", part))[0])
    assert told(receiver.committed("e", commit(2))) == ["committed"]

    receiver.announce(OTHER, 16)
    receiver.opened("e", OTHER, 8)
    receiver.reserved(OTHER, 0)
    earlier = offer(0, 10, 16, key=OTHER)
    earlier.group = 1
    (failed,) = failures(receiver.offered("e", earlier))
    assert "which was not reserved" in failed.message


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
