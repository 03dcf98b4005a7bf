"""Decode steps as CUDA graphs: one for each of a few batch sizes, captured at the start, replayed with new inputs.

A step in which every sequence has one token launches the same kernels each time, so that a recording of them spares the
CPU all but one launch. What changes from step to step lies in fixed memory (`engine.decode_inputs`): a step is padded
to the next captured size, what the device does not have of it is sent, and the recording for that size runs. Rows of
padding attend to one token of the scratch block, which no sequence owns, and write there; their logits are dropped.
Everything else (prompts, mixed steps, more sequences than the largest size) is computed as ever. Knows no model: what
is captured is a function.

A recording begins with the rows' next positions and tokens, and ends with the choice of the tokens that follow, where
a chooser can be recorded: they lie where the next step looks.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from engine.decode_inputs import Advance, DecodeInputs, InputMemory, advance_rows
from engine.sampling.params import SampleRow
from engine.sampling.sampler import RecordedChooser
from engine.sampling.samples import Samples
from engine.step_input import StepInput, build_step, is_decode

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records work that does the same to the same memory on each run; returns a function that repeats it."""

_LARGEST = 512
"""More sequences than this keep the GPU busy without graphs."""
_CAPTURABLE_NCCL = (2, 9, 6)
"""The first version whose collectives graphs can hold, among others that are launched one by one."""

Made = TypeVar("Made")
Compute = Callable[[DecodeInputs], torch.Tensor]
"""Logits [n, V] of a pass; reads and writes fixed memory only, and waits for nothing."""


def bucket_sizes(most: int) -> tuple[int, ...]:
    """The sizes to capture for up to `most` sequences: 1, 2, 4, then by 8, from 128 on by an eighth, up to 512."""
    most = min(most, _LARGEST)
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << (size.bit_length() - 1)) // 8)
    return (*sizes, most)


class DecodeGraphs:
    """The recordings of one model. Raises RuntimeError when one cannot be made."""

    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        *,
        most: int,
        width: int,
        block_size: int,
        scratch_block: int,
        vocab_size: int,
        device: torch.device,
        advance: Advance = advance_rows,
        agree: Callable[[bool], bool] = bool,
        chooser_of: Callable[[torch.device, int], RecordedChooser | None] | None = None,
        num_groups: int = 1,
    ) -> None:
        """`most` sequences of at most `width` blocks of each group of layers. The largest size goes first: the others
        reuse its memory.

        Each recording begins with `advance`. `agree` says whether something is so on every rank: a collective must be
        captured on all of them or on none. `chooser_of` makes the chooser of so many rows on that device.
        """
        self.sizes = bucket_sizes(most)
        most = self.sizes[-1]
        self._is_prepared = False
        self._replays: dict[int, Callable[[], None]] = {}

        def reserve() -> tuple[InputMemory, torch.Tensor, RecordedChooser | None]:
            inputs = InputMemory(most, width, block_size, scratch_block, device, advance, num_groups)
            logits = torch.empty((most, vocab_size), device=device)
            return inputs, logits, None if chooser_of is None else chooser_of(logits.device, most)

        self._inputs, self._logits, self._chooser = _on_every_rank(reserve, agree)
        for size in reversed(self.sizes):
            self._inputs.fill(build_step([], block_size, num_groups=num_groups), size)
            self._replays[size] = _on_every_rank(partial(capture, self._work(compute, size)), agree)

    def takes(self, step: StepInput, sampled: torch.Tensor | None = None) -> bool:
        """Whether `run` can compute it. Its block copies are the caller's to carry out."""
        num_rows = max(len(step.seqlens_k), 0 if sampled is None else len(sampled))
        return num_rows <= self.sizes[-1] and is_decode(step)

    @property
    def chooses(self) -> bool:
        """Whether tokens can be chosen in recordings."""
        return self._chooser is not None

    def prepare(self, rows: Sequence[SampleRow]) -> None:
        """The step that is run next leads to the tokens of these rows, one for each of its sequences, if that can be
        recorded."""
        self._is_prepared = self._chooser is not None and self._chooser.place(rows)

    def run(self, step: StepInput, sampled: torch.Tensor | None = None) -> tuple[torch.Tensor, Samples | None]:
        """Float32 logits [S, V], which stay until the next call, and the tokens if it was prepared for. Takes no memory
        on the device.

        `sampled`: the tokens that the step before led to, if it needs them.
        """
        count = len(step.seqlens_k)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._inputs.fill(step, size, sampled)
        chooser, is_prepared, self._is_prepared = self._chooser, self._is_prepared, False
        if chooser is not None and not is_prepared:
            chooser.place(())
        self._replays[size]()
        samples = chooser.samples(self._inputs.sampled[:count]) if chooser is not None and is_prepared else None
        return self._logits[:count], samples

    def _work(self, compute: Compute, size: int) -> Callable[[], None]:
        inputs, logits = self._inputs.of(size), self._logits[:size]

        def work() -> None:
            self._inputs.advance(size)
            logits.copy_(compute(inputs))
            if self._chooser is not None:
                self._chooser.record(logits, self._inputs.sampled[:size])

        return work


def _on_every_rank(work: Callable[[], Made], agree: Callable[[bool], bool]) -> Made:
    """Returns what `work` makes. Raises RuntimeError on every rank if CUDA refuses it on one, or is out of memory."""
    try:
        made = work()
    except RuntimeError as error:
        agree(False)
        raise RuntimeError(str(error) or type(error).__name__) from error
    if not agree(True):
        raise RuntimeError("another rank could not")
    return made


class CudaCapture:
    """Captures on one device. All recordings share one memory pool, so they must not run at the same time.

    They are made on one stream: memory that one of them has freed is given to the next on the same stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            stream = self._stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # what a first call sets up (handles, workspaces) must not be captured
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, for transfers: only this one is held to what can be captured.
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    work()
            except RuntimeError as error:
                # The end of a capture that has failed fails too, says no more than that, and leaves its stream current.
                torch.cuda.set_stream(before)
                raise RuntimeError("; ".join(str(each) for each in (error.__context__, error) if each)) from error
            before.wait_stream(stream)
        return graph.replay


def choose_capture(up_to: int, device: torch.device, tp_size: int, static_obstacle: str) -> tuple[Capture | None, str]:
    """Chooses how decode steps of up to `up_to` sequences are captured; or None, and why they are not.

    `static_obstacle` is the attention backend's.
    """
    if up_to == 0:
        return None, "not wanted"
    if device.type != "cuda":
        return None, f"they need a CUDA device, this is {device.type}"
    if tp_size > 1:
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if version < _CAPTURABLE_NCCL:
            return None, f"NCCL {_dotted(version)} cannot be captured; {_dotted(_CAPTURABLE_NCCL)} and newer can"
    if static_obstacle:
        return None, static_obstacle
    return CudaCapture(device), ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
