"""A receiving machine brought to where a test begins, what it is offered, and what it asks for."""

from __future__ import annotations

from cluster.kv_groups import all_layers
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from decode_worker.receiver import Receiver
from kv_transfer.actions import Actions, Chunk, Fail, Land, Reserve, SendMessage

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
    receiver = Receiver(all_layers(num_layers))
    assert receiver.connection_called("e", CHUNK_TOKENS, num_slots) == []
    assert receiver.connection_open("e") == []
    return receiver


def receiving(num_slots: int = 2, num_tokens: int = 16, cached: int = 0, num_layers: int = 1) -> Receiver:
    receiver = linked(num_slots, num_layers)
    assert receiver.announce(KEY, num_tokens) == []
    assert receiver.opened("e", KEY, 16) == [Reserve(KEY)]
    assert told(receiver.reserved(KEY, cached)) == ["reserved"]
    return receiver


def landing(num_tokens: int = 16) -> tuple[Receiver, Chunk]:
    """A receiver with one chunk granted."""
    receiver = receiving(num_tokens=num_tokens)
    actions = receiver.offered("e", offer(0, 0, 8))
    assert told(actions) == ["grant"]
    (chunk,) = landings(actions)
    return receiver, chunk
