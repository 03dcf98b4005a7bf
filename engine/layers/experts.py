"""The MLP of a layer that chooses among experts (arXiv 1701.06538), each of them sliced over the ranks like any MLP.

One grouped product where there is a kernel for it: Baton's own on a CPU, torch's on a GPU. Elsewhere experts are taken
one after another.

Legend: T tokens, E hidden_size, N experts, K experts that a token chooses, W width of an expert on this rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.checkpoint import TensorSlice
from engine.expert_placement import Move, Placement, Round
from engine.layers.expert_weights import InterleavedExperts, Plain, separate_expert, stacked_weights
from engine.layers.linear import Linear, Loader
from engine.layers.ops import clamped_mul
from engine.models.experts import ExpertNames, ExpertsConfig, Routing
from engine.native import Native
from engine.native.structures import CLAMPED, SILU, NativeExperts, NativeGate, NativeMatrix
from engine.quantization.interface import Give, Matrix, Rows, make_matrix, native_tiles
from engine.tp import ExpertSlices

Gated = Callable[[Tensor], Tensor]
"""The middle of a gated linear unit."""
_MULTIPLE = 8
"""Torch's grouped product takes sizes that are multiples of this: 16 bytes."""
_SMALLEST_SUM = 1e-20
"""Added to a sum of shares before they are divided by it, as transformers does."""


class Expert:
    """A gated linear unit of [T, E]: this rank's part of [T, E]."""

    def __init__(self, gate_up: Plain, down: Plain, gated: Gated) -> None:
        self.gate_up, self.down, self._gated = gate_up, down, gated

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._gated(self.gate_up(x)))


class SeparateExperts:
    """Experts that are multiplied with by themselves, in whatever form their weights are kept; where all are laid out
    for Baton's kernels, in one product."""

    def __init__(
        self, name: str, held: Sequence[int], sizes: tuple[int, int], config: ExpertsConfig, loader: Loader
    ) -> None:
        """`name`: what the tensors of all of them begin with; `held`: the numbers of those that this rank has."""
        gated = _gated(config, loader)
        if config.is_interleaved:
            stacked = InterleavedExperts(name, config, sizes, loader)
            self.experts = [Expert(*stacked.expert(n), gated) for n in held]
        else:
            self.experts = [Expert(*separate_expert(f"{name}.{n}", config.names, sizes, loader), gated) for n in held]
        self._by_number = dict(zip(held, self.experts, strict=True))
        self.native = _native(self._by_number, config, loader)
        """The experts as Baton's kernels read them; None: they do not."""

    @property
    def linears(self) -> Iterator[Linear]:
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def renew(self, place: int, give: Give) -> None:
        """The expert at a place becomes another one; `give` is called with each of its tensors (`Matrix.renew`)."""
        self.experts[place].gate_up.renew(give)
        self.experts[place].down.renew(give)

    def hold(self, held: Sequence[int]) -> None:
        """Says which expert is at each place, after some were renewed."""
        self._by_number = dict(zip(held, self.experts, strict=True))
        if self.native is not None:
            _set_places(self.native, held)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[T, E] through the experts `chosen`, int64 [T, K], times `shares`, float32 [T, K]: float32 [T, E]."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for number in sorted(set(chosen.flatten().tolist()) & self._by_number.keys()):
            rows, choice = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, self._by_number[number](x[rows]) * shares[rows, choice, None])
        return out


class StackedExperts:
    """Experts in one tensor, which torch multiplies with in groups of tokens, without waiting for the device."""

    native: NativeExperts | None = None
    linears: Sequence[Linear] = ()

    def __init__(
        self, name: str, held: Sequence[int], sizes: tuple[int, int], config: ExpertsConfig, loader: Loader
    ) -> None:
        """Raises ConfigError for what torch's grouped product does not take."""
        _check_grouped(sizes, loader)
        self._place: Tensor | None = None
        """int64 [N]: where an expert stands among those of this rank; those of other ranks stand behind all of them."""
        if len(held) < config.num_experts:
            self._place = torch.empty(config.num_experts, dtype=torch.int64, device=loader.device)
            self.hold(held)
        self._weights = stacked_weights(name, held, config, sizes, loader)
        self._gated = _gated(config, loader)

    def renew(self, place: int, give: Give) -> None:
        """Does what `SeparateExperts.renew` does."""
        self._weights.renew(place, give)

    def hold(self, held: Sequence[int]) -> None:
        """Says which expert is at each place, in the memory that CUDA graphs read."""
        if self._place is not None:
            places = torch.full(self._place.shape, len(held), dtype=torch.int64)
            places[list(held)] = torch.arange(len(held))
            self._place.copy_(places)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Computes what `SeparateExperts` computes."""
        weights, count = self._weights, len(self._weights.gate_up)
        place = chosen if self._place is None else self._place[chosen]
        experts, order = place.flatten().sort(stable=True)
        all_experts = torch.arange(count, device=x.device)
        ends = torch.searchsorted(experts, all_experts, right=True).int()
        gate_up = torch._grouped_mm(x[order // chosen.shape[1]], weights.gate_up.transpose(1, 2), offs=ends)
        if weights.gate_up_bias is not None:
            gate_up = gate_up + weights.gate_up_bias[experts.clamp(max=count - 1)]
        outputs = torch._grouped_mm(self._gated(gate_up), weights.down.transpose(1, 2), offs=ends)
        if weights.down_bias is not None:
            outputs = outputs + weights.down_bias[experts.clamp(max=count - 1)]
        of_choices = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*chosen.shape, -1)
        if self._place is not None:
            of_choices.masked_fill_((place == count).unsqueeze(-1), 0.0)
        return (of_choices * shares.unsqueeze(-1)).sum(dim=1)


class RoutedExperts:
    """Each token goes through the K experts that a router likes best, and their outputs add up by its shares."""

    takes_rounded = False
    """Whether what computes its input should round it: no, the router reads it as it is."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, layer: int, loader: Loader) -> None:
        """Raises ConfigError where nothing here multiplies with such weights."""
        name = f"model.layers.{layer}.{config.names.block}"
        self._config, self._tp, self._kernels = config, loader.tp, loader.kernels
        self.bias: Tensor | None = None
        """Float32 [N], added to the scores of experts for their choice."""
        if config.routing is not None and config.routing.has_bias:
            self.bias = torch.empty(config.num_experts, device=loader.device)
            part = TensorSlice(f"{name}.gate.e_score_correction_bias", (config.num_experts,))
            loader.checkpoint.read(part, self.bias)
        router = f"{name}.{config.names.router}"
        bias = TensorSlice(f"{router}.bias", (config.num_experts,))
        self.router = Plain(
            _unrounded(f"{router}.weight", (config.num_experts, hidden_size), loader),
            loader.stack([bias]) if config.has_biases else None,
        )
        kind = SeparateExperts if loader.device.type == "cpu" else StackedExperts
        self.group = config.group_of(loader.tp.rank, loader.tp.size)
        """This rank's group, of those that divide the experts."""
        self._placed: tuple[Placement, Tensor | None] = config.first_placement, None
        held = config.first_placement[self.group]
        sizes = hidden_size, config.intermediate_size
        self._slices = ExpertSlices(loader.tp, config.num_groups)
        self.experts = kind(f"{name}.experts", held, sizes, config, replace(loader, tp=self._slices))
        loader.checkpoint.leave(f"{name}.experts", set(range(config.num_experts)) - set(held))
        self.num_tokens = torch.zeros(config.num_experts, dtype=torch.int64, device=loader.device)
        """Tokens that each expert got, those of other ranks included; of CUDA graphs also what pads their steps."""
        if self.experts.native is not None:
            self.experts.native.tokens = self.num_tokens.data_ptr()
        self.shared: Expert | None = None
        """The expert that every token takes."""
        if config.shared_intermediate_size:
            sizes = hidden_size, config.shared_intermediate_size
            self.shared = Expert(
                *separate_expert(f"{name}.{config.names.shared}", ExpertNames(), sizes, loader), _gated(config, loader)
            )
        self.shared_gate: Plain | None = None
        if self.shared is not None and config.has_shared_gate:
            self.shared_gate = Plain(_unrounded(f"{name}.shared_expert_gate.weight", (1, hidden_size), loader))

    @property
    def placement(self) -> Placement:
        """The experts of each group, by their places there."""
        return self._placed[0]

    def group_tokens(self) -> list[int]:
        """Returns the tokens that each group's experts got since it has them."""
        placement, before = self._placed
        tokens = (self.num_tokens if before is None else self.num_tokens - before).tolist()
        return [sum(tokens[expert] for expert in held) for held in placement]

    def forms(self) -> list[str]:
        """Returns the shapes and types of each of this rank's experts. Only experts of one form can change places."""
        places = range(len(self.placement[self.group]))
        return [str([(tensor.dtype, tensor.shape) for tensor in self._tensors(place)]) for place in places]

    def move(self, rounds: Sequence[Round], placement: Placement) -> None:
        """Exchanges experts' weights with other groups, which leads to `placement`. Called by all ranks at once."""
        for moves in rounds:
            self._exchange(moves.get(self.group))
        self.experts.hold(placement[self.group])
        self._placed = placement, self.num_tokens.clone()

    def _exchange(self, move: Move | None) -> None:
        """Gives one expert and takes one, both from ranks that have the same slice; None: looks on."""
        slices, own = self._slices.size, self._tp.rank
        if move is None:
            self._tp.exchange(torch.empty(0, dtype=torch.uint8, device=self.num_tokens.device), own, own)
            return
        tensors = self._tensors(move.slot)
        sent = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors])
        ranks = [group * slices + self._slices.rank for group in (move.destination, move.source)]
        parts = iter(torch.split(self._tp.exchange(sent, *ranks), [tensor.nbytes for tensor in tensors]))
        self.experts.renew(move.slot, lambda tensor: next(parts).clone().view(tensor.dtype).view(tensor.shape))

    def _tensors(self, place: int) -> list[Tensor]:
        """The tensors of the expert at a place."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.experts.renew(place, note)
        return found

    @property
    def linears(self) -> Iterator[Linear]:
        """Yields the layers that kernels must be able to multiply with, to compute it all."""
        yield self.router
        yield from self.experts.linears
        if self.shared is not None:
            yield from (self.shared.gate_up, self.shared.down)
        if self.shared_gate is not None:
            yield self.shared_gate

    def __call__(self, x: Rows) -> Tensor:
        """[T, E] to [T, E]."""
        assert isinstance(x, Tensor), "the router reads tokens as they are"
        logits = self.router(x, torch.float32)
        shared = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x, torch.float32)
        if self.experts.native is not None and isinstance(self._kernels, Native):
            choice = None if self._config.routing is None else self._choose(logits)
            out = self._kernels.experts(x, logits, self.experts.native, shared, gate, choice)
        else:
            chosen, shares = self._choose(logits)
            self.num_tokens.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
            mixed = self.experts(x, chosen, shares)
            if shared is not None:
                mixed = mixed + (shared if gate is None else gate.sigmoid() * shared)
            out = mixed.to(x.dtype)
        self._tp.all_reduce(out)
        return out

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts, int64 [T, K], and their shares, float32 [T, K].

        Scores are computed in float64: in float32 their last bits depend on how many tokens there are.
        """
        routing, num_per_token = self._config.routing, self._config.num_per_token
        if routing is None:
            shares, chosen = logits.softmax(dim=-1).topk(num_per_token, dim=-1)
        else:
            scores = _scores(logits.double(), routing)
            ranked = scores if self.bias is None else scores + self.bias
            chosen = _within_groups(ranked, routing).topk(num_per_token, dim=-1).indices
            shares = scores.gather(1, chosen)
        if self._config.normalizes:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        return chosen, shares if routing is None else (shares * routing.scale).float()


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    return logits.softmax(dim=-1) if routing.scores == "softmax" else logits.sigmoid()


def _within_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Scores [T, N], minus infinity in the groups that a token does not choose among."""
    if routing.num_chosen_groups == routing.num_groups:
        return ranked
    groups = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)
    chosen = groups.topk(routing.num_summed, dim=-1).values.sum(dim=-1).topk(routing.num_chosen_groups, dim=-1).indices
    is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, chosen, False)
    left: Tensor = groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf"))
    return left.flatten(1)


def _gated(config: ExpertsConfig, loader: Loader) -> Gated:
    """[T, 2 W] to [T, W]."""
    gate, silu_mul = config.clamped_gate, loader.ops.silu_mul
    if gate is not None:
        return partial(clamped_mul, limit=gate.limit, alpha=gate.alpha)

    def gated(gate_up: Tensor) -> Tensor:
        middle = silu_mul(gate_up)
        assert isinstance(middle, Tensor), "nothing asked for rounded rows"
        return middle

    return gated


def _unrounded(name: str, shape: tuple[int, int], loader: Loader) -> Matrix:
    """A weight that every rank has whole, and that is never rounded to fewer bits."""
    return make_matrix(loader.stack([TensorSlice(name, shape)]), loader.kernels)


def _native(held: Mapping[int, Expert], config: ExpertsConfig, loader: Loader) -> NativeExperts | None:
    """Returns the experts for Baton's kernels; None where some weights are not laid out for those, or another type is
    computed in."""
    if loader.dtype != torch.bfloat16:
        return None
    sides = []
    experts = held.values()
    for linears in ([expert.gate_up for expert in experts], [expert.down for expert in experts]):
        tiles = [native_tiles(linear.matrix) for linear in linears]
        # Tokens are rounded for all experts alike: none may have an order of its own.
        if not all(tile is not None and tile.order is None for tile in tiles):
            return None
        if len({(tile.kind, tile.group) for tile in tiles if tile is not None}) > 1:
            return None
        sides.append(
            (NativeMatrix * len(tiles))(
                *[
                    NativeMatrix(weight=tile.weight, bias=None if linear.bias is None else linear.bias.data_ptr())
                    for tile, linear in zip(tiles, linears, strict=True)
                    if tile is not None
                ]
            )
        )
    gate = config.clamped_gate
    gating = NativeGate(SILU) if gate is None else NativeGate(CLAMPED, gate.limit, gate.alpha)
    places = (ctypes.c_int32 * config.num_experts)()
    native = NativeExperts(*sides, config.num_experts, config.num_per_token, config.normalizes, gating, places)
    _set_places(native, tuple(held))
    return native


def _set_places(native: NativeExperts, held: Sequence[int]) -> None:
    order = {number: place for place, number in enumerate(held)}
    for number in range(native.count):
        native.places[number] = order.get(number, -1)


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
            f"on a GPU torch multiplies multiples of {_MULTIPLE}: set a smaller tensor_parallel, or "
            "a larger expert_parallel"
        )
