"""The machines of a hand-off in a small world, and what must never happen there, checked as it happens.

Two senders and one receiver over links that carry numbered messages and one pair each. The world carries out what the
machines ask for (`_carry_out`) and raises Violation where that breaks a rule: a page that is touched while nobody holds
it, a slot that is used twice, a chunk that lands in another's place, a request that ends twice. What may happen next is
`handoff_model`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self

from handoff_state import (
    Bounds,
    Link,
    Message,
    Said,
    Side,
    Stream,
    Violation,
    clone_receiver,
    clone_sender,
    describe,
    freeze_receiver,
    freeze_sender,
)

from cluster.lifecycle import RequestKey
from decode_worker.receiver import Receiver
from kv_transfer.actions import (
    Actions,
    BeginPrefill,
    Chunk,
    Fail,
    Gather,
    Land,
    Ready,
    ReleasePages,
    Reserve,
    SendMessage,
    Transmit,
)
from prefill_worker.sender import Sender


class World:
    """One state. `machines` makes the machines, so that broken ones can be tried too."""

    def __init__(
        self, bounds: Bounds, machines: tuple[Callable[[int], Sender], Callable[[int], Receiver]] = (Sender, Receiver)
    ) -> None:
        self.bounds = bounds
        self.machines = machines
        self.senders = [machines[0](bounds.groups) for _ in range(2)]
        self.receiver = machines[1](bounds.groups)
        self.links: dict[str, Link] = {}
        self.at_sender: dict[RequestKey, Side] = {}
        self.at_receiver: dict[RequestKey, Side] = {}
        self.gathers: set[tuple[Chunk, int]] = set()
        """Running gathers, with the sender."""
        self.send_slots: dict[tuple[str, int], Chunk] = {}
        self.landing_slots: dict[tuple[str, int], Chunk] = {}
        self.announced: set[RequestKey] = set()
        self.opened: set[RequestKey] = set()
        self.withdrawn: dict[RequestKey, str] = {}
        """Attempts that the router gives up, with the sides (`s`, `r`) that know or have said so."""
        self.dead: set[str] = set()
        self.faults_left = bounds.num_faults

    # Copies

    def clone(self) -> Self:
        new = type(self).__new__(type(self))
        new.bounds, new.machines, new.faults_left = self.bounds, self.machines, self.faults_left
        new.senders = [clone_sender(s) for s in self.senders]
        new.receiver = clone_receiver(self.receiver)
        new.links = {epoch: link.clone() for epoch, link in self.links.items()}
        new.at_sender = {key: replace(side) for key, side in self.at_sender.items()}
        new.at_receiver = {key: replace(side) for key, side in self.at_receiver.items()}
        new.gathers = set(self.gathers)
        new.send_slots, new.landing_slots = dict(self.send_slots), dict(self.landing_slots)
        new.announced, new.opened, new.dead = set(self.announced), set(self.opened), set(self.dead)
        new.withdrawn = dict(self.withdrawn)
        return new

    def freeze(self) -> tuple[object, ...]:
        """Equal for equal states."""
        return (
            tuple(freeze_sender(s) for s in self.senders),
            freeze_receiver(self.receiver),
            tuple((epoch, link.freeze()) for epoch, link in self.links.items()),
            tuple((key, side.freeze()) for key, side in self.at_sender.items()),
            tuple((key, side.freeze()) for key, side in self.at_receiver.items()),
            frozenset(self.gathers),
            frozenset(self.announced),
            frozenset(self.opened),
            frozenset(self.dead),
            tuple(self.withdrawn.items()),
            self.faults_left,
        )

    # Behind the moves

    def _sender_of(self, key: RequestKey) -> int:
        return 1 if self.bounds.other_sender and key.attempt > 1 else 0

    def _has_failed(self, key: RequestKey) -> bool:
        """The router knows that the attempt is over, and the decode worker has let go of it."""
        if key not in self.opened or key not in self.announced or key in self.receiver or "r" in self.dead:
            return False
        return self.at_receiver[key].outcome in ("failed", "released")

    def _stream(self, epoch: str, side: str) -> Stream:
        """What `side` hears."""
        return self.links[epoch].there if side == "r" else self.links[epoch].back

    def _link_is_open(self, epoch: str, side: str) -> bool:
        return self.links[epoch].is_open[side]

    def _say(self, epoch: str, side: str, message: Message) -> None:
        """`side` speaks; on a link that it has retired nobody hears it."""
        if not self._link_is_open(epoch, side):
            return
        stream = self._stream(epoch, "r" if side == "s" else "s")
        stream.said += 1
        stream.queue.append(Said(stream.said, message))

    def _hear(self, epoch: str, side: str, said: Said) -> None:
        stream, link = self._stream(epoch, side), self.links[epoch]
        number, message = said.number, said.message
        if number <= stream.heard:
            return
        if number > stream.heard + 1:
            self._retire(epoch, side)
            return
        stream.heard = number
        if message.HasField("hello"):
            link.was_called = link.is_open["r"] = True
            self._carry_out("r", self.receiver.connection_called(epoch, 1, self.bounds.num_slots))
            return
        stream.last = said
        self._to_machine(epoch, side, message)

    def _to_machine(self, epoch: str, side: str, message: Message) -> None:
        kind = message.WhichOneof("message")
        body = getattr(message, str(kind))
        key = RequestKey.of(body.key)
        if side == "r":
            heard = {
                "open": lambda: self.receiver.opened(epoch, key, body.num_tokens),
                "offer": lambda: self.receiver.offered(epoch, body),
                "commit": lambda: self.receiver.committed(epoch, body),
                "abort": lambda: self.receiver.peer_aborted(epoch, key),
            }
            if "r" not in self.dead and (kind != "open" or self._link_is_open(epoch, "r")):
                self._carry_out("r", heard[str(kind)]())
            return
        number = self.links[epoch].sender
        sender = self.senders[number]
        answers = {
            "reserved": lambda: sender.reserved(epoch, key, body.num_cached_tokens),
            "grant": lambda: sender.granted(epoch, key, body.chunk_index),
            "committed": lambda: sender.committed(epoch, key),
            "abort": lambda: sender.peer_aborted(epoch, key),
        }
        if f"s{number}" not in self.dead:
            self._carry_out(f"s{number}", answers[str(kind)]())

    def _retire(self, epoch: str, side: str) -> None:
        """As a connection is retired: once, and the machine learns of it."""
        link = self.links[epoch]
        if not link.is_open[side]:
            if side == "r" and not link.was_called:
                link.was_called = True
            return
        link.is_open[side] = False
        if side == "s":
            link.was_called = True
            self._carry_out(f"s{link.sender}", self.senders[link.sender].connection_lost(epoch))
        else:
            self._carry_out("r", self.receiver.connection_lost(epoch))

    def _carry_out(self, worker: str, actions: Actions, over: tuple[str, Chunk] | None = None) -> None:
        if over is not None and over[1].slot is not None:
            chunk = over[1]
            sender = self.senders[int(worker[1])]
            out = sender._outgoing.get(chunk.key)
            if out is None or chunk.index not in out.chunks:
                self.send_slots.pop((chunk.epoch, chunk.slot), None)
        for action in actions:
            match action:
                case SendMessage():
                    self._tell(worker, action)
                case Gather():
                    self._begin_gather(int(worker[1]), action.chunk)
                case Transmit():
                    self._begin_send(action.chunk)
                case Land():
                    self._begin_landing(action.chunk)
                case BeginPrefill() if self.bounds.num_kept is not None:
                    sender = self.senders[int(worker[1])]
                    self._carry_out(worker, sender.computed(action.key, self.bounds.num_kept, 0))
                    self._carry_out(worker, sender.commit(action.key, []))
                case BeginPrefill():
                    side = self.at_sender[action.key]
                    side.holds_pages = side.is_computing = True
                case Reserve():
                    self.at_receiver[action.key].wants_blocks = True
                case Ready():
                    self._end(self.at_receiver, action.key, "ready")
                    self._check_landed(action.key)
                case Fail():
                    self._end(self.at_sender if worker != "r" else self.at_receiver, action.key, "failed")
                    known = self.withdrawn.get(action.key, "")
                    self.withdrawn[action.key] = known + worker[0] if worker[0] not in known else known
                case ReleasePages():
                    self._release(worker, action.key)

    def _tell(self, worker: str, action: SendMessage) -> None:
        if worker != "r" and action.message.HasField("offer"):
            chunk = self.send_slots.get((action.epoch, action.message.offer.slot))
            if chunk is None or any(c == chunk for c, _ in self.gathers):
                raise Violation(f"{describe(action.message)} is offered before it is gathered")
        self._say(action.epoch, "r" if worker == "r" else "s", action.message)

    def _begin_gather(self, sender: int, chunk: Chunk) -> None:
        self._forget_dropped_offers(sender)
        if not self._link_is_open(chunk.epoch, "s"):
            raise Violation(f"{chunk} is gathered into a slot of a link that is down")
        if not self.at_sender[chunk.key].holds_pages:
            raise Violation(f"{chunk} is gathered from pages that are not held")
        if (chunk.epoch, chunk.slot) in self.send_slots:
            raise Violation(f"{chunk} is gathered over {self.send_slots[chunk.epoch, chunk.slot]}")
        if chunk.range.token_end > max(self.at_sender[chunk.key].num_computed, 0):
            raise Violation(f"{chunk} is gathered before it is computed")
        self.send_slots[chunk.epoch, chunk.slot] = chunk
        self.gathers.add((chunk, sender))

    def _begin_send(self, chunk: Chunk) -> None:
        if self.send_slots.get((chunk.epoch, chunk.slot)) != chunk or any(c == chunk for c, _ in self.gathers):
            raise Violation(f"{chunk} is sent, but its slot holds something else")
        if any(c == chunk for c, _ in self.links[chunk.epoch].sends):
            raise Violation(f"{chunk} is sent twice")
        self.links[chunk.epoch].sends.append((chunk, False))

    def _begin_landing(self, chunk: Chunk) -> None:
        if not self.at_receiver[chunk.key].holds_pages:
            raise Violation(f"{chunk} would land in pages that are not held")
        if (chunk.epoch, chunk.slot) in self.landing_slots:
            raise Violation(f"{chunk} would land over {self.landing_slots[chunk.epoch, chunk.slot]}")
        if not self._link_is_open(chunk.epoch, "r"):
            raise Violation(f"{chunk} is granted on a link that is down")
        self.landing_slots[chunk.epoch, chunk.slot] = chunk
        self.links[chunk.epoch].receives.append((chunk, False))

    def _forget_dropped_offers(self, sender: int) -> None:
        """Slots of offers that the machine took back: nobody can be granted them any more."""
        known = {c for out in self.senders[sender]._outgoing.values() for c, _ in out.chunks.values()}
        for place, chunk in list(self.send_slots.items()):
            link = self.links[place[0]]
            is_busy = any(c == chunk for c, _ in self.gathers) or any(c == chunk and not o for c, o in link.sends)
            if link.sender == sender and chunk not in known:
                if is_busy:
                    raise Violation(f"{chunk} is forgotten while an operation is under way")
                del self.send_slots[place]

    def _check_landed(self, key: RequestKey) -> None:
        cells = set()
        for link in self.links.values():
            for place, (chunk, is_over) in enumerate(link.receives):
                if chunk.key == key and is_over and place < len(link.sends):
                    where = chunk.range
                    for token in range(where.token_start, where.token_end):
                        cells |= {(where.group, token, layer) for layer in range(where.layer_start, where.layer_end)}
        num_tokens = self.bounds.num_handed
        wanted = {
            (place, token, layer)
            for place, group in enumerate(self.bounds.groups)
            for token in range(0 if group.window is None else max(0, num_tokens + 1 - group.window), num_tokens)
            for layer in range(len(group.layers))
        }
        if cells != wanted:
            raise Violation(f"{key} is ready with {len(cells)} cells of its prompt")

    @staticmethod
    def _end(sides: dict[RequestKey, Side], key: RequestKey, outcome: str) -> None:
        if sides[key].outcome:
            raise Violation(f"{key} is {outcome}, but was {sides[key].outcome} already")
        sides[key].outcome = outcome

    def _release(self, worker: str, key: RequestKey) -> None:
        side = self.at_receiver[key] if worker == "r" else self.at_sender[key]
        running = (
            [c for c in self.landing_slots.values() if c.key == key]
            if worker == "r"
            else [c for c, _ in self.gathers if c.key == key]
        )
        if running:
            raise Violation(f"pages of {key} are released while {running[0]} may touch them")
        if side.outcome == "ready":
            raise Violation(f"pages of {key} are released, but it is decoding")
        side.holds_pages = side.is_computing = side.wants_blocks = False
        side.outcome = side.outcome or ("released" if worker == "r" else "")
