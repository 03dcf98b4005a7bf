"""The ranks of a simulated worker, as one (`worker.step_pipeline.Ranks`): steps that end in time, and transfers of KV.

    launch -> the curve's seconds -> done: the engine thread has a turn, samples and reads
    gather -> once the step that writes its layers has come so far; what a pair sends travels over the wire
    receive -> a landing writes its pages when the last byte has come

Where pages are shared, a landing reads those of the sender at that moment. Every command is answered once, through the
inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from cluster.pb import rank_pb2
from cluster.transports import shares_pages
from engine.step_input import StepInput, size_of
from engine.token_hash import StateArray
from kv_transfer.actions import Chunk
from simulate.curves import StepCurve
from simulate.model import KvPages, PageAlarm, SimulatedStep
from simulate.pairs import Gathered, PairEnd, Posted, SimulatedPair
from simulate.virtual_loop import VirtualLoop
from simulate.wire import Cores, Flows, Lane, Nic
from worker.handoff_connection import Done, ErrorKind

KIND_NONE = rank_pb2.RankReply.KIND_UNSPECIFIED
KIND_TRANSFER, KIND_CORRUPT = rank_pb2.RankReply.KIND_TRANSFER, rank_pb2.RankReply.KIND_CORRUPT


class Pages(NamedTuple):
    """Where a chunk lies in a worker's pages (`rank_pb2.ChunkPages`)."""

    chunk: Chunk
    block_table: Sequence[int]
    after_step: int

    @classmethod
    def of(cls, what: rank_pb2.ChunkPages) -> Pages:
        return cls(Chunk.from_proto(what.chunk, what.pair_epoch), list(what.block_table), what.after_step)

    @property
    def tokens(self) -> tuple[Sequence[int], int, int]:
        """The block table, and the first token and the one behind the last."""
        return self.block_table, self.chunk.range.token_start, self.chunk.range.token_end


class Clockwork(Protocol):
    """The parts of a cluster that ranks share with those of its other workers."""

    @property
    def loop(self) -> VirtualLoop: ...
    @property
    def flows(self) -> Flows: ...
    @property
    def cores(self) -> Cores | None:
        """The processors of the machine that all its programs run on; None: none of them waits for another."""
        ...

    @property
    def pairs(self) -> dict[str, SimulatedPair]: ...
    @property
    def keeps_trace(self) -> bool: ...
    def note(self, what: str) -> None: ...
    def strikes(self, fault: str) -> bool:
        """Whether a fault of this name happens now."""
        ...

    def spread(self) -> float:
        """Returns how many times longer than usual the next thing takes."""
        ...


class SimulatedRanks:
    """The ranks of one worker. `post` gives a call to its engine thread."""

    def __init__(
        self,
        world: Clockwork,
        name: str,
        pages: KvPages,
        curve: StepCurve,
        nic: Nic,
        kv_bytes_per_token: float,
        command_s: float,
        post: Callable[..., None],
        num_threads: int = 1,
        share: Lane | None = None,
        tier_bytes_per_s: float = 20e9,
    ) -> None:
        """`command_s`: seconds that a command takes beside its transfer. `num_threads`: of a step. `share`: what the
        worker may use of the cores; None: all."""
        self.pages = pages
        self.num_steps = 0
        self.busy_s = 0.0
        self.slowdown = 1.0
        """Times longer that its steps take than the curve says."""
        self._world = world
        self._name = name
        self._curve = curve
        self.nic = nic
        self._cell_bytes = kv_bytes_per_token / pages.num_layers
        self._command_s = command_s
        self._tier_bytes_per_s = tier_bytes_per_s
        self._post = post
        self._num_threads = num_threads
        self._share = share
        self._step: SimulatedStep | None = None
        self._num_done = 0
        self._waiting: list[tuple[Pages, Done]] = []
        """Gathers of steps that are not launched yet."""
        self._behind_layers: list[tuple[Pages, Done]] = []
        """Gathers of layers that are not computed yet, where cores are shared."""
        self._ends: dict[str, PairEnd] = {}
        self._num_open = 0
        self._answers_at = 0.0
        """When the last answer is due of those under way: they come in order."""
        self._is_dead = False

    @property
    def is_idle(self) -> bool:
        """Whether no command is under way."""
        return not (self._num_open or self._waiting)

    # Steps

    def launch(self, step: StepInput, rows: object = None) -> SimulatedStep:
        self.num_steps += 1
        loop, size = self._world.loop, size_of(step)
        if step.has_unread_tokens:
            assert self._step is not None, "a step needs tokens of the one before it, and there was none"
            step = step.with_tokens(np.array(self._step.token_ids, dtype=np.int32))
        seconds = self._curve.seconds(size) * self.slowdown * self._world.spread()
        if self._world.keeps_trace:
            self._world.note(f"{self._name} step {self.num_steps}: {size}")
        launched = SimulatedStep(step, self.pages.write_step(step), loop.time(), seconds)
        self._step = launched
        if self._world.cores is None or not self._num_threads:
            loop.call_later(seconds, self._end_step, launched)
        else:
            # Chunks of prompts set off as their layers are computed.
            each = 1 if len(step.token_ids) > len(step.logits_indices) else self.pages.num_layers
            layers = range(each, self.pages.num_layers + 1, each)
            ends = [partial(self._computed, launched, layer) for layer in layers]
            self._world.cores.compute(seconds, ends, self._num_threads, self._share)
        self._gather_waiting()
        return launched

    def _gather_waiting(self) -> None:
        """Sets off what waited for a step to be launched."""
        waiting, self._waiting = self._waiting, []
        for command, done in waiting:
            self._gather(command, done)

    def _end_step(self, launched: SimulatedStep) -> None:
        if self._is_dead:
            return
        self.pages.check_step(launched.step, launched.states)
        self.busy_s += self._world.loop.time() - launched.begun_at
        launched.is_done = True
        self._num_done += 1
        self._post(do_nothing)

    def _computed(self, launched: SimulatedStep, num_layers: int) -> None:
        """So many layers of a step, on cores that are shared."""
        launched.num_layers = num_layers
        if num_layers == self.pages.num_layers:
            self._end_step(launched)
        self._gather_computed()

    def _gather_computed(self) -> None:
        """Sets off what waited for a layer of the step under way."""
        step, waiting = self._step, self._behind_layers
        assert step is not None, "a chunk is of a step, and there was none"
        self._behind_layers = []
        for what, done in waiting:
            if what.after_step <= self._num_done or what.chunk.range.layer_end <= step.num_layers:
                self._world.loop.call_later(self._command_s, self._gathered, what, done)
            else:
                self._behind_layers.append((what, done))

    def is_at(self, num_tokens: int) -> bool:
        """Whether a step of fewer tokens is under way."""
        step = self._step
        return step is not None and not step.is_done and len(step.step.token_ids) < num_tokens

    # Commands

    def issue(self, command: rank_pb2.RankCommand, done: Done) -> None:
        """`worker.handoff_connection.HandoffContext.issue`."""
        match command.WhichOneof("command"):
            case "open_pair":
                self._open(command.open_pair, done)
            case "close_pair":
                self._close(command.close_pair.pair_epoch, done)
            case "gather":
                self.gather(Pages.of(command.gather), done)
            case "send":
                self.send((command.send.pair_epoch, command.send.slot), done)
            case "receive":
                self.receive(Pages.of(command.receive), done)
            case "move_blocks":
                self._num_open += 1
                move = command.move_blocks
                size_bytes = len(move.sources) * self.pages.block_size * self._cell_bytes * self.pages.num_layers
                seconds = (self._command_s + size_bytes / self._tier_bytes_per_s) * self._world.spread()
                self._world.loop.call_later(seconds, self._moved, move, int(size_bytes), done)

    def gather(self, what: Pages, done: Done) -> None:
        self._gather(what, self._guarded(what, done))

    def send(self, slot: tuple[str, int], done: Done) -> None:
        """`slot`: of the pair of that epoch."""
        self._put(slot[0], Posted(done, slot[1]))

    def receive(self, what: Pages, done: Done) -> None:
        posted = Posted(self._guarded(what, done), what.chunk.slot, (what.chunk, what.block_table))
        self._put(what.chunk.epoch, posted)

    def _moved(self, move: rank_pb2.BlockMove, size_bytes: int, done: Done) -> None:
        """A move has ended, which may have failed half-way."""
        self._num_open -= 1
        has_failed = self._world.strikes("copy failed")
        num_copied = len(move.sources) // 2 if has_failed else len(move.sources)
        if not self._is_dead:
            for source, target in list(zip(move.sources, move.targets, strict=True))[:num_copied]:
                self.pages.move(move.kind, source, target)
        self._reply(done, "the copy failed" if has_failed else "", size_bytes)

    def die(self) -> None:
        """The process is gone: nothing is answered any more, and its peers' commands fail."""
        self._is_dead = True
        for epoch in list(self._ends):
            self._close_end(epoch)

    def _guarded(self, what: Pages, done: Done) -> Done:
        return self.pages.guarded(*what.tokens, done)

    def _open(self, what: rank_pb2.OpenPair, done: Done) -> None:
        pair = self._world.pairs.setdefault(what.pair_epoch, SimulatedPair())
        end = PairEnd(self, shares_pages(what.agreed.transport), done)
        self._ends[what.pair_epoch] = pair.ends[what.is_sender] = end
        self._num_open += 1
        if pair.is_broken:
            pair.fail_all()
        elif len(pair.ends) == 2:
            pair.is_open = True
            for each in pair.ends.values():
                opened, each.opened = each.opened, None
                assert opened is not None
                each.ranks.answer(opened, "it did not" if self._world.strikes("pair did not open") else "")

    def _close(self, epoch: str, done: Done) -> None:
        """What is under way may arrive before the pair is closed."""
        self._num_open += 1
        self._world.loop.call_at(self._due(), self._closed, epoch, done)

    def _closed(self, epoch: str, done: Done) -> None:
        self._close_end(epoch)
        self._answered(done, "", 0, KIND_NONE)

    def _close_end(self, epoch: str) -> None:
        end, pair = self._ends.pop(epoch, None), self._world.pairs.get(epoch)
        if end is None or pair is None:
            return
        end.is_closed = pair.is_broken = True
        if pair.moving is not None:
            self._world.flows.cancel(pair.moving)
            pair.moving = None
        pair.fail_all()
        if len(pair.ends) == 2 and all(each.is_closed for each in pair.ends.values()):
            del self._world.pairs[epoch]

    def _gather(self, what: Pages, done: Done) -> None:
        """Copies pages to a slot once the step that writes them has come to the chunk's last layer."""
        ahead = what.after_step - self._num_done
        if ahead > 0 and what.after_step > self.num_steps:
            self._waiting.append((what, done))
            return
        self._num_open += 1
        delay = self._command_s * self._world.spread()
        if ahead > 0 and self._world.cores is not None and self._num_threads:
            self._behind_layers.append((what, done))
            self._gather_computed()
            return
        if ahead > 0:
            delay += max(0.0, self._written_at(what) - self._world.loop.time())
        self._world.loop.call_later(delay, self._gathered, what, done)

    def _written_at(self, what: Pages) -> float:
        """When the step under way has written the last layer of a chunk."""
        assert self._step is not None, "a chunk is of a step, and there was none"
        return self._step.begun_at + self._step.seconds * what.chunk.range.layer_end / self.pages.num_layers

    def _complete_at(self, what: Pages, size_bytes: int) -> float:
        """When the last byte of a chunk can have arrived that is gathered now; the wire alone says so here."""
        return 0.0

    def _gathered(self, what: Pages, done: Done) -> None:
        self._num_open -= 1
        end = self._ends.get(what.chunk.epoch)
        if end is None or self._world.strikes("gather failed"):
            self._reply(done, "the pair is closed" if end is None else "the gather failed")
            return
        chunk = what.chunk
        if any(posted.slot == chunk.slot for posted in end.posted):
            raise PageAlarm(f"{chunk} is gathered over a slot that is being sent")
        size_bytes = int(chunk.range.num_cells * self._cell_bytes)
        read = self._reader(what, end.shares_pages)
        end.slots[chunk.slot] = Gathered(chunk, read, size_bytes, self._complete_at(what, size_bytes))
        self._reply(done, size_bytes=size_bytes)

    def _reader(self, what: Pages, is_shared: bool) -> Callable[[], StateArray]:
        """Reads pages now, and returns what was read, or where they are shared how they are read again."""
        tokens = what.tokens
        step, now = self._step, self._world.loop.time()
        if self._world.cores is None and step is not None and not step.is_done and now < self._written_at(what):
            self.pages.check_apart(step.step, *tokens)
        states, check = self.pages.read(*tokens), self.pages.guarded(*tokens, do_nothing)

        def read_again() -> StateArray:
            check()
            return self.pages.read(*tokens)

        return read_again if is_shared else lambda: states

    def _put(self, epoch: str, posted: Posted) -> None:
        self._num_open += 1
        end, pair = self._ends.get(epoch), self._world.pairs.get(epoch)
        if end is None or pair is None or pair.is_broken:
            self.answer(posted.done, "the pair is closed")
            return
        end.posted.append(posted)
        pair.move(self._world.flows)

    def arrived(self, pair: SimulatedPair) -> None:
        """The transfer at the head of a pair, of which this is the receiver, is complete."""
        pair.moving = None
        source, target = pair.ends[True], pair.ends[False]
        sent, received = source.posted.popleft(), target.posted.popleft()
        gathered = source.slots.pop(sent.slot)
        size_bytes, strikes = gathered.size_bytes, self._world.strikes
        is_lost = strikes("transfer failed")
        if is_lost or strikes("send failed"):
            source.ranks.answer(sent.done, "the transfer failed")
        else:
            source.ranks.answer(sent.done, size_bytes=size_bytes)
        if is_lost or strikes("receive failed"):
            self.fail(received, "the transfer failed")
            return
        if strikes("damaged"):
            self.fail(received, "the digest differs", KIND_CORRUPT)
            return
        assert received.landing is not None
        chunk, table = received.landing
        if (chunk.key, chunk.epoch, chunk.index) != (gathered.chunk.key, gathered.chunk.epoch, gathered.chunk.index):
            raise PageAlarm(f"{chunk} was to land, and {gathered.chunk} lies in the slot that was sent")
        where = chunk.range
        self.pages.land(table, where.token_start, gathered.read(), (where.layer_start, where.layer_end))
        later_s = max(0.0, gathered.complete_at - self._world.loop.time())
        self.answer(received.done, size_bytes=size_bytes, later_s=later_s)
        pair.move(self._world.flows)

    # Answers

    def answer(
        self, done: Done, error: str = "", size_bytes: int = 0, kind: ErrorKind = KIND_TRANSFER, later_s: float = 0.0
    ) -> None:
        """After the time that a command takes, and `later_s`."""
        self._world.loop.call_at(self._due() + later_s, self._answered, done, error, size_bytes, kind)

    def _due(self) -> float:
        """When a command is answered that has just ended."""
        self._answers_at = max(self._answers_at, self._world.loop.time() + self._command_s * self._world.spread())
        return self._answers_at

    def fail(self, posted: Posted, error: str, kind: ErrorKind = KIND_TRANSFER) -> None:
        """A landing may have begun to write."""
        if posted.landing is not None and self._world.strikes("landing torn"):
            chunk, table = posted.landing
            self.pages.tear(table, chunk.range.token_start, chunk.range.token_end)
        self.answer(posted.done, error, kind=kind)

    def _answered(self, done: Done, error: str, size_bytes: int, kind: ErrorKind) -> None:
        self._num_open -= 1
        self._reply(done, error, size_bytes, kind)

    def _reply(self, done: Done, error: str = "", size_bytes: int = 0, kind: ErrorKind = KIND_TRANSFER) -> None:
        """`kind`: of the error, if there is one."""
        if not self._is_dead:
            self._post(done, error, kind if error else KIND_NONE, size_bytes)


def do_nothing() -> None:
    """A step has ended: the engine thread has a turn."""
