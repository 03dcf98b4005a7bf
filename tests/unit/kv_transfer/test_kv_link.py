"""What a link knows of its slots, without a transport."""

from __future__ import annotations

import pytest

from kv_transfer.failures import TransferFailed
from kv_transfer.layout import KvLayout
from kv_transfer.link import Link, PairSpec

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", tp_size=1, block_size=16, model="m")
SPEC = PairSpec("e", "127.0.0.1:1", False, LAYOUT, "shm", "native", chunk_tokens=16, num_slots=2)


@pytest.fixture
def link() -> Link:
    link = Link(SPEC)
    link.open()
    return link


def test_a_slot_is_landed_from_its_arrival_until_it_is_written_to_the_pages(link: Link) -> None:
    link.post_receive(0)
    link.post_receive(1)
    assert link.num_landed == 0
    link.arrived(0)
    assert link.num_landed == 1
    with pytest.raises(ValueError, match="slot 0 is landed; wait for it before it is used again"):
        link.post_receive(0)
    link.free(0)
    assert link.num_landed == 0
    link.post_receive(0)


def test_a_link_that_has_ended_counts_nothing_as_landed(link: Link) -> None:
    link.post_receive(0)
    link.arrived(0)
    assert link.end("its peer is gone")
    assert link.num_landed == 0
    with pytest.raises(TransferFailed, match="pair e cannot be used: its peer is gone"):
        link.post_receive(1)
