"""What the sending machine sends of layers that keep a window."""

from __future__ import annotations

from cluster.kv_groups import KvGroup
from cluster.lifecycle import RequestKey
from kv_transfer.actions import Actions, Gather, Range
from prefill_worker.sender import Sender

CHUNK_TOKENS = 8


def ranges(actions: Actions) -> list[Range]:
    return [a.chunk.range for a in actions if isinstance(a, Gather)]


def test_of_a_window_only_what_the_next_token_sees_is_sent() -> None:
    sender = Sender((KvGroup((1, 3)), KvGroup((0, 2), window=6)))
    sender.connection_open("e", CHUNK_TOKENS, 100)
    cold, up_to_it, warm = RequestKey("a", 1), RequestKey("b", 1), RequestKey("c", 1)
    for key, num_cached in ((cold, 0), (up_to_it, 0), (warm, 16)):
        sender.open(key, "e", 20)
        sender.reserved("e", key, num_cached)
    assert ranges(sender.computed(cold, 14, 1)) == [Range(0, 14, 0, 2)]
    assert ranges(sender.computed(cold, 20, 2)) == [Range(14, 20, 0, 2), Range(15, 20, 0, 2, 1)]
    assert ranges(sender.computed(up_to_it, 15, 1)) == [Range(0, 15, 0, 2)], "none of the tokens before the window"
    assert ranges(sender.computed(warm, 20, 1)) == [Range(16, 20, 0, 2), Range(16, 20, 0, 2, 1)]
