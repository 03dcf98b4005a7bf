"""All hand-off connections of one worker: which one a request takes, who may call, and when an idle one is closed.

Runs on the engine thread, but for `accept`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.pb import handoff_pb2, worker_pb2
from worker.decode_role import DecodeRole
from worker.handoff_connection import ConnectionState, HandoffConnection, HandoffContext
from worker.prefill_role import PrefillRole

logger = logging.getLogger(__name__)

OFFERED_LAST_S = 300.0
"""A transport by which a pair did not open to a worker is offered to it after all others for so long."""

Dial = Callable[[HandoffConnection, str, str], None]
"""Connects to (address, incarnation) of a decode worker, and moves the stream of the connection; returns at once."""


class Handoffs:
    """Connections are kept until their pair is closed on every rank."""

    def __init__(
        self,
        context: HandoffContext,
        prefill: PrefillRole,
        decode: DecodeRole,
        dial: Dial,
        *,
        worker_id: str,
        max_pairs: int,
        answer_timeout_s: float,
    ) -> None:
        self._context = context
        self._prefill = prefill
        self._decode = decode
        self._dial = dial
        self._worker_id = worker_id
        self._max_pairs = max_pairs
        self._answer_timeout_s = answer_timeout_s
        self._connections: list[HandoffConnection] = []
        self._by_peer: dict[str, HandoffConnection] = {}
        """Connections that this worker opened, by the life of the other worker; retired ones are replaced."""
        self._unopened: dict[tuple[str, str], float] = {}
        """When a transport by which no pair opened may go first again, by life of the other worker and transport."""

    def connect_to(self, peer: worker_pb2.Peer) -> HandoffConnection:
        """The connection to a decode worker; opens one when there is none."""
        name = f"{peer.worker_id}@{peer.incarnation}"
        known = self._by_peer.get(name)
        if known is not None and not known.is_retired:
            known.last_used = self._context.clock()
            return known
        self._by_peer = {connection.peer: connection for connection in self._live() if connection.is_sender}
        epoch = f"{self._worker_id}-{peer.worker_id}-{self._context.fresh_name()}"
        connection = self._context.make_connection(
            epoch, self._prefill, self._context, peer=name, last=self._offered_last(name)
        )
        self._connections.append(connection)
        self._by_peer[name] = connection
        self._close_spare()
        self._dial(connection, peer.address, peer.incarnation)
        return connection

    def accept(self, hello: handoff_pb2.SenderHello, agreed: handoff_pb2.ReceiverHello) -> HandoffConnection:
        """From the speaking loop: a prefill worker has called, and was answered what both sides use."""
        connection = self._context.make_connection(hello.pair_epoch, self._decode, self._context)
        self._context.post(self._called, connection, hello, agreed)
        return connection

    def _called(
        self,
        connection: HandoffConnection,
        hello: handoff_pb2.SenderHello,
        agreed: handoff_pb2.ReceiverHello,
    ) -> None:
        self._connections.append(connection)
        self._decode.connection_called(connection, agreed)
        connection.open_pair(agreed, hello.layout)

    def tick(self) -> None:
        """Every heartbeat: retires connections whose peer owes an answer for too long, and idle ones beyond the
        limit."""
        for connection in self._live():
            connection.check_deadline(self._answer_timeout_s)
        self._close_spare()

    @property
    def last_step(self) -> int:
        """Number of the newest step that has ended."""
        return self._context.last_step

    def step_ended(self, number: int) -> None:
        self._context.last_step = number

    def count_by_state(self) -> dict[str, int]:
        counts = {state.value: 0 for state in ConnectionState if state is not ConnectionState.CLOSED}
        for connection in self._kept():
            counts[connection.state.value] += 1
        return counts

    def count_quarantined(self, *, is_sender: bool) -> int:
        """Slots of retired connections that an operation may still touch."""
        closing = [c for c in self._kept() if c.is_retired and c.is_sender == is_sender]
        return sum(connection.agreed.num_slots for connection in closing)

    def _offered_last(self, peer: str) -> frozenset[str]:
        now = self._context.clock()
        self._unopened = {key: until for key, until in self._unopened.items() if until > now}
        return frozenset(transport for name, transport in self._unopened if name == peer)

    def _note_unopened(self) -> None:
        """A pair that does not open by one transport may do so by the next."""
        for connection in self._connections:
            if connection.unopened:
                peer, transport = connection.peer, connection.agreed.transport
                self._unopened[peer, transport] = self._context.clock() + OFFERED_LAST_S
                text = "%s is the last transport to be tried towards %s for %.0f s: %s"
                logger.warning(text, transport, peer, OFFERED_LAST_S, connection.unopened)
                connection.unopened = ""

    def _kept(self) -> list[HandoffConnection]:
        self._note_unopened()
        self._connections = [c for c in self._connections if c.state is not ConnectionState.CLOSED]
        return self._connections

    def _live(self) -> list[HandoffConnection]:
        return [connection for connection in self._kept() if not connection.is_retired]

    def _close_spare(self) -> None:
        """Closes connections to decode workers that nothing is on, least recently used first, down to the limit."""
        outgoing = [c for c in self._live() if c.is_sender]
        if len(outgoing) <= self._max_pairs:
            return
        outgoing.sort(key=lambda c: c.last_used)
        idle = [c for c in outgoing[:-1] if not self._prefill.num_on(c.epoch)]
        for connection in idle[: len(outgoing) - self._max_pairs]:
            why = "it is idle, and more than max_pairs are open"
            connection.retire(worker_pb2.Failed.REASON_UNSPECIFIED, why)
