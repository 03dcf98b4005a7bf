"""What decode steps as graphs read and reserve, on one stream, and on tensor-parallel ranks alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain_kernels
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, on_each_rank
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.attention.flash import FlashAttention
from engine.cuda_graphs import CudaCapture, DecodeGraphs
from engine.model_runner import ModelRunner
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.samples import Samples
from engine.step_input import SequenceSlice, StepInput, build_step

CPU = torch.device("cpu")
BLOCK_SIZE = 256  # that GPU kernels read in place


def _starting_at(starts: list[int], block_size: int) -> StepInput:
    """A decode step; its tables are as long as the longest sequence needs."""
    width = max(starts, default=0) // block_size + 1
    tables = [tuple(range(width * i, width * i + width)) for i in range(len(starts))]
    slices = [SequenceSlice((i + 1,), start, tables[i], True) for i, start in enumerate(starts)]
    return build_step(slices, block_size)


class _Made(TorchDispatchMode):
    """Notes operations that take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.names.append(str(func))
        return out


class _Chooser:
    """A choice that is recorded and chooses nothing; it notes for how many rows."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int]] = []
        self.placed: list[int] = []

    def record(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.recorded.append((len(logits), len(token_ids)))

    def place(self, rows: Sequence[SampleRow]) -> bool:
        self.placed.append(len(rows))
        return bool(rows)

    def samples(self, token_ids: torch.Tensor) -> Samples:
        return Samples(token_ids)


def _graphs(chooser: _Chooser | None = None) -> DecodeGraphs:
    graphs = DecodeGraphs(
        lambda inputs: torch.zeros(len(inputs.token_ids), VOCAB_SIZE),
        lambda work: (work(), work)[1],
        most=9,
        width=12,
        block_size=16,
        scratch_block=99,
        vocab_size=VOCAB_SIZE,
        device=CPU,
        chooser_of=None if chooser is None else lambda device, most: chooser,
    )
    graphs._replays = dict.fromkeys(graphs._replays, lambda: None)  # what those take, they took when they were made
    return graphs


def test_a_replayed_step_takes_no_memory() -> None:
    graphs = _graphs()
    for starts in ([5], [3, 99, 17], list(range(9))):
        with _Made() as made:
            logits, samples = graphs.run(_starting_at(starts, 16))
        assert logits.shape == (len(starts), VOCAB_SIZE) and samples is None and made.names == []


def test_a_step_that_chooses_its_tokens_leaves_them_where_the_next_one_looks() -> None:
    """No memory is taken, no token is moved, and nothing is sent to a step that goes on with the rows of the last one.
    A step that was not prepared for chooses none."""
    chooser = _Chooser()
    graphs = _graphs(chooser)
    assert graphs.chooses and chooser.recorded == [(size, size) for size in reversed(graphs.sizes)]
    rows = [SampleRow(SamplingParams(), i, (1,), ()) for i in range(3)]
    known = _starting_at([3, 99, 17], 16)
    second, third = (
        replace(_starting_at([3 + n, 99 + n, 17 + n], 16), token_ids=np.array([-2, -1, -3], dtype=np.int32))
        for n in (1, 2)
    )
    chosen_elsewhere = torch.tensor([7, 8, 9], dtype=torch.int32)
    chosen_here = graphs._inputs.sampled[:3]
    for step, sampled, num_copies in ((known, None, 2), (second, chosen_elsewhere, 3), (third, chosen_here, 0)):
        with _Made() as made, _Copies() as copies:
            graphs.prepare(rows)
            _, samples = graphs.run(step, sampled)
        assert samples is not None and made.names == []
        assert copies.count == num_copies, "what is new, to the device and to its place; tokens from elsewhere"
        assert samples.token_ids.data_ptr() == chosen_here.data_ptr() and len(samples.token_ids) == 3
        samples.token_ids.copy_(torch.tensor([4, 5, 6], dtype=torch.int32))  # as the recording would
    graphs._inputs.advance(4)
    assert graphs._inputs.of(4).token_ids.tolist()[:3] == [5, 4, 6]
    assert graphs.run(known)[1] is None
    assert chooser.placed == [3, 3, 3, 0]
    graphs.prepare(())
    assert graphs.run(known)[1] is None and chooser.placed[4:] == [0, 0]


class _Copies(TorchDispatchMode):
    """Counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "copy" in str(func)
        return func(*args, **(kwargs or {}))


class _FakeCuda:
    """As much of torch.cuda as captures use. Memory is reserved for a pool and a stream, and taken again only there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = _FakeStream("main", self)
        self.pool = "default"
        self.reserved: Counter[tuple[str, _FakeStream]] = Counter()
        self.calls: list[str] = []
        self.num_replays = 0
        self.is_refusing = False
        names = {
            "Stream": lambda: _FakeStream("side", self),
            "current_stream": lambda: self.current,
            "stream": lambda stream: self._under("current", stream),
            "device": lambda device: nullcontext(),
            "graph_pool_handle": lambda: "shared",
            "CUDAGraph": lambda: self,
            "graph": self._graph,
            "set_stream": lambda stream: setattr(self, "current", stream),
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def take(self, size: int) -> None:
        """Work that takes so much memory and frees it again."""
        self.calls.append(f"{size} in {self.pool}")
        self.reserved[self.pool, self.current] = max(size, self.reserved[self.pool, self.current])

    def replay(self) -> None:
        self.num_replays += 1

    @contextmanager
    def _graph(self, graph: Any, *, pool: str, stream: _FakeStream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        with self._under("current", stream), self._under("pool", pool):
            try:
                yield
            finally:  # as torch's: what is raised here comes in place of what was raised in the block
                if self.is_refusing:
                    raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def _under(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        yield
        setattr(self, name, before)


class _FakeStream:
    def __init__(self, name: str, cuda: _FakeCuda) -> None:
        self._name, self._cuda = name, cuda

    def wait_stream(self, other: _FakeStream) -> None:
        self._cuda.calls.append(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        self._cuda.calls.append(f"{self._name} is over")


def test_all_recordings_together_reserve_what_the_largest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recording was made on a stream of its own, so that none could use memory that another had freed."""
    cuda = _FakeCuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda:0"))

    replays = [capture(lambda size=size: cuda.take(size)) for size in (64, 32, 16)]  # type: ignore[misc]
    replays[1]()

    assert sorted(cuda.reserved.values()) == [64, 64]  # of the warm-ups, and of the recordings
    assert {pool for pool, _ in cuda.reserved} == {"default", "shared"} and cuda.current is cuda.main
    assert cuda.calls[:5] == [
        "side waits for main",
        "64 in default",
        "side is over",
        "64 in shared",
        "main waits for side",
    ]
    assert cuda.num_replays == 1


@pytest.mark.parametrize("cause", ["operation not permitted when stream is capturing", ""])
def test_a_capture_that_fails_names_the_cause_and_leaves_its_stream(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's end of it raises another error in place of the first, and its stream stays the current one."""
    cuda = _FakeCuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda:0"))

    def work() -> None:
        if cuda.is_refusing and cause:
            raise RuntimeError(cause)
        cuda.is_refusing = True

    with pytest.raises(RuntimeError, match=cause or "operation failed due to a previous error during capture"):
        capture(work)
    assert cuda.current is cuda.main


def _captured_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: list[Callable]) -> list[ModelRunner]:
    """A runner for each rank, captured with a function of its own."""
    folder = make_checkpoint("llama", tmp_path)
    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    sizes = {"num_blocks": 8, "block_size": BLOCK_SIZE, "graphs_up_to": 3, "kernels": "torch"}
    return on_each_rank(
        len(captures),
        lambda tp: make_runner(folder, tp=tp, capture=captures[tp.rank], **sizes),  # type: ignore[arg-type]
    )


def test_ranks_capture_the_same_steps_collectives_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[list[int]] = [[], []]

    def capture_of(rank: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def capture(work: Callable[[], None]) -> Callable[[], None]:
            work()
            return lambda: (work(), replayed[rank].append(1))[0]

        return capture

    ranks = _captured_at(tmp_path, monkeypatch, [capture_of(0), capture_of(1)])
    (alone,) = _captured_at(tmp_path, monkeypatch, [lambda work: work])

    assert {rank.graphs_reason for rank in ranks} == {
        "3 sizes of decode steps, up to 3 sequences, with the collectives of 2 ranks"
    }
    for count in (1, 2, 3):
        step = _starting_at([0] * count, BLOCK_SIZE)
        logits = on_each_rank(2, lambda tp, step=step: ranks[tp.rank].forward(step).clone())  # type: ignore[misc]
        assert torch.equal(logits[0], logits[1])
        assert (logits[0] - alone.forward(step)).abs().max() < 1e-4
        ahead = replace(step, token_ids=-1 - np.arange(count, dtype=np.int32))  # of tokens that rank 0 alone has
        sampled = torch.arange(5, 5 + count)
        logits = on_each_rank(
            2,
            lambda tp, step=ahead, ids=sampled: ranks[tp.rank].run(step, sampled=None if tp.rank else ids)[0].clone(),  # type: ignore[misc]
        )
        assert torch.equal(logits[0], logits[1])
        assert (logits[0] - alone.run(ahead, sampled=sampled).logits).abs().max() < 1e-4
    assert replayed == [[1] * 6, [1] * 6]


def test_where_one_rank_cannot_capture_none_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective in a graph on one rank, and launched by itself on another, may never end."""

    def fails_at_the_second(sizes: Iterator[bool]) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def capture(work: Callable[[], None]) -> Callable[[], None]:
            work()
            if next(sizes):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work

        return capture

    ranks = _captured_at(
        tmp_path,
        monkeypatch,
        [fails_at_the_second(iter([False] * 3)), fails_at_the_second(iter([False, True, False]))],
    )

    assert [rank.graphs_reason for rank in ranks] == [
        "capturing them failed: another rank could not",
        "capturing them failed: CUDA out of memory",
    ]
    step = _starting_at([0, 0], BLOCK_SIZE)
    assert torch.equal(*on_each_rank(2, lambda tp: ranks[tp.rank].forward(step)))


def test_where_rank_0_has_no_memory_to_choose_tokens_none_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone has a sampler: the others were in the first capture's collectives by then."""
    folder = make_checkpoint("llama", tmp_path)
    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    sampler = Sampler(VOCAB_SIZE)

    def reserve(device: torch.device, most: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sampler, "reserve", reserve)
    sizes = {"num_blocks": 8, "block_size": BLOCK_SIZE, "graphs_up_to": 3, "kernels": "torch"}
    ranks = on_each_rank(
        2,
        lambda tp: make_runner(folder, tp=tp, capture=lambda work: work, sampler=None if tp.rank else sampler, **sizes),  # type: ignore[arg-type]
    )
    assert [rank.graphs_reason for rank in ranks] == [
        "capturing them failed: CUDA out of memory",
        "capturing them failed: another rank could not",
    ]
