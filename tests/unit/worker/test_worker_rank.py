"""What a rank does beside its steps: in which order, waiting for what, and with which answers.

The transfer engine here moves nothing: an operation ends when the test says so. Its pairs are real.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fake_streams import FakeEvent, FakeGpu

from cluster.errors import Corrupted, TransferFailed
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2
from engine.model_runner import StepOutput
from engine.step_input import SequenceSlice, StepInput, build_step
from kv_transfer.actions import Chunk, Range
from kv_transfer.rank_pair import RankPair
from worker.rank import AHEAD_LAYERS, OVERLAP_TOKENS, RankExecutor

NO_KIND = rank_pb2.RankReply.KIND_UNSPECIFIED
TRANSFER = rank_pb2.RankReply.KIND_TRANSFER
CORRUPT = rank_pb2.RankReply.KIND_CORRUPT
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


class QueueingRunner(FakeRunner):
    """A forward pass that is only queued; layers are computed on a GPU as the test lets them."""

    device = torch.device("cuda")

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.num_allowed = 0
        self.num_queued = 0

    def run(
        self, step: StepInput, on_layer: Callable[[int], None] | None = None, sampled: torch.Tensor | None = None
    ) -> StepOutput:
        for layer in range(1, NUM_LAYERS + 1):
            self.num_queued += 1
            self.gpu.current.launch(self._compute, partial(self._is_allowed, self.num_queued))
            if on_layer is not None:
                on_layer(layer)
        return StepOutput(torch.tensor(step.token_ids))

    def _compute(self) -> None:
        self.num_written += 1

    def _is_allowed(self, number: int) -> bool:
        return number <= self.num_allowed


class EventEngine(FakeEngine):
    """Notes which events copies are to wait for, and the layers that were queued when a step began."""

    def __init__(self, runner: QueueingRunner) -> None:
        super().__init__(runner)
        self.ready: list[FakeEvent] = []
        self.queued_before_steps: list[int] = []

    def before_step(self) -> None:
        assert isinstance(self.runner, QueueingRunner)
        self.queued_before_steps.append(self.runner.num_queued)

    def gather(self, chunk: Chunk, block_table: Any, ready: object = None) -> int:
        assert isinstance(ready, FakeEvent)
        self.ready.append(ready)
        return super().gather(chunk, block_table)

    def complete_receive(self, landing: Posted, ready: object = None) -> int:
        assert isinstance(ready, FakeEvent)
        self.ready.append(ready)
        return super().complete_receive(landing)


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


@contextmanager
def stepping(bench: Bench, num_tokens: int) -> Iterator[threading.Thread]:
    """A step that writes a layer each time `may_write` is released; it has ended when the block ends."""
    bench.runner.is_free = False
    thread = threading.Thread(target=bench.executor.step, args=(a_step(num_tokens),))
    thread.start()
    try:
        yield thread
    finally:
        bench.runner.is_free = True
        bench.runner.may_write.release(NUM_LAYERS)
        thread.join(SOON_S)
        assert not thread.is_alive()


def a_step(num_tokens: int) -> StepInput:
    table = tuple(range(-(-num_tokens // 16)))
    return build_step([SequenceSlice(tuple(range(num_tokens)), 0, table, wants_logits=True)], 16)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.executor.close()


def test_a_gather_waits_for_its_layers_of_the_step_under_way(bench: Bench) -> None:
    bench.executor.step(a_step(1))
    with stepping(bench, OVERLAP_TOKENS):
        numbers = [bench.gather(2, layer_end=layer, slot=layer) for layer in (1, 3)]
        bench.runner.may_write.release()
        assert bench.replies.of(numbers[0]) == ("", NO_KIND, 100)
        bench.runner.may_write.release(2)
        assert bench.replies.of(numbers[1]) == ("", NO_KIND, 100)
        assert bench.runner.num_written == NUM_LAYERS + 3, "the step ended before its layers were gathered"
    assert bench.engine.written_at["gather 1"] == NUM_LAYERS + 1
    assert bench.engine.written_at["gather 3"] == NUM_LAYERS + 3


def test_a_gather_of_a_step_that_was_not_run_yet_waits_for_it(bench: Bench) -> None:
    number = bench.gather(after_step=2, slot=2)
    bench.executor.step(a_step(OVERLAP_TOKENS))
    ready = bench.gather(after_step=1)
    assert bench.replies.of(ready) == ("", NO_KIND, 100)
    bench.executor.step(a_step(OVERLAP_TOKENS))
    assert bench.replies.of(number) == ("", NO_KIND, 100)
    assert bench.engine.written_at["gather 2"] == 2 * NUM_LAYERS


def test_a_gather_that_must_wait_does_not_hold_up_one_whose_pages_are_written(bench: Bench) -> None:
    bench.executor.step(a_step(1))
    with stepping(bench, OVERLAP_TOKENS):
        waiting = bench.gather(2, slot=2)
        assert bench.replies.of(bench.gather(1, slot=1)) == ("", NO_KIND, 100)
        assert not bench.replies.is_there(waiting)
    bench.replies.of(waiting)
    assert bench.gathered_slots() == [1, 2]


def test_a_short_step_is_gathered_from_once_it_has_ended(bench: Bench) -> None:
    with stepping(bench, OVERLAP_TOKENS - 1):
        number = bench.gather(1, layer_end=1)
        bench.runner.may_write.release(NUM_LAYERS - 1)
    assert bench.replies.of(number) == ("", NO_KIND, 100)
    assert bench.engine.written_at["gather 0"] == NUM_LAYERS


def test_what_landed_is_scattered_after_the_steps_launched_before_it(bench: Bench) -> None:
    bench.opened()
    bench.engine.pairs["e"].may_end.set()
    with stepping(bench, OVERLAP_TOKENS):
        number = bench.receive(after_step=1)
        bench.engine.await_call("receive", "e", 0)
        bench.runner.may_write.release(NUM_LAYERS - 1)
    assert bench.replies.of(number) == ("", NO_KIND, 7)
    assert bench.engine.written_at["scatter"] == NUM_LAYERS


def test_a_pair_whose_peer_stalls_holds_up_no_other(bench: Bench) -> None:
    bench.opened("stalled")
    bench.opened("well")
    stalled = [bench.send(epoch="stalled"), bench.receive(epoch="stalled")]
    bench.engine.pairs["well"].may_end.set()
    well = [bench.send(epoch="well"), bench.receive(epoch="well"), bench.gather(0, epoch="well")]
    assert [bench.replies.of(n) for n in well] == [("", NO_KIND, 0), ("", NO_KIND, 7), ("", NO_KIND, 100)]
    assert not any(bench.replies.is_there(n) for n in stalled)
    bench.engine.pairs["stalled"].may_end.set()
    assert [bench.replies.of(n) for n in stalled] == [("", NO_KIND, 0), ("", NO_KIND, 7)]


def test_operations_are_posted_in_the_order_of_the_log(bench: Bench) -> None:
    bench.opened()
    bench.engine.pairs["e"].may_end.set()
    expected = []
    for slot in range(20):
        number = bench.send(slot) if slot % 3 else bench.receive(slot=slot)
        expected.append(("send" if slot % 3 else "receive", "e", slot))
    bench.replies.of(number)
    assert [call for call in bench.engine.calls if call[0] in ("send", "receive")] == expected


def test_closing_a_pair_does_not_wait_for_its_operations_and_answers_them_all(bench: Bench) -> None:
    bench.opened()
    numbers = [bench.send(0), bench.receive(slot=1), bench.send(2)]
    bench.engine.await_call("send", "e", 2)
    assert bench.replies.of(bench.close()) == ("", NO_KIND, 0)
    assert [bench.replies.of(n)[1] for n in numbers] == [TRANSFER] * 3
    assert bench.replies.of(bench.send())[1] == TRANSFER


def test_a_pair_that_is_closed_while_it_opens_is_given_up(bench: Bench) -> None:
    bench.engine.peers_there.clear()
    opening = bench.open()
    bench.engine.await_call("opening", "e", -1)
    assert bench.replies.of(bench.close()) == ("", NO_KIND, 0)
    assert bench.replies.of(opening)[1] == TRANSFER
    assert not bench.engine.pairs


def test_a_pair_that_is_closed_before_it_began_to_open_does_not_stay_open(bench: Bench) -> None:
    closings: list[int] = []
    really_open = bench.engine.open_pair

    def open_late(pair: FakePair) -> None:
        closings.append(bench.close())
        bench.replies.of(closings[0])
        really_open(pair)

    bench.engine.open_pair = open_late  # type: ignore[method-assign]
    assert bench.replies.of(bench.open())[1] == TRANSFER
    assert closings
    assert not bench.engine.pairs


def test_an_epoch_that_is_open_is_not_opened_again(bench: Bench) -> None:
    bench.opened()
    error, kind, _ = bench.replies.of(bench.open())
    assert "open already" in error
    assert kind == NO_KIND
    assert [call[0] for call in bench.engine.calls] == ["opening"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TransferFailed("gone"), TRANSFER), (Corrupted("damaged"), CORRUPT), (ValueError("slot 9"), NO_KIND)],
)
def test_an_answer_says_what_kind_of_failure_it_was(bench: Bench, error: Exception, kind: int) -> None:
    bench.opened()
    bench.engine.pairs["e"].error = error
    bench.engine.pairs["e"].may_end.set()
    assert bench.replies.of(bench.receive()) == (str(error), kind, 0)
    assert bench.replies.of(bench.send()) == (str(error), kind, 0)


def test_no_thread_outlives_its_pair(bench: Bench) -> None:
    before = threading.active_count()
    threads: set[threading.Thread] = set()
    for cycle in range(1000):
        epoch = bench.opened(f"e{cycle}")
        numbers = [bench.send(0, epoch), bench.receive(slot=1, epoch=epoch)] if cycle % 2 else []
        threads.update(threading.enumerate())
        bench.replies.of(bench.close(epoch))
        for number in numbers:
            bench.replies.of(number)
    for thread in threads:
        if thread.name.startswith(("kv-wait", "kv-close")):
            thread.join(SOON_S)
            assert not thread.is_alive(), thread.name
    assert len([t for t in threads if t.name.startswith("kv-wait")]) == 1000
    assert threading.active_count() <= before + 1  # the last kv-close may be about to end
    assert bench.engine.num_closed == 1000


def test_on_a_gpu_a_gather_is_answered_before_its_last_layers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is launched, and its slot offered, when few of the layers that it waits for are still to be computed."""
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    runner = QueueingRunner(gpu)
    engine = EventEngine(runner)
    bench = Bench(runner, engine)
    bench.executor.step(a_step(OVERLAP_TOKENS))
    number = bench.gather(1)
    gpu.await_sync()
    runner.num_allowed = NUM_LAYERS - AHEAD_LAYERS
    assert bench.replies.of(number) == ("", NO_KIND, 100)
    assert engine.written_at["gather 0"] == NUM_LAYERS - AHEAD_LAYERS
    (ready,) = engine.ready
    assert not ready.query()
    runner.num_allowed = NUM_LAYERS
    ready.synchronize()
    assert runner.num_written == NUM_LAYERS
    bench.executor.close()


def test_on_a_gpu_what_landed_waits_for_the_steps_launched_before_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    runner = QueueingRunner(gpu)
    engine = EventEngine(runner)
    bench = Bench(runner, engine)
    bench.opened()
    for _ in range(2):
        bench.executor.step(a_step(OVERLAP_TOKENS))
    engine.pairs["e"].may_end.set()
    assert bench.replies.of(bench.receive(after_step=1)) == ("", NO_KIND, 7)
    (ready,) = engine.ready
    runner.num_allowed = NUM_LAYERS
    ready.synchronize()  # though the second step has not begun
    assert runner.num_written == NUM_LAYERS
    assert engine.queued_before_steps == [0, NUM_LAYERS], "what copies wait for is settled before a step is queued"
    bench.executor.close()


def test_at_the_end_everything_that_waits_is_answered() -> None:
    bench = Bench()
    bench.opened()
    numbers = [bench.gather(after_step=5), bench.send(), bench.receive(after_step=5, slot=1)]
    bench.engine.await_call("receive", "e", 1)
    bench.executor.close()
    assert all(bench.replies.of(number)[0] for number in numbers)
