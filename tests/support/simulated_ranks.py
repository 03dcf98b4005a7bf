"""The ranks of a simulated worker, as one: steps that take turns, gathers, and pairs between two workers.

A long step writes layer by layer while others have their turns; a gather runs once what it reads is written; sends and
receives of a pair meet in the order in which they were posted, and end in that order on either side. Where pages are
shared, a landing reads those of the sender at that moment, and fails once a side is closed. An operation may fail, a
pair may be closed at any moment, and what was posted on it still ends, later. Every command is answered once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from simulated_pages import OWNER, TOKEN, Alarm, Cells, Pages

from cluster.pb import rank_pb2
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.sampler import Sampler
from engine.step_input import StepInput
from kv_transfer.actions import Chunk
from worker.handoff_connection import Done

if TYPE_CHECKING:
    from simulation import Node

VOCAB = 97
KIND_NONE = rank_pb2.RankReply.KIND_UNSPECIFIED
KIND_TRANSFER, KIND_CORRUPT = rank_pb2.RankReply.KIND_TRANSFER, rank_pb2.RankReply.KIND_CORRUPT
Move = Callable[[], None]


def next_tokens(tokens: list[int]) -> tuple[int, int]:
    """The two tokens that may follow."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB, (value // VOCAB) % VOCAB


class Step:
    """A step that was launched."""

    span = None

    def __init__(self, ranks: Ranks, step: StepInput, is_long: bool) -> None:
        """`step`: with every token known."""
        self._ranks = ranks
        self._step = step
        self.is_long = is_long
        self.num_layers_done = 0
        self._rows: list[tuple[Any, Cells, str]] = []
        self._sampled: list[SampledToken] = []
        self._context: list[list[int]] = []

    @property
    def is_done(self) -> bool:
        if not self.is_long and not self.num_layers_done:
            self._run(self._ranks.pages.num_layers)
        return self.num_layers_done == self._ranks.pages.num_layers

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        assert self.is_done
        flat = [row for of_one in rows for row in of_one]
        self._sampled = self._ranks.sampler.sample(torch.from_numpy(self._logits(rows)), flat) if flat else []

    def tokens(self) -> list[SampledToken]:
        """A step behind this one may have been launched."""
        return self._sampled

    def scores(self) -> list[SampledToken]:
        return []

    def _logits(self, rows: Sequence[Sequence[SampleRow]]) -> npt.NDArray[np.float32]:
        logits = np.zeros((len(self._step.logits_indices), VOCAB), dtype=np.float32)
        ends = (self._step.cu_seqlens_q[1:] - 1).tolist()
        for row, index in enumerate(self._step.logits_indices.tolist()):
            logits[row, list(next_tokens(self._context[ends.index(index)]))] = 50.0
        return logits[[i for i, of_one in enumerate(rows) for _ in of_one]]

    def advance(self) -> None:
        """One layer more."""
        self._run(1)

    def _run(self, num_layers: int) -> None:
        pages, step = self._ranks.pages, self._step
        if not self._rows:
            self._begin()
        first = self.num_layers_done
        layers = slice(first, first + num_layers)
        for row, (places, mine, who) in enumerate(self._rows):
            start, end = step.cu_seqlens_q[row], step.cu_seqlens_q[row + 1]
            pages.write(step.slot_mapping[start:end], layers, mine[:, :, start - end :], int(mine[OWNER, 0, 0]), who)
            cells = pages.read(places, layers, mine, who)
            self._context[row] = cells[TOKEN, -1].tolist()
        self.num_layers_done += num_layers
        if self.num_layers_done == pages.num_layers:
            self._ranks.num_steps_done += 1

    def _begin(self) -> None:
        step, node = self._step, self._ranks.node
        for source, target in step.block_copies.tolist():
            self._ranks.pages.copy_block(source, target)
        flight = node.core._steps._flight
        assert flight is not None
        for row, scheduled in enumerate(flight.decoding + flight.prefilling):
            sequence, length = scheduled.sequence, int(step.seqlens_k[row])
            places = self._ranks.pages.places(step.block_tables[row].tolist(), 0, length)
            new = step.token_ids[step.cu_seqlens_q[row] : step.cu_seqlens_q[row + 1]].tolist()
            mine = node.world.mark_of(sequence.request.key).cells([*sequence.tokens(0, length - len(new)), *new])
            self._rows.append((places, mine, f"a step of {node.name} for {sequence.request.key}"))
        self._context = [[] for _ in self._rows]


@dataclass
class Transfer:
    """A send and a receive that meet."""

    send_slot: int | None = None
    receive_slot: int | None = None
    has_moved: bool = False
    has_landed: bool = False
    is_broken: bool = False

    @property
    def is_met(self) -> bool:
        return self.send_slot is not None and self.receive_slot is not None and not self.is_broken


@dataclass
class Posted:
    """A command that waits for its end on one side of a pair."""

    number: int
    kind: str
    command: Any
    chunk: Chunk | None
    transfer: Transfer | None


@dataclass
class PairSide:
    """One worker's side of a pair."""

    is_opened: bool = False
    is_closed: bool = False
    posted: deque[Posted] = field(default_factory=deque)
    num_transfers: int = 0
    slots: dict[int, tuple[int, Callable[[], Cells]]] = field(default_factory=dict)
    """What lies in each slot: its tag, and its cells, or how they are read."""


_OVER = PairSide(is_closed=True)


@dataclass
class Pair:
    """Both sides by `is_sender`, and what moves between them, in order."""

    sides: dict[bool, PairSide] = field(default_factory=lambda: {True: PairSide(), False: PairSide()})
    transfers: list[Transfer] = field(default_factory=list)

    def next_transfer(self, side: PairSide) -> Transfer:
        side.num_transfers += 1
        while len(self.transfers) < side.num_transfers:
            self.transfers.append(Transfer())
        return self.transfers[side.num_transfers - 1]


class Ranks:
    """Of one worker."""

    def __init__(self, node: Node, pages: Pages, long_tokens: int) -> None:
        self.node = node
        self.pages = pages
        self.num_steps = 0
        self.num_steps_done = 0
        self._long_tokens = long_tokens
        self.sampler = Sampler(VOCAB)
        self._number = 0
        self._done: dict[int, Done] = {}
        self._step: Step | None = None
        self._gathers: list[tuple[int, rank_pb2.ChunkPages, Chunk]] = []
        self._closes: list[tuple[int, str]] = []
        self._sides: dict[str, PairSide] = {}
        """Of the pairs that are not over."""

    def launch(self, step: StepInput, rows: object = None) -> Step:
        """It begins later: what is released meanwhile must stay as it is."""
        self.num_steps += 1
        if step.has_unread_tokens:
            assert self._step is not None and self._step.is_done, "a step needs tokens of one that is not done"
            step = step.with_tokens(np.array([token.token_id for token in self._step.tokens()]))
            self.node.world.counts["steps launched ahead"] += 1
        self._step = Step(self, step, len(step.token_ids) >= self._long_tokens)
        return self._step

    def issue(self, command: rank_pb2.RankCommand, done: Done) -> None:
        self._number += 1
        number, kind = self._number, str(command.WhichOneof("command"))
        self._done[number] = done
        what = getattr(command, kind)
        chunk = Chunk.from_proto(what.chunk, what.pair_epoch) if kind in ("gather", "receive") else None
        match kind:
            case "gather":
                assert chunk is not None
                self._gathers.append((number, what, chunk))
            case "close_pair":
                self._closes.append((number, what.pair_epoch))
            case "open_pair":
                side = self._sides[what.pair_epoch] = self._pair(what.pair_epoch).sides[what.is_sender]
                side.is_opened = True
                side.posted.append(Posted(number, kind, what, None, None))
            case "send" | "receive":
                self._post(number, kind, what, chunk)

    def die(self) -> None:
        """The process is gone: whoever it had a pair with will notice."""
        for side in self._sides.values():
            side.is_closed = True
            side.posted.clear()

    @property
    def is_idle(self) -> bool:
        return (
            not self._done
            and not self._gathers
            and not self._closes
            and not any(side.posted for side in self._sides.values())
        )

    def moves(self) -> Iterator[Move]:
        """What may happen next."""
        if self._step is not None and self._step.is_long and not self._step.is_done:
            yield self._step.advance
        for entry in self._gathers:
            if self._has_written(entry[1].after_step, entry[1].chunk.layer_end):
                yield lambda entry=entry: self._gather(*entry)  # type: ignore[misc]
        for close in self._closes:
            yield lambda close=close: self._close(*close)  # type: ignore[misc]
        for epoch, side in self._sides.items():
            if side.posted and self._can_end(epoch, side.posted[0]):
                yield lambda epoch=epoch: self._end(epoch)  # type: ignore[misc]

    # Operations

    def _post(self, number: int, kind: str, what: Any, chunk: Chunk | None) -> None:
        side = self._side(what.pair_epoch)
        transfer = self._pair(what.pair_epoch).next_transfer(side)
        if chunk is None:
            transfer.send_slot = what.slot
        else:
            transfer.receive_slot = chunk.slot
            if any(p.chunk is not None and p.chunk.slot == transfer.receive_slot for p in side.posted):
                raise Alarm(f"a receive into slot {chunk.slot} of {what.pair_epoch} is posted while another is")
        side.posted.append(Posted(number, kind, what, chunk, transfer))

    def _gather(self, number: int, what: rank_pb2.ChunkPages, chunk: Chunk) -> None:
        self._gathers.remove((number, what, chunk))
        side, world = self._side(what.pair_epoch), self.node.world
        if any(p.kind == "send" and p.command.slot == chunk.slot for p in side.posted):
            raise Alarm(f"{chunk} is gathered over a slot that is being sent")
        where = chunk.range
        places = self.pages.places(what.block_table, where.token_start, where.token_end)
        mine = world.mark_of(chunk.key).cells(world.tokens_of(chunk.key)[: where.token_end], where.token_start)
        layers = slice(where.layer_start, where.layer_end)
        who = f"a {'reader' if world.shares_pages else 'gather'} of {self.node.name} for {chunk}"
        cells = self.pages.read(places, layers, mine, who)
        if side.is_closed or world.strikes("gather failed"):
            self._reply(number, "the gather failed", KIND_TRANSFER)
            return
        later = partial(self.pages.read, places, layers, mine, who)
        side.slots[chunk.slot] = chunk.tag, later if world.shares_pages else lambda: cells
        self._reply(number, "", KIND_NONE, cells.nbytes)

    def _close(self, number: int, epoch: str) -> None:
        self._closes.remove((number, epoch))
        self._side(epoch).is_closed = True
        self._forget_if_over(epoch)
        self._reply(number, "", KIND_NONE)

    def _can_end(self, epoch: str, posted: Posted) -> bool:
        pair = self._pair(epoch)
        if any(side.is_closed for side in pair.sides.values()):
            return True
        if posted.transfer is None:
            return all(side.is_opened for side in pair.sides.values())
        is_late = posted.kind == "receive" and posted.command.after_step > self.num_steps_done
        if self.node.world.shares_pages and posted.kind == "send":
            return posted.transfer.has_landed or posted.transfer.is_broken
        return (posted.transfer.is_met or posted.transfer.is_broken) and not is_late

    def _end(self, epoch: str) -> None:
        """The head of a pair's line ends."""
        pair, side = self._pair(epoch), self._side(epoch)
        self._answer(pair, side, side.posted.popleft())
        self._forget_if_over(epoch)

    def _answer(self, pair: Pair, side: PairSide, posted: Posted) -> None:
        """One way or the other."""
        world = self.node.world
        is_cut = any(s.is_closed for s in pair.sides.values())
        transfer = posted.transfer
        if transfer is None:
            is_well = not is_cut and not world.strikes("pair did not open")
            return self._reply(posted.number, "" if is_well else "the pair was closed", KIND_TRANSFER)
        has_arrived = transfer.has_moved and (not is_cut or world.random.random() < 0.5)
        if world.shares_pages:
            has_arrived = transfer.has_landed and has_arrived
        if not has_arrived and (is_cut or not transfer.is_met or world.strikes(f"{posted.kind} failed")):
            transfer.is_broken = True
            self._tear_if_landing(posted)
            return self._reply(posted.number, "the transfer failed", KIND_TRANSFER)
        if not transfer.has_moved:
            self._move(pair, transfer)
        if posted.kind == "send":
            return self._reply(posted.number, "", KIND_NONE)
        return self._land(side, posted)

    @staticmethod
    def _move(pair: Pair, transfer: Transfer) -> None:
        assert transfer.send_slot is not None and transfer.receive_slot is not None
        if transfer.send_slot not in pair.sides[True].slots:
            raise Alarm(f"slot {transfer.send_slot} is sent, and nothing was ever gathered into it")
        transfer.has_moved = True
        pair.sides[False].slots[transfer.receive_slot] = pair.sides[True].slots[transfer.send_slot]

    def _land(self, side: PairSide, posted: Posted) -> None:
        what, chunk = posted.command, posted.chunk
        assert chunk is not None
        tag, read = side.slots[chunk.slot]
        if tag != chunk.tag:
            raise Alarm(f"{chunk} was expected in its landing slot, but another chunk lies there")
        assert posted.transfer is not None
        if self.node.world.strikes("damaged"):
            posted.transfer.is_broken = True
            return self._reply(posted.number, "the digest differs", KIND_CORRUPT)
        where = chunk.range
        places = self.pages.places(what.block_table, where.token_start, where.token_end)
        owner, layers = self.node.world.mark_of(chunk.key).owner, slice(where.layer_start, where.layer_end)
        cells = read().copy()
        posted.transfer.has_landed = True
        cells[OWNER] = owner
        self.pages.write(places, layers, cells, owner, f"a landing of {self.node.name} for {chunk}")
        return self._reply(posted.number, "", KIND_NONE, cells.nbytes)

    def _tear_if_landing(self, posted: Posted) -> None:
        what, chunk = posted.command, posted.chunk
        if chunk is None or self.node.world.random.random() < 0.5:
            return
        self.node.world.counts["landings torn"] += 1
        where = chunk.range
        places = self.pages.places(what.block_table, where.token_start, where.token_end)
        owner, layers = self.node.world.mark_of(chunk.key).owner, slice(where.layer_start, where.layer_end)
        self.pages.tear(places, layers, owner, f"a failing landing of {self.node.name} for {chunk}")

    def _has_written(self, num_steps: int, num_layers: int) -> bool:
        ahead = num_steps - self.num_steps_done
        return ahead <= 0 or (ahead == 1 and self._step is not None and num_layers <= self._step.num_layers_done)

    def _reply(self, number: int, error: str, kind: int, size_bytes: int = 0) -> None:
        done = self._done.pop(number)
        self.node.core.inbox.post(done, error, kind if error else KIND_NONE, size_bytes)

    def _pair(self, epoch: str) -> Pair:
        return self.node.world.pairs[epoch]

    def _side(self, epoch: str) -> PairSide:
        return self._sides.get(epoch, _OVER)

    def _forget_if_over(self, epoch: str) -> None:
        side = self._side(epoch)
        if side.is_closed and not side.posted:
            side.slots.clear()
            self._sides.pop(epoch, None)
