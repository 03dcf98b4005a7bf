"""A place for one more worker, kept before that worker is asked for.

While no node has one, its placement group waits at Ray, which has Ray's autoscaler bring a node where cluster.yaml lets
it (`max_workers`). Knows no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

Bundles = Sequence[dict[str, float]]
"""What each rank of a worker books."""


Labels = Sequence[tuple[str, str]]
"""Of the node, each a key and what Ray selects by."""


def place(bundles: Bundles, labels: Labels = ()) -> PlacementGroup:
    """On one node with these labels, as soon as one has room for all."""
    selector = [dict(labels)] * len(bundles) if labels else None
    group: PlacementGroup = placement_group(list(bundles), strategy="STRICT_PACK", bundle_label_selector=selector)
    return group


def place_apart(num_nodes: int, bundle: dict[str, float]) -> PlacementGroup:
    """A bundle on each of so many nodes, as soon as there are as many."""
    group: PlacementGroup = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
    return group


def num_gpus() -> int:
    """On the nodes that Ray has now."""
    return int(ray.cluster_resources().get("GPU", 0))


class Capacity:
    """`bundles`: of the worker that would come next; `labels`: of nodes on which workers may be."""

    def __init__(self, bundles: Callable[[], Bundles], labels: Labels = ()) -> None:
        self._bundles = bundles
        self._labels = labels
        self._group: PlacementGroup | None = None
        self._is_for: Bundles = ()

    def ask(self) -> bool:
        """Whether there is a place, which is then kept; while there is none, Ray is asked for one."""
        bundles = self._bundles()
        if bundles != self._is_for:
            self.give_back()
        if self._group is None:
            self._group, self._is_for = place(bundles, self._labels), bundles
        return _is_there(self._group)

    def take(self, bundles: Bundles) -> PlacementGroup | None:
        """The place that is kept, where it is one for these; whose it is from now on."""
        if self._group is None or bundles != self._is_for or not _is_there(self._group):
            return None
        taken, self._group = self._group, None
        return taken

    def give_back(self) -> None:
        """No place is needed now."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _is_there(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")
