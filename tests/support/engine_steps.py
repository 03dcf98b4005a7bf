"""Drives a `ModelRunner` by hand in tests: one or more sequences, in chunks, over scattered blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from thread_group import ThreadGroup
from torch.distributed import HashStore, Store

from engine.checkpoint import Checkpoint
from engine.cuda_graphs import Capture
from engine.gguf_checkpoint import open_checkpoint
from engine.model_runner import ModelRunner, StepOutput
from engine.models.folder import read_model
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.step_input import SequenceSlice, StepInput, build_step
from engine.tp import ProcessGroupTP, SharedMemoryTP, SingleGroup, TPGroup, make_process_group

Result = TypeVar("Result")


def make_runner(
    path: Path,
    *,
    tp: TPGroup | None = None,
    num_blocks: int = 32,
    block_size: int = 16,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str = "auto",
    kernels: str = "auto",
    model_impl: str = "auto",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,
    graphs_up_to: int = 0,
    capture: Capture | None = None,
    open_weights: Callable[[Path], Checkpoint] = open_checkpoint,
    sampler: Sampler | None = None,
    report: Callable[[str], None] | None = None,
    expert_parallel: int = 1,
    expert_rebalance_tokens: int = 0,
    split_latents: bool = False,
) -> ModelRunner:
    return ModelRunner(
        path,
        tp=tp or SingleGroup(),
        device=device,
        dtype=dtype,
        num_blocks=num_blocks * len(read_model(path, model_impl).kv_groups),
        block_size=block_size,
        attention=attention,
        kernels=kernels,
        model_impl=model_impl,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        graphs_up_to=graphs_up_to,
        capture=capture,
        open_weights=open_weights,
        sampler=sampler,
        report=report,
        expert_parallel=expert_parallel,
        expert_rebalance_tokens=expert_rebalance_tokens,
        split_latents=split_latents,
    )


def step_of(runner: ModelRunner, slices: Sequence[SequenceSlice], copies: Sequence[tuple[int, int]] = ()) -> StepInput:
    """A step of slices whose tables name as many blocks as one group of the model's layers has."""
    count = len(runner.config.kv_groups)

    def of_each(blocks: Sequence[int]) -> tuple[int, ...]:
        return tuple(block * count + place for block in blocks for place in range(count))

    every = [replace(one, block_table=of_each(one.block_table)) for one in slices]
    pairs = [pair for source, target in copies for pair in zip(of_each([source]), of_each([target]), strict=True)]
    return build_step(every, runner.block_size, pairs, count)


def scattered_table(runner: ModelRunner, num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Blocks of one group for `num_tokens` in no particular order."""
    order = np.random.default_rng(seed).permutation(runner.kv.shape[2] // len(runner.config.kv_groups))
    return tuple(int(block) for block in order[: -(-num_tokens // runner.block_size)])


def with_all_logits(step: StepInput) -> StepInput:
    return replace(step, logits_indices=np.arange(len(step.token_ids), dtype=np.int32))


def run_in_chunks(
    runner: ModelRunner, token_ids: Sequence[int], chunks: Iterable[int], table: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Logits of every position of one sequence, computed `chunks` tokens at a time."""
    table = table or scattered_table(runner, len(token_ids))
    rows, start = [], 0
    for size in chunks:
        piece = SequenceSlice(tuple(token_ids[start : start + size]), start, table, wants_logits=True)
        logits = runner.forward(with_all_logits(step_of(runner, [piece])))
        rows.append(logits.clone())  # those of a replayed step stay only until the next one
        start += size
    assert start == len(token_ids)
    return torch.cat(rows)


def generate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_steps: int, overlaps: bool, rank: int = 0
) -> list[list[int]]:
    """What follows the prompts, drawn with noise, in recordings where the runner's sampler can be a part of them.

    `overlaps`: a step is launched before the one before it is read, and ranks other than 0 are not given the tokens
    that it needs.
    """
    sampler, size = runner._sampler or Sampler(runner.config.vocab_size), runner.block_size
    width = -(-(max(map(len, prompts)) + num_steps) // size)
    tables = [tuple(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
    outputs: list[list[int]] = [[] for _ in prompts]
    rows = [SampleRow(SamplingParams(seed=i), 0, prompt, outputs[i]) for i, prompt in enumerate(prompts)]

    def run(token_ids: Iterable[int], number: int, sampled: torch.Tensor | None = None) -> StepOutput:
        new = zip(token_ids, prompts, tables, strict=True)
        step = build_step([SequenceSlice((t,), len(p) + number, table, True) for t, p, table in new], size)
        runner.prepare(step, sampled, lambda: [replace(row, num_unread=int(overlaps)) for row in rows])
        return runner.run(step, sampled=sampled)

    first = [SequenceSlice(tuple(p), 0, table, True) for p, table in zip(prompts, tables, strict=True)]
    output = runner.run(build_step(first, size))
    for number in range(num_steps):
        samples = output.samples or sampler.launch(output.logits, rows)
        if overlaps:
            unread = (-1 - row for row in range(len(rows)))
            output = run(unread, number, None if rank else samples.token_ids)
        for told, token in zip(outputs, samples.read(), strict=True):
            told.append(token.token_id)
        if not overlaps:
            output = run((told[-1] for told in outputs), number)
    return outputs


def on_each_rank(size: int, work: Callable[[TPGroup], Result]) -> list[Result]:
    """Runs `work` on each rank of a `ThreadGroup` at once; raises what a rank raised."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank] = work(group)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in ThreadGroup.create(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def join(by: str, store: Store, rank: int, size: int, timeout_s: float = 60.0) -> SharedMemoryTP | ProcessGroupTP:
    """One rank of what `make_process_group` joins: by `gloo`, or in `memory` that they share."""
    obstacle = "" if by == "memory" else "a test is of Gloo"
    group = make_process_group(store, rank, size, "cpu", timeout_s=timeout_s, obstacle=obstacle)
    assert isinstance(group, SharedMemoryTP if by == "memory" else ProcessGroupTP), group.origin
    return group


def on_joined_ranks(by: str, size: int, work: Callable[[TPGroup], Result]) -> list[Result]:
    """Runs `work` on each rank of such a group, in threads. Raises what the first rank raised that failed."""
    store = HashStore()
    errors: list[BaseException] = []

    def run(rank: int) -> Result | None:
        group = join(by, store, rank, size)
        try:
            result = work(group)
            group.all_reduce(torch.zeros(1))  # nobody leaves while another still computes
            return result
        except BaseException as error:
            errors.append(error)
            return None
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    if errors:
        raise errors[0]
    return cast("list[Result]", results)


def held_bytes(runner: ModelRunner) -> int:
    """Of a runner's weights, but for what counts tokens; counted and not computed. A tensor packed by oneDNN does not
    say its bytes."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in _tensors_of(runner._model, {}))


def _tensors_of(thing: Any, seen: dict[int, torch.Tensor]) -> Iterable[torch.Tensor]:
    """Each tensor that an object of the engine holds, once."""
    if isinstance(thing, torch.Tensor):
        seen[id(thing)] = thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            _tensors_of(part, seen)
    elif type(thing).__module__.startswith("engine.") and hasattr(thing, "__dict__"):
        _tensors_of([value for name, value in vars(thing).items() if name != "num_tokens"], seen)
    return seen.values()
