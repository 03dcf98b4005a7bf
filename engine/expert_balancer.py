"""Moves experts between the groups of a worker's ranks while it serves, so that no group has more to do than others.

Each rank has one, which counts the tokens of its steps; every rank runs the same steps, so all look at the load at the
same one. The load is what rank 0 has counted since the last look, and `engine.expert_placement` makes a placement of
it for each layer. One layer is moved before each of the steps that follow, so that none waits for more than that.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Mapping
from statistics import fmean

import torch

from cluster.errors import ConfigError
from engine.expert_placement import even_groups, imbalance, rounds_to
from engine.layers.experts import RoutedExperts
from engine.tp import TPGroup

logger = logging.getLogger(__name__)

_LEAST_GAIN = 0.05
"""A layer is left as it is if its busiest group would not get less by this share: less is within the noise of a look,
and would be moved back by the next one."""


class ExpertBalancer:
    """Looks every `interval` tokens."""

    def __init__(self, mlps: Mapping[int, RoutedExperts], tp: TPGroup, interval: int) -> None:
        """`mlps`: the layers with experts, by number. Called on every rank at once. Raises ConfigError, on every rank
        alike, for experts that cannot change places."""
        self.num_moved = 0
        """Experts that have gone from one group to another."""
        self._mlps, self._tp, self._interval = mlps, tp, interval
        self._num_tokens = 0
        self._before = {number: torch.zeros_like(mlp.num_tokens) for number, mlp in mlps.items()}
        self._loads: dict[int, list[int]] = {}
        """The loads of layers that this look has not come to."""
        self._gains: list[tuple[float, float]] = []
        self._moved_by_look, self._spent_s = 0, 0.0
        self._check_forms()

    def before_step(self, num_tokens: int) -> None:
        """Moves a layer's experts, if there is one to be moved. Called on every rank before each step, of this size."""
        if self._loads:
            number, loads = self._loads.popitem()
            self._place(self._mlps[number], loads)
            if not self._loads:
                self._report()
        elif self._num_tokens >= self._interval:
            self._num_tokens = 0
            self._look()
        self._num_tokens += num_tokens

    def _look(self) -> None:
        counts = torch.stack([mlp.num_tokens for mlp in self._mlps.values()])
        self._tp.broadcast(counts)
        new = (counts - torch.stack(list(self._before.values()))).tolist()
        self._before = dict(zip(self._mlps, counts, strict=True))
        self._loads = dict(zip(self._mlps, new, strict=True))

    def _place(self, mlp: RoutedExperts, loads: list[int]) -> None:
        groups = even_groups(loads, mlp.placement)
        uneven, even = imbalance(loads, mlp.placement), imbalance(loads, groups)
        if even > uneven * (1 - _LEAST_GAIN):
            return
        began = time.perf_counter()
        rounds, placement = rounds_to(groups, mlp.placement)
        mlp.move(rounds, placement)
        self._spent_s += time.perf_counter() - began
        self._moved_by_look += sum(map(len, rounds))
        self.num_moved += sum(map(len, rounds))
        self._gains.append((uneven, even))

    def _report(self) -> None:
        if self._gains and self._tp.rank == 0:
            before, after = (fmean(side) for side in zip(*self._gains, strict=True))
            logger.info(
                "experts of %d of %d layers placed anew by load: %d moved, in %.3f s; the busiest group of ranks had "
                "%.2f of the mean there, and has %.2f of the same tokens now",
                *(len(self._gains), len(self._mlps), self._moved_by_look, self._spent_s, before, after),
            )
        self._gains, self._moved_by_look, self._spent_s = [], 0, 0.0

    def _check_forms(self) -> None:
        """Compares each rank's experts with those of the ranks that have the same slice in other groups."""
        first = next(iter(self._mlps.values()))
        forms = {number: mlp.forms() for number, mlp in self._mlps.items()}
        mixed = [number for number, of_layer in forms.items() if len(set(of_layer)) > 1]
        digest = -1 if mixed else zlib.crc32(repr([of_layer[0] for of_layer in forms.values()]).encode())
        own = torch.tensor([digest], dtype=torch.int64, device=first.num_tokens.device)
        num_slices = self._tp.size // len(first.placement)
        by_group = self._tp.all_gather(own).view(-1, num_slices)
        if (by_group < 0).any() or (by_group != by_group[0]).any():
            raise ConfigError(
                "engine.expert_rebalance_tokens: the checkpoint keeps a layer's experts in different formats, so they "
                "cannot change places; use 0"
            )
