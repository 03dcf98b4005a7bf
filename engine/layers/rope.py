"""Rotary position embeddings: frequencies as transformers computes them, tabulated once, applied in three operations.

Legend: P positions in the table, T tokens, H heads, D head_dim. Halves are rotated as in GPT-NeoX and Hugging Face's
checkpoints (dimension i pairs with i + D/2; `RopeConfig.head_order` brings others into that order). The papers:
RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from engine.models.config import RopeConfig


class RopeTable:
    """cos and sin of every position up to `length`, in the dtype the model computes in."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, scale = rope_frequencies(rope, rope.rotary_dim(head_dim))
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)  # [P, D/2], less where partial
        cos, sin = angles.cos() * scale, angles.sin() * scale
        rest = head_dim // 2 - angles.shape[1]
        cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
        self.cos = torch.cat([cos, cos], dim=-1).unsqueeze(1).to(device, dtype)  # [P, 1, D]
        self.sin = torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(device, dtype)  # [P, 1, D], signed for the rotation

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of [T] positions, to be passed to `rotate`: two of [T, 1, D]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(heads: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates [T, H, D] query or key heads by a table's rows."""
    cos, sin = rows
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of `head_dim` dimensions, float32 [D/2], and the factor on cos and sin.

    `dynamic` scales only beyond max_position_embeddings, which no sequence here exceeds, so that it equals `default`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.rope_theta**exponents)
    match rope.rope_type:
        case "default" | "dynamic":
            return plain, 1.0
        case "none":
            return plain[:0], 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, rope, head_dim), _yarn_attention_factor(rope)
        case "longrope":
            return 1.0 / (torch.tensor(rope.frequency_factors) * rope.rope_theta**exponents), _longrope_factor(rope)
    raise ValueError(f"rope_type {rope.rope_type!r} has no formula here")


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wave_lengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wave_lengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, slow ones interpolated, a ramp between."""

    def dimension_of(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _longrope_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
