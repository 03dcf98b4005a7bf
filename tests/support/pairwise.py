"""Few combinations of several values in which every pair of two values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence


def pairwise(dimensions: Mapping[str, Sequence[Hashable]]) -> list[tuple[Hashable, ...]]:
    """Returns combinations, one value for each dimension in their order, that cover every pair of values of two
    dimensions. Each next one is the first of those that cover most of what is not covered yet."""
    combinations = list(itertools.product(*dimensions.values()))
    missing = set().union(*map(_pairs, combinations))
    chosen = []
    while missing:
        best = max(combinations, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination: tuple[Hashable, ...]) -> set[tuple[tuple[int, Hashable], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))
