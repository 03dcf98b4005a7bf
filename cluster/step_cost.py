"""The cost of a step in seconds, as a sum over its parts. Workers learn it, the router predicts with it.

    seconds = fixed + prompt tokens * a + keys that those attend to * b + sequences * c + KV tokens that those read * d

One sum covers every kind of step, so that a chunk of a prompt beside decoding sequences teaches both. Pure: knows no
clock, no worker and no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Self

from cluster.pb import worker_pb2

OVERLAP_TOKENS = 64
"""A step of so many tokens is long: the leader's engine thread does not wait for it, and if it computes tokens of a
prompt, its layers are noted."""


@dataclass(slots=True, unsafe_hash=True)
class StepSize:
    """The work of one step. Never changed, though not frozen: that makes it five times as slow to make, and a router
    makes some twenty for each request."""

    num_prompt_tokens: int = 0
    num_attended: int = 0
    """Keys that each prompt token attends to, summed up."""
    num_sequences: int = 0
    """Sequences that get their next token."""
    num_kv_tokens: int = 0
    """KV tokens that those sequences hold together."""

    @classmethod
    def of_prompt(cls, num_tokens: int, num_before: int = 0) -> Self:
        """`num_tokens` of one prompt, after `num_before` computed ones."""
        return cls(num_tokens, _num_attended(num_tokens, num_before))

    def __add__(self, other: StepSize) -> StepSize:
        if other is NO_STEP:
            return self
        return StepSize(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_attended + other.num_attended,
            self.num_sequences + other.num_sequences,
            self.num_kv_tokens + other.num_kv_tokens,
        )

    def __sub__(self, other: StepSize) -> StepSize:
        if other is NO_STEP:
            return self
        return StepSize(
            self.num_prompt_tokens - other.num_prompt_tokens,
            self.num_attended - other.num_attended,
            self.num_sequences - other.num_sequences,
            self.num_kv_tokens - other.num_kv_tokens,
        )


NO_STEP = StepSize()
PACE_SHARE = 0.75
"""Share of the time per token that a step with decoding sequences may take, prompts included; the rest is for the work
between steps."""


@dataclass(unsafe_hash=True)
class StepCost:
    """Seconds, none of them negative; 0 for a part that was never seen, or cannot be separated from the others. Never
    changed, though not frozen, as of `StepSize`."""

    fixed_s: float
    prompt_token_s: float
    attended_s: float
    sequence_s: float
    kv_token_s: float

    @classmethod
    def from_proto(cls, cost: worker_pb2.StepCost) -> Self:
        return cls(cost.fixed_s, cost.prompt_token_s, cost.attended_s, cost.sequence_s, cost.kv_token_s)

    def to_proto(self) -> worker_pb2.StepCost:
        return worker_pb2.StepCost(**vars(self))

    @property
    def knows_prompts(self) -> bool:
        return self.prompt_token_s > 0 or self.attended_s > 0

    @property
    def knows_sequences(self) -> bool:
        return self.sequence_s > 0 or self.kv_token_s > 0

    def filled(self, usual: StepCost) -> StepCost:
        """This cost, with parts never seen here from `usual`: a worker that only decodes knows no prompts."""
        prompts = self if self.prompt_token_s > 0 or self.attended_s > 0 else usual
        sequences = self if self.sequence_s > 0 or self.kv_token_s > 0 else usual
        if prompts is sequences is self:
            return self
        return StepCost(
            self.fixed_s, prompts.prompt_token_s, prompts.attended_s, sequences.sequence_s, sequences.kv_token_s
        )

    def of_sequences(self, num_sequences: int, num_kv_tokens: int) -> float:
        """Seconds of a step in which these sequences get their next token, and nothing else is computed."""
        return self.fixed_s + self.sequence_s * num_sequences + self.kv_token_s * num_kv_tokens

    def of_prompt(self, num_tokens: int, num_before: int) -> float:
        """Seconds of a step that computes `StepSize.of_prompt` of at least one token, and nothing else."""
        attended_s = self.attended_s * _num_attended(num_tokens, num_before)
        return self.fixed_s + self.prompt_token_s * num_tokens + attended_s

    def of(self, step: StepSize) -> float:
        """Seconds of a step; 0 for one that computes nothing."""
        if not step.num_prompt_tokens and not step.num_sequences:
            return 0.0
        return (
            self.fixed_s
            + self.prompt_token_s * step.num_prompt_tokens
            + self.attended_s * step.num_attended
            + self.sequence_s * step.num_sequences
            + self.kv_token_s * step.num_kv_tokens
        )


def _num_attended(num_tokens: int, num_before: int) -> int:
    """Each token sees all before it and itself."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


def usual(costs: Sequence[StepCost]) -> StepCost:
    """The mean of at least one cost, over the workers that have seen each part.

    The costs of a prompt are averaged together, and so are those of a sequence: where one worker attributes a prompt's
    cost to its tokens, and another to the keys that they attend to, the mean is half of each. The fixed cost is taken
    from workers that have seen sequences, as prompts alone do not show it.
    """
    prompts = [c for c in costs if c.knows_prompts]
    sequences = [c for c in costs if c.knows_sequences]
    return StepCost(
        _mean([c.fixed_s for c in sequences or costs]),
        _mean([c.prompt_token_s for c in prompts]),
        _mean([c.attended_s for c in prompts]),
        _mean([c.sequence_s for c in sequences]),
        _mean([c.kv_token_s for c in sequences]),
    )


class UsualCost:
    """The `usual` of costs that come and go, without a look at all of them."""

    def __init__(self, sums: Iterable[float] = (0.0,) * 9) -> None:
        self._sums = list(sums)
        """The number of costs and their fixed part; the same of those that know sequences, and their two other parts;
        the number of those that know prompts, and their two parts."""

    def add(self, cost: StepCost, sign: int = 1) -> None:
        parts = [1.0, cost.fixed_s] + [0.0] * 7
        if cost.knows_sequences:
            parts[2:6] = 1.0, cost.fixed_s, cost.sequence_s, cost.kv_token_s
        if cost.knows_prompts:
            parts[6:] = 1.0, cost.prompt_token_s, cost.attended_s
        self._sums = [whole + sign * part for whole, part in zip(self._sums, parts, strict=True)]

    def remove(self, cost: StepCost) -> None:
        """One that was added."""
        self.add(cost, -1)

    def merge(self, other: UsualCost) -> UsualCost:
        """Returns the usual cost of both together."""
        return UsualCost(map(add, self._sums, other._sums))

    @property
    def value(self) -> StepCost | None:
        """None: there is no cost. Sums that have come down to nothing may be off by the last digit, but not below 0."""
        num, fixed, num_sequences, fixed_of_sequences, sequence, kv_token, num_prompts, prompt_token, attended = (
            self._sums
        )
        if not num:
            return None
        fixed_s = fixed_of_sequences / num_sequences if num_sequences else fixed / num
        num_prompts, num_sequences = num_prompts or math.inf, num_sequences or math.inf
        return StepCost(
            max(0.0, fixed_s),
            max(0.0, prompt_token / num_prompts),
            max(0.0, attended / num_prompts),
            max(0.0, sequence / num_sequences),
            max(0.0, kv_token / num_sequences),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


@dataclass(frozen=True)
class RoleCosts:
    """Costs of a worker of each role: prompts in one piece, or in small ones beside sequences."""

    prefill: StepCost
    decode: StepCost


def usual_by_role(costs: Iterable[tuple[bool, StepCost | None]]) -> RoleCosts | None:
    """The usual costs of workers, each given with whether it prefills; a role without any cost has the other's."""
    known = [(prefills, cost) for prefills, cost in costs if cost is not None]
    if not known:
        return None
    overall = usual([cost for _, cost in known])
    by_role = [[cost for prefills, cost in known if prefills is role] for role in (True, False)]
    prefill, decode = (usual(own).filled(overall) if own else overall for own in by_role)
    return RoleCosts(prefill, decode)
