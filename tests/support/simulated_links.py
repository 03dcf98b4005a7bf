"""The network between simulated workers: two streams for each connection; messages are lost, doubled, late or cut off.

Both ends are real connections (`worker.handoff_connection`) with their numbers and their ends; what gRPC and the clock
do in a real worker is decided here. Each side notices an end in its own time; what was on its way may still be received
before that, or not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cluster.pb import handoff_pb2
from worker.handoff_connection import HandoffConnection, HandoffMessage, StreamGap

if TYPE_CHECKING:
    from simulation import Node, World

Move = Callable[[], None]


class End:
    """One side of a link: its connection, and what is on its way to it."""

    def __init__(self, node: Node, connection: HandoffConnection | None) -> None:
        self.node = node
        self.connection = connection
        """None for a callee that was not called yet."""
        self.inbox: deque[HandoffMessage] = deque()
        self.is_gone = False
        """Its process has died, or it refused the call."""

    @property
    def is_over(self) -> bool:
        return self.is_gone or (self.connection is not None and bool(self.connection.ended))

    @property
    def is_open(self) -> bool:
        return self.connection is not None and not self.is_over

    @property
    def is_suspect(self) -> bool:
        return self.connection is not None and self.connection.is_suspect

    @property
    def num_sent(self) -> int:
        return 0 if self.connection is None else self.connection.num_sent

    @property
    def num_received(self) -> int:
        return 0 if self.connection is None else self.connection.num_received


class Link:
    """From its opening by a prefill worker until both sides have ended it.

    A move may have been made void by another of the same turn.
    """

    def __init__(self, world: World, connection: HandoffConnection, caller: Node, callee: Node | None) -> None:
        self._world = world
        self.caller = End(caller, connection)
        self.callee = End(callee, None) if callee is not None else None
        self.is_cut = callee is None
        """Nothing more arrives: each side will notice."""
        self.is_silent = False
        """Nothing arrives now: each side will suspect the other."""

    @property
    def is_over(self) -> bool:
        caller, callee = self.caller, self.callee
        return caller.is_over and (callee is None or callee.is_over or (self.is_cut and not callee.is_open))

    def end_of(self, node: Node) -> End | None:
        for end in (self.caller, self.callee):
            if end is not None and end.node is node:
                return end
        return None

    def carry(self) -> None:
        """Sets what either side sends on its way."""
        for end in (self.caller, self.callee):
            queue = end.connection._queue if end is not None and end.connection is not None else None
            while queue is not None and not queue.empty():
                message = queue.get_nowait()
                assert end is not None and end.connection is not None
                if message is None or not end.is_open:
                    continue
                end.connection.stamp(message)
                other = self._other(end)
                if other is not None and not other.is_over and not self.is_cut:
                    other.inbox.append(message)

    def close(self, end: End, why: str, is_final: bool = False) -> None:
        """This side's stream ends, for whatever reason."""
        if end.is_open and end.connection is not None:
            end.inbox.clear()
            end.connection.end(why, is_final=is_final)

    def cut(self, chance: random.Random) -> None:
        """The connection is gone: of what was on its way to each side, only a beginning may still be received."""
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
            elif other is not None and not other.is_over and other.num_sent != end.num_received:
                yield lambda end=end: self.close(end, "a sign of life showed a gap")  # type: ignore[misc]
            if self.is_cut or (other is not None and other.is_over):
                yield lambda end=end: self.close(end, "the stream has ended")  # type: ignore[misc]

    def _other(self, end: End) -> End | None:
        return self.callee if end is self.caller else self.caller

    def _speak_again(self) -> None:
        self.is_silent = False

    def _suspect(self, end: End, is_suspect: bool) -> None:
        if end.is_open and end.connection is not None and end.is_suspect != is_suspect:
            self._world.counts["suspected" if is_suspect else "heard again"] += 1
            end.connection.suspect(is_suspect)

    def _call(self) -> None:
        """The receiver gets the hello."""
        end = self.callee
        assert end is not None
        if self.is_cut or not end.inbox:
            return
        if self._world.strikes("link refused"):
            end.is_gone = True
            self.close(self.caller, "the layouts differ", is_final=True)
            return
        hello = end.inbox.popleft()
        assert isinstance(hello, handoff_pb2.SenderMessage)
        node, caller = end.node, self.caller.node
        agreed = handoff_pb2.ReceiverHello(
            transport="shm_pages" if self._world.shares_pages else "simulated",
            chunk_tokens=min(node.chunk_tokens, caller.chunk_tokens),
            num_slots=min(node.num_slots, caller.num_slots),
        )
        end.connection = node.core.handoffs.accept(hello.hello, agreed)
        end.connection.accept(hello.number)
        end.connection.greeted()
        node.on_loop(end.connection.enqueue, handoff_pb2.ReceiverMessage(hello=agreed))

    def _deliver(self, end: End) -> None:
        if not end.inbox or end.connection is None:
            return
        message = end.inbox.popleft()
        if self._world.strikes("message lost"):
            return
        if self._world.strikes("message doubled"):
            end.inbox.insert(min(len(end.inbox), self._world.random.randint(0, 2)), message)
        try:
            if message.HasField("hello"):
                if end.connection.accept(message.number):
                    end.connection.greeted(message.hello)  # type: ignore[arg-type]  # only a receiver's arrives here
            else:
                was_suspect = end.is_suspect
                end.connection.receive(message)
                self._world.counts["heard again"] += was_suspect and not end.is_suspect
        except StreamGap as gap:
            self.close(end, gap.message)
