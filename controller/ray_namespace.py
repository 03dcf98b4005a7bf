"""One cluster's part of Ray: its processes and placement groups, which outlive the controller that made them, and what
that controller saved for the next one.

All of it is found by the cluster's name: actors live in Ray's namespace of that name, placement groups have it in front
of theirs, and the saved state is the value of one key in Ray's own store, which lasts as long as Ray does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from controller.adoption import FoundProcess, ProcessIdentity, SavedCluster

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
DETACHED = "baton"
"""The one cluster of a Ray that needs no command to stay; `ray list actors` shows both names."""
_KEY = b"controller"
_ANSWER_S = 15.0
"""Seconds that a process may take to say who it is: as long as Ray takes to give up a machine, as the shipped files
have it."""


def new_name() -> str:
    """Returns a name for a cluster that ends with the command that started it."""
    return f"{DETACHED}-{secrets.token_hex(4)}"


class RayNamespace:
    """One cluster's part of Ray."""

    def __init__(self, name: str) -> None:
        self.name = name

    def actor_options(self, identity: ProcessIdentity) -> dict[str, Any]:
        """Options of an actor that outlives its maker. A name is never used twice: Ray frees it a moment after the
        death."""
        number = f"{identity.group}.{identity.rank}.{identity.epoch}.{secrets.token_hex(4)}"
        return {"name": number, "namespace": self.name, "lifetime": "detached"}

    def group_options(self, what: str) -> dict[str, str]:
        """Options of a placement group that outlives its maker."""
        return {"name": f"{self.name}/{what}/{secrets.token_hex(4)}", "lifetime": "detached"}

    def process_names(self) -> list[str]:
        """Names of the processes' actors that are not known to be dead."""
        named = list_named_actors(all_namespaces=True)
        return [one["name"] for one in named if one["namespace"] == self.name and one["name"] != CONTROLLER]

    async def found(self) -> tuple[FoundProcess, ...]:
        """The processes that answer; what does not is ended, since nobody could take it over."""
        return tuple(filter(None, await asyncio.gather(*map(self._describe, self.process_names()))))

    async def _describe(self, name: str) -> FoundProcess | None:
        try:
            actor = ray.get_actor(name, namespace=self.name)
        except ValueError:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                found: FoundProcess = await actor.describe.remote()
            return replace(found, actor=actor)
        except (TimeoutError, RayError) as error:
            logger.warning("%s of the controller before does not say who it is, and is ended: %s", name, error)
            ray.kill(actor, no_restart=True)
            return None

    def remove_groups(self, kept: Collection[PlacementGroup] = ()) -> None:
        """Removes the cluster's placement groups but those."""
        ids = {group.id.hex() for group in kept}
        for group_id, row in placement_group_table().items():
            is_ours = str(row["name"]).startswith(f"{self.name}/") and row["state"] != "REMOVED"
            if is_ours and group_id not in ids:
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))

    def kill_all(self) -> int:
        """Ends every process at once, and gives everything back to Ray. Returns how many there were."""
        names = self.process_names()
        for name in names:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=self.name), no_restart=True)
        self.remove_groups()
        self.forget()
        return len(names)

    def load(self) -> SavedCluster | None:
        """Reads the state that the controller before has saved; None: there is none, or it cannot be read. Raises
        IncompatibleProtocol."""
        text = internal_kv._internal_kv_get(_KEY, namespace=self.name)
        if not text:
            return None
        try:
            return SavedCluster.from_json(text.decode())
        except (TypeError, ValueError, KeyError) as error:
            logger.warning("what the controller before has saved cannot be read: %s", error)
            return None

    def save(self, cluster: SavedCluster) -> None:
        """Blocks while Ray's head does not answer."""
        internal_kv._internal_kv_put(_KEY, cluster.to_json().encode(), True, namespace=self.name)

    def forget(self) -> None:
        """Removes what was saved."""
        internal_kv._internal_kv_del(_KEY, namespace=self.name)
