"""Chooses layouts and numbers of workers for a load and its objectives, with and without disaggregation.

A plan is the fewest devices on which the estimated latencies (`simulate.estimates`) keep the objectives. The queues are
those of `controller.goodput_model`, by which a running cluster moves workers: one before all prefill workers, and
decode workers that compute what would be late there. A plan asks for a share of each objective, has all lengths instead
of their mean and variance, and takes curves that are no lines.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from cluster.errors import ConfigError
from simulate.curves import StepCurve
from simulate.devices import GRAPHS, Efficiency
from simulate.estimates import (
    DecodeLoad,
    DecodeWorkers,
    LatencyEstimate,
    OfferedLoad,
    WaitingTimes,
    latency_estimate,
    prompt_seconds,
)
from simulate.memory_plan import LayoutMemory, MemoryQuestion, memory_of, usual_layouts
from simulate.placement import LatencyGoal, fewest, highest_rate
from simulate.roofline import ComputedCurve
from simulate.shapes import DeviceLayout
from simulate.worker_profile import WorkerProfile

MOST_WORKERS = 1024
_MOST_RATE = 1e6
_SHARES = (1.0, 0.5, 0.25, 0.0)
"""Shares that are tried on decode workers, of the prompts that are too many for the prefill workers."""


@dataclass(frozen=True)
class PlanQuestion:
    """A model on devices, a load, and what is asked of its latencies."""

    memory: MemoryQuestion
    load: OfferedLoad
    goal: LatencyGoal
    price_per_hour: float
    """The price of one device."""
    efficiency: Efficiency = GRAPHS
    most_devices: int | None = None
    layouts: tuple[DeviceLayout, ...] = ()
    """Layouts to choose from; empty: the usual ones."""
    profile: WorkerProfile | None = None
    """A worker that was measured, in the place of computed ones."""


@dataclass(frozen=True)
class WorkerOption:
    """A worker of one layout: its memory and its curve."""

    memory: LayoutMemory
    curve: StepCurve
    services_s: tuple[float, ...]
    """Seconds of the load's prompts alone, ascending."""
    decode: DecodeLoad

    @property
    def layout(self) -> DeviceLayout:
        return self.memory.layout

    def takes_batch(self, num_seqs: int, load: OfferedLoad, tpot_s: float) -> bool:
        """Whether so many sequences of each group fit into its memory, and a step of them into the time per token."""
        num = num_seqs * self.layout.num_groups
        return num * load.mean_kv <= self.memory.num_tokens and self.decode.step_s(num) <= tpot_s


@dataclass(frozen=True)
class RolePlan:
    """The workers of one role."""

    option: WorkerOption
    num_workers: int

    @property
    def num_devices(self) -> int:
        return self.num_workers * self.option.layout.num_devices


@dataclass(frozen=True)
class DevicePlan:
    """Workers and what they should do. `prefill` None: each worker does both."""

    prefill: RolePlan | None
    decode: RolePlan
    estimate: LatencyEstimate
    transfer_s: float
    """Seconds of the mean prompt's hand-off over the network."""

    @property
    def num_devices(self) -> int:
        return self.decode.num_devices + (self.prefill.num_devices if self.prefill else 0)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that there should be at most at nearly all moments, and some more; a power of two. All that fit,
        where the load is too much."""
        decode = self.decode.option.decode
        if math.isinf(self.estimate.num_running):
            return int(decode.num_at_most)
        num = decode.at_share(max(1.0, self.estimate.num_running), 0.999)
        return int(min(decode.num_at_most, 1 << math.ceil(math.log2(max(8.0, num)))))


class Planner:
    """Answers one question."""

    def __init__(self, question: PlanQuestion) -> None:
        """Raises ConfigError where the model fits into no layout."""
        self.question = question
        self._most_prompts: dict[tuple[DeviceLayout, int], float] = {}
        memory, profile = question.memory, question.profile
        profiled = () if profile is None else (DeviceLayout(profile.worker.tensor_parallel),)
        wanted = profiled or question.layouts or usual_layouts(memory.shape, memory.device.devices_per_node)
        held = [memory_of(memory, layout) for layout in wanted]
        self.options = [self._option(one) for one in held if one.num_requests]
        if not self.options:
            nearest = max(held, key=lambda one: one.left_bytes)
            raise ConfigError(
                f"memory: one request of {memory.context:,} tokens fits beside {memory.shape.name} in no layout on "
                f"{memory.device.name}, {nearest.layout} comes nearest; see `baton plan --memory`, and use a larger "
                "device, --quantization or shorter requests"
            )

    def _option(self, memory: LayoutMemory) -> WorkerOption:
        question, profile = self.question.memory, self.question.profile
        most_seqs, num_tokens = question.max_num_seqs, memory.num_tokens
        if profile is not None:
            curve: StepCurve = profile.curve.curve
            most_seqs, num_tokens = profile.worker.max_num_seqs, profile.worker.kv_tokens
        else:
            curve = ComputedCurve(
                question.shape,
                question.device,
                memory.layout,
                question.quantization,
                question.kv_dtype,
                self.question.efficiency,
            )
        load, groups = self.question.load, memory.layout.num_groups
        services = tuple(prompt_seconds(curve, n, question.max_num_batched_tokens, groups) for n in load.prompts)
        in_memory = int(num_tokens / load.mean_kv)
        decode = DecodeLoad(curve, load.mean_kv, max(1, min(most_seqs * groups, in_memory)), groups)
        return WorkerOption(memory, curve, services, decode)

    @property
    def _chunk(self) -> int:
        return self.question.memory.max_num_batched_tokens

    def option_of(self, layout: DeviceLayout) -> WorkerOption:
        """Raises ConfigError for a layout that is not among the options."""
        for option in self.options:
            if option.layout == layout:
                return option
        raise ConfigError(f"--tp, --ep: {self.question.memory.shape.name} is not planned for with {layout}")

    def under(self, load: OfferedLoad, plan: DevicePlan) -> tuple[Planner, DevicePlan]:
        """The same question under another load, and what a plan's workers should do then."""
        roles = [role for role in (plan.prefill, plan.decode) if role is not None]
        layouts = tuple({role.option.layout: None for role in roles})
        planner = Planner(replace(self.question, load=load, layouts=layouts))
        decode, *prefill = [RolePlan(planner.option_of(r.option.layout), r.num_workers) for r in reversed(roles)]
        return planner, planner.of_workers(prefill[0] if prefill else None, decode)

    def at_rate(self, rate: float) -> Planner:
        """The same question under another rate."""
        other = copy.copy(self)
        other.question = replace(self.question, load=replace(self.question.load, rate=rate))
        return other

    def split(self) -> DevicePlan | None:
        """The fewest devices with workers of both roles; None where no number of them keeps the objectives.

        Layouts are chosen as if each role did its own work only; then decode workers take what prompts they can.
        """
        prefill = self._least(self.prefill_workers)
        if prefill is None:
            return None
        decode = self._least(partial(self.decode_workers, prefill.option))
        if decode is None:
            return None
        best = self.of_workers(prefill, decode)
        for num_decode in range(decode.num_workers, decode.num_workers + prefill.num_workers):
            if (found := self._with_decode(replace(decode, num_workers=num_decode), best)) is not None:
                best = found
            elif num_decode > decode.num_workers:
                break
        return best

    def _with_decode(self, decode: RolePlan, than: DevicePlan) -> DevicePlan | None:
        """The fewest prefill workers beside these, if that takes fewer devices than another plan."""
        assert than.prefill is not None
        prefill = than.prefill
        most = (than.num_devices - 1 - decode.num_devices) // prefill.option.layout.num_devices

        def is_enough(num: int) -> bool:
            return self.of_workers(replace(prefill, num_workers=num), decode).estimate.keeps(self.question.goal)

        num = fewest(is_enough, most)
        return None if num is None else self.of_workers(replace(prefill, num_workers=num), decode)

    def colocated(self) -> DevicePlan | None:
        """The fewest devices of which each does both; None where no number of them keeps the objectives."""
        best = self._least(self._colocated_workers)
        return None if best is None else self.of_workers(None, best)

    def of_workers(self, prefill: RolePlan | None, decode: RolePlan) -> DevicePlan:
        """Returns what these workers should do, whether or not it is enough.

        Decode workers compute prompts that come to more than the prefill workers compute in time, as many as serve the
        objectives best.
        """
        load, goal, option = self.question.load, self.question.goal, decode.option
        workers = DecodeWorkers(decode.num_workers, option.decode, option.services_s, self._chunk)
        if prefill is None:
            return DevicePlan(None, decode, latency_estimate(load, None, workers, goal), 0.0)
        transfer_s = self._transfer_s(prefill.option, option)
        left = max(0.0, load.rate - self.most_prompts(prefill))
        best: LatencyEstimate | None = None
        for share in _SHARES if left else (0.0,):
            apart = replace(self._waiting(prefill.option, prefill.num_workers), rate=load.rate - share * left)
            found = latency_estimate(load, apart, workers, goal, transfer_s)
            best = found if best is None or found.kept_share > best.kept_share else best
            if found.keeps(goal):
                break
        assert best is not None
        return DevicePlan(prefill, decode, best, transfer_s)

    def _waiting(self, option: WorkerOption, num_workers: int) -> WaitingTimes:
        """Each group of a worker's devices computes prompts of its own."""
        return WaitingTimes(option.services_s, self.question.load.rate, num_workers * option.layout.num_groups)

    def _transfer_s(self, sender: WorkerOption, receiver: WorkerOption) -> float:
        """The whole KV of the mean prompt, through the network cards of the devices that have it on each side."""
        memory = self.question.memory
        size = self.question.load.mean_prompt * memory.shape.kv_bytes_per_token(1, memory.kv_dtype)
        cards = min(sender.layout.tp_size, receiver.layout.tp_size)
        return size / (cards * memory.device.nic_bytes_per_s * self.question.efficiency.memory)

    def most_rate(self, plan: DevicePlan) -> float:
        """The highest rate at which a plan's workers keep the objectives, in requests a second; 0: at none."""
        goal = self.question.goal

        return _rate_within(
            lambda rate: self.at_rate(rate).of_workers(plan.prefill, plan.decode).estimate.keeps(goal),
            self.question.load.rate,
        )

    def most_prompts(self, role: RolePlan) -> float:
        """Prompts a second that prefill workers compute in time."""
        key = role.option.layout, role.num_workers
        if key not in self._most_prompts:
            goal, waiting = self.question.goal, self._waiting(role.option, role.num_workers)
            self._most_prompts[key] = highest_rate(
                lambda rate: replace(waiting, rate=rate).share_within(goal.ttft_s) >= goal.share, waiting.capacity
            )
        return self._most_prompts[key]

    def _least(self, count: Callable[[WorkerOption], int]) -> RolePlan | None:
        found = [RolePlan(option, num) for option in self.options if (num := count(option))]
        return min(found, key=lambda plan: (plan.num_devices, plan.option.layout.num_devices), default=None)

    @property
    def least_ttft(self) -> tuple[float, DeviceLayout]:
        """Seconds within which enough prompts are computed without any wait, and the layout that does it."""
        share = self.question.goal.share
        return min(
            ((one.services_s[math.ceil(share * len(one.services_s)) - 1], one.layout) for one in self.options),
            key=lambda found: found[0],
        )

    @property
    def least_tpot(self) -> tuple[float, DeviceLayout]:
        """Seconds of a step with one sequence, and the layout that does it."""
        return min(((one.decode.step_s(1), one.layout) for one in self.options), key=lambda found: found[0])

    def prefill_workers(self, option: WorkerOption) -> int:
        """The fewest that compute the load's prompts in time; 0: no number is enough."""
        goal = self.question.goal
        return fewest(lambda n: self._waiting(option, n).share_within(goal.ttft_s) >= goal.share, MOST_WORKERS) or 0

    def decode_workers(self, sender: WorkerOption, option: WorkerOption) -> int:
        """The fewest that generate the load's outputs in time; 0: no number is enough."""
        load, goal, decode = self.question.load, self.question.goal, option.decode
        limit_s = goal.tpot_s - load.token_delay_s(self._transfer_s(sender, option))

        def is_enough(num: int) -> bool:
            return decode.share_within(decode.running(load.rate * load.mean_output / num), limit_s) >= goal.share

        return fewest(is_enough, MOST_WORKERS) or 0

    def _colocated_workers(self, option: WorkerOption) -> int:
        goal = self.question.goal
        return fewest(lambda n: self.of_workers(None, RolePlan(option, n)).estimate.keeps(goal), MOST_WORKERS) or 0


def _rate_within(is_kept: Callable[[float], bool], near: float) -> float:
    """The highest rate that is kept, searched from `near` on; 0: none is."""
    most = near
    while is_kept(most) and most < _MOST_RATE:
        most *= 2
    return highest_rate(is_kept, most)
