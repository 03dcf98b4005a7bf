"""Two pools of machines, one for prompts and one for outputs, as queues: what a search over placements asks often.

It is much simpler than Baton, whose own parts `simulate.world` runs. Prompts are computed whole, in the order in which
they came, and go to the machine with the fewest prompt tokens. Outputs go to the one with the least KV reserved, and
hold a request's prompt and output from their first step to their last. Nothing is cached, and no transfer waits for
another.

A machine may be a pipeline of stages, each of which takes its share of a step: as many batches are under way. Batches
that wait for the first stage go on as one, as in DistServe's simulator.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.step_cost import StepSize
from simulate.curves import StepCurve
from simulate.workload import RequestShape


@dataclass(frozen=True)
class PoolSpec:
    """Machines that are alike, each of which holds the model once."""

    curve: StepCurve
    """Seconds of a step through all stages."""
    num_machines: int = 1
    num_stages: int = 1
    max_num_seqs: int = 1 << 30
    max_num_batched_tokens: int = 1 << 30
    """Prompt tokens of a step; a longer prompt has a step of its own."""
    kv_tokens: int = 1 << 60


class RequestTimes(NamedTuple):
    """Latencies of one request; an output of one token has a `tpot_s` of 0."""

    ttft_s: float
    tpot_s: float
    e2e_s: float

    @classmethod
    def of(cls, shape: RequestShape, first_at: float, last_at: float) -> RequestTimes:
        """The latencies of a request whose first and last token came at these times."""
        num_steps = shape.num_output_tokens - 1
        tpot_s = (last_at - first_at) / num_steps if num_steps > 0 else 0.0
        return cls(first_at - shape.at, tpot_s, max(first_at, last_at) - shape.at)


def run_pools(
    shapes: Sequence[RequestShape],
    prefill: PoolSpec,
    decode: PoolSpec,
    transfer_s: Callable[[int], float] = lambda num_tokens: 0.0,
) -> list[RequestTimes]:
    """The latencies of each request, in the order of `shapes`, which are by time.

    Raises ValueError for a request that never fits a decode machine.
    """
    firsts = first_tokens(shapes, prefill)
    ends = last_tokens(
        shapes, [at + transfer_s(s.num_prompt_tokens) for s, at in zip(shapes, firsts, strict=True)], decode
    )
    return [RequestTimes.of(*one) for one in zip(shapes, firsts, ends, strict=True)]


def first_tokens(shapes: Sequence[RequestShape], pool: PoolSpec) -> list[float]:
    """When each prompt has been computed."""
    at = [math.inf] * len(shapes)
    machines = [_PromptMachine(pool, at) for _ in range(pool.num_machines)]
    for index, shape in enumerate(shapes):
        for machine in machines:
            machine.advance(shape.at)
        min(machines, key=_PromptMachine.load).add(index, shape)
    for machine in machines:
        machine.advance(math.inf)
    return at


def last_tokens(shapes: Sequence[RequestShape], handed_at: Sequence[float], pool: PoolSpec) -> list[float]:
    """When each output is complete, of requests that come to the pool with their first token."""
    ends = list(handed_at)
    machines = [_TokenMachine(pool, ends) for _ in range(pool.num_machines)]
    for index in sorted(range(len(shapes)), key=lambda i: handed_at[i]):
        if shapes[index].num_output_tokens > 1:
            for machine in machines:
                machine.advance(handed_at[index])
            min(machines, key=lambda machine: machine.reserved).add(index, handed_at[index], shapes[index])
    for machine in machines:
        machine.advance(math.inf)
    return ends


class _Stages:
    """When each stage of a machine is free."""

    def __init__(self, num: int) -> None:
        self._free_at = [-math.inf] * num

    @property
    def free_at(self) -> float:
        """The first."""
        return self._free_at[0]

    def run(self, at: float, seconds: float) -> float:
        """Sends a batch through all stages; returns its end. None overtakes one that was sent before it."""
        each = seconds / len(self._free_at)
        for i, free_at in enumerate(self._free_at):
            at = self._free_at[i] = max(at, free_at) + each
        return at


class _PromptMachine:
    def __init__(self, pool: PoolSpec, first_at: list[float]) -> None:
        self._pool = pool
        self._first_at = first_at
        self._stages = _Stages(pool.num_stages)
        self._queue: deque[tuple[float, int, int]] = deque()
        self._num_queued = self._num_running = 0

    def load(self) -> int:
        """Prompt tokens that are queued, or in the batch that its first stage computes."""
        return self._num_queued + self._num_running

    def add(self, index: int, shape: RequestShape) -> None:
        self._queue.append((shape.at, index, shape.num_prompt_tokens))
        self._num_queued += shape.num_prompt_tokens

    def advance(self, now: float) -> None:
        """Begins every batch that begins before `now`."""
        while self._queue and (start := max(self._stages.free_at, self._queue[0][0])) < now:
            self._begin(start)
        if self._stages.free_at <= now:
            self._num_running = 0

    def _begin(self, start: float) -> None:
        pool, batch, step = self._pool, list[int](), StepSize()
        while self._queue and self._queue[0][0] <= start and len(batch) < pool.max_num_seqs:
            _, index, num_tokens = self._queue[0]
            if batch and step.num_prompt_tokens + num_tokens > pool.max_num_batched_tokens:
                break
            self._queue.popleft()
            batch.append(index)
            step += StepSize.of_prompt(num_tokens)
        self._num_queued -= step.num_prompt_tokens
        self._num_running = step.num_prompt_tokens
        end = self._stages.run(start, pool.curve.seconds(step))
        for index in batch:
            self._first_at[index] = end


class _Batch:
    """Sequences that step together. `ends`: at which of its steps each has its last token, and its KV by then."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_kv_tokens = 0
        self.ends: list[tuple[int, int, int]] = []

    def add(self, index: int, num_steps: int, shape: RequestShape) -> None:
        self.num_kv_tokens += shape.num_prompt_tokens + 1
        heapq.heappush(
            self.ends, (self.num_steps + num_steps, index, shape.num_prompt_tokens + shape.num_output_tokens)
        )

    def take(self, other: _Batch) -> None:
        """Goes on with the other's sequences, too."""
        self.num_kv_tokens += other.num_kv_tokens
        for end, index, most in other.ends:
            heapq.heappush(self.ends, (end - other.num_steps + self.num_steps, index, most))

    def step(self) -> list[tuple[int, int, int]]:
        """Each sequence gets a token; returns those that are complete."""
        self.num_steps += 1
        self.num_kv_tokens += len(self.ends)
        done = []
        while self.ends and self.ends[0][0] <= self.num_steps:
            done.append(heapq.heappop(self.ends))
            self.num_kv_tokens -= done[-1][2]
        return done


class _TokenMachine:
    def __init__(self, pool: PoolSpec, ends: list[float]) -> None:
        self._pool = pool
        self._ends = ends
        self._stages = _Stages(pool.num_stages)
        self._waiting: deque[tuple[float, int, RequestShape]] = deque()
        self._ready: list[tuple[float, int, _Batch]] = []
        self._num_begun = self._num_seqs = self._held = 0
        self.reserved = 0
        """KV tokens of its sequences at their ends, those that wait included."""

    def add(self, index: int, at: float, shape: RequestShape) -> None:
        size = shape.num_prompt_tokens + shape.num_output_tokens
        if size > self._pool.kv_tokens:
            raise ValueError(f"request {index} needs {size} KV tokens and a machine holds {self._pool.kv_tokens}")
        self.reserved += size
        self._waiting.append((at, index, shape))

    def advance(self, now: float) -> None:
        """Begins every step that begins before `now`."""
        while (start := max(self._stages.free_at, self._next_at())) < now:
            self._begin(start)

    def _next_at(self) -> float:
        ready_at = self._ready[0][0] if self._ready else math.inf
        return min(ready_at, self._waiting[0][0]) if self._can_admit() else ready_at

    def _can_admit(self) -> bool:
        if not self._waiting or self._num_seqs >= self._pool.max_num_seqs:
            return False
        shape = self._waiting[0][2]
        return self._held + shape.num_prompt_tokens + shape.num_output_tokens <= self._pool.kv_tokens

    def _begin(self, start: float) -> None:
        batch = _Batch()
        while self._ready and self._ready[0][0] <= start:
            other = heapq.heappop(self._ready)[2]
            if len(other.ends) > len(batch.ends):
                batch, other = other, batch
            batch.take(other)
        while self._can_admit() and self._waiting[0][0] <= start:
            _, index, shape = self._waiting.popleft()
            self._num_seqs += 1
            self._held += shape.num_prompt_tokens + shape.num_output_tokens
            batch.add(index, shape.num_output_tokens - 1, shape)
        size = StepSize(num_sequences=len(batch.ends), num_kv_tokens=batch.num_kv_tokens)
        end = self._stages.run(start, self._pool.curve.seconds(size))
        for _, index, held in batch.step():
            self._ends[index] = end
            self._num_seqs -= 1
            self._held -= held
            self.reserved -= held
        if batch.ends:
            self._num_begun += 1
            heapq.heappush(self._ready, (end, self._num_begun, batch))
