"""`rebalance.mode: auto` in a cluster: once a second the rebalancer looks at what the routers have counted, and what it
proposes becomes a change of the configuration that runs.

Knows workers, routers and changes as the controller does; a place for one more worker is what `reserve` says. Knows no
Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.config.choices import DeviceName
from controller.events import EventKind, EventLog
from controller.rebalance_policy import AutoRatio
from controller.rebalancer import MakePolicy, MeasuredLoad, Rebalancer, Split
from controller.reconfigurer import Reconfigurer
from controller.router_link import RouterLinks
from controller.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class AutoMode:
    """`run` for as long as the cluster serves; it does nothing in another mode, which may change."""

    def __init__(
        self,
        pool: WorkerPool,
        links: RouterLinks,
        reconfigurer: Reconfigurer,
        events: EventLog,
        reserve: Callable[[], bool],
        release: Callable[[], None],
        device: DeviceName = "auto",
        make_policy: MakePolicy = AutoRatio,
    ) -> None:
        """`reserve`, `release` and `device` as `Rebalancer` has them."""
        self._pool = pool
        self._links = links
        self._reconfigurer = reconfigurer
        self._events = events
        hooks = self._measure, self._split, self._move, reserve, release
        self.rebalancer = Rebalancer(*hooks, self._report, device, make_policy)

    async def run(self) -> None:
        """Looks at the load every `_LOOK_EVERY_S` seconds until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.rebalancer.look(asyncio.get_running_loop().time(), self._reconfigurer.config)
            except Exception:
                # A bug here must not end the watch over the load unseen.
                logger.exception("mode auto could not look at the load")

    async def _measure(self) -> MeasuredLoad | None:
        return MeasuredLoad.of(await self._links.demand())

    def _split(self) -> Split | None:
        """None while it changes, or a worker is not there."""
        reconfigurer = self._reconfigurer
        members = [m for m in self._pool.members() if not m.is_draining]
        if reconfigurer.changing is not None or not all(m.is_ready for m in members):
            return None
        num_prefill = sum(m.role == "prefill" for m in members)
        num_added = reconfigurer.num_added // reconfigurer.config.roles.decode.tensor_parallel
        return Split(num_prefill, len(members) - num_prefill, reconfigurer.version, num_added)

    def _move(self, num_prefill: int, num_decode: int, version: int, why: str) -> None:
        wanted = self._reconfigurer.with_split(num_prefill, num_decode)
        origin = f"mode auto {num_prefill}:{num_decode}"
        self._reconfigurer.propose(wanted, origin, expected_version=version, is_auto=True)

    def _report(self, why: str) -> None:
        self._events.add(EventKind.AUTO, f"mode auto: {why}")
