"""Latencies that a load should see on workers of given curves, by formulas of queues.

    prefill     one queue before all workers (Erlang C, with the correction of Allen and Cunneen for lengths that vary):
                a prompt waits, then takes its own time
    decode      n sequences run where arrivals times output tokens times the step of n is n (Little's law); they vary
                about as the square root of n
    beside      a step has as much of a prompt as ends within the pace that a worker keeps beside its sequences
                (`cluster.step_cost.PACE_SHARE` of the time per token); a prompt waits for about one step, which runs or
                is launched when it comes

Where each worker computes both, all prompts are computed beside sequences. Where prefill has workers of its own, those
prompts are that come to more than they compute in time: the router places a prompt where it ends first.

No number of requests is drawn: the same question has the same answer at once. What is left out: bursts, prefix caches,
preemption, prompts that are unevenly spread, and hand-offs that share a network card.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from cluster.demand import Demand
from cluster.step_cost import PACE_SHARE, StepSize
from simulate.curves import StepCurve, StepSample
from simulate.placement import LatencyGoal

_HALVINGS = 40
_MOST_SAMPLES = 500
_FAR_S = 1e6
_ROUNDS = 30
_ALIKE = 1e-4


@dataclass(frozen=True)
class OfferedLoad:
    """Requests a second, and the lengths of some of them."""

    rate: float
    lengths: tuple[tuple[int, int], ...]
    """Tokens of a prompt and of its output."""

    @cached_property
    def mean_prompt(self) -> float:
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @cached_property
    def mean_output(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)

    @cached_property
    def mean_kv(self) -> float:
        """KV tokens of a sequence, at any moment of its decoding."""
        weighted = sum(output * (prompt + output / 2) for prompt, output in self.lengths)
        return weighted / sum(output for _, output in self.lengths)

    @cached_property
    def prompts(self) -> tuple[int, ...]:
        """Prompt lengths, ascending; at most `_MOST_SAMPLES`, evenly picked."""
        ordered = sorted(prompt for prompt, _ in self.lengths)
        step = max(1.0, len(ordered) / _MOST_SAMPLES)
        return tuple(ordered[int(step * n)] for n in range(min(len(ordered), _MOST_SAMPLES)))

    def longest(self, share: float) -> int:
        """Tokens of prompt and output that this share of the requests stays within."""
        ordered = sorted(prompt + output for prompt, output in self.lengths)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    def stretched(self, prompt: float, output: float) -> OfferedLoad:
        """The same requests with lengths times these factors, each at least 1."""
        lengths = tuple((max(1, round(prompt * one)), max(1, round(output * other))) for one, other in self.lengths)
        return OfferedLoad(self.rate, lengths)

    def token_delay_s(self, handoff_s: float) -> float:
        """Seconds that a hand-off adds to each token after the first of the mean output."""
        return handoff_s / max(1.0, self.mean_output - 1)

    def demand(self) -> Demand:
        """The sums of one second, as a router would count them."""
        num = len(self.lengths)
        scale = self.rate / num
        attended = sum(prompt * (prompt + 1) / 2 for prompt, _ in self.lengths)
        kv = sum(prompt + output / 2 for prompt, output in self.lengths)
        outputs = sum(output for _, output in self.lengths)
        prompts = sum(prompt for prompt, _ in self.lengths)
        return Demand(num, num, prompts, attended, 0, num, outputs, kv).scaled(scale)


@dataclass(frozen=True)
class WaitingTimes:
    """Seconds until prompts are computed, among `num_servers` that share one queue."""

    services_s: Sequence[float]
    """Seconds of prompts alone, ascending; each as likely."""
    rate: float
    num_servers: int
    delay_s: float = 0.0
    """Seconds before each prompt is looked at."""

    @cached_property
    def mean_service_s(self) -> float:
        return sum(self.services_s) / len(self.services_s)

    @property
    def capacity(self) -> float:
        """Prompts a second at which no server rests."""
        return self.num_servers / self.mean_service_s

    @property
    def busy(self) -> float:
        return self.rate / self.capacity

    @cached_property
    def _waiting(self) -> tuple[float, float]:
        """The share of prompts that wait, and their mean wait."""
        if self.busy >= 1:
            return 1.0, math.inf
        waits = erlang_c(self.num_servers, self.rate * self.mean_service_s)
        variance = sum(s * s for s in self.services_s) / len(self.services_s) / self.mean_service_s**2 - 1
        return waits, (1 + variance) / 2 * self.mean_service_s / (self.num_servers * (1 - self.busy))

    def share_within(self, seconds: float) -> float:
        """Share of the prompts that are computed within these seconds from their arrival."""
        waits, mean_s = self._waiting
        if math.isinf(mean_s):
            return 0.0
        seconds -= self.delay_s
        in_time = [s for s in self.services_s if s <= seconds]
        return sum(1 - waits * math.exp(-(seconds - s) / mean_s) for s in in_time) / len(self.services_s)


@dataclass(frozen=True)
class PromptQueues:
    """Prompts that wait in several places, each with its share of them."""

    parts: tuple[tuple[float, WaitingTimes], ...]

    def share_within(self, seconds: float) -> float:
        """Share of all prompts that are computed within these seconds from their arrival."""
        return sum(weight * waiting.share_within(seconds) for weight, waiting in self.parts)

    def quantile_s(self, share: float) -> float:
        """Seconds within which this share is computed; infinite where fewer ever are."""
        low, high = 0.0, max(waiting.services_s[-1] for _, waiting in self.parts)
        while self.share_within(high) < share:
            high *= 2
            if high > _FAR_S:
                return math.inf
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.share_within(middle) >= share else (middle, high)
        return high


def erlang_c(num_servers: int, offered: float) -> float:
    """The share of arrivals that find all of `num_servers` busy, where `offered` would be busy on the mean."""
    blocked = 1.0  # Erlang B, by its recursion
    for n in range(1, num_servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / num_servers * (1 - blocked))


@dataclass(frozen=True)
class LatencyEstimate:
    """Latencies of a plan under a load, and the shares of the requests that keep each objective."""

    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    ttft_share: float
    tpot_share: float
    num_running: float
    """Sequences that one worker decodes on the mean."""

    @property
    def kept_share(self) -> float:
        """Share of the requests that keep both, as if neither depended on the other."""
        return self.ttft_share * self.tpot_share

    def keeps(self, goal: LatencyGoal) -> bool:
        """Whether enough requests keep each of the objectives."""
        return min(self.ttft_share, self.tpot_share) >= goal.share


@dataclass(frozen=True)
class DecodeLoad:
    """Sequences on one worker."""

    curve: StepCurve
    kv_tokens: float
    """KV tokens of each sequence."""
    num_at_most: int
    """Sequences that fit into its memory and its batch."""
    num_groups: int = 1
    """Groups of devices that have requests of their own."""

    def step_s(self, num: float) -> float:
        count = max(1, round(num))
        return self.curve.seconds(StepSize(0, 0, count, round(count * self.kv_tokens)))

    def with_prompt(self, num: float, pace_s: float, most_tokens: int) -> StepSample:
        """The step of `num` sequences and, in each group, the largest chunk of a prompt, up to `most_tokens`, that ends
        in time; of no prompt's tokens where even one is too many."""
        count = max(1, round(num))
        alone = StepSize(0, 0, count, round(count * self.kv_tokens))
        low, high = 0, most_tokens
        while low < high:
            middle = (low + high + 1) // 2
            is_in_time = self.curve.seconds(alone + _prompts(middle, 0, self.num_groups)) <= pace_s
            low, high = (middle, high) if is_in_time else (low, middle - 1)
        step = alone + _prompts(low, 0, self.num_groups) if low else alone
        return StepSample(step, self.curve.seconds(step))

    def mean_step_s(self, num: float, slow_s: float, busy: float) -> float:
        """Seconds of a step where for the share `busy` of the time each takes `slow_s`, if that is longer."""
        step_s = self.step_s(num)
        return 1 / (busy / max(slow_s, step_s) + (1 - busy) / step_s)

    def running(self, tokens_per_s: float, slow_s: float = 0.0, busy: float = 0.0) -> float:
        """Sequences at a time where so many tokens are asked for; infinite where that is too many. `slow_s`, `busy`: as
        for `mean_step_s`."""

        def wanted(num: float) -> float:
            return tokens_per_s * self.mean_step_s(num, slow_s, busy)

        if wanted(self.num_at_most) > self.num_at_most:
            return math.inf
        low, high = 0.0, float(self.num_at_most)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if wanted(middle) <= middle else (middle, high)
        return high

    def at_share(self, num: float, share: float) -> float:
        """Sequences that there are, or fewer, at this share of the moments."""
        return num + NormalDist().inv_cdf(share) * math.sqrt(num)

    def share_within(self, num: float, tpot_s: float) -> float:
        """Share of the moments at which a step has all sequences and is short enough, with `num` on the mean."""
        if math.isinf(num) or self.step_s(1) > tpot_s:
            return 0.0
        low, high = 1, self.num_at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_s(middle) <= tpot_s else (low, middle - 1)
        return NormalDist(num, math.sqrt(max(num, 1e-9))).cdf(low)


def prompt_seconds(curve: StepCurve, num_tokens: int, chunk: int, num_groups: int = 1) -> float:
    """Seconds of a prompt in steps of at most `chunk` tokens, beside one like it in each other group of the worker."""
    begins = range(0, num_tokens, chunk)
    return sum(curve.seconds(_prompts(min(chunk, num_tokens - begin), begin, num_groups)) for begin in begins)


def _prompts(num_tokens: int, num_before: int, num: int) -> StepSize:
    one = StepSize.of_prompt(num_tokens, num_before)
    return StepSize(num * one.num_prompt_tokens, num * one.num_attended)


@dataclass(frozen=True)
class _Beside:
    """Decode workers with the prompts that they compute beside their sequences."""

    num: float
    """Sequences of one worker; infinite: too many."""
    busy: float = 0.0
    """Share of the time in steps with a prompt's tokens."""
    slow_s: float = 0.0
    """Seconds of such a step."""
    waiting: WaitingTimes | None = None
    """The waiting times of these prompts; None: there are none."""

    def tpot_s(self, decode: DecodeLoad, running: float) -> float:
        return math.inf if math.isinf(running) else decode.mean_step_s(running, self.slow_s, min(1.0, self.busy))


@dataclass(frozen=True)
class DecodeWorkers:
    """Workers that generate, and may compute prompts beside."""

    num_workers: int
    decode: DecodeLoad
    services_s: Sequence[float]
    """Seconds of prompts alone on one of them."""
    chunk: int
    """Most tokens of a step."""

    def beside(self, load: OfferedLoad, prompts_per_s: float, goal: LatencyGoal) -> _Beside | None:
        """None where steps have no room for prompts."""
        decode, tokens_per_s = self.decode, load.rate * load.mean_output / self.num_workers
        if prompts_per_s <= 0:
            return _Beside(decode.running(tokens_per_s))
        alone = min(self.chunk, max(1, round(load.mean_prompt)))
        alone_s = decode.curve.seconds(_prompts(alone, 0, decode.num_groups)) / (alone * decode.num_groups)
        found = _Beside(0.0)
        for _ in range(_ROUNDS):  # more prompts make longer steps, thus more sequences, which leave prompts less
            num = decode.running(tokens_per_s, found.slow_s, min(1.0, found.busy))
            mixed = None if math.isinf(num) else decode.with_prompt(num, PACE_SHARE * goal.tpot_s, self.chunk)
            if mixed is None or not mixed.step.num_prompt_tokens:
                return None
            stretch = mixed.seconds / mixed.step.num_prompt_tokens / alone_s
            services = [s * stretch for s in self.services_s]
            num_queues = self.num_workers * decode.num_groups
            waiting = WaitingTimes(services, prompts_per_s, num_queues, decode.step_s(num))
            before, found = found.busy, _Beside(num, waiting.busy, mixed.seconds, waiting)
            if abs(waiting.busy - before) < _ALIKE or waiting.busy >= 1:
                break
        return found


def latency_estimate(
    load: OfferedLoad, apart: WaitingTimes | None, workers: DecodeWorkers, goal: LatencyGoal, handoff_s: float = 0.0
) -> LatencyEstimate:
    """`apart`: the prompts that have workers of their own, at the rate that comes to those; all others are computed
    beside sequences. `handoff_s`: seconds of a hand-off after the first token; they count among an output's tokens."""
    share = 0.0 if apart is None else min(1.0, apart.rate / load.rate)
    decode, found = workers.decode, workers.beside(load, (1 - share) * load.rate, goal)
    if found is None:
        return LatencyEstimate(math.inf, math.inf, math.inf, math.inf, 0.0, 0.0, math.inf)
    both = ((share, apart), (1 - share, found.waiting))
    queues = PromptQueues(tuple((weight, waiting) for weight, waiting in both if waiting is not None))
    added_s = share * load.token_delay_s(handoff_s)
    return LatencyEstimate(
        queues.quantile_s(0.5),
        queues.quantile_s(0.9),
        found.tpot_s(decode, found.num) + added_s,
        found.tpot_s(decode, decode.at_share(found.num, 0.9)) + added_s,
        queues.share_within(goal.ttft_s),
        decode.share_within(found.num, goal.tpot_s - added_s),
        found.num,
    )
