"""Hands a cluster from one controller to the next: processes that serve, and what their controller has saved.

The new controller first takes over what it wants of the processes that answer, and ends the others; only then does it
name the workers to the routers. From then on it saves, after each change, what its own successor must know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.errors import IncompatibleProtocol
from controller.adoption import Adoption, SavedCluster, choose
from controller.ray_actors import Hosting
from controller.router_pool import RouterPool
from controller.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Takeover:
    """`changed` after each change; `keep_saved` runs for as long as the controller does. `refusal`: why what the
    controller before has saved is not understood."""

    def __init__(
        self, hosting: Hosting, report: Callable[[str], None], refusal: IncompatibleProtocol | None = None
    ) -> None:
        self._refusal = refusal
        self._hosting = hosting
        self._report = report
        self._unsaved = asyncio.Event()

    def changed(self) -> None:
        """There is something new to save."""
        self._unsaved.set()

    async def adopt(self, pool: WorkerPool, routers: RouterPool) -> Adoption:
        """Takes over what serves of these workers and routers, and ends what else there is. Raises
        IncompatibleProtocol, before anything is touched."""
        if self._refusal is not None:
            raise self._refusal
        namespace = self._hosting.namespace
        names = {router.name for router in routers.supervisors}
        sizes = {member.worker_id: member.tp_size for member in pool.members()} | dict.fromkeys(names, 1)
        adoption = choose(sizes, await namespace.found())
        for group, ranks in adoption.kept.items():
            if group in names:
                routers.adopt(ranks[0])
            else:
                pool.adopt(group, ranks)
        orphans = [self._hosting.adopt(process, self._report) for process in adoption.orphans]
        await asyncio.gather(*(orphan.kill() for orphan in orphans))
        groups = [process.placement_group for ranks in adoption.kept.values() for process in ranks]
        namespace.remove_groups([group for group in groups if group is not None])
        return adoption

    async def keep_saved(self, compose: Callable[[], SavedCluster]) -> None:
        """Saves what `compose` returns, at once and after each change."""
        self.changed()
        while True:
            await self._unsaved.wait()
            self._unsaved.clear()
            try:
                await asyncio.to_thread(self._hosting.namespace.save, compose())
            except Exception:
                # While Ray's head is away; the next controller begins with what was saved last.
                logger.exception("the state of the cluster could not be saved")
                self.changed()
                await asyncio.sleep(_RETRY_S)
