"""The keys of each role: its workers, and where they differ from `model`, `placement` and `engine`.

What a role leaves null is as those sections say. Conditions between the two roles are in `cluster.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cluster.config.overrides import RoleOverrides
from cluster.config.read import ROLLING, RUN_TIME, bounded
from cluster.config.workers import EngineSection, ModelSection, PlacementSection

RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)
SHORT_NAMES = ("block_size", "kv_cache_tokens")
"""Keys of `engine` that a role may set by their names alone, too."""


class ModelOverrides(RoleOverrides, of=ModelSection, at="model"):
    """Says what the weights of the role's workers are served as. Where the roles differ in it, the prompt and the first
    token are computed with prefill's weights, and the rest with decode's."""


class PlacementOverrides(RoleOverrides, of=PlacementSection, at="placement"):
    """Says on which of Ray's nodes the role's workers are."""


class EngineOverrides(RoleOverrides, of=EngineSection, at="engine"):
    """How the role's workers run the model."""


@dataclass(frozen=True)
class RoleSection:
    """The workers of one role: devices / tensor_parallel of them."""

    devices: int = bounded(1, at_least=0, at_most=65_536, is_run_time=True)
    """Devices (GPUs, or CPU ranks) that this role uses in all. 0 for prefill: decode workers compute prompts as well,
    and nothing is handed off; that serves more on a single device."""
    tensor_parallel: int = bounded(1, at_least=1, at_most=1024, is_run_time=True)
    """Devices of one worker; must divide `devices`."""
    expert_parallel: int = bounded(1, at_least=1, at_most=1024, is_run_time=True)
    """Groups of a worker's devices among which the experts of a model are divided whole; each expert is sliced over the
    devices of its group. Must divide `tensor_parallel`; 1: every expert is sliced over all of them."""
    split_latents: bool = field(default=False, metadata=RUN_TIME)
    """Each of a worker's devices keeps an equal part of every block's tokens, which it can of models that keep latents
    (MLA) alone: else all of them keep the same. For 1 / `tensor_parallel` of the memory a generated token's queries and
    what they find are exchanged in each layer. `tensor_parallel` must divide the block size."""
    min_workers: int = bounded(1, at_least=0, at_most=65_536, is_run_time=True)
    """A change of the ratio never leaves fewer workers than this."""
    block_size: int | None = bounded(None, at_least=1, at_most=4096, is_run_time=True)
    """The role's `engine.block_size`, by a shorter name; null: what that says."""
    kv_cache_tokens: int | None = bounded(None, at_least=1, at_most=2**40, is_run_time=True)
    """The role's `engine.kv_cache_tokens`, by a shorter name; null: what that says."""
    model: ModelOverrides = field(default_factory=ModelOverrides, metadata=ROLLING)
    """What its weights are served as."""
    placement: PlacementOverrides = field(default_factory=PlacementOverrides)
    """On which nodes its workers are."""
    engine: EngineOverrides = field(default_factory=EngineOverrides, metadata=ROLLING)
    """How its workers run the model."""

    @property
    def num_workers(self) -> int:
        return self.devices // self.tensor_parallel

    def engine_over(self, common: EngineSection) -> EngineSection:
        """Returns the engine settings of this role's workers."""
        short: dict[str, Any] = {name: getattr(self, name) for name in SHORT_NAMES if getattr(self, name) is not None}
        return self.engine.over(replace(common, **short))


@dataclass(frozen=True)
class RolesSection:
    """How the devices are split between computing prompts and generating tokens."""

    prefill: RoleSection = field(default_factory=RoleSection)
    """Workers that compute prompts."""
    decode: RoleSection = field(default_factory=RoleSection)
    """Workers that generate tokens."""
