"""A cluster whose workers change roles, as queues: what is asked often, and of many workers.

It is much simpler than Baton, whose own parts `simulate.world` runs, but for what decides: the rebalancer, its policy
and what a router counts for them are the real ones. Between two events a worker goes on evenly: a sequence gets a token
each step, a prompt has the worker, or beside sequences what their pace leaves. A request goes where it should end
first, as under the router's policy `predicted`; sequences on a worker that turns to prompts go to others at once.
Nothing is cached, transfers take no time, and prompts of one queue are computed one after another.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from cluster.config.schema import ServingConfig, SloSection
from cluster.step_cost import PACE_SHARE, RoleCosts, StepCost
from controller.rebalancer import MakePolicy, MeasuredLoad, Rebalancer, Split
from router.routing.demand import DemandWindow
from simulate.controller import SplitSince
from simulate.worker import WorkerSpec
from simulate.workload import RequestShape

_LEAST_SHARE = 0.02
_LOOK_EVERY_S = 1.0
_NEVER = math.inf
_LOAD = attrgetter("num_promised")
_DUE_AT = attrgetter("due_at")


@dataclass(slots=True)
class PooledRequest:
    """The state of one request; times count from the begin of the run."""

    shape: RequestShape
    num_output: int
    kv_tokens: int
    """At its end."""
    prompt_left_s: float = 0.0
    """Seconds that its prompt still takes a worker that does nothing else."""
    machine: _Machine | None = field(default=None, compare=False)
    """The worker where it decodes, or is to."""
    first_token_s: float = _NEVER
    last_token_s: float = _NEVER

    @classmethod
    def of(cls, shape: RequestShape) -> PooledRequest:
        num_output = max(1, shape.num_output_tokens)
        return cls(shape, num_output, shape.num_prompt_tokens + num_output)


class _Machine:
    """One worker at an instant, `at`."""

    def __init__(self, index: int, cost: StepCost, spec: WorkerSpec, pace_s: float, *, prefills: bool) -> None:
        self.index = index
        self._cost = cost
        self._spec = spec
        self._pace_s = pace_s
        self.prefills = prefills
        self.at = 0.0
        self.version = 0
        """Grows whenever its next event is another one than was said."""
        self.prompts: deque[PooledRequest] = deque()
        self.prompts_s = 0.0
        """Seconds of all its prompts."""
        self.due_at = 0.0
        """When they should be over."""
        self.sequences: list[tuple[float, int, PooledRequest]] = []
        """Sequences by the token count of the worker at which each ends."""
        self.waiting: deque[tuple[int, float, PooledRequest]] = deque()
        """Sequences for which there is no room yet."""
        self.num_tokens = 0.0
        """Tokens that each sequence would have got since the begin."""
        self.num_kv_tokens = 0.0
        self.num_promised = 0
        """Sequences that it has or is to have."""
        self.num_generated = 0.0
        """Tokens that its sequences have got since they were counted."""
        self._held = 0

    def rates(self) -> tuple[float, float]:
        """The share of its time that prompts get, or would, and the steps that it makes in a second."""
        num = len(self.sequences)
        if not num:
            return 1.0, 0.0
        cost, pace_s = self._cost, self._pace_s
        step_s = cost.fixed_s + cost.sequence_s * num + cost.kv_token_s * self.num_kv_tokens
        share = 1 - step_s / pace_s
        slowest_s = pace_s if self.prompts and step_s < pace_s else step_s
        return (share if share > _LEAST_SHARE else _LEAST_SHARE), 1 / slowest_s

    def advance(self, now: float) -> None:
        passed_s = now - self.at
        if passed_s <= 0:
            return
        self.at = now
        prompt_share, steps_per_s = self.rates()
        if self.prompts:
            first = self.prompts[0]
            done_s = min(passed_s * prompt_share, first.prompt_left_s)
            first.prompt_left_s -= done_s
            self.prompts_s -= done_s
        new_tokens = passed_s * steps_per_s
        self.num_tokens += new_tokens
        num_generated = new_tokens * len(self.sequences)
        self.num_kv_tokens += num_generated
        self.num_generated += num_generated

    def look_ahead(self) -> float:
        """When a prompt or a sequence of it ends; also notes when all its prompts should be over."""
        prompt_share, steps_per_s = self.rates()
        ends_at = _NEVER
        self.due_at = self.at
        if self.prompts:
            ends_at = self.at + self.prompts[0].prompt_left_s / prompt_share
            self.due_at = self.at + self.prompts_s / prompt_share
        if self.sequences:
            tokens_left = self.sequences[0][0] - self.num_tokens
            ends_at = min(ends_at, self.at + tokens_left / steps_per_s if tokens_left > 0 else self.at)
        return ends_at

    def add_prompt(self, request: PooledRequest) -> None:
        self.prompts.append(request)
        self.prompts_s += request.prompt_left_s

    def add_sequence(self, number: int, tokens_left: float, request: PooledRequest) -> None:
        self.waiting.append((number, tokens_left, request))
        self.admit()

    def admit(self) -> None:
        """Takes up those that wait, as far as there is room."""
        spec = self._spec
        while self.waiting and len(self.sequences) < spec.max_num_seqs:
            number, tokens_left, request = self.waiting[0]
            if self.sequences and self._held + request.kv_tokens > spec.kv_tokens:
                return
            self.waiting.popleft()
            self._held += request.kv_tokens
            self.num_kv_tokens += request.kv_tokens - tokens_left
            heapq.heappush(self.sequences, (self.num_tokens + tokens_left, number, request))

    def pop_sequence(self) -> tuple[int, float, PooledRequest]:
        """Takes out the one that ends first, with the tokens that it still is to get."""
        end, number, request = heapq.heappop(self.sequences)
        left = max(0.0, end - self.num_tokens)
        self._held -= request.kv_tokens
        self.num_kv_tokens -= request.kv_tokens - left
        if not self.sequences:
            self.num_kv_tokens = 0.0
        return number, left, request


class _Least:
    """Finds the machine with the smallest `key` of many, the one with the lowest index of equals.

    A heap of keys as they were: those that have changed since are dropped when they come to the top.
    """

    def __init__(self, machines: Sequence[_Machine], key: Callable[[_Machine], float]) -> None:
        self._machines, self._key = machines, key
        self._most = 8 * len(machines) + 64
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._key(machine), machine.index, machine) for machine in self._machines]
        heapq.heapify(self._heap)

    def changed(self, machine: _Machine) -> None:
        """Its key is another one."""
        if len(self._heap) >= self._most:
            self._rebuild()
        else:
            heapq.heappush(self._heap, (self._key(machine), machine.index, machine))

    def find(self) -> _Machine:
        heap, key = self._heap, self._key
        while heap[0][0] != key(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][2]


class TurningPools:
    """Runs once. All workers are like `worker`, whose curve is `cost`."""

    def __init__(
        self,
        worker: WorkerSpec,
        cost: StepCost,
        config: ServingConfig,
        make_policy: MakePolicy,
        token_limit: int | None = None,
    ) -> None:
        """`token_limit`: what every client says that its output may be at most; None: what it will be."""
        self._worker = worker
        self._cost = cost
        self._config = config
        self._slo: SloSection = config.rebalance.slo
        self._token_limit = token_limit
        pace_s = PACE_SHARE * self._slo.tpot_s
        roles = config.roles
        num_prefill, num_workers = roles.prefill.num_workers, roles.prefill.num_workers + roles.decode.num_workers
        self._machines = [
            _Machine(index, cost, worker, pace_s, prefills=index < num_prefill) for index in range(num_workers)
        ]
        self._sort_by_role()
        self._counts = config.rebalance.mode == "auto"
        """Somebody asks for the demand."""
        self._window = DemandWindow()
        self._events: list[tuple[float, int, int, int]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._version = 1
        self.rebalancer = Rebalancer(
            self._measure, self._split, self._move, lambda: False, lambda: None, lambda why: None, "cpu", make_policy
        )
        self.splits = [SplitSince(0.0, roles.prefill.num_workers, roles.decode.num_workers)]

    def run(self, shapes: Sequence[RequestShape]) -> list[PooledRequest]:
        """All requests of a load, in its order."""
        requests = [PooledRequest.of(shape) for shape in shapes]
        looks_at = _LOOK_EVERY_S
        for number, request in enumerate(requests):
            while looks_at <= request.shape.at:
                self._run_until(looks_at)
                self._look()
                looks_at += _LOOK_EVERY_S
            self._run_until(request.shape.at)
            self._place(number, request)
        self._run_until(_NEVER)
        return requests

    def _run_until(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            at, _, index, version = heapq.heappop(events)
            machine = self._machines[index]
            if machine.version == version:
                self._now = at
                self._end(machine)
        self._now = until

    def _touch(self, machine: _Machine) -> None:
        """Its next event is another one."""
        machine.version += 1
        at = machine.look_ahead()
        if machine.prefills:
            self._earliest.changed(machine)
        if at < _NEVER:
            heapq.heappush(self._events, (at, next(self._order), machine.index, machine.version))

    def _end(self, machine: _Machine) -> None:
        """A prompt or a sequence of this worker ends now."""
        machine.advance(self._now)
        if self._counts and self._token_limit:
            self._window.lengths.add_tokens(machine.num_generated, self._token_limit)
            machine.num_generated = 0.0
        if machine.prompts and machine.prompts[0].prompt_left_s <= 1e-9:
            self._on_first_token(machine.prompts.popleft(), machine)
        while machine.sequences and machine.sequences[0][0] <= machine.num_tokens + 1e-6:
            self._on_end(machine.pop_sequence()[2])
        machine.admit()
        self._touch(machine)

    # A request

    def _place(self, number: int, request: PooledRequest) -> None:
        now, shape, cost = self._now, request.shape, self._cost
        if self._counts:
            self._window.add_arrival(now)
            self._window.add_placement(now, shape.num_prompt_tokens, 0, 1, self._token_limit or request.num_output)
        num_steps = max(1.0, shape.num_prompt_tokens / self._worker.max_num_batched_tokens)
        own_s = cost.of_prompt(shape.num_prompt_tokens, 0) + (num_steps - 1) * cost.fixed_s
        request.prompt_left_s = own_s
        decode = self._least_loaded.find()
        prefill = self._earliest.find() if self._of_role[True] else decode
        if self._is_better_there(decode, prefill, own_s):
            prefill = decode
            request.prompt_left_s -= num_steps * cost.fixed_s  # which its sequences' steps take in any case
        self._promise(request, decode)
        prefill.advance(now)
        prefill.add_prompt(request)
        self._touch(prefill)

    def _promise(self, request: PooledRequest, machine: _Machine | None) -> None:
        """It decodes there, and no longer where it was to; None: it has ended."""
        for each, step in ((request.machine, -1), (machine, 1)):
            if each is not None:
                each.num_promised += step
                if not each.prefills:
                    self._least_loaded.changed(each)
        request.machine = machine

    def _is_better_there(self, there: _Machine, other: _Machine, own_s: float) -> bool:
        """Whether a decode worker should compute the prompt itself."""
        if there is other:
            return True
        slo = self._slo
        there.advance(self._now)
        other.advance(self._now)
        first_s = (there.prompts_s + own_s) / there.rates()[0]
        handed_s = other.prompts_s / other.rates()[0] + own_s
        if not (other.prompts or first_s <= slo.tpot_s):
            return False
        delay_s = (len(there.sequences) + len(there.prompts)) * (own_s - self._cost.fixed_s)
        return (first_s > slo.ttft_s, first_s + delay_s) < (handed_s > slo.ttft_s, handed_s)

    def _on_first_token(self, request: PooledRequest, at: _Machine) -> None:
        request.first_token_s = self._now
        at.num_generated += 1
        if request.num_output == 1:
            self._on_end(request)
        else:
            self._decode(request, float(request.num_output - 1), at)

    def _decode(self, request: PooledRequest, tokens_left: float, touched: _Machine) -> None:
        """`touched`: a worker whose next event is asked for in any case."""
        machine = request.machine
        assert machine is not None, "it was placed"
        if machine.prefills:
            machine = self._least_loaded.find()
            self._promise(request, machine)
        machine.advance(self._now)
        machine.add_sequence(next(self._order), tokens_left, request)
        if machine is not touched:
            self._touch(machine)

    def _on_end(self, request: PooledRequest) -> None:
        self._promise(request, None)
        request.last_token_s = self._now
        if self._counts:
            self._window.lengths.add(request.num_output, self._token_limit or request.num_output)
            self._window.add_end(self._now, is_kept=self.is_kept(request))

    def is_kept(self, request: PooledRequest) -> bool:
        """Whether it was in time."""
        tpot_s = (request.last_token_s - request.first_token_s) / max(1, request.num_output - 1)
        return request.first_token_s - request.shape.at <= self._slo.ttft_s and tpot_s <= self._slo.tpot_s

    # The controller

    def _look(self) -> None:
        looking = self.rebalancer.look(self._now, self._config)
        try:
            looking.send(None)
        except StopIteration:
            return
        raise AssertionError("nothing that the rebalancer asks for takes time here")

    async def _measure(self) -> MeasuredLoad:
        window_s, demand = self._window.sums(self._now)
        return MeasuredLoad(window_s, demand, RoleCosts(self._cost, self._cost), self._worker.kv_tokens)

    def _split(self) -> Split:
        last = self.splits[-1]
        return Split(last.num_prefill, last.num_decode, self._version)

    def _move(self, num_prefill: int, num_decode: int, version: int, why: str) -> None:
        self._version += 1
        while (missing := num_prefill - self.splits[-1].num_prefill) != 0:
            self._turn(min(self._of_role[missing < 0], key=_LOAD))
        assert self.splits[-1].num_decode == num_decode

    def _turn(self, machine: _Machine) -> None:
        """One worker changes its role."""
        last = self.splits[-1]
        machine.advance(self._now)
        machine.prefills = not machine.prefills
        self._sort_by_role()
        step = 1 if machine.prefills else -1
        self.splits.append(SplitSince(self._now, last.num_prefill + step, last.num_decode - step))
        if machine.prefills:
            leaving = [machine.pop_sequence() for _ in range(len(machine.sequences))]
            leaving += machine.waiting
            machine.waiting.clear()
            for _, tokens_left, request in leaving:
                self._decode(request, tokens_left, machine)
        self._touch(machine)

    def _sort_by_role(self) -> None:
        self._of_role = {
            prefills: [machine for machine in self._machines if machine.prefills is prefills]
            for prefills in (True, False)
        }
        self._least_loaded = _Least(self._of_role[False], _LOAD)
        self._earliest = _Least(self._of_role[True], _DUE_AT)
