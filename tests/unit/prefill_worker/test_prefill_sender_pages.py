"""The sending machine where the receiver reads its worker's pages: until when they are held."""

from __future__ import annotations

import pytest

from cluster.kv_groups import all_layers
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2
from kv_transfer.actions import Actions, BeginPrefill, Chunk, Fail, Gather, ReleasePages, SendMessage, Transmit
from prefill_worker.sender import Sender

KEY = RequestKey("a", 1)
FIRST = [handoff_pb2.FirstToken(sequence_index=0, token_id=7)]
CHUNK_TOKENS = 8


def told(actions: Actions) -> list[str]:
    return [a.message.WhichOneof("message") or "" for a in actions if isinstance(a, SendMessage)]


def one_offered(num_tokens: int = CHUNK_TOKENS, *, shares_pages: bool = True) -> tuple[Sender, Chunk]:
    """A sender whose first chunk is offered, and nothing else under way."""
    sender = Sender(all_layers(1))
    sender.connection_open("e", CHUNK_TOKENS, 2, shares_pages=shares_pages)
    sender.open(KEY, "e", num_tokens)
    assert sender.reserved("e", KEY, 0) == [BeginPrefill(KEY)]
    (chunk,) = [a.chunk for a in sender.computed(KEY, CHUNK_TOKENS, 1) if isinstance(a, Gather)]
    assert told(sender.gathered(chunk)) == ["offer"]
    return sender, chunk


def test_shared_pages_are_held_until_the_receiver_has_read_the_last_chunk() -> None:
    sender, chunk = one_offered()
    assert told(sender.commit(KEY, FIRST)) == ["commit"]
    assert sender.granted("e", KEY, 0) == [Transmit(chunk)]
    assert sender.committed("e", KEY) == []
    assert sender.sent(chunk) == [ReleasePages(KEY)]
    sender.check_idle()


def test_shared_pages_of_an_aborted_hand_off_are_held_until_the_abort_is_answered() -> None:
    sender, _ = one_offered(20)
    assert told(sender.abort(KEY, "cancelled")) == ["abort"]
    assert sender.peer_aborted("e", KEY) == [ReleasePages(KEY)]
    sender.check_idle()


def test_shared_pages_of_an_aborted_hand_off_that_were_granted_are_held_until_they_are_read() -> None:
    sender, chunk = one_offered(20)
    sender.abort(KEY, "cancelled")
    assert sender.granted("e", KEY, 0) == [Transmit(chunk)]
    assert sender.peer_aborted("e", KEY) == []
    assert sender.sent(chunk) == [ReleasePages(KEY)]


@pytest.mark.parametrize("is_granted", [True, False])
def test_shared_pages_of_a_lost_connection_are_held_until_its_pair_is_closed(is_granted: bool) -> None:
    sender, chunk = one_offered(20)
    if is_granted:
        sender.granted("e", KEY, 0)
    (failed,) = sender.connection_lost("e")
    assert isinstance(failed, Fail)
    if is_granted:
        assert sender.sent(chunk) == []  # some rank may not have closed it
    assert sender.connection_closed("e") == [ReleasePages(KEY)]
    assert KEY not in sender


def test_shared_pages_of_a_closed_pair_are_released_before_a_send_that_is_late_has_ended() -> None:
    sender, chunk = one_offered(20)
    sender.granted("e", KEY, 0)
    sender.connection_lost("e")
    assert sender.connection_closed("e") == [ReleasePages(KEY)]
    assert sender.sent(chunk) == [] and KEY not in sender


def test_a_pair_that_is_closed_changes_nothing_where_pages_are_gathered() -> None:
    sender, _ = one_offered(shares_pages=False)
    assert ReleasePages(KEY) in sender.connection_lost("e")
    assert sender.connection_closed("e") == []
