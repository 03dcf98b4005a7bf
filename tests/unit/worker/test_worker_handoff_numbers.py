"""Whatever a stream drops or repeats, what is taken from it is the beginning of what was said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.failure_detector import FailureTimeouts
from cluster.pb import handoff_pb2
from worker.handoff_connection import HandoffConnection, HandoffContext, StreamGap
from worker.handoff_metrics import HandoffMetrics


def a_connection(peer: str = "") -> HandoffConnection:
    nobody: Any = None
    context = HandoffContext(nobody, nobody, nobody, FailureTimeouts(1.0, 2.0, 3.0), HandoffMetrics())
    return HandoffConnection("e", nobody, context, peer=peer)


def said(count: int) -> list[handoff_pb2.SenderMessage]:
    speaker = a_connection()
    messages = [handoff_pb2.SenderMessage(abort=handoff_pb2.Abort(reason=str(i))) for i in range(count)]
    for message in messages:
        speaker.stamp(message)
    return messages


@given(st.lists(st.integers(0, 7), max_size=40))
def test_any_drops_repeats_and_reordering_yield_a_prefix_or_end_the_stream(order: list[int]) -> None:
    messages, listener = said(8), a_connection()
    taken: list[str] = []
    for place, index in enumerate(order):
        try:
            if listener.accept(messages[index].number):
                taken.append(messages[index].abort.reason)
        except StreamGap:
            assert index > len(taken), f"message {index} was refused although {taken} came before it: {order[:place]}"
            break
        else:
            assert index < len(taken)
    assert taken == [str(i) for i in range(len(taken))]


def test_a_whole_stream_is_taken_and_its_repetition_is_dropped() -> None:
    messages, listener = said(5), a_connection()
    assert [m.number for m in messages] == [1, 2, 3, 4, 5]
    assert all(listener.accept(m.number) for m in messages)
    assert not any(listener.accept(m.number) for m in messages)
    assert listener.accept(6)


def test_a_lost_message_is_named() -> None:
    listener = a_connection()
    assert listener.accept(1)
    with pytest.raises(StreamGap, match="message 2 of the stream is missing: number 3 came instead"):
        listener.accept(3)


@pytest.mark.parametrize("number", [0, 2])
def test_a_stream_begins_with_number_one(number: int) -> None:
    with pytest.raises(StreamGap, match="message 1 of the stream is missing"):
        a_connection().accept(number)


def test_both_directions_count_for_themselves() -> None:
    side = a_connection()
    side.stamp(handoff_pb2.SenderMessage())
    side.stamp(handoff_pb2.SenderMessage())
    assert side.accept(1)
    assert (side.num_sent, side.num_received) == (2, 1)


async def test_a_sender_writes_nothing_behind_its_hello_until_that_is_answered() -> None:
    """gRPC tells one who writes to a call that was refused of an internal error, and not why it was refused."""
    sender = a_connection(peer="d")
    sender.tick(1.5)
    sender.enqueue(said(1)[0])
    messages = sender.outbound()
    assert (await anext(messages)).WhichOneof("message") == "abort", "no sign of life comes before it"
    sender.greeted()
    sender.tick(1.5)
    assert (await anext(messages)).WhichOneof("message") == "alive"
    await messages.aclose()  # type: ignore[attr-defined]
