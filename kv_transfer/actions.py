"""Actions that the two sides of a hand-off ask their worker to carry out. The machines that decide them do no I/O.

A hand-off is named by (request, attempt, pair epoch): `key` is the first two. `epoch` names the connection to the other
worker and the pair of its ranks. A slot is one of the pair's; token ranges are of the prompt.
None is changed once it is made; those of which each chunk has one are not frozen, which would take five times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2


@dataclass(slots=True, unsafe_hash=True)
class Range:
    """The KV of tokens [token_start, token_end) in layers [layer_start, layer_end), counted within a group of layers
    (`cluster.kv_groups`)."""

    token_start: int
    token_end: int
    layer_start: int
    layer_end: int
    group: int = 0

    @property
    def num_tokens(self) -> int:
        return self.token_end - self.token_start

    @property
    def num_cells(self) -> int:
        """Tokens times layers: what fills a slot, and what a whole prompt is counted in."""
        return self.num_tokens * (self.layer_end - self.layer_start)

    def cut(self, capacity: int) -> tuple[Range, list[Range]]:
        """The first part, which fits a slot of `capacity` cells, and what is left: layers first, then tokens."""
        if self.num_cells <= capacity:
            return self, []
        layer = min(self.layer_start + max(1, capacity // self.num_tokens), self.layer_end)
        token = min(self.token_start + capacity, self.token_end)
        first = replace(self, token_end=token, layer_end=layer)
        rest = [replace(self, token_start=token, layer_end=layer)] if token < self.token_end else []
        if layer < self.layer_end:
            rest.append(replace(self, layer_start=layer))
        return first, rest


@dataclass(slots=True, unsafe_hash=True)
class Chunk:
    """One range of one hand-off in one slot of its pair."""

    key: RequestKey
    epoch: str
    index: int
    """From 0 within the hand-off."""
    slot: int
    range: Range

    @property
    def tag(self) -> int:
        """The chunk's identity in 64 bits, equal on both sides: (request, attempt, pair epoch, index)."""
        name = f"{self.key.request_id}\0{self.key.attempt}\0{self.epoch}\0{self.index}"
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")

    def to_proto(self) -> handoff_pb2.Chunk:
        where = self.range
        return handoff_pb2.Chunk(
            key=self.key.to_proto(),
            index=self.index,
            slot=self.slot,
            token_start=where.token_start,
            token_end=where.token_end,
            layer_start=where.layer_start,
            layer_end=where.layer_end,
            group=where.group,
        )

    @classmethod
    def from_proto(cls, message: handoff_pb2.Chunk, epoch: str) -> Chunk:
        where = Range(message.token_start, message.token_end, message.layer_start, message.layer_end, message.group)
        return cls(RequestKey.of(message.key), epoch, message.index, message.slot, where)


@dataclass(slots=True, unsafe_hash=True)
class SendMessage:
    """Send a control message to the peer."""

    epoch: str
    message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage


@dataclass(slots=True, unsafe_hash=True)
class Gather:
    """Copy a chunk from this worker's pages into its send slot, once `after_step` steps have written it."""

    chunk: Chunk
    after_step: int


@dataclass(slots=True, unsafe_hash=True)
class Transmit:
    """Send a gathered chunk to the peer, who has posted its receive."""

    chunk: Chunk


@dataclass(slots=True, unsafe_hash=True)
class Land:
    """Receive a chunk into its landing slot and scatter it into this worker's pages."""

    chunk: Chunk


@dataclass(frozen=True)
class BeginPrefill:
    """The decode worker has reserved: compute the prompt."""

    key: RequestKey


@dataclass(frozen=True)
class Reserve:
    """Both the router and the prefill worker have asked: reserve blocks as soon as they are free."""

    key: RequestKey


@dataclass(frozen=True)
class Ready:
    """Every chunk has landed and the commit is in: decode."""

    key: RequestKey
    first_tokens: tuple[handoff_pb2.FirstToken, ...]


@dataclass(frozen=True)
class ReleasePages:
    """No operation of the hand-off may touch the request's pages any more; the first `num_kept_tokens` are whole."""

    key: RequestKey
    num_kept_tokens: int = 0


@dataclass(frozen=True)
class Fail:
    """SendMessage the router that the request cannot go on here."""

    key: RequestKey
    reason: worker_pb2.Failed.Reason
    message: str
    num_kept_tokens: int = 0


Action = SendMessage | Gather | Transmit | Land | BeginPrefill | Reserve | Ready | ReleasePages | Fail
Actions = list[Action]
