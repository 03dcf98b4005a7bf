"""What a rank does beside its steps on a GPU, where a step that was run is only queued."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_streams import FakeEvent, FakeGpu
from rank_bench import NO_KIND, NUM_LAYERS, Bench, FakeEngine, FakeRunner, Posted, a_step

from engine.model_runner import StepOutput
from engine.step_input import StepInput
from kv_transfer.actions import Chunk
from worker.rank import AHEAD_LAYERS, OVERLAP_TOKENS


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
