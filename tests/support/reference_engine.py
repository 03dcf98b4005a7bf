"""Owns the plain way from prompts to tokens in one process: the reference that the disaggregated path must equal.

Deliberately simple: each prompt is prefilled in turn, chunk by chunk, then all sequences decode in one batch until they
end. Of a request with n > 1 the sequences share the prompt's full blocks; a partial last block is copied. There is no
queue and no preemption: a pool that is too small raises NoFreeBlocks. Whatever happens, every block is given back.
Knows no text, no transport and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from engine.kv.block_manager import BlockManager
from engine.sampling.params import Finish, SampledToken, SampleRow, SamplingParams, check_finish
from engine.sampling.sampler import Sampler
from engine.sequence import blocks_for
from engine.step_input import SequenceSlice, StepInput, build_step


class Model(Protocol):
    """Runs steps over a paged KV cache of its own; `engine.model_runner.ModelRunner` is one."""

    def forward(self, step: StepInput) -> Tensor:
        """Float32 logits [R, V] of the rows that the step asks for."""
        ...


@dataclass(frozen=True)
class Completion:
    """One sequence of one prompt; `sampled` has an entry for each token, with logprobs if they were asked for."""

    token_ids: tuple[int, ...]
    sampled: tuple[SampledToken, ...]
    finish: Finish


@dataclass(eq=False)
class _Sequence:
    """The KV of all tokens but the newest output token lies in `block_table`."""

    params: SamplingParams
    index: int
    prompt: tuple[int, ...]
    block_table: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def num_computed_tokens(self) -> int:
        return len(self.prompt) + max(0, len(self.output) - 1)

    def row(self) -> SampleRow:
        return SampleRow(self.params, self.index, self.prompt, self.output)

    def append(self, token: SampledToken) -> None:
        if token.problem:
            raise ValueError(f"the constraint cannot be followed: {token.problem}")
        self.output.append(token.token_id)
        self.sampled.append(token)
        self.finish = check_finish(self.params, self.output)

    def completion(self) -> Completion:
        assert self.finish is not None, "a completion was taken from a sequence that still runs"
        return Completion(tuple(self.output), tuple(self.sampled), self.finish)


class Engine:
    """Generates for lists of prompts, one list after another; the prefix cache carries over. One thread."""

    def __init__(self, model: Model, blocks: BlockManager, vocab_size: int, max_num_batched_tokens: int = 2048) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens: must be at least 1 (got {max_num_batched_tokens})")
        self._model = model
        self._blocks = blocks
        self._sampler = Sampler(vocab_size)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._copies: list[tuple[int, int]] = []  # (source, target) blocks, carried out by the next step

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Completion]]:
        """For each prompt its `n` completions. Raises NoFreeBlocks when the pool cannot hold all of them at once."""
        groups = [
            [_Sequence(p, index, tuple(prompt)) for index in range(p.n)]
            for prompt, p in zip(prompts, params, strict=True)
        ]
        sequences = [sequence for group in groups for sequence in group]
        try:
            for group in groups:
                self._prefill(group)
            while running := [s for s in sequences if s.finish is None]:
                self._decode(running)
        finally:
            self._copies.clear()
            for sequence in sequences:
                self._give_back(sequence)
        return [[sequence.completion() for sequence in group] for group in groups]

    def _prefill(self, group: list[_Sequence]) -> None:
        """Computes the prompt once, samples the first token of each sequence, and gives each its blocks."""
        first, prompt = group[0], group[0].prompt
        if not prompt:
            raise ValueError("a prompt has no tokens; give at least one")
        first.block_table = self._blocks.match_prefix(prompt)
        count, size = len(self._blocks.groups), self._blocks.block_size
        start = len(first.block_table) // count * size
        first.block_table += self._blocks.allocate(blocks_for(len(prompt), size) * count - len(first.block_table))
        while start < len(prompt):
            end = min(start + self._max_num_batched_tokens, len(prompt))
            is_last = end == len(prompt)
            logits = self._run([SequenceSlice(prompt[start:end], start, tuple(first.block_table), is_last)])
            start = end
        self._blocks.publish(prompt, first.block_table, b"", len(prompt))
        rows = [sequence.row() for sequence in group]
        for sequence, token in zip(group, self._sampler.sample(logits.expand(len(rows), -1), rows), strict=True):
            sequence.append(token)
        for sequence in group[1:]:
            if sequence.finish is None:
                self._fork(first, sequence)
        if first.finish is not None:  # a pending copy out of its last block still finds it: nothing is written before
            self._give_back(first)

    def _fork(self, source: _Sequence, target: _Sequence) -> None:
        """Full blocks are shared. A partial one will be written by both, so the target gets a copy."""
        num_full = len(source.prompt) // self._blocks.block_size * len(self._blocks.groups)
        shared = source.block_table[:num_full]
        self._blocks.share(shared)
        target.block_table = list(shared)
        for block in source.block_table[num_full:]:
            (own,) = self._blocks.allocate(1)
            target.block_table.append(own)
            self._copies.append((block, own))

    def _decode(self, running: list[_Sequence]) -> None:
        """One token for each sequence; the blocks of those that end are given back."""
        slices = []
        for s in running:
            position = s.num_computed_tokens
            count = len(self._blocks.groups)
            if position * count == len(s.block_table) * self._blocks.block_size:
                s.block_table += self._blocks.allocate(count)
            self._blocks.leave_windows(s.block_table, position)
            slices.append(SequenceSlice((s.output[-1],), position, tuple(s.block_table), True))
        logits = self._run(slices)
        for s, token in zip(running, self._sampler.sample(logits, [s.row() for s in running]), strict=True):
            s.append(token)
            if s.finish is not None:
                self._blocks.publish(s.prompt + tuple(s.output), s.block_table, b"", s.num_computed_tokens)
                self._give_back(s)

    def _run(self, slices: list[SequenceSlice]) -> Tensor:
        step = build_step(slices, self._blocks.block_size, self._copies, len(self._blocks.groups))
        self._copies = []
        return self._model.forward(step)

    def _give_back(self, sequence: _Sequence) -> None:
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
