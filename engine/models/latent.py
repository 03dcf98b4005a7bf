"""Latent attention as config.json describes it, and how a model's ranks divide what it keeps.

Knows no weights and loads no torch; `engine.layers.latent` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_EXPANDED = 1 << 26
"""Elements of keys, and as many of values, that are made of latents at a time, unless one head has more."""


@dataclass(frozen=True)
class LatentConfig:
    """Attention whose keys and values are made of one latent for all heads (MLA, arXiv 2405.04434), which is kept.

    The latent is the first `kv_lora_rank` of a token's `head_dim` values; behind it lies the part of all keys that is
    turned by rope.
    """

    q_lora_rank: int | None
    """Width that queries are made of; None: they are made of the layer's input."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_shares: int = 1
    """Ranks that each keep an equal run of every block's tokens; 1: each rank keeps all of them."""

    @property
    def width(self) -> int:
        """Values that a layer keeps of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def made_dim(self) -> int:
        """Values of a head that are made of a latent: the part of its key that is not turned, and its value."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def expanded_dim(self) -> int:
        """Dimensions of a key, and of a value, that are made of a latent: the narrower is padded."""
        return max(self.qk_head_dim, self.v_head_dim)

    def heads_at_once(self, num_keys: int, num_heads: int) -> int:
        """Heads of which keys and values are made at a time, of so many that a rank has."""
        return min(num_heads, max(1, _MAX_EXPANDED // (num_keys * self.expanded_dim)))
