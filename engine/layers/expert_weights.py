"""Reads the weights of a layer's experts, sliced over the ranks: each in tensors of its own, or all in one tensor for
each matrix, gate and up in turn (gpt-oss), plain or in MXFP4.

Either way a rank has its rows of gate and then those of up, and its columns of down; the bias of down is the first
rank's, since the ranks' outputs are added up.

Legend: N experts, E hidden_size, W width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checkpoint import TensorSlice
from engine.layers.linear import Loader, multiply
from engine.models.experts import ExpertNames, ExpertsConfig
from engine.quantization.integers import Quantized, make_quantized
from engine.quantization.interface import Give, Matrix, renew
from engine.quantization.microscaled import decode_expert, read_expert
from engine.quantization.stored import Microscaling


class Plain:
    """A matrix of one rank, and its bias, if any."""

    def __init__(self, matrix: Matrix, bias: Tensor | None = None) -> None:
        self.matrix, self.bias = matrix, bias

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return multiply(self.matrix, x, self.bias, dtype)

    def renew(self, give: Give) -> None:
        """Becomes another one of the same form (`Matrix.renew`)."""
        self.matrix.renew(give)
        renew(give, self.bias)


def separate_expert(name: str, names: ExpertNames, sizes: tuple[int, int], loader: Loader) -> tuple[Plain, Plain]:
    """An expert's gate with up, and down; `sizes` are those of input and middle."""
    gate, up, down = _slices(name, names, sizes, loader)
    return Plain(loader.linear([gate, up])), Plain(loader.linear([down]))


@dataclass(frozen=True)
class StackedWeights:
    """Weights of a rank's experts in the model's type, N of them."""

    gate_up: Tensor  # [N, 2 W, E]
    down: Tensor  # [N, E, W]
    gate_up_bias: Tensor | None  # [N, 2 W]
    down_bias: Tensor | None  # [N, E]

    def renew(self, place: int, give: Give) -> None:
        """The expert at a place becomes another one (`Matrix.renew`)."""
        stacks = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        renew(give, *(None if stack is None else stack[place] for stack in stacks))


def stacked_weights(
    name: str, held: Sequence[int], config: ExpertsConfig, sizes: tuple[int, int], loader: Loader
) -> StackedWeights:
    """Reads this rank's experts, `held`, of the layer whose experts' tensors begin with `name`."""
    count = len(held)
    if not config.is_interleaved:
        experts = [_slices(f"{name}.{n}", config.names, sizes, loader) for n in held]
        gate_up = loader.stack([part for gate, up, _ in experts for part in (gate, up)])
        down = loader.stack([down for *_, down in experts])
        return StackedWeights(gate_up.view(count, -1, sizes[0]), down.view(count, sizes[0], -1), None, None)
    experts_of = InterleavedExperts(name, config, sizes, loader)
    biases = [experts_of.biases(n) for n in held]
    gate_up, down = (
        torch.stack([_numbers(read(n), loader.dtype) for n in held]) for read in (experts_of.gate_up, experts_of.down)
    )
    return StackedWeights(gate_up, down, *(_stack([pair[side] for pair in biases]) for side in (0, 1)))


class InterleavedExperts:
    """All experts of a layer in one tensor for each matrix."""

    def __init__(self, name: str, config: ExpertsConfig, sizes: tuple[int, int], loader: Loader) -> None:
        self._name, self._config, self._loader = name, config, loader
        self._hidden, self._inner = sizes
        self._own = loader.equal_share(self._inner)

    def expert(self, n: int) -> tuple[Plain, Plain]:
        """Gate with up, and down, as they are multiplied with."""
        loader, (of_gate_up, of_down) = self._loader, self.biases(n)
        gate_up, down = (
            make_quantized(weight, loader.kernels) if isinstance(weight, Quantized) else loader.matrix(weight)
            for weight in (self.gate_up(n), self.down(n))
        )
        return Plain(gate_up, of_gate_up), Plain(down, of_down)

    def gate_up(self, n: int) -> Tensor | Quantized:
        """[2 W, E]"""
        columns = 2 * self._own.start, 2 * self._own.stop
        found = self._read("gate_up_proj", n, (2 * self._inner, self._hidden), 0, *columns)
        if isinstance(found, Quantized):
            return replace(found, data=_in_halves(found.data), scales=_in_halves(found.scales))
        return _in_halves(found)

    def down(self, n: int) -> Tensor | Quantized:
        """[E, W]"""
        return self._read("down_proj", n, (self._hidden, self._inner), 1, self._own.start, self._own.stop)

    def biases(self, n: int) -> tuple[Tensor | None, Tensor | None]:
        """[2 W] and [E]"""
        if not self._config.has_biases:
            return None, None
        loader, stack = self._loader, (n, self._config.num_experts)
        columns = 2 * self._own.start, 2 * self._own.stop
        of_gate_up = TensorSlice(f"{self._name}.gate_up_proj_bias", (2 * self._inner,), 0, *columns, stack)
        of_down = loader.stack([TensorSlice(f"{self._name}.down_proj_bias", (self._hidden,), stack=stack)])
        return _in_halves(loader.stack([of_gate_up])), of_down if loader.tp.rank == 0 else None

    def _read(self, what: str, n: int, shape: tuple[int, int], dim: int, start: int, stop: int) -> Tensor | Quantized:
        """A slice of a weight [outputs, inputs]."""
        loader, stack = self._loader, (n, self._config.num_experts)
        part = TensorSlice(f"{self._name}.{what}", shape, dim, start, stop, stack)
        if not isinstance(loader.packing, Microscaling):
            inputs_first = replace(part, shape=shape[::-1], dim=1 - dim)
            return loader.stack([inputs_first]).T.contiguous()
        if loader.keeps_codes and loader.packing.can_keep(part.local_shape[1]):
            return read_expert(loader.checkpoint, part, loader.device)
        return decode_expert(loader.checkpoint, part, loader.device, loader.dtype)


def _slices(name: str, names: ExpertNames, sizes: tuple[int, int], loader: Loader) -> Sequence[TensorSlice]:
    """This rank's rows of an expert's gate and up, and columns of its down; `sizes` are those of input and middle."""
    hidden, inner = sizes
    own = loader.equal_share(inner)
    rows = [
        TensorSlice(f"{name}.{part}.weight", (inner, hidden), 0, own.start, own.stop) for part in (names.gate, names.up)
    ]
    return *rows, TensorSlice(f"{name}.{names.down}.weight", (hidden, inner), 1, own.start, own.stop)


def _in_halves(rows: Tensor) -> Tensor:
    """Every other row, then the rest."""
    return torch.cat((rows[0::2], rows[1::2]))


def _numbers(weight: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, Quantized) else weight


def _stack(rows: Sequence[Tensor | None]) -> Tensor | None:
    found = [row for row in rows if row is not None]
    return torch.stack(found) if found else None
