"""Layers that keep a recurrent state by the gated delta rule, as config.json describes them: which, and their sizes.

Knows no weights and loads no torch; `engine.layers.delta_net` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import CheckpointError
from cluster.kv_groups import StateShape
from engine.json_fields import Fields


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta-net layers of one model. Sizes are of the whole model; ranks share out the key heads."""

    layers: tuple[bool, ...]
    """For each layer, whether it keeps a state; the others attend."""
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Inputs that the convolution before the rule reaches over, the token's own included."""

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def values_per_key(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def head_channels(self) -> int:
        """Inputs of the convolution for one key head: query, key and values."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim

    @property
    def head_outputs(self) -> int:
        """Outputs of the projections for one key head: the convolution's inputs, and of each of its value heads a gate,
        beta and the decay's argument."""
        return self.head_channels + self.values_per_key * (self.value_head_dim + 2)

    @property
    def matrix_elements(self) -> int:
        """Elements of the rule's matrices, all heads of one layer."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def state(self) -> StateShape:
        """The rule's matrices, and the last inputs of the convolution."""
        matrices = self.values_per_key * self.key_head_dim * self.value_head_dim
        return StateShape(self.num_key_heads, (matrices, self.head_channels * (self.conv_kernel - 1)))


def read_delta_net(fields: Fields, layers: tuple[bool, ...]) -> DeltaNetConfig:
    """Raises CheckpointError naming the field."""
    config = DeltaNetConfig(
        layers=layers,
        num_key_heads=fields.size("linear_num_key_heads", 16),
        num_value_heads=fields.size("linear_num_value_heads", 32),
        key_head_dim=fields.size("linear_key_head_dim", 128),
        value_head_dim=fields.size("linear_value_head_dim", 128),
        conv_kernel=fields.size("linear_conv_kernel_dim", 4),
    )
    if config.num_value_heads % config.num_key_heads:
        raise CheckpointError(
            f"config.json: linear_num_key_heads {config.num_key_heads} does not divide "
            f"linear_num_value_heads {config.num_value_heads}"
        )
    if config.conv_kernel < 2:
        raise CheckpointError(
            f"config.json: linear_conv_kernel_dim {config.conv_kernel} is not supported; Baton computes 2 and more"
        )
    return config
