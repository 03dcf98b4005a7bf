"""What the two sides of a hand-off ask their worker to do. The machines that decide them do no I/O.

`peer` names the other worker's link, `slot` a send or landing slot of this worker, ranges are tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2, worker_pb2


@dataclass(frozen=True)
class Tell:
    """Send a control message to the peer."""

    peer: str
    message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage


@dataclass(frozen=True)
class Gather:
    """Copy a token range from this worker's pages into a send slot."""

    key: RequestKey
    peer: str
    chunk_index: int
    slot: int
    token_start: int
    token_end: int


@dataclass(frozen=True)
class Transmit:
    """Send a gathered slot to the peer, who has posted its receive."""

    key: RequestKey
    peer: str
    chunk_index: int
    slot: int
    num_tokens: int


@dataclass(frozen=True)
class Land:
    """Receive a chunk into a landing slot and scatter it into this worker's pages."""

    key: RequestKey
    peer: str
    chunk_index: int
    slot: int
    token_start: int
    token_end: int


@dataclass(frozen=True)
class BeginPrefill:
    """The decode worker has reserved: compute the prompt."""

    key: RequestKey


@dataclass(frozen=True)
class Reserve:
    """Router and prefill worker have both spoken: reserve blocks as soon as they are free."""

    key: RequestKey


@dataclass(frozen=True)
class Ready:
    """Every chunk has landed and the commit is in: decode."""

    key: RequestKey
    first_tokens: tuple[handoff_pb2.FirstToken, ...]


@dataclass(frozen=True)
class ReleasePages:
    """No operation of the hand-off may touch the request's pages any more."""

    key: RequestKey


@dataclass(frozen=True)
class Fail:
    """Tell the router that the request cannot go on here."""

    key: RequestKey
    reason: worker_pb2.Failed.Reason
    message: str


Action = Tell | Gather | Transmit | Land | BeginPrefill | Reserve | Ready | ReleasePages | Fail
Actions = list[Action]
