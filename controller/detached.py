"""The controller as Ray hosts it: how it is started, begins again after its own death, is found and ended.

Ray starts a controller that died again, on its node. The routers and workers that it had started live on and serve
meanwhile; the new one adopts them. With `baton serve` alone the actor, and all that it has started, ends with that
command; a detached one stays, and there is at most one in a Ray cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config.schema import ServingConfig
from cluster.errors import IncompatibleProtocol
from controller.adoption import SavedCluster
from controller.config_file import ConfigFile
from controller.plan import CPU_SHARE, ClusterPlan
from controller.ray_actors import Hosting
from controller.ray_namespace import CONTROLLER, DETACHED, RayNamespace
from controller.reconciler import Controller, Programs

_LOOK_S = 0.2
_GONE_S = 10.0
_DEATHS = 3


class HostedController(Controller):
    """The actor."""

    def __init__(
        self, config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile | None, name: str
    ) -> None:
        context = ray.get_runtime_context()
        is_again, namespace = context.was_current_actor_reconstructed, RayNamespace(name)
        saved, refusal = SavedCluster.first(config, plan, time.time()), None
        if is_again or namespace.process_names():
            try:
                saved = (namespace.load() or saved).next_life(time.time())
            except IncompatibleProtocol as error:
                saved, refusal = saved.next_life(time.time()), error
        if refusal is None:
            # At once, so that a controller which dies while it begins is counted, and the next one has its token.
            namespace.save(saved)
        owner = None if name == DETACHED else context.current_actor
        hosting = Hosting(namespace, config.log_dir, lambda: self.events.version, owner, saved.token)
        super().__init__(saved, plan, programs, file, hosting, refusal)
        if is_again:
            self._tasks.append(asyncio.get_running_loop().create_task(self._begin_again(), name="begin again"))

    async def _begin_again(self) -> None:
        await asyncio.sleep(self.saved.delay_s)
        await self.run()


def start_controller(
    config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile | None, name: str
) -> Any:
    """Starts the actor on the caller's node and returns its handle; `run` it. `name`: of the cluster, DETACHED for one
    that stays. `file`: where `config` comes from; it is watched if it is the operator's own. Raises ValueError where
    there is a detached one already."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": CPU_SHARE, "max_restarts": -1, "scheduling_strategy": here}
    if name == DETACHED:
        options |= {"name": CONTROLLER, "namespace": DETACHED, "lifetime": "detached"}
    return ray.remote(HostedController).options(**options).remote(config, plan, programs, file, name)


def find_controller() -> Any | None:
    """The handle of the detached one; None: none was started with --detach, or it has ended."""
    try:
        return ray.get_actor(CONTROLLER, namespace=DETACHED)
    except ValueError:
        return None


def is_given_up(controller: Any) -> bool:
    """Whether Ray no longer starts the controller again. A call that was under way ends with an error either way; and
    one that Ray repeats by itself is reported to the operator in Ray's words."""
    for _ in range(_DEATHS):
        try:
            ray.get(controller.status.remote(), timeout=_GONE_S)
        except ActorDiedError:
            time.sleep(_LOOK_S)
        except RayError:
            return False
        else:
            return False
    return True


def end_controller(controller: Any, name: str, timeout_s: float) -> None:
    """Asks the controller to end everything, also one that is just being started again; what it could not end is
    killed. Returns when Ray has its name for another one."""
    give_up_at = time.monotonic() + timeout_s
    with contextlib.suppress(RayError):
        while True:
            try:
                ray.get(controller.shutdown.remote(), timeout=max(0.0, give_up_at - time.monotonic()))
                break
            except ActorUnavailableError:
                time.sleep(_LOOK_S)
    leave_running(controller, name)
    RayNamespace(name).kill_all()


def leave_running(controller: Any, name: str) -> None:
    """Ends the controller and nothing else. Returns when Ray has its name for another one."""
    ray.kill(controller)
    give_up_at = time.monotonic() + _GONE_S
    while name == DETACHED and find_controller() == controller and time.monotonic() < give_up_at:
        time.sleep(_LOOK_S)


def has_abandoned() -> bool:
    """Whether processes of a detached cluster run, which the next controller adopts."""
    return bool(RayNamespace(DETACHED).process_names())


def end_abandoned() -> bool:
    """Kills what a detached controller has left that Ray no longer starts again; False where there is nothing."""
    return RayNamespace(DETACHED).kill_all() > 0
