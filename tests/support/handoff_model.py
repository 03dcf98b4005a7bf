"""Everything that may happen to a hand-off, one move at a time, for the model checker.

The router announces, opens and takes back attempts; an engine computes prompts chunk by chunk; messages are heard,
operations end. Faults are moves like others, out of one budget: a message lost, doubled or late, an operation that
fails, a link that breaks, a worker that dies, a cancel. Each move is carried out on a copy of the world. What must hold
in the end is checked where nothing but faults could still happen.
"""

from __future__ import annotations

from collections.abc import Iterator

from handoff_state import Link, Side, Violation
from handoff_world import World

from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2
from kv_transfer.actions import Chunk

Move = tuple[object, ...]
FIRST_TOKENS = [handoff_pb2.FirstToken(token_id=1)]


class Model(World):
    """A world and its moves."""

    # What may happen

    def fair_moves(self) -> list[Move]:
        """Everything but faults: what happens by itself, sooner or later."""
        return [*self._router_moves(), *self._link_moves(), *self._engine_moves(), *self._operation_moves()]

    def faults(self) -> list[Move]:
        """While the budget lasts."""
        return list(self._faults()) if self.faults_left else []

    def after(self, move: Move) -> Model:
        """The state after a move; raises Violation."""
        world = self.clone()
        name, *arguments = move
        try:
            getattr(world, f"_do_{name}")(*arguments)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        return world

    def check_end(self) -> None:
        """Nothing but faults could happen: everything must be over, and everything back. Raises Violation."""
        for key in self.opened | self.announced:
            for name, sides in (("prefill", self.at_sender), ("decode", self.at_receiver)):
                side = sides.get(key)
                if side is not None and side.holds_pages and side.outcome != "ready":
                    raise Violation(f"the {name} worker holds the pages of {key} for ever")
            side = self.at_receiver.get(key)
            if key in self.announced and (side is None or not side.outcome):
                raise Violation(f"{key} has no outcome at the decode worker")
        try:
            for number, sender in enumerate(self.senders):
                if f"s{number}" not in self.dead:
                    sender.check_idle()
            if "r" not in self.dead:
                self.receiver.check_idle()
        except AssertionError as error:
            raise Violation(f"not idle at the end: {error}") from error

    def _router_moves(self) -> Iterator[Move]:
        for request in range(self.bounds.num_requests):
            for attempt in range(1, self.bounds.num_attempts + 1):
                key = RequestKey(f"q{request}", attempt)
                if attempt > 1 and not self._has_failed(RequestKey(f"q{request}", attempt - 1)):
                    break
                if f"s{self._sender_of(key)}" in self.dead or "r" in self.dead:
                    continue
                if key not in self.announced:
                    yield ("announce", key)
                if key not in self.opened:
                    yield ("open", key)
        for key, sides in self.withdrawn.items():
            if "s" not in sides and key in self.opened and f"s{self._sender_of(key)}" not in self.dead:
                yield ("withdraw", key, "s")
            if "r" not in sides and key in self.announced and "r" not in self.dead:
                yield ("withdraw", key, "r")

    def _link_moves(self) -> Iterator[Move]:
        for epoch, link in self.links.items():
            for side, stream in (("r", link.there), ("s", link.back)):
                if not link.is_open[side] and not (side == "r" and not link.was_called and link.is_open["s"]):
                    continue
                if stream.queue:
                    yield ("deliver", epoch, side)
                elif stream.said != stream.heard:
                    yield ("beat", epoch, side)  # the next sign of life shows the gap
            if link.was_called:
                for side in ("s", "r"):
                    if link.is_open[side] and not link.is_up[side]:
                        yield ("pair_up", epoch, side)
                    if link.is_open[side] and not link.is_open["r" if side == "s" else "s"]:
                        yield ("retire", epoch, side)

    def _engine_moves(self) -> Iterator[Move]:
        for key, side in self.at_sender.items():
            if side.is_computing and self.senders[self._sender_of(key)].is_live(key):
                yield ("compute", key)
        for key, side in self.at_receiver.items():
            if side.wants_blocks:
                yield ("reserve", key)
                if self.bounds.num_kept is not None:
                    yield ("refuse", key)

    def _operation_moves(self) -> Iterator[Move]:
        for chunk, sender in sorted(self.gathers, key=_order):
            yield ("gathered", chunk, sender)
        for epoch, link in self.links.items():
            for place, (_, is_over) in enumerate(link.sends):
                is_met = place < len(link.receives)
                if self.bounds.shares_pages:  # the receiver says when it has read them
                    is_met = is_met and link.receives[place][1]
                if not is_over and f"s{link.sender}" not in self.dead and (is_met or not link.is_whole):
                    yield ("sent", epoch, place)
            for place, (_, is_over) in enumerate(link.receives):
                is_met = place < len(link.sends)
                if not is_over and "r" not in self.dead and (is_met or not link.is_whole):
                    yield ("landed", epoch, place)
                    break  # a pair's landings end in order
            is_lost = not link.is_open["s"] and f"s{link.sender}" not in self.dead
            if self.bounds.shares_pages and is_lost and not link.is_closed:
                yield ("close", epoch)

    def _faults(self) -> Iterator[Move]:
        for epoch, link in self.links.items():
            for side, stream in (("r", link.there), ("s", link.back)):
                if stream.queue and link.is_open["s"]:
                    yield ("lose", epoch, side)
                    yield ("double", epoch, side)
                if stream.last is not None and not link.is_open[side]:
                    yield ("repeat", epoch, side)
            for side in ("s", "r"):
                if link.is_open[side]:
                    yield ("break", epoch, side)
            for place, (_, is_over) in enumerate(link.receives):
                if not is_over and "r" not in self.dead:
                    yield ("damage", epoch, place)
                    break
        for chunk, sender in sorted(self.gathers, key=_order):
            yield ("gather_fails", chunk, sender)
        for key in sorted(self.opened):
            if key not in self.withdrawn and self.senders[self._sender_of(key)].is_live(key):
                yield ("cancel", key, "s")
        for key in sorted(self.announced):
            if key not in self.withdrawn and key in self.receiver:
                yield ("cancel", key, "r")
        for worker in ("s0", "s1", "r"):
            if worker not in self.dead and (
                worker == "r" or any(f"s{x.sender}" == worker for x in self.links.values())
            ):
                yield ("die", worker)

    # Moves: the router and the engine

    def _do_announce(self, key: RequestKey) -> None:
        self.announced.add(key)
        self.at_receiver[key] = Side()
        is_fetch = self.bounds.num_kept is not None
        self._carry_out("r", self.receiver.announce(key, self.bounds.num_tokens, is_fetch=is_fetch))

    def _do_open(self, key: RequestKey) -> None:
        sender = self._sender_of(key)
        self.opened.add(key)
        kept = self.bounds.num_kept
        self.at_sender[key] = Side() if kept is None else Side(holds_pages=True, num_computed=kept)
        if kept == 0:
            self.at_sender[key] = Side(outcome="failed")
            self.withdrawn[key] = self.withdrawn.get(key, "") + "s"
            return
        live = [e for e, link in self.links.items() if link.sender == sender and link.is_open["s"]]
        epoch = live[0] if live else f"e{len(self.links)}"
        if not live:
            self.links[epoch] = Link(sender)
            self._say(epoch, "s", handoff_pb2.SenderMessage(hello=handoff_pb2.SenderHello()))
        self._carry_out(f"s{sender}", self.senders[sender].open(key, epoch, self.bounds.num_handed))

    def _do_compute(self, key: RequestKey) -> None:
        side, sender, bounds = self.at_sender[key], self.senders[self._sender_of(key)], self.bounds
        name = f"s{self._sender_of(key)}"
        before = side.num_computed
        side.num_computed = min(before + bounds.tokens_a_step, bounds.num_tokens)
        is_last = side.num_computed == bounds.num_tokens
        if is_last and bounds.is_layered:
            self._carry_out(name, sender.computing(key, side.num_computed, side.num_computed))
        self._carry_out(name, sender.computed(key, side.num_computed, side.num_computed))
        if is_last:
            side.is_computing = False
            self._carry_out(name, sender.commit(key, FIRST_TOKENS))

    def _do_reserve(self, key: RequestKey) -> None:
        side = self.at_receiver[key]
        side.wants_blocks = False
        side.holds_pages = True
        self._carry_out("r", self.receiver.reserved(key, 0))

    def _do_refuse(self, key: RequestKey) -> None:
        self.at_receiver[key].wants_blocks = False
        self._carry_out("r", self.receiver.refused(key, "no blocks"))

    def _do_cancel(self, key: RequestKey, side: str) -> None:
        self.faults_left -= 1
        self._do_withdraw(key, side)

    def _do_withdraw(self, key: RequestKey, side: str) -> None:
        """The router takes an attempt back, here and in its time on the other side too."""
        self.withdrawn[key] = self.withdrawn.get(key, "") + side
        if side == "s":
            number = self._sender_of(key)
            self._carry_out(f"s{number}", self.senders[number].abort(key, "cancelled"))
        else:
            self._carry_out("r", self.receiver.cancel(key, "cancelled"))

    # Moves: messages and links

    def _do_deliver(self, epoch: str, side: str) -> None:
        stream = self._stream(epoch, side)
        self._hear(epoch, side, stream.queue.pop(0))

    def _do_beat(self, epoch: str, side: str) -> None:
        self._retire(epoch, side)

    def _do_lose(self, epoch: str, side: str) -> None:
        self.faults_left -= 1
        self._stream(epoch, side).queue.pop(0)

    def _do_double(self, epoch: str, side: str) -> None:
        self.faults_left -= 1
        stream = self._stream(epoch, side)
        stream.queue.append(stream.queue[0])

    def _do_repeat(self, epoch: str, side: str) -> None:
        """A message of this or an earlier time reaches the machine past all numbers: identity alone must stop it."""
        self.faults_left -= 1
        said = self._stream(epoch, side).last
        assert said is not None
        self._to_machine(epoch, side, said.message)

    def _do_break(self, epoch: str, side: str) -> None:
        self.faults_left -= 1
        self._retire(epoch, side)

    def _do_retire(self, epoch: str, side: str) -> None:
        self._retire(epoch, side)

    def _do_pair_up(self, epoch: str, side: str) -> None:
        link = self.links[epoch]
        link.is_up[side] = True
        if side == "s":
            shares_pages, num_slots = self.bounds.shares_pages, self.bounds.num_slots
            up = self.senders[link.sender].connection_open(epoch, 1, num_slots, shares_pages=shares_pages)
            self._carry_out(f"s{link.sender}", up)
        else:
            self._carry_out("r", self.receiver.connection_open(epoch))

    def _do_close(self, epoch: str) -> None:
        link = self.links[epoch]
        link.is_closed = True
        self._carry_out(f"s{link.sender}", self.senders[link.sender].connection_closed(epoch))

    def _do_die(self, worker: str) -> None:
        """All that it knew and did is gone; the others' sockets close, each when it notices."""
        self.faults_left -= 1
        self.dead.add(worker)
        for key in self.announced | self.opened:
            if worker in ("r", f"s{self._sender_of(key)}"):
                self.withdrawn.setdefault(key, "")
        for link in self.links.values():
            if worker == "r":
                link.is_open["r"], link.was_called = False, True
            elif worker == f"s{link.sender}":
                link.is_open["s"] = False
                link.is_closed = self.bounds.shares_pages
                link.there.queue.clear()
        if worker == "r":
            self.receiver = self.machines[1](self.bounds.groups)
            self.at_receiver = {key: Side(outcome="died") for key in self.at_receiver}
            self.landing_slots = {}
            return
        number = int(worker[1])
        self.senders[number] = self.machines[0](self.bounds.groups)
        self.gathers = {(chunk, s) for chunk, s in self.gathers if s != number}
        for key in [k for k in self.at_sender if self._sender_of(k) == number]:
            self.at_sender[key] = Side(outcome="died")

    # Moves: operations

    def _do_gathered(self, chunk: Chunk, sender: int) -> None:
        self.gathers.discard((chunk, sender))
        self._carry_out(f"s{sender}", self.senders[sender].gathered(chunk), over=("s", chunk))

    def _do_gather_fails(self, chunk: Chunk, sender: int) -> None:
        self.faults_left -= 1
        self._retire(chunk.epoch, "s")
        self._do_gathered(chunk, sender)

    def _do_sent(self, epoch: str, place: int) -> None:
        link = self.links[epoch]
        chunk, _ = link.sends[place]
        link.sends[place] = (chunk, True)
        if place >= len(link.receives) or (self.bounds.shares_pages and not link.receives[place][1]):
            self._retire(epoch, "s")
        del self.send_slots[epoch, chunk.slot]
        self._carry_out(f"s{link.sender}", self.senders[link.sender].sent(chunk))

    def _do_landed(self, epoch: str, place: int, is_damaged: bool = False) -> None:
        link = self.links[epoch]
        chunk, _ = link.receives[place]
        link.receives[place] = (chunk, True)
        came = link.sends[place][0] if place < len(link.sends) else None
        if not self.at_receiver[chunk.key].holds_pages:
            raise Violation(f"{chunk} lands in pages that are not held")
        if came is not None and came != chunk and not is_damaged:
            raise Violation(f"{came} landed where {chunk} was expected")
        del self.landing_slots[epoch, chunk.slot]
        is_whole = came is not None and not is_damaged and not link.is_closed
        if self.bounds.shares_pages and is_whole and not self.at_sender[chunk.key].holds_pages:
            raise Violation(f"{chunk} has landed out of pages that the prefill worker does not hold")
        error = "" if is_whole else "the transfer failed"
        self._carry_out("r", self.receiver.landed(chunk, error))
        if error:
            self._retire(epoch, "r")

    def _do_damage(self, epoch: str, place: int) -> None:
        self.faults_left -= 1
        self._do_landed(epoch, place, is_damaged=True)


def _order(gather: tuple[Chunk, int]) -> tuple[object, ...]:
    return (gather[0].key, gather[0].epoch, gather[0].index)
