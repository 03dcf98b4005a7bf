"""The weights of transformers' modelling code in a checkpoint: under its names, renamed, or to be put together.

transformers renames tensors of a checkpoint as it loads them, and makes one parameter of several: of experts, mostly.
This follows its rules, so that a slice that is under one name is read alone; what is put together is made whole, one
parameter at a time, and cut afterwards. Knows no modules and no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from engine.checkpoint import Checkpoint, TensorSlice


class ForeignWeights:
    """The tensors of one checkpoint, by the names that parameters have in a model."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._names: dict[str, str] = {}
        """The tensor that is a parameter, where it is called otherwise."""
        self._made: dict[str, Any] = {}
        """The converter that makes a parameter of tensors; one object for all parameters that it makes at once."""
        self._ready: dict[str, torch.Tensor] = {}
        """Parameters that were made and not asked for yet."""
        self._find(model.state_dict())

    def _find(self, parameters: dict[str, torch.Tensor]) -> None:
        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix = self._model.base_model_prefix
        for name in sorted(self._checkpoint.names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
            if target not in parameters and name in parameters:
                target, pattern = name, None
            if target not in parameters:
                continue
            if pattern is None:
                self._names[target] = name
                continue
            maker = self._made.setdefault(target, deepcopy(by_pattern[pattern]))
            maker.add_tensor(target, name, pattern, lambda name=name: self._whole(name))
        for maker in {id(maker): maker for maker in self._made.values()}.values():
            for other in _other_targets(maker):
                if other in parameters:
                    self._made[other] = maker

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._names or parameter in self._made

    def is_tensor(self, parameter: str) -> bool:
        """Whether it is read as it lies there; also if it is not there, which reading it says."""
        return parameter not in self._made

    def tensor_name(self, parameter: str) -> str:
        return self._names.get(parameter, parameter)

    def read(self, parts: Sequence[TensorSlice], dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Slices of one parameter, by its name in the model, one after another along `dim`. Raises CheckpointError."""
        name = parts[0].name
        if self.is_tensor(name):
            pieces = [torch.empty(part.local_shape, dtype=dtype, device=device) for part in parts]
            for part, piece in zip(parts, pieces, strict=True):
                self._checkpoint.read(replace(part, name=self.tensor_name(name)), piece)
        else:
            whole = self._make(name)
            pieces = [whole.narrow(part.dim, part.start, part.local_shape[part.dim]) for part in parts]
            pieces = [piece.to(device=device, dtype=dtype) for piece in pieces]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=dim)

    def _make(self, parameter: str) -> torch.Tensor:
        if parameter not in self._ready:
            made = self._made[parameter].convert(parameter, model=self._model, config=self._model.config)
            self._ready |= {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return self._ready.pop(parameter)

    def _whole(self, name: str) -> torch.Tensor:
        part = TensorSlice(name, self._checkpoint.shape_of(name))
        out = torch.empty(part.shape, dtype=self._model.dtype)
        self._checkpoint.read(part, out)
        return out


def _other_targets(maker: Any) -> list[str]:
    """The parameters that a converter makes beside the first."""
    first = next(iter(maker.layer_targets))
    head, *rest = maker.target_patterns
    return [first.replace(head, other) for other in rest]
