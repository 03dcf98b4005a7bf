"""The sending machine: what it asks for after each event, what it drops, and what it never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import prefill_worker.sender as sender_module
from cluster.kv_groups import all_layers
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from kv_transfer.actions import Actions, BeginPrefill, Chunk, Fail, Gather, Range, ReleasePages, SendMessage, Transmit
from prefill_worker.sender import TABLE, Outgoing, Sender, SendEvent, SendState

KEY, OTHER = RequestKey("a", 1), RequestKey("b", 1)
AGAIN = RequestKey("a", 2)
FIRST = [handoff_pb2.FirstToken(sequence_index=0, token_id=7)]
CHUNK_TOKENS = 8


def told(actions: Actions) -> list[str]:
    return [a.message.WhichOneof("message") or "" for a in actions if isinstance(a, SendMessage)]


def gathers(actions: Actions) -> list[Chunk]:
    return [a.chunk for a in actions if isinstance(a, Gather)]


def tokens(actions: Actions) -> list[tuple[int, int]]:
    return [(c.range.token_start, c.range.token_end) for c in gathers(actions)]


def streaming(
    sender: Sender, key: RequestKey = KEY, epoch: str = "e", num_tokens: int = 20, cached: int = 0
) -> RequestKey:
    assert told(sender.open(key, epoch, num_tokens)) == ["open"]
    assert sender.reserved(epoch, key, cached) == [BeginPrefill(key)]
    return key


def linked(num_slots: int = 2, num_layers: int = 1) -> Sender:
    sender = Sender(all_layers(num_layers))
    assert sender.connection_open("e", CHUNK_TOKENS, num_slots) == []
    return sender


def one_offered(num_slots: int = 2, num_tokens: int = 20) -> tuple[Sender, Chunk]:
    """A sender whose first chunk of several is offered and nothing else under way."""
    sender = linked(num_slots)
    streaming(sender, num_tokens=num_tokens)
    (chunk,) = gathers(sender.computed(KEY, CHUNK_TOKENS, 1))
    assert told(sender.gathered(chunk)) == ["offer"]
    return sender, chunk


def committing() -> tuple[Sender, Chunk]:
    sender = linked()
    streaming(sender, num_tokens=CHUNK_TOKENS)
    (chunk,) = gathers(sender.computed(KEY, CHUNK_TOKENS, 1))
    sender.commit(KEY, FIRST)
    assert told(sender.gathered(chunk)) == ["offer", "commit"]
    return sender, chunk


# The table


def test_every_state_can_be_left_but_the_last_and_the_last_is_reached_from_everywhere() -> None:
    assert set(TABLE) == set(SendState)
    for state, moves in TABLE.items():
        assert (not moves) == (state is SendState.SETTLED)
        if state is not SendState.SETTLED:
            assert moves[SendEvent.CONNECTION_LOST] is moves[SendEvent.PEER_ABORTED] is SendState.SETTLED


@pytest.mark.parametrize("state", SendState)
@pytest.mark.parametrize("event", SendEvent)
def test_advance_follows_the_table_and_changes_nothing_else(state: SendState, event: SendEvent) -> None:
    out = Outgoing(KEY, "e", 8, state=state)
    expected = TABLE[state].get(event)
    assert out.advance(event) is (expected is not None)
    assert out.state is (expected or state)
    assert out.is_live is (out.state in (SendState.OPENING, SendState.STREAMING, SendState.COMMITTING))


# Chunks


def test_a_computed_range_is_cut_into_chunks_that_fit_the_slots_and_name_the_step_that_wrote_them() -> None:
    sender = linked(num_slots=4)
    streaming(sender)
    actions = sender.computed(KEY, 20, after_step=5)
    assert tokens(actions) == [(0, 8), (8, 16), (16, 20)]
    assert {a.after_step for a in actions if isinstance(a, Gather)} == {5}
    assert [c.index for c in gathers(actions)] == [0, 1, 2]
    assert len({c.slot for c in gathers(actions)}) == 3


def test_a_slot_holds_cells_so_a_wide_chunk_of_few_layers_fits_too() -> None:
    sender = linked(num_slots=8, num_layers=4)
    streaming(sender, num_tokens=20)
    chunks = gathers(sender.computed(KEY, 20, 1))
    assert all(c.range.num_cells <= CHUNK_TOKENS * 4 for c in chunks)
    cells = [
        (token, layer)
        for c in chunks
        for token in range(c.range.token_start, c.range.token_end)
        for layer in range(c.range.layer_start, c.range.layer_end)
    ]
    assert len(cells) == len(set(cells)) == 20 * 4, "every cell once"


@pytest.mark.parametrize("num_layers", [1, 3, 4, 7])
@pytest.mark.parametrize("num_tokens", [64, 65, 200])
def test_a_last_step_is_cut_by_layers_too_and_each_cell_travels_once(num_layers: int, num_tokens: int) -> None:
    sender = linked(num_slots=1000, num_layers=num_layers)
    streaming(sender, num_tokens=num_tokens)
    actions = sender.computing(KEY, num_tokens, after_step=9)
    ranges = [c.range for c in gathers(actions)]
    assert {a.after_step for a in actions if isinstance(a, Gather)} == {9}
    assert all(r.num_cells <= CHUNK_TOKENS * num_layers for r in ranges)
    cells = [
        (t, x) for r in ranges for t in range(r.token_start, r.token_end) for x in range(r.layer_start, r.layer_end)
    ]
    assert len(cells) == len(set(cells)) == num_tokens * num_layers
    assert ranges[0].layer_end <= -(-num_layers // min(4, num_layers)), "the first layers need not wait for the last"
    assert sender.computed(KEY, num_tokens, 9) == [], "what was announced is not gathered again"


def test_a_short_last_step_is_one_chunk_of_all_layers() -> None:
    sender = linked(num_layers=4)
    streaming(sender, num_tokens=6)
    (chunk,) = gathers(sender.computing(KEY, 6, 1))
    assert chunk.range == Range(0, 6, 0, 4)


def test_what_the_receiver_already_has_is_not_sent() -> None:
    sender = linked()
    streaming(sender, cached=16)
    assert sender.computed(KEY, 16, 1) == []
    assert tokens(sender.computed(KEY, 20, 2)) == [(16, 20)]


def test_a_prompt_that_the_receiver_has_whole_is_committed_without_a_chunk() -> None:
    sender = linked()
    streaming(sender, cached=20)
    sender.computed(KEY, 20, 1)
    actions = sender.commit(KEY, FIRST)
    assert told(actions) == ["commit"] and ReleasePages(KEY) in actions


def test_nothing_is_gathered_before_the_pair_is_up_and_then_what_waits() -> None:
    sender = Sender(all_layers(1))
    streaming(sender)
    assert sender.computed(KEY, 8, 1) == []
    assert tokens(sender.connection_open("e", 5, 4)) == [(0, 5), (5, 8)]


def test_nothing_new_is_gathered_for_a_suspect_until_it_is_heard_again() -> None:
    sender = linked()
    streaming(sender)
    assert sender.connection_suspected("e", True) == []
    assert sender.computed(KEY, 8, 1) == []
    assert tokens(sender.connection_suspected("e", False)) == [(0, 8)]
    assert sender.connection_suspected("unknown", True) == []


def test_a_chunk_without_a_slot_waits_for_one() -> None:
    sender = linked(num_slots=2)
    streaming(sender)
    first, second = gathers(sender.computed(KEY, 20, 1))
    sender.gathered(first)
    assert sender.granted("e", KEY, first.index) == [Transmit(first)]
    (third,) = gathers(sender.sent(first))
    assert third.slot == first.slot and third.slot != second.slot
    assert third.range.token_start == 16


def test_slots_are_the_links_own_so_a_stalled_peer_holds_up_only_itself() -> None:
    sender = linked(num_slots=1)
    streaming(sender)
    assert len(gathers(sender.computed(KEY, 20, 1))) == 1
    sender.connection_open("f", CHUNK_TOKENS, 2)
    streaming(sender, OTHER, "f")
    assert len(gathers(sender.computed(OTHER, 20, 1))) == 2


def test_the_oldest_hand_off_of_a_link_gets_the_next_slot() -> None:
    sender = linked(num_slots=1)
    streaming(sender)
    streaming(sender, OTHER)
    (first,) = gathers(sender.computed(KEY, 16, 1))
    assert sender.computed(OTHER, 8, 2) == []
    sender.gathered(first)
    sender.granted("e", KEY, 0)
    assert [c.key for c in gathers(sender.sent(first))] == [KEY]


# Commit


def test_commit_follows_the_last_offer_and_pages_go_back_at_the_last_gather() -> None:
    sender = linked(num_slots=4)
    streaming(sender, num_tokens=16)
    first, second = gathers(sender.computed(KEY, 16, 1))
    assert sender.commit(KEY, FIRST) == []
    assert told(sender.gathered(second)) == ["offer"]
    last = sender.gathered(first)
    assert told(last) == ["offer", "commit"]
    commit = next(a.message.commit for a in last if isinstance(a, SendMessage) and a.message.HasField("commit"))
    assert commit.num_chunks == 2 and commit.first_tokens[0].token_id == 7
    assert ReleasePages(KEY) in last


def test_a_commit_counts_only_once_everything_is_computed() -> None:
    sender, _ = one_offered()
    assert sender.commit(KEY, FIRST) == [], "12 tokens are neither computed nor offered"
    (chunk,) = gathers(sender.computed(KEY, 16, 2))
    sender.gathered(chunk)
    assert sender.is_live(KEY) and sender.count_stages()["offered"] == 2


def test_the_hand_off_is_forgotten_once_it_is_committed_and_all_is_sent_in_either_order() -> None:
    for last in ("sent", "committed"):
        sender, chunk = committing()
        sender.granted("e", KEY, 0)
        steps = {"sent": lambda: sender.sent(chunk), "committed": lambda: sender.committed("e", KEY)}  # noqa: B023
        steps["committed" if last == "sent" else "sent"]()
        assert KEY in sender
        assert steps[last]() == []
        assert KEY not in sender
        sender.check_idle()


# Ends


def test_an_abort_is_told_once_and_the_answer_settles_it() -> None:
    sender = linked()
    streaming(sender)
    actions = sender.abort(KEY, "cancelled")
    assert told(actions) == ["abort"] and ReleasePages(KEY) in actions
    assert sender.abort(KEY, "cancelled") == []
    assert sender.peer_aborted("e", KEY) == []
    sender.check_idle()


def test_a_grant_after_an_abort_is_still_sent() -> None:
    sender, chunk = one_offered()
    assert told(sender.abort(KEY, "cancelled")) == ["abort"]
    assert sender.granted("e", KEY, 0) == [Transmit(chunk)]
    sender.peer_aborted("e", KEY)
    assert sender.count_stages() == {"gathering": 0, "offered": 0, "sending": 1, "free": 1}
    sender.sent(chunk)
    sender.check_idle()


def test_an_offered_slot_returns_only_when_the_receiver_has_answered_the_abort() -> None:
    sender, _ = one_offered()
    sender.abort(KEY, "cancelled")
    assert sender.count_stages()["free"] == 1
    sender.peer_aborted("e", KEY)
    assert sender.count_stages()["free"] == 2
    sender.check_idle()


def test_a_grant_of_what_was_taken_back_is_dropped() -> None:
    sender, _ = one_offered()
    sender.peer_aborted("e", KEY)
    assert sender.granted("e", KEY, 0) == []


def test_pages_are_not_released_while_a_gather_reads_them() -> None:
    ends: list[Callable[[Sender], Actions]] = [
        lambda sender: sender.abort(KEY, "cancelled"),
        lambda sender: sender.peer_aborted("e", KEY),
        lambda sender: sender.connection_lost("e"),
    ]
    for end in ends:
        sender = linked()
        streaming(sender)
        (chunk,) = gathers(sender.computed(KEY, 8, 1))
        assert ReleasePages(KEY) not in end(sender)
        assert sender.computed(KEY, 16, 2) == [], "a hand-off that is over sends no more"
        actions = sender.gathered(chunk)
        assert actions.count(ReleasePages(KEY)) == 1 and told(actions) == []


def test_what_waits_is_not_gathered_after_an_abort() -> None:
    sender = linked(num_slots=1)
    streaming(sender)
    (chunk,) = gathers(sender.computed(KEY, 20, 1))
    sender.abort(KEY, "cancelled")
    assert gathers(sender.gathered(chunk)) == []


def test_a_slot_that_an_abort_frees_goes_to_the_next_hand_off() -> None:
    sender = linked(num_slots=1)
    streaming(sender)
    (chunk,) = gathers(sender.computed(KEY, 8, 1))
    sender.gathered(chunk)
    streaming(sender, OTHER)
    assert sender.computed(OTHER, 8, 2) == []
    assert [c.key for c in gathers(sender.peer_aborted("e", KEY))] == [OTHER]


def test_the_router_hears_once_why_a_live_hand_off_ended_and_nothing_of_one_it_ended_itself() -> None:
    sender, _ = one_offered()
    (failed,) = [a for a in sender.peer_aborted("e", KEY) if isinstance(a, Fail)]
    assert failed.reason == worker_pb2.Failed.REASON_TRANSFER_FAILED
    assert sender.connection_lost("e") == []

    sender, _ = one_offered()
    sender.abort(KEY, "cancelled")
    assert not [a for a in sender.connection_lost("e") if isinstance(a, Fail)]


@pytest.mark.parametrize("state", ["opening", "streaming", "offered", "committing"])
def test_a_link_that_is_down_fails_its_hand_offs_only_and_takes_its_slots_with_it(state: str) -> None:
    if state == "opening":
        sender = linked()
        sender.open(KEY, "e", 8)
    elif state == "streaming":
        sender = linked()
        streaming(sender)
    else:
        sender = one_offered()[0] if state == "offered" else committing()[0]
    sender.connection_open("f", CHUNK_TOKENS, 2)
    streaming(sender, OTHER, "f")
    actions = sender.connection_lost("e", worker_pb2.Failed.REASON_INCOMPATIBLE, "no common layout")
    assert [(a.key, a.reason, a.message) for a in actions if isinstance(a, Fail)] == [
        (KEY, worker_pb2.Failed.REASON_INCOMPATIBLE, "no common layout")
    ]
    assert KEY not in sender and OTHER in sender
    assert sender.count_stages()["free"] == 2, "only the other link's"
    assert gathers(sender.computed(OTHER, 20, 1))


def test_what_was_granted_drains_after_its_link_is_down_and_no_slot_of_it_comes_back() -> None:
    sender, chunk = one_offered()
    sender.granted("e", KEY, 0)
    assert ReleasePages(KEY) in sender.connection_lost("e")
    assert KEY in sender and sender.num_on("e") == 1
    assert sender.sent(chunk) == []
    assert KEY not in sender and sender.count_stages()["free"] == 0


# Identity


def test_what_is_late_or_of_another_hand_off_changes_nothing() -> None:
    sender, chunk = one_offered()
    late: list[Actions] = [
        sender.reserved("e", KEY, 0),
        sender.reserved("e", OTHER, 0),
        sender.granted("e", OTHER, 0),
        sender.granted("e", KEY, 5),
        sender.granted("e", AGAIN, 0),
        sender.granted("f", KEY, 0),
        sender.committed("e", KEY),
        sender.committed("f", KEY),
        sender.peer_aborted("f", KEY),
        sender.peer_aborted("e", AGAIN),
        sender.connection_lost("f"),
        sender.computed(OTHER, 8, 1),
        sender.computing(OTHER, 8, 1),
        sender.commit(OTHER, FIRST),
        sender.abort(OTHER, "cancelled"),
    ]
    assert late == [[]] * len(late)
    assert sender.is_live(KEY)
    assert sender.granted("e", KEY, 0) == [Transmit(chunk)]
    assert sender.granted("e", KEY, 0) == [], "a grant heard twice sends once"


def test_a_second_attempt_on_another_link_is_not_touched_by_what_is_left_of_the_first() -> None:
    sender, chunk = one_offered()
    sender.granted("e", KEY, 0)
    sender.connection_lost("e")
    sender.connection_open("f", CHUNK_TOKENS, 2)
    streaming(sender, AGAIN, "f")
    (again,) = gathers(sender.computed(AGAIN, 8, 2))
    assert told(sender.gathered(again)) == ["offer"]
    assert sender.granted("f", KEY, 0) == [] and sender.granted("e", AGAIN, 0) == []
    assert sender.sent(chunk) == []
    assert sender.granted("f", AGAIN, 0) == [Transmit(again)]


def test_the_last_step_is_layered_only_where_that_is_worth_a_message() -> None:
    assert sender_module.MIN_LAYER_PARTS > 1
    for num_tokens, num_groups in ((sender_module.MIN_LAYERED_TOKENS - 1, 1), (sender_module.MIN_LAYERED_TOKENS, 4)):
        sender = Sender(all_layers(4))
        sender.connection_open("e", 1000, 8)
        streaming(sender, num_tokens=num_tokens)
        assert len(gathers(sender.computing(KEY, num_tokens, 1))) == num_groups
