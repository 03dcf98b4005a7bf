"""States of the hand-off model: links, what each side holds, and cheap copies and names of the machines.

A copy shares what is never changed (messages, chunks); a frozen state is a tuple, equal for equal states.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cluster.kv_groups import KvGroup, group_layers
from cluster.pb import handoff_pb2
from decode_worker.receiver import Incoming, LandingSlots, Receiver
from kv_transfer.actions import Chunk
from prefill_worker.sender import Outgoing, Sender

Message = handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage


class Violation(AssertionError):
    """Something that must never happen has happened."""


@dataclass(frozen=True)
class Bounds:
    """How large a world is explored."""

    name: str
    num_requests: int = 1
    num_attempts: int = 1
    num_tokens: int = 3
    windows: tuple[int | None, ...] = (None,)
    """For each layer, how many tokens a token sees; None: all before it."""
    num_slots: int = 2
    num_faults: int = 2
    tokens_a_step: int = 1
    other_sender: bool = False
    """Attempt 2 goes through another prefill worker."""
    is_layered: bool = False
    """The last step's layers are sent while it runs."""
    shares_pages: bool = False
    """The decode worker reads the prefill worker's pages itself."""
    num_kept: int | None = None
    """A fetch, of which the sender's cache has so many tokens when it is told; None: the prompt is computed."""

    @property
    def num_handed(self) -> int:
        """Tokens that the hand-off is of."""
        return self.num_tokens if self.num_kept is None else self.num_kept

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        return group_layers(self.windows)


class Said:
    """A message with its number; equal when what it says is."""

    __slots__ = ("message", "name", "number")

    def __init__(self, number: int, message: Message) -> None:
        self.number = number
        self.message = message
        self.name = (number, *describe(message))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Said) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass
class Stream:
    """One direction of a link: what was said and not heard, and both ends' numbers."""

    queue: list[Said] = field(default_factory=list)
    said: int = 0
    heard: int = 0
    last: Said | None = None
    """The newest message that was heard, for one that comes late again."""

    def clone(self) -> Stream:
        return Stream(list(self.queue), self.said, self.heard, self.last)

    def freeze(self) -> tuple[object, ...]:
        return (tuple(self.queue), self.said, self.heard, self.last)


@dataclass
class Link:
    """One link as both sides see it, and its pair: sends and receives meet in the order in which they are posted."""

    sender: int
    there: Stream = field(default_factory=Stream)
    back: Stream = field(default_factory=Stream)
    is_open: dict[str, bool] = field(default_factory=lambda: {"s": True, "r": False})
    """By side: it has not retired it. The receiver knows it once it was called."""
    is_up: dict[str, bool] = field(default_factory=lambda: {"s": False, "r": False})
    was_called: bool = False
    sends: list[tuple[Chunk, bool]] = field(default_factory=list)
    """Chunks sent, in order; whether the operation is over at the sender."""
    receives: list[tuple[Chunk, bool]] = field(default_factory=list)
    is_closed: bool = False
    """The sender has closed its side of the pair on every rank."""

    @property
    def is_whole(self) -> bool:
        return self.is_open["s"] and self.is_open["r"]

    def clone(self) -> Link:
        return Link(
            self.sender,
            self.there.clone(),
            self.back.clone(),
            dict(self.is_open),
            dict(self.is_up),
            self.was_called,
            list(self.sends),
            list(self.receives),
            self.is_closed,
        )

    def freeze(self) -> tuple[object, ...]:
        return (
            self.sender,
            self.there.freeze(),
            self.back.freeze(),
            *self.is_open.values(),
            *self.is_up.values(),
            self.was_called,
            tuple(self.sends),
            tuple(self.receives),
            self.is_closed,
        )


@dataclass
class Side:
    """What one worker holds for one attempt, and what it has told the router."""

    holds_pages: bool = False
    outcome: str = ""
    """`ready`, `failed` or `released`: how it ended here."""
    num_computed: int = 0
    is_computing: bool = False
    wants_blocks: bool = False

    def freeze(self) -> tuple[object, ...]:
        return (self.holds_pages, self.outcome, self.num_computed, self.is_computing, self.wants_blocks)


def describe(message: Message) -> tuple[object, ...]:
    """A message as a hashable value, readable in a trace."""
    kind = str(message.WhichOneof("message"))
    body = getattr(message, kind)
    key = (body.key.request_id, body.key.attempt) if kind != "hello" else ()
    return (kind, *key, getattr(body, "index", getattr(body, "chunk_index", None)))


def clone_sender(sender: Sender) -> Sender:
    new = type(sender).__new__(type(sender))
    new._groups, new._num_layers = sender._groups, sender._num_layers
    new._outgoing = {
        k: replace(o, waiting=o.waiting.copy(), chunks=dict(o.chunks)) for k, o in sender._outgoing.items()
    }
    new._slots = {e: replace(o, free_slots=list(o.free_slots)) for e, o in sender._slots.items()}
    new._closing = set(sender._closing)
    return new


def clone_receiver(receiver: Receiver) -> Receiver:
    new = type(receiver).__new__(type(receiver))
    new._groups, new._num_layers = receiver._groups, receiver._num_layers
    new._incoming = {
        k: replace(i, landing=dict(i.landing), landed=list(i.landed)) for k, i in receiver._incoming.items()
    }
    new._opened = dict(receiver._opened)
    new._slots = {
        e: LandingSlots(i.capacity, set(i.free_slots), i.num_slots, i.is_open, i.offers.copy())
        for e, i in receiver._slots.items()
    }
    return new


def _freeze_outgoing(out: Outgoing) -> tuple[object, ...]:
    chunks = tuple((chunk, stage.value) for chunk, stage in out.chunks.values())
    has_first = out.first_tokens is not None
    return (out.epoch, out.state.value, out.next_token, tuple(out.waiting), chunks, has_first, out.holds_pages)


def _freeze_incoming(i: Incoming) -> tuple[object, ...]:
    commit = i.commit.num_chunks if i.commit is not None else -1
    return (
        i.num_tokens,
        i.epoch,
        i.state.value,
        tuple(i.landing.values()),
        frozenset(i.landed),
        commit,
        i.failure is not None,
    )


def freeze_sender(sender: Sender) -> tuple[object, ...]:
    outlets = tuple((e, tuple(o.free_slots)) for e, o in sender._slots.items())
    closing = frozenset(sender._closing)
    return (tuple((k, _freeze_outgoing(o)) for k, o in sender._outgoing.items()), outlets, closing)


def freeze_receiver(receiver: Receiver) -> tuple[object, ...]:
    inlets = tuple((e, frozenset(i.free_slots), i.is_open, tuple(i.offers)) for e, i in receiver._slots.items())
    incoming = tuple((k, _freeze_incoming(i)) for k, i in receiver._incoming.items())
    return (incoming, tuple(receiver._opened.items()), inlets)
