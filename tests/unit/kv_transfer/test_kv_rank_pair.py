"""What a rank's pair knows of its slots, without a transport."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from cluster.errors import TransferFailed
from cluster.pb import handoff_pb2, rank_pb2
from kv_transfer.layout import KvLayout
from kv_transfer.rank_pair import RankPair

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", tp_size=1, block_size=16, model="m")
AGREED = handoff_pb2.ReceiverHello(transport="shm", wire_format="native", chunk_tokens=16, num_slots=2)
SPEC = rank_pb2.OpenPair(pair_epoch="e", is_sender=False, remote=LAYOUT.to_proto(), agreed=AGREED)


@pytest.fixture
def pair() -> RankPair:
    pair = RankPair(SPEC)
    pair.open()
    return pair


def test_a_slot_is_landed_from_its_arrival_until_it_is_written_to_the_pages(pair: RankPair) -> None:
    pair.post_receive(0)
    pair.post_receive(1)
    assert pair.num_landed == 0
    pair.arrived(0)
    assert pair.num_landed == 1
    with pytest.raises(ValueError, match="slot 0 is landed; wait for it before it is used again"):
        pair.post_receive(0)
    pair.free(0)
    assert pair.num_landed == 0
    pair.post_receive(0)


def test_a_pair_that_has_ended_counts_nothing_as_landed(pair: RankPair) -> None:
    pair.post_receive(0)
    pair.arrived(0)
    assert pair.end("its peer is gone")
    assert pair.num_landed == 0
    with pytest.raises(TransferFailed, match="pair e cannot be used: its peer is gone"):
        pair.post_receive(1)


def test_who_waits_for_a_pair_to_close_goes_on_when_closing_fails(pair: RankPair) -> None:
    transport = Mock(slots=[])
    transport.close.side_effect = RuntimeError("the driver is gone")
    pair.add_route(Mock(), transport)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        pair.end("its peer is gone")

    waiting = threading.Thread(target=pair.await_closed, daemon=True)
    waiting.start()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
