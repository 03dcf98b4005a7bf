"""Chooses layouts and numbers of workers for a load and its objectives, with and without disaggregation.

A plan is the fewest devices on which the estimated latencies (`simulate.estimates`) keep the objectives. It differs
from `controller.goodput_model`, by which a running cluster moves workers, in that it asks for percentiles, knows how
lengths spread, and takes curves that are no lines.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.errors import ConfigError
from cluster.text import count_of
from simulate.curves import StepCurve
from simulate.devices import GRAPHS, Efficiency
from simulate.estimates import (
    DecodeLoad,
    LatencyEstimate,
    OfferedLoad,
    WaitingTimes,
    colocated_estimate,
    prompt_seconds,
    split_estimate,
)
from simulate.memory_plan import LayoutMemory, MemoryQuestion, memory_of, usual_layouts
from simulate.placement import LatencyGoal, fewest, highest_rate
from simulate.roofline import ComputedCurve
from simulate.shapes import DeviceLayout
from simulate.worker_profile import WorkerProfile

MOST_WORKERS = 1024
_MOST_RATE = 1e6
_NEAR = 1.05
"""The nearest objective that can be met is this many times what no wait at all would take."""


@dataclass(frozen=True)
class PlanQuestion:
    """A model on devices, a load, and what is asked of its latencies."""

    memory: MemoryQuestion
    load: OfferedLoad
    goal: LatencyGoal
    price_per_hour: float
    """Of one device."""
    efficiency: Efficiency = GRAPHS
    most_devices: int | None = None
    layouts: tuple[DeviceLayout, ...] = ()
    """Those to choose from; empty: the usual ones."""
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
        """As many as there should be at nearly all moments, and some more; a power of two. All that fit, where the load
        is too much."""
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
        memory = question.memory
        profile = question.profile
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

    def at_rate(self, rate: float) -> Planner:
        """The same question under another rate."""
        other = copy.copy(self)
        other.question = replace(self.question, load=replace(self.question.load, rate=rate))
        return other

    def split(self) -> DevicePlan:
        """The fewest devices with prefill and decode apart. Raises ConfigError that names what cannot be met."""
        prefill = self._least(self._prefill_workers, self._refuse_ttft)
        decode = self._least(self._decode_workers, self._refuse_tpot)
        return self.of_workers(prefill, decode)

    def colocated(self) -> DevicePlan | None:
        """The fewest devices of which each does both; None where no number of them keeps the objectives."""
        found = [RolePlan(option, num) for option in self.options if (num := self._colocated_workers(option))]
        best = min(found, key=lambda plan: plan.num_devices, default=None)
        return None if best is None else self.of_workers(None, best)

    def of_workers(self, prefill: RolePlan | None, decode: RolePlan) -> DevicePlan:
        """What these workers should do, whether or not it is enough."""
        load, goal = self.question.load, self.question.goal
        if prefill is None:
            option = decode.option
            estimate = colocated_estimate(load, option.services_s, option.decode, decode.num_workers, goal, self._chunk)
            return DevicePlan(None, decode, estimate, 0.0)
        transfer_s = self._transfer_s(prefill.option, decode.option)
        waiting = self._waiting(prefill.option, prefill.num_workers)
        estimate = split_estimate(load, waiting, decode.option.decode, decode.num_workers, goal, transfer_s)
        return DevicePlan(prefill, decode, estimate, transfer_s)

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

        def is_kept(rate: float) -> bool:
            return self.at_rate(rate).of_workers(plan.prefill, plan.decode).estimate.kept_share >= goal.share

        most = self.question.load.rate
        while is_kept(most) and most < _MOST_RATE:
            most *= 2
        return highest_rate(is_kept, most)

    def _least(self, count: Callable[[WorkerOption], int], refuse: Callable[[], ConfigError]) -> RolePlan:
        found = [RolePlan(option, num) for option in self.options if (num := count(option))]
        if not found:
            raise refuse()
        return min(found, key=lambda plan: (plan.num_devices, plan.option.layout.num_devices))

    def _prefill_workers(self, option: WorkerOption) -> int:
        """0: no number is enough."""
        goal = self.question.goal
        return fewest(lambda n: self._waiting(option, n).share_within(goal.ttft_s) >= goal.share, MOST_WORKERS) or 0

    def _decode_workers(self, option: WorkerOption) -> int:
        load, goal, decode = self.question.load, self.question.goal, option.decode

        def is_enough(num: int) -> bool:
            running = decode.running(load.rate * load.mean_output / num)
            return decode.share_within(running, goal.tpot_s) >= goal.share and (
                decode.at_share(running, goal.share) <= decode.num_at_most
            )

        return fewest(is_enough, MOST_WORKERS) or 0

    def _colocated_workers(self, option: WorkerOption) -> int:
        load, goal = self.question.load, self.question.goal

        def is_enough(num: int) -> bool:
            found = colocated_estimate(load, option.services_s, option.decode, num, goal, self._chunk)
            return found.kept_share >= goal.share and found.num_running <= option.decode.num_at_most

        return fewest(is_enough, MOST_WORKERS) or 0

    def _refuse_ttft(self) -> ConfigError:
        goal = self.question.goal
        alone = {
            option.layout: option.services_s[math.ceil(goal.share * len(option.services_s)) - 1]
            for option in self.options
        }
        best = min(alone, key=lambda layout: alone[layout])
        needed = _NEAR * alone[best]
        return self._refusal("ttft", goal.ttft_s, alone[best], best, replace(goal, ttft_s=needed))

    def _refuse_tpot(self) -> ConfigError:
        goal = self.question.goal
        alone = {option.layout: option.decode.step_s(1) for option in self.options}
        best = min(alone, key=lambda layout: alone[layout])
        return self._refusal("tpot", goal.tpot_s, alone[best], best, replace(goal, tpot_s=2 * alone[best]))

    def _refusal(
        self, name: str, limit_s: float, least_s: float, best: DeviceLayout, nearest: LatencyGoal
    ) -> ConfigError:
        memory = self.question.memory
        if least_s <= limit_s:
            return ConfigError(
                f"--rate: {self.question.load.rate:g} requests a second take more than {MOST_WORKERS:,} workers of "
                f"{memory.shape.name} on {memory.device.name}; lower it, and plan for a part of the load"
            )
        text = (
            f"--{name}-ms: {1000 * limit_s:g} ms in {self.question.goal.share:.0%} of the requests cannot be met with "
            f"any number of {memory.device.name}: {memory.shape.name} takes {1000 * least_s:.1f} ms without any wait "
            f"with {best}, which comes nearest"
        )
        wanted = math.ceil(1000 * (nearest.ttft_s if name == "ttft" else nearest.tpot_s))
        goal = replace(nearest, **{f"{name}_s": wanted / 1000})
        try:
            plan = Planner(replace(self.question, goal=goal)).split()
        except ConfigError:
            return ConfigError(f"{text}; raise it to {wanted} or more, or use a faster device")
        return ConfigError(f"{text}; --{name}-ms {wanted} would take {plan.num_devices} of them")

    def check_number(self, plan: DevicePlan) -> None:
        """Raises ConfigError where a plan needs more devices than there may be."""
        most = self.question.most_devices
        if most is None or plan.num_devices <= most:
            return
        share = most / plan.num_devices
        raise ConfigError(
            f"--devices: {most} {self.question.memory.device.name} do not serve {self.question.load.rate:g} requests "
            f"a second within the objectives, {plan.num_devices} do; {most} serve some "
            f"{share * self.question.load.rate:.2g}: lower --rate, or allow more"
        )


@dataclass(frozen=True)
class PlanChoice:
    """What was compared."""

    best: DevicePlan
    split: DevicePlan
    colocated: DevicePlan | None
    """None: no number of devices keeps the objectives so."""
    what_if: DevicePlan | None

    @property
    def plans(self) -> dict[str, DevicePlan]:
        """Those that there are, by name."""
        plans = {"disaggregated": self.split, "colocated": self.colocated, "what_if": self.what_if}
        return {name: plan for name, plan in plans.items() if plan is not None}

    @property
    def verdict(self) -> str:
        """Whether to disaggregate, and why."""
        split = self.split.num_devices
        if self.colocated is None:
            return (
                f"Disaggregate: no number of devices keeps these objectives where each computes both; apart {split} do."
            )
        both = self.colocated.num_devices
        if both < split:
            return f"Do not disaggregate: where each computes both, it takes {count_of(both, 'device')}; apart {split}."
        if both == split:
            return f"Do not disaggregate: it takes {count_of(both, 'device')} either way, and nothing is handed over."
        return f"Disaggregate: {split} devices instead of {both} that each compute both, {1 - split / both:.0%} fewer."


def choose(planner: Planner, ratio: tuple[int, int] | None = None) -> PlanChoice:
    """The best plan with and without disaggregation. `ratio`: workers of each role, of the same layouts, to compare.

    Raises ConfigError for what no plan can meet.
    """
    split, colocated = planner.split(), planner.colocated()
    best = split if colocated is None or split.num_devices < colocated.num_devices else colocated
    planner.check_number(best)
    what_if = None
    if ratio is not None:
        num_prefill, num_decode = ratio
        layouts_of = split if num_prefill or colocated is None else colocated
        prefill = None
        if num_prefill:
            assert split.prefill is not None
            prefill = RolePlan(split.prefill.option, num_prefill)
        what_if = planner.of_workers(prefill, RolePlan(layouts_of.decode.option, num_decode))
    return PlanChoice(best, split, colocated, what_if)
