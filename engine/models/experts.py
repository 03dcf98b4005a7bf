"""Layers that choose among experts, as config.json describes them: how many, how large, and how a token chooses.

Knows no weights and loads no torch; `engine.layers.experts` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import CheckpointError
from engine.json_fields import Fields


@dataclass(frozen=True)
class ExpertNames:
    """What tensors of experts are called in a checkpoint, below `model.layers.N`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


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
    """Of the expert that every token takes, times a gate of its own; 0: there is none."""
    names: ExpertNames = ExpertNames()

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    def chosen_share(self, num_tokens: int) -> float:
        """Returns the share of a layer's experts that as many tokens choose, if each chooses evenly and by itself."""
        return 1.0 - (1.0 - self.num_per_token / self.num_experts) ** num_tokens


def no_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    return None


def mixtral_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """In all layers. Raises CheckpointError naming the field."""
    num_experts, num_per_token = _numbers(fields, "num_local_experts")
    return ExpertsConfig(
        layers=(True,) * num_layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=fields.size("intermediate_size"),
        normalizes=True,
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )


def qwen2_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """Those of `qwen_experts`, beside one that every token takes."""
    return qwen_experts(fields, num_layers, fields.size("shared_expert_intermediate_size"))


def qwen_experts(fields: Fields, num_layers: int, shared_intermediate_size: int = 0) -> ExpertsConfig | None:
    """In each `decoder_sparse_step`th layer that `mlp_only_layers` does not name. Raises CheckpointError naming the
    field."""
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layers (got {dense!r})")
    step = fields.size("decoder_sparse_step", 1)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(layers):
        return None
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"  # transformers 4, or 5
    num_experts, num_per_token = _numbers(fields, name)
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=fields.size("moe_intermediate_size"),
        normalizes=fields.flag("norm_topk_prob"),
        shared_intermediate_size=shared_intermediate_size,
    )


def _numbers(fields: Fields, name: str) -> tuple[int, int]:
    """Experts that there are, and that a token chooses."""
    num_experts, num_per_token = fields.size(name), fields.size("num_experts_per_tok")
    if num_per_token > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {num_per_token} is more than {name} {num_experts}, of which it chooses"
        )
    return num_experts, num_per_token
