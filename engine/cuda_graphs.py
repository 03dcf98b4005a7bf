"""Decode steps as CUDA graphs: one for each of a few batch sizes, captured at the start, replayed with new inputs.

A step in which every sequence has one token launches the same kernels each time, so that a recording of them spares the
CPU all but one launch. What changes from step to step lies in fixed memory (`_Inputs`): a step is padded to the next
captured size, copied there, and the recording for that size runs. Rows of padding attend to one token of the scratch
block, which no sequence owns, and write there; their logits are dropped. Everything else (prompts, mixed steps, more
sequences than the largest size) is computed as ever. Knows no model: what is captured is a function.

Legend: n rows of a padded step, S sequences, B blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.interface import AttentionBatch, PagedBatch
from engine.step_input import StepInput, build_step, is_decode

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records work that does the same to the same memory on each run; returns a function that repeats it."""

_LARGEST = 512
"""More sequences than this keep the GPU busy without graphs."""


@dataclass(frozen=True)
class DecodeInputs:
    """One forward pass over n sequences of one token each, all of it in fixed memory."""

    token_ids: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int32 [n]
    slots: torch.Tensor  # int32 [n]
    logits_indices: torch.Tensor  # int32 [n], every row
    batch: AttentionBatch


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


def pad(step: StepInput, size: int, width: int, block_size: int, scratch_block: int) -> StepInput:
    """A decode step as one of `size` sequences and tables of `width` blocks; what is added is in the scratch block."""
    count = len(step.seqlens_k)
    assert count <= size, f"{count} sequences do not fit in a step of {size}"

    def filled(values: np.typing.NDArray[np.int32], filler: int) -> np.typing.NDArray[np.int32]:
        return np.concatenate([values, np.full(size - count, filler, dtype=np.int32)])

    tables = np.full((size, width), scratch_block, dtype=np.int32)
    columns = min(width, step.block_tables.shape[1])
    tables[:count, :columns] = step.block_tables[:, :columns]
    return StepInput(
        token_ids=filled(step.token_ids, 0),
        positions=filled(step.positions, 0),
        slot_mapping=filled(step.slot_mapping, scratch_block * block_size),
        cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
        seqlens_k=filled(step.seqlens_k, 1),
        block_tables=tables,
        logits_indices=np.arange(size, dtype=np.int32),
        block_copies=np.empty((0, 2), dtype=np.int32),
        scored=np.empty((0, 3), dtype=np.int32),
    )


class _Inputs:
    """The fixed memory of all sizes: each size reads the first rows of it."""

    def __init__(self, most: int, width: int, block_size: int, scratch_block: int, device: torch.device) -> None:
        self._width, self._block_size, self._scratch_block, self._device = width, block_size, scratch_block, device
        self._vectors = torch.zeros((5, most + 1), dtype=torch.int32, device=device)
        self._tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._every = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.fill(build_step([], block_size), most)

    def fill(self, step: StepInput, size: int) -> None:
        """Writes the first `size` rows, in two copies. Pageable memory may be reused as soon as they return."""
        width = min(self._width, step.block_tables.shape[1])
        padded = pad(step, size, width, self._block_size, self._scratch_block)
        vectors = np.zeros((5, size + 1), dtype=np.int32)
        vectors[:4, :size] = padded.token_ids, padded.positions, padded.slot_mapping, padded.seqlens_k
        vectors[4, 1:] = np.cumsum(padded.seqlens_k)
        self._vectors[:, : size + 1].copy_(torch.from_numpy(vectors), non_blocking=True)
        self._tables[:size, :width].copy_(torch.from_numpy(padded.block_tables), non_blocking=True)

    def of(self, size: int) -> DecodeInputs:
        token_ids, positions, slots, seqlens_k = (row[:size] for row in self._vectors[:4])
        paged = PagedBatch(
            cu_seqlens_q=self._every[: size + 1],
            cu_seqlens_k=self._vectors[4, : size + 1],
            seqlens_k=seqlens_k,
            block_table=self._tables[:size],
            max_seqlen_q=1,
            max_seqlen_k=self._width * self._block_size,
        )
        anything = pad(build_step([], self._block_size), size, 1, self._block_size, self._scratch_block)
        batch = AttentionBatch(anything, self._block_size, self._device, paged)
        return DecodeInputs(token_ids, positions, slots, self._every[:size], batch)


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
    ) -> None:
        """`most` sequences of at most `width` blocks. The largest size goes first: the others reuse its memory."""
        self.sizes = bucket_sizes(most)
        most = self.sizes[-1]
        self._inputs = _Inputs(most, width, block_size, scratch_block, device)
        self._logits = torch.empty((most, vocab_size), device=device)
        self._replays: dict[int, Callable[[], None]] = {}
        for size in reversed(self.sizes):
            self._replays[size] = capture(self._work(compute, size))

    def takes(self, step: StepInput) -> bool:
        """Whether `run` can compute it. Its block copies are the caller's to carry out."""
        return len(step.seqlens_k) <= self.sizes[-1] and is_decode(step)

    def run(self, step: StepInput) -> torch.Tensor:
        """Float32 logits [S, V], a copy."""
        count = len(step.seqlens_k)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._inputs.fill(step, size)
        self._replays[size]()
        return self._logits[:count].clone()

    def _work(self, compute: Compute, size: int) -> Callable[[], None]:
        inputs, logits = self._inputs.of(size), self._logits[:size]

        def work() -> None:
            logits.copy_(compute(inputs))

        return work


class CudaCapture:
    """Captures on one device; all recordings share one memory pool, so they must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # what a first call sets up (handles, workspaces) must not be captured
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, for transfers: only this one is held to what can be captured.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                work()
            torch.cuda.current_stream().wait_stream(stream)
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
        return None, f"collectives of {tp_size} ranks are not captured"
    if static_obstacle:
        return None, static_obstacle
    return CudaCapture(device), ""
