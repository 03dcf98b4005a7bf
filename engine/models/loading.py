"""Loads a model: Baton's own decoder, or transformers' modelling code where `ModelConfig.foreign` says so."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

import torch

from engine.layers.linear import Loader
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Hidden, StepContext
from engine.models.tensors import unused_endings
from engine.tp import TPGroup


class Model(Protocol):
    """A model that a runner runs: `Decoder`, or one of transformers' own code."""

    @property
    def tp(self) -> TPGroup: ...

    def only(self, layers: Sequence[int]) -> Self:
        """The model without its other layers, sharing the weights."""
        ...

    def __call__(self, token_ids: torch.Tensor, context: StepContext) -> Hidden:
        """Runs [T] ids through all layers, which write their KV."""
        ...

    def logits(self, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of [R] rows of a step; `hidden` is not changed."""
        ...


def load_model(config: ModelConfig, folder: Path, loader: Loader, report: Callable[[str], None]) -> Model:
    """Raises CheckpointError for what is missing or left over."""
    checkpoint = loader.checkpoint
    model: Model
    if config.foreign is None:
        model = Decoder(config, loader, report)
    else:
        code = importlib.import_module("engine.models.transformers_model")  # needs transformers
        model = foreign = code.TransformersModel(config, folder, loader, report)
        checkpoint.discard(foreign.unused_tensors)
    if config.packing is not None:
        checkpoint.discard_zeros(".bias")  # which some writers add to every packed layer
    checkpoint.check_all_read(unused_endings(config), config.left_out)
    if num_unused := checkpoint.num_unread(config.left_out):
        names = " and ".join(f"{name}*" for name in config.left_out)
        report(f"{num_unused} tensors of {names} are left out: layers that predict several tokens are not used")
    return model
