"""Decides which group of ranks holds which experts of a layer, so that the groups' loads are even, and in which order
experts change places. Knows no weights and no torch.

A placement is, for each group, its experts by slot. A group holds as many experts in any placement, so memory stays
the same on all ranks, and an expert that leaves a slot makes room for one that comes.

Legend: N experts, G groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

Placement = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Move:
    """A group's part in a round: the expert in `slot` goes to one group, and another group's comes there instead."""

    slot: int
    destination: int
    source: int


Round = dict[int, Move]
"""Moves by group, at the same time; groups without one wait."""


def imbalance(loads: Sequence[int], groups: Sequence[Collection[int]]) -> float:
    """Returns how uneven the loads of groups are, each of which is that of its experts; `loads`: [N]."""
    return busiest_over_mean([sum(loads[expert] for expert in held) for held in groups])


def busiest_over_mean(loads: Sequence[int]) -> float:
    """Returns the largest load over the mean; 1 if there is none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def even_groups(loads: Sequence[int], placement: Placement) -> list[set[int]]:
    """Returns the experts of each group, as many as it has in `placement`, with loads [N] that are near to even.

    Longest processing time first (R. L. Graham, 1969): each expert, those with most load first, goes to the group with
    the least load that has room. Groups get the names under which most of their experts stay.
    """
    rooms = [len(held) for held in placement]
    now = {expert: group for group, held in enumerate(placement) for expert in held}
    groups: list[set[int]] = [set() for _ in rooms]
    sums = [0] * len(rooms)
    for expert in sorted(now, key=lambda n: (-loads[n], n)):
        free = [group for group, room in enumerate(rooms) if len(groups[group]) < room]
        chosen = min(free, key=lambda group: (sums[group], group != now[expert]))
        groups[chosen].add(expert)
        sums[chosen] += loads[expert]
    return _named(groups, [set(held) for held in placement])


def _named(groups: Sequence[set[int]], before: Sequence[set[int]]) -> list[set[int]]:
    """The groups in the order of those before them with which they share most, of those of the same size."""
    pairs = [(new, old) for new in range(len(groups)) for old in range(len(groups))]
    pairs.sort(key=lambda pair: -len(groups[pair[0]] & before[pair[1]]))
    found: dict[int, int] = {}
    for new, old in pairs:
        if len(groups[new]) == len(before[old]) and old not in found and new not in found.values():
            found[old] = new
    return [groups[found[old]] for old in range(len(groups))]


def rounds_to(groups: Sequence[set[int]], placement: Placement) -> tuple[list[Round], list[list[int]]]:
    """Returns how a placement becomes one of these groups, and that placement; experts that stay keep their slots.

    In a round a group sends one expert and receives one, so that a rank needs room for one more.
    """
    goal = {expert: group for group, experts in enumerate(groups) for expert in experts}
    after = [list(held) for held in placement]
    rounds: list[Round] = []
    for cycle in _cycles(goal, placement):
        moves: Round = {}
        for i, (group, slot) in enumerate(cycle):
            (source, sent), (destination, _) = cycle[i - 1], cycle[(i + 1) % len(cycle)]
            moves[group] = Move(slot, destination, source)
            after[group][slot] = placement[source][sent]
        free = next((one for one in rounds if not one.keys() & moves.keys()), None)
        if free is None:
            rounds.append(moves)
        else:
            free.update(moves)
    return rounds, after


def _cycles(goal: dict[int, int], placement: Placement) -> Iterator[list[tuple[int, int]]]:
    """Groups and slots of experts, each of which goes to the group of the next one, the last to that of the first.

    As many leave a group as come, so a walk from group to group comes back to one where it was: that is a cycle.
    """
    leaving = [
        [slot for slot, expert in enumerate(held) if goal[expert] != group] for group, held in enumerate(placement)
    ]
    for start in range(len(placement)):
        walk: list[tuple[int, int]] = []
        group = start
        while leaving[group] or walk:
            visited = [at for at, _ in walk]
            if group in visited:
                first = visited.index(group)
                yield walk[first:]
                del walk[first:]
            elif leaving[group]:
                slot = leaving[group].pop()
                walk.append((group, slot))
                group = goal[placement[group][slot]]
