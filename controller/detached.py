"""A controller that outlives the command that started it: by which name Ray knows it, how it begins again after its
own death, and how it ends.

There is at most one in a Ray cluster. What it has started is its own and goes with it, so one that Ray starts again
starts everything again, as its file says then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.address import listen_error
from cluster.config.schema import ServingConfig
from cluster.errors import ConfigError
from controller.config_file import ConfigFile
from controller.launchers import num_gpus
from controller.plan import CPU_SHARE, ClusterPlan, plan_cluster
from controller.reconciler import Controller, Programs

logger = logging.getLogger(__name__)

NAME = "controller"
NAMESPACE = "baton"
"""Ray's namespace; `ray list actors` shows both."""
_LOOK_S = 0.2
_PORTS_S = 30.0
_GONE_S = 10.0


class DetachedController(Controller):
    """The actor."""

    def __init__(self, config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile) -> None:
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        if is_again:
            config, plan = _reloaded(file, config, plan)
        super().__init__(config, plan, programs, file)
        if is_again:
            self._tasks.append(asyncio.get_running_loop().create_task(self._begin_again(), name="begin again"))

    async def _begin_again(self) -> None:
        """Waits for the ports first: the processes of the dead controller end in a moment and may still hold them."""
        logger.warning("the controller had died; it starts everything again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PORTS_S):
                while self._is_a_port_taken():
                    await asyncio.sleep(_LOOK_S)
        await self.run()

    def _is_a_port_taken(self) -> bool:
        config = self.reconfigurer.config
        wanted = [(config.router.host, config.router.port), (config.admin.host, config.admin.port)]
        if config.router.http_port is not None:
            wanted.append((config.router.host, config.router.http_port))
        return any(listen_error(host, port) is not None for host, port in wanted)


def _reloaded(file: ConfigFile, config: ServingConfig, plan: ClusterPlan) -> tuple[ServingConfig, ClusterPlan]:
    """The configuration of the file now, since the ratio may have changed; after a mistake in it, the first one."""
    try:
        config = file.load()
        return config, plan_cluster(config, num_gpus=num_gpus(), num_cores=None, may_grow=True)
    except ConfigError as error:
        logger.warning("%s cannot be used, so everything starts as at first: %s", file.path, error.message)
        return config, plan


def start_detached(config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile) -> Any:
    """Starts the actor on the caller's node and returns its handle; `run` it. Raises ValueError where there is one."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "name": NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": CPU_SHARE,
        "max_restarts": -1,
        "scheduling_strategy": here,
    }
    return ray.remote(DetachedController).options(**options).remote(config, plan, programs, file)


def find_controller() -> Any | None:
    """Its handle; None: none was started with --detach, or it has ended."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def end_controller(controller: Any, timeout_s: float) -> None:
    """Asks the controller to end everything; one that cannot is ended with what it started. Returns when Ray has its
    name for another one."""
    with contextlib.suppress(RayError):
        ray.get(controller.shutdown.remote(), timeout=timeout_s)
    ray.kill(controller)
    give_up_at = time.monotonic() + _GONE_S
    while find_controller() == controller and time.monotonic() < give_up_at:
        time.sleep(_LOOK_S)
