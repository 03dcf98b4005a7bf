"""Layers that choose among experts, as config.json describes them: how many, how large, and how a token chooses.

Knows no weights and loads no torch; `engine.layers.experts` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from cluster.errors import CheckpointError, ConfigError
from engine.json_fields import Fields

MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4, by the OCP's specification of microscaling formats, version 1.0."""


@dataclass(frozen=True)
class ExpertNames:
    """The names of experts' tensors in a checkpoint, below `model.layers.N`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_expert"


@dataclass(frozen=True)
class ClampedGate:
    """A gate that is gate * sigmoid(alpha * gate) of gates up to `limit`, times up + 1 of ups from -limit to limit."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class Routing:
    """The way a token chooses experts, where it is not those of the greatest shares of a softmax."""

    scores: Literal["softmax", "sigmoid"]
    """The function that makes a score of an expert's logit; a token's share in an expert is made of the score."""
    has_bias: bool
    """Whether a bias for each expert, which is no part of the shares, is added to the scores for the choice."""
    num_groups: int
    """Groups of equally many experts."""
    num_chosen_groups: int
    """A token chooses among the experts of so many groups, those with the greatest sums."""
    num_summed: int
    """The best experts of a group, whose scores are its sum."""
    scale: float
    """The shares are multiplied by it."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of one model; each is a SwiGLU MLP. Sizes are of the whole model."""

    layers: tuple[bool, ...]
    """For each layer, whether it chooses among experts; the others have one MLP."""
    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalizes: bool
    """Whether the shares of the experts that a token chooses add up to one."""
    shared_intermediate_size: int = 0
    """The width of the expert that every token takes, times its own gate if `has_shared_gate`; 0: there is none."""
    names: ExpertNames = ExpertNames()
    has_biases: bool = False
    """Biases on the router and on all matrices of experts."""
    is_interleaved: bool = False
    """The checkpoint has all experts of a layer in one tensor for each matrix, inputs first unless it is packed, and
    the outputs of gate and up in turn."""
    clamped_gate: ClampedGate | None = None
    """None: SwiGLU's."""
    has_shared_gate: bool = True
    routing: Routing | None = None
    num_groups: int = 1
    """Groups of a worker's ranks, each of which has some experts to itself, sliced over its own ranks; not of the
    model, but of how it is served."""

    def in_groups(self, num_groups: int, tp_size: int) -> ExpertsConfig:
        """Returns it for as many groups of the ranks. Raises ConfigError with the numbers that work."""
        fitting = [n for n in range(1, min(tp_size, self.num_experts) + 1) if tp_size % n == 0]
        if num_groups not in fitting:
            raise ConfigError(
                f"expert_parallel: {num_groups} groups of {tp_size} ranks (tensor_parallel) cannot share "
                f"{self.num_experts} experts; use {' or '.join(map(str, fitting))}"
            )
        return replace(self, num_groups=num_groups)

    def group_of(self, tp_rank: int, tp_size: int) -> int:
        """Returns the group of a rank."""
        return tp_rank * self.num_groups // tp_size

    @property
    def first_placement(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each group when a worker starts, in every layer; the first groups have one more where the
        groups do not divide them."""
        each, more = divmod(self.num_experts, self.num_groups)
        starts = [group * each + min(group, more) for group in range(self.num_groups + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))

    @property
    def most_held(self) -> int:
        """Experts of the rank that has most."""
        return -(-self.num_experts // self.num_groups)

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def num_biases(self) -> int:
        """Float32 numbers, of all layers, that are added to scores for the choice."""
        return self.num_layers * self.num_experts if self.routing is not None and self.routing.has_bias else 0

    def chosen_share(self, num_tokens: int) -> float:
        """Returns the share of a layer's experts that as many tokens choose, if each chooses evenly and by itself."""
        return 1.0 - (1.0 - self.num_per_token / self.num_experts) ** num_tokens


@dataclass(frozen=True)
class ExpertLoad:
    """Tokens that a model's experts have got on one worker, by layer."""

    experts: dict[int, list[int]] = field(default_factory=dict)
    """Of each expert, since the start."""
    groups: dict[int, list[int]] = field(default_factory=dict)
    """Of the experts of each group, since the groups have held these."""
    num_moved: int = 0
    """Experts that have gone from one group to another, all layers together."""


def local_experts(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Reads experts of which all layers have `num_local_experts`, whose shares add up to one."""
    num_experts, num_per_token = expert_numbers(fields, "num_local_experts")
    return ExpertsConfig((True,) * num_layers, num_experts, num_per_token, intermediate_size, normalizes=True)


def expert_numbers(fields: Fields, name: str) -> tuple[int, int]:
    """Returns how many experts there are, by the field of this name, and how many a token chooses."""
    num_experts, num_per_token = fields.size(name), fields.size("num_experts_per_tok")
    if num_per_token > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {num_per_token} is more than {name} {num_experts}, of which it chooses"
        )
    return num_experts, num_per_token
