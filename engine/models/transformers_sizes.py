"""The sizes of a model that transformers' own modelling code computes, as a trial of that code found them.

Knows no weights and loads no torch; `engine.models.shapes` makes one rank's matrices of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ForeignMatrix:
    """Equal weights [O, I] of the layers. Sizes are of the whole model."""

    num_outputs: int
    num_inputs: int
    count: int
    """The number of them, in all layers; each expert counts."""
    split: Literal["outputs", "inputs", ""] = ""
    """The dimension that tensor-parallel ranks divide; empty: each holds the whole."""
    is_linear: bool = True
    """Whether Baton multiplies with it, in any form; elsewhere transformers does, with the plain weight."""
    is_expert: bool = False
    """Whether a token is multiplied with those of its experts only."""


@dataclass(frozen=True)
class ForeignModel:
    """The part of `ModelConfig` that only such a model has."""

    matrices: tuple[ForeignMatrix, ...]
    num_vector_elements: int
    """Elements of norms, biases, tables and small matrices, such as routers'; each rank holds all of them."""
    divided_sizes: tuple[int, ...]
    """Sizes that the ranks divide, besides heads."""
    layer_kinds: tuple[int, ...]
    """For each layer a number, equal for layers that compute the same."""
    tp_obstacle: str = ""
    """The reason why several ranks cannot hold the model, or nothing."""
