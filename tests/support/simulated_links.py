"""Links between simulated workers: two ordered streams of messages that are lost, doubled, late, silent or cut.

Numbers are the real ones (`kv_transfer.ordered`), and what a side is told of its link is what `worker.links` tells: it
greeted or called, was heard, is suspected, is down. Each side notices an end in its own time; what was on its way may
still be heard before that, or not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cluster.pb import handoff_pb2
from kv_transfer.ordered import Ordered, StreamGap

if TYPE_CHECKING:
    from simulation import Node, World

Message = handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage
Move = Callable[[], None]


class End:
    """One side of a link: who it is, what is on its way to it, and whether it still uses it."""

    def __init__(self, node: Node, is_open: bool) -> None:
        self.node = node
        self.ordered = Ordered()
        self.inbox: deque[Message] = deque()
        self.is_open = is_open
        self.is_over = False
        self.is_suspect = False


class Link:
    """From its opening by a prefill worker until both sides have let go of it.

    A move may have been made void by another of the same turn.
    """

    def __init__(self, world: World, epoch: str, caller: Node, callee: Node | None, hello: Message) -> None:
        self._world = world
        self.epoch = epoch
        self.caller = End(caller, is_open=True)
        self.callee = End(callee, is_open=False) if callee is not None else None
        self.is_cut = callee is None
        """Nothing more arrives: each side will notice."""
        self.is_silent = False
        """Nothing arrives now: each side will suspect the other."""
        self.say(self.caller, hello)

    @property
    def is_over(self) -> bool:
        caller, callee = self.caller, self.callee
        return caller.is_over and (callee is None or callee.is_over or (self.is_cut and not callee.is_open))

    def end_of(self, node: Node) -> End | None:
        for end in (self.caller, self.callee):
            if end is not None and end.node is node:
                return end
        return None

    def say(self, end: End, message: Message) -> None:
        if not end.is_open:
            return
        end.ordered.stamp(message)
        other = self._other(end)
        if other is not None and not other.is_over and not self.is_cut:
            other.inbox.append(message)

    def close(self, end: End, why: str, is_final: bool = False) -> None:
        """This side lets go of the link, for whatever reason, and is told so."""
        if end.is_open:
            end.is_open, end.is_over = False, True
            end.inbox.clear()
            end.node.post("link_down", self.epoch, why, is_final)

    def cut(self, chance: random.Random) -> None:
        """The connection is gone: of what was on its way to each side, only a beginning may still be heard."""
        self.is_cut = True
        for end in (self.caller, self.callee):
            keep = chance.randint(0, len(end.inbox)) if end is not None else 0
            while end is not None and len(end.inbox) > keep:
                end.inbox.pop()

    def moves(self) -> Iterator[Move]:
        """What may happen next."""
        caller, callee = self.caller, self.callee
        if callee is not None and not callee.is_open and not callee.is_over and callee.node.is_running:
            yield self._call
        for end in (caller, callee):
            if end is None or not end.is_open or not end.node.is_running:
                continue
            other = self._other(end)
            is_quiet = self.is_silent or (other is not None and not other.node.is_running)
            if end.inbox and not self.is_silent:
                yield lambda end=end: self._deliver(end)  # type: ignore[misc]
            elif is_quiet and not end.is_suspect:
                yield lambda end=end: self._suspect(end, True)  # type: ignore[misc]
            elif is_quiet:
                yield lambda end=end: self.close(end, "the peer has been silent")  # type: ignore[misc]
                yield self._speak_again
            elif end.is_suspect:
                yield lambda end=end: self._suspect(end, False)  # type: ignore[misc]
            elif other is not None and not other.is_over and other.ordered.num_said != end.ordered.num_heard:
                yield lambda end=end: self.close(end, "a sign of life showed a gap")  # type: ignore[misc]
            if self.is_cut or (other is not None and other.is_over):
                yield lambda end=end: self.close(end, "the stream has ended")  # type: ignore[misc]

    def _other(self, end: End) -> End | None:
        return self.callee if end is self.caller else self.caller

    def _speak_again(self) -> None:
        self.is_silent = False

    def _suspect(self, end: End, is_suspect: bool) -> None:
        end.is_suspect = is_suspect
        self._world.counts["suspected" if is_suspect else "heard again"] += 1
        end.node.post("link_suspected", self.epoch, is_suspect)

    def _call(self) -> None:
        """The receiver hears the hello."""
        end = self.callee
        assert end is not None
        if self.is_cut or not end.inbox:
            return
        if self._world.strikes("link refused"):
            end.is_over = True
            self.close(self.caller, "the layouts differ", is_final=True)
            return
        hello = end.inbox.popleft()
        assert isinstance(hello, handoff_pb2.SenderMessage)
        end.is_open = end.ordered.accept(hello.number)
        node, caller = end.node, self.caller.node
        agreed = handoff_pb2.ReceiverHello(
            transport="simulated",
            chunk_tokens=min(node.chunk_tokens, caller.chunk_tokens),
            num_slots=min(node.num_slots, caller.num_slots),
        )
        node.post("link_called", self.epoch, hello.hello, agreed)
        self.say(end, handoff_pb2.ReceiverMessage(hello=agreed))

    def _deliver(self, end: End) -> None:
        if not end.inbox:
            return
        message = end.inbox.popleft()
        if self._world.strikes("message lost"):
            return
        if self._world.strikes("message doubled"):
            end.inbox.insert(min(len(end.inbox), self._world.random.randint(0, 2)), message)
        try:
            is_new = end.ordered.accept(message.number)
        except StreamGap as gap:
            self.close(end, gap.message)
            return
        if end.is_suspect:
            self._suspect(end, False)
        if not is_new:
            return
        if message.HasField("hello"):
            end.node.post("link_greeted", self.epoch, message.hello)
        else:
            end.node.post("link_heard", self.epoch, message)
