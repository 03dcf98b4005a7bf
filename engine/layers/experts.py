"""The MLP of a layer that chooses among experts (arXiv 1701.06538), each of them sliced over the ranks like any MLP.

One grouped product where there is a kernel for it: Baton's own on a CPU, torch's on a GPU. Elsewhere experts are taken
one after another.

Legend: T tokens, E hidden_size, N experts, K experts that a token chooses, W width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.checkpoint import TensorSlice
from engine.layers.linear import Linear, Loader, multiply
from engine.models.experts import ExpertNames, ExpertsConfig
from engine.native import Native
from engine.native.structures import NativeExperts, NativeMatrix
from engine.quantization.interface import Matrix, Rows, make_matrix, native_tiles

_MULTIPLE = 8
"""Of which torch's grouped product takes sizes: 16 bytes."""


class Plain:
    """A matrix without a bias."""

    bias: Tensor | None = None

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return multiply(self.matrix, x, dtype=dtype)


class Expert:
    """SwiGLU of [T, E]: this rank's part of [T, E]."""

    def __init__(self, name: str, names: ExpertNames, sizes: tuple[int, int], loader: Loader) -> None:
        gate, up, down = _slices(name, names, sizes, loader)
        self.gate_up, self.down = Plain(loader.linear([gate, up])), Plain(loader.linear([down]))
        self._ops = loader.ops

    def __call__(self, x: Tensor) -> Tensor:
        hidden = self._ops.silu_mul(self.gate_up(x))
        assert isinstance(hidden, Tensor), "nothing asked for rounded rows"
        return self.down(hidden)


class SeparateExperts:
    """Experts that are multiplied with by themselves, in whatever form their weights are kept; where all are laid out
    for Baton's kernels, in one product."""

    def __init__(self, names: Sequence[str], sizes: tuple[int, int], config: ExpertsConfig, loader: Loader) -> None:
        self.experts = [Expert(name, config.names, sizes, loader) for name in names]
        self.native = _native(self.experts, config, loader)
        """As Baton's kernels read them; None: they do not."""

    @property
    def linears(self) -> Iterator[Linear]:
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[T, E] through the experts `chosen`, int64 [T, K], times `shares`, float32 [T, K]: float32 [T, E]."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.experts[expert](x[rows]) * shares[rows, choice, None])
        return out


class StackedExperts:
    """Experts in one tensor, which torch multiplies with in groups of tokens, without waiting for the device."""

    native: NativeExperts | None = None
    linears: Sequence[Linear] = ()

    def __init__(self, names: Sequence[str], sizes: tuple[int, int], config: ExpertsConfig, loader: Loader) -> None:
        """Raises ConfigError for what torch's grouped product does not take."""
        _check_grouped(sizes, loader)
        experts = [_slices(name, config.names, sizes, loader) for name in names]
        gate_up = loader.stack([part for gate, up, _ in experts for part in (gate, up)])
        down = loader.stack([down for *_, down in experts])
        self._gate_up = gate_up.view(len(experts), -1, gate_up.shape[1])  # [N, 2 W, E]
        self._down = down.view(len(experts), -1, down.shape[1])  # [N, E, W]
        self._ops = loader.ops

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """As of `SeparateExperts`."""
        experts, order = chosen.flatten().sort(stable=True)
        all_experts = torch.arange(len(self._gate_up), device=x.device)
        ends = torch.searchsorted(experts, all_experts, right=True).int()
        gate_up = torch._grouped_mm(x[order // chosen.shape[1]], self._gate_up.transpose(1, 2), offs=ends)
        middle = self._ops.silu_mul(gate_up)
        assert isinstance(middle, Tensor), "nothing asked for rounded rows"
        outputs = torch._grouped_mm(middle, self._down.transpose(1, 2), offs=ends)
        of_choices = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*chosen.shape, -1)
        return (of_choices * shares.unsqueeze(-1)).sum(dim=1)


class RoutedExperts:
    """Each token goes through the K experts that a router likes best, and their outputs add up by its shares."""

    takes_rounded = False
    """Whether what computes its input should round it: no, the router reads it as it is."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, layer: int, loader: Loader) -> None:
        """Raises ConfigError where nothing here multiplies with such weights."""
        name = f"model.layers.{layer}.{config.names.block}"
        self._config, self._tp, self._kernels = config, loader.tp, loader.kernels
        self.router = Plain(_unrounded(f"{name}.gate.weight", (config.num_experts, hidden_size), loader))
        kind = SeparateExperts if loader.device.type == "cpu" else StackedExperts
        names = [f"{name}.experts.{n}" for n in range(config.num_experts)]
        self.experts = kind(names, (hidden_size, config.intermediate_size), config, loader)
        self.shared: Expert | None = None
        """The expert that every token takes."""
        if config.shared_intermediate_size:
            sizes = hidden_size, config.shared_intermediate_size
            self.shared = Expert(f"{name}.shared_expert", ExpertNames(), sizes, loader)
            self.shared_gate = Plain(_unrounded(f"{name}.shared_expert_gate.weight", (1, hidden_size), loader))

    @property
    def linears(self) -> Iterator[Linear]:
        """Those that kernels must be able to multiply with, to compute it all."""
        yield self.router
        yield from self.experts.linears
        if self.shared is not None:
            yield from (self.shared.gate_up, self.shared.down, self.shared_gate)

    def __call__(self, x: Rows) -> Tensor:
        """[T, E] to [T, E]."""
        assert isinstance(x, Tensor), "the router reads tokens as they are"
        logits = self.router(x, torch.float32)
        shared = gate = None
        if self.shared is not None:
            shared, gate = self.shared(x), self.shared_gate(x, torch.float32)
        if self.experts.native is not None and isinstance(self._kernels, Native):
            out = self._kernels.experts(x, logits, self.experts.native, shared, gate)
        else:
            mixed = self.experts(x, *self._choose(logits))
            out = (mixed if shared is None or gate is None else mixed + gate.sigmoid() * shared).to(x.dtype)
        self._tp.all_reduce(out)
        return out

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts, int64 [T, K], and their shares, float32 [T, K]."""
        shares, chosen = logits.softmax(dim=-1).topk(self._config.num_per_token, dim=-1)
        if self._config.normalizes:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares


def _slices(name: str, names: ExpertNames, sizes: tuple[int, int], loader: Loader) -> Sequence[TensorSlice]:
    """This rank's rows of an expert's gate and up, and columns of its down; `sizes` are those of input and middle."""
    hidden, inner = sizes
    own = loader.equal_share(inner)
    rows = [
        TensorSlice(f"{name}.{part}.weight", (inner, hidden), 0, own.start, own.stop) for part in (names.gate, names.up)
    ]
    return *rows, TensorSlice(f"{name}.{names.down}.weight", (hidden, inner), 1, own.start, own.stop)


def _unrounded(name: str, shape: tuple[int, int], loader: Loader) -> Matrix:
    """A weight that every rank has whole, and that is never rounded to fewer bits."""
    return make_matrix(loader.stack([TensorSlice(name, shape)]), loader.kernels)


def _native(experts: Sequence[Expert], config: ExpertsConfig, loader: Loader) -> NativeExperts | None:
    """None where some weights are not laid out for Baton's kernels, or they compute in another type."""
    if loader.dtype != torch.bfloat16:
        return None
    sides = []
    for linears in ([expert.gate_up for expert in experts], [expert.down for expert in experts]):
        tiles = [native_tiles(linear.matrix) for linear in linears]
        if None in tiles or len({(tile.kind, tile.group) for tile in tiles if tile is not None}) > 1:
            return None
        sides.append(
            (NativeMatrix * len(tiles))(*[NativeMatrix(weight=tile.weight) for tile in tiles if tile is not None])
        )
    return NativeExperts(*sides, len(experts), config.num_per_token, config.normalizes)


def _check_grouped(sizes: tuple[int, int], loader: Loader) -> None:
    for is_refused, remedy in (
        (loader.quantization != "none", f"model.quantization: {loader.quantization} to none"),
        (loader.packing is not None, "model.path to a checkpoint that is not packed"),
        (loader.dtype != torch.bfloat16, "model.dtype to bfloat16"),
        (loader.kernels is not None and loader.kernels.is_fixed, "engine.deterministic to false"),
    ):
        if is_refused:
            raise ConfigError(f"experts on a GPU are multiplied by torch, in bfloat16 only: set {remedy}")
    hidden, inner = sizes[0], sizes[1] // loader.tp.size
    if hidden % _MULTIPLE or inner % _MULTIPLE:
        raise ConfigError(
            f"tensor_parallel: {loader.tp.size} leaves each rank {inner} columns of an expert, over {hidden} inputs; "
            f"on a GPU torch multiplies multiples of {_MULTIPLE}: set a smaller tensor_parallel"
        )
