"""A rank's executor, with a runner and a transfer engine that do what a test lets them; its pairs are real."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cluster.errors import TransferFailed
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2
from engine.model_runner import StepOutput
from engine.step_input import SequenceSlice, StepInput, build_step
from kv_transfer.actions import Chunk, Range
from kv_transfer.rank_pair import RankPair
from worker.rank import RankExecutor

NO_KIND = rank_pb2.RankReply.KIND_UNSPECIFIED
LAYOUT = handoff_pb2.KvLayout(
    num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", tp_size=1, block_size=16, model="m"
)
SOON_S = 10.0
NUM_LAYERS = 4


class FakeRunner:
    """A forward pass that goes on layer by layer, as the test lets it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.may_write = threading.Semaphore(0)
        self.is_free = True
        self.num_written = 0
        """Layers of all steps together."""

    def run(
        self, step: StepInput, on_layer: Callable[[int], None] | None = None, sampled: torch.Tensor | None = None
    ) -> StepOutput:
        for layer in range(1, NUM_LAYERS + 1):
            if not self.is_free:
                assert self.may_write.acquire(timeout=SOON_S)
            self.num_written += 1
            if on_layer is not None:
                on_layer(layer)
        return StepOutput(torch.tensor(step.token_ids))


class FakePair(RankPair):
    """A pair without routes."""

    def __init__(self, spec: rank_pb2.OpenPair) -> None:
        super().__init__(spec)
        self.may_end = threading.Event()
        self.error: Exception | None = None


@dataclass
class Posted:
    """A send or a receive on a pair."""

    pair: FakePair


class FakeEngine:
    """Sends and landings last until `may_end` of their pair is set, or the pair is closed."""

    tier = None

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.written_at: dict[str, int] = {}
        """Layers written when pages were touched, by operation and slot."""
        self.pairs: dict[str, FakePair] = {}
        self.calls: list[tuple[str, str, int]] = []
        self.changed = threading.Condition()
        self.peers_there = threading.Event()
        self.peers_there.set()
        self.num_closed = 0

    def note(self, name: str, epoch: str, slot: int = -1) -> None:
        with self.changed:
            self.calls.append((name, epoch, slot))
            self.changed.notify_all()

    def await_call(self, *call: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: call in self.calls, SOON_S), f"{call} is not in {self.calls}"

    def add_pair(self, spec: rank_pb2.OpenPair) -> FakePair:
        if spec.pair_epoch in self.pairs:
            raise ValueError(f"pair {spec.pair_epoch} is open already")
        pair = self.pairs[spec.pair_epoch] = FakePair(spec)
        return pair

    def open_pair(self, pair: FakePair) -> None:
        self.note("opening", pair.epoch)
        while not self.peers_there.wait(0.001) and pair.ended is None:
            continue
        pair.check_wanted()

    def close_pair(self, epoch: str) -> None:
        pair = self.pairs.pop(epoch, None)
        if pair is not None:
            pair.end("it was closed")
            pair.may_end.set()
            self.num_closed += 1
        self.note("closed", epoch)

    def close(self) -> None:
        for epoch in list(self.pairs):
            self.close_pair(epoch)

    def before_step(self) -> None:
        """There are no streams here."""

    def num_layers_of(self, what: Range) -> int:
        """The layers are one group."""
        return what.layer_end

    def gather(self, chunk: Chunk, block_table: Any, ready: object = None) -> int:
        assert ready is None
        self.written_at[f"gather {chunk.slot}"] = self.runner.num_written
        self.note("gather", chunk.epoch, chunk.slot)
        return 100

    def _post(self, name: str, epoch: str, slot: int) -> Posted:
        if epoch not in self.pairs:
            raise TransferFailed(f"pair {epoch} is not open")
        self.note(name, epoch, slot)
        return Posted(self.pairs[epoch])

    def _complete(self, pair: FakePair) -> None:
        assert pair.may_end.wait(SOON_S)
        if pair.error is not None:
            raise pair.error
        if pair.ended is not None:
            raise TransferFailed("the pair was closed")

    def send(self, epoch: str, slot: int) -> Posted:
        return self._post("send", epoch, slot)

    def complete_send(self, sending: Posted) -> None:
        self._complete(sending.pair)

    def post_receive(self, chunk: Chunk, block_table: Any) -> Posted:
        return self._post("receive", chunk.epoch, chunk.slot)

    def complete_receive(self, landing: Posted, ready: object = None) -> int:
        assert ready is None
        self.written_at["scatter"] = self.runner.num_written
        self._complete(landing.pair)
        return 7


class Replies:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._told: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)

    def __call__(self, number: int, error: str, kind: int, size_bytes: int) -> None:
        with self._changed:
            self._told[number].append((error, kind, size_bytes))
            self._changed.notify_all()

    def of(self, number: int) -> tuple[str, int, int]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._told[number], SOON_S), f"command {number} was not answered"
            assert len(self._told[number]) == 1, f"command {number} was answered twice: {self._told[number]}"
            return self._told[number][0]

    def is_there(self, number: int) -> bool:
        return bool(self._told[number])


class Bench:
    """An executor, its fakes, and a log to write commands into."""

    def __init__(self, runner: FakeRunner | None = None, engine: FakeEngine | None = None) -> None:
        self.runner, self.replies = runner or FakeRunner(), Replies()
        self.engine = engine or FakeEngine(self.runner)
        self.executor = RankExecutor(self.runner, self.engine, self.replies)  # type: ignore[arg-type]
        self.number = 0

    def issue(self, **command: Any) -> int:
        self.number = number = self.number + 1
        self.executor.execute(rank_pb2.RankCommand(number=number, **command))
        return number

    def open(self, epoch: str = "e") -> int:
        return self.issue(open_pair=rank_pb2.OpenPair(pair_epoch=epoch, remote=LAYOUT))

    def close(self, epoch: str = "e") -> int:
        return self.issue(close_pair=rank_pb2.ClosePair(pair_epoch=epoch))

    def gather(self, after_step: int, layer_end: int = NUM_LAYERS, slot: int = 0, epoch: str = "e") -> int:
        return self.issue(gather=self.pages(after_step, layer_end, slot, epoch))

    def receive(self, after_step: int = 0, slot: int = 0, epoch: str = "e") -> int:
        return self.issue(receive=self.pages(after_step, NUM_LAYERS, slot, epoch))

    def send(self, slot: int = 0, epoch: str = "e") -> int:
        return self.issue(send=rank_pb2.Send(pair_epoch=epoch, slot=slot))

    @staticmethod
    def pages(after_step: int, layer_end: int, slot: int, epoch: str) -> rank_pb2.ChunkPages:
        chunk = Chunk(RequestKey("r", 1), epoch, 0, slot, Range(0, 16, 0, layer_end))
        return rank_pb2.ChunkPages(pair_epoch=epoch, chunk=chunk.to_proto(), block_table=[0], after_step=after_step)

    def opened(self, epoch: str = "e") -> str:
        assert self.replies.of(self.open(epoch)) == ("", NO_KIND, 0)
        return epoch

    def gathered_slots(self) -> list[int]:
        return [slot for name, _, slot in self.engine.calls if name == "gather"]


def a_step(num_tokens: int) -> StepInput:
    table = tuple(range(-(-num_tokens // 16)))
    return build_step([SequenceSlice(tuple(range(num_tokens)), 0, table, wants_logits=True)], 16)
