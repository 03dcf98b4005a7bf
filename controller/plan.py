"""From a configuration to the processes that serve it: which workers there are, and the settings of each process.

Pure and without Ray: the machine's cores and GPUs are arguments. What only the running cluster knows (the address of
a node, of a group's rank 0) is filled in by `controller.launchers`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config.choices import DeviceName
from cluster.config.schema import ROLES, EngineSection, RoleName, ServingConfig
from cluster.errors import ConfigError
from cluster.settings import RouterSettings, WorkerSettings

STATE_FOLDER = "~/.local/state/baton"
"""The folder where batches and the journal of streams are kept unless the configuration says otherwise."""
CPU_SHARE = 0.01
"""Ray CPUs that a process books. Ray's CPUs are tickets, not cores, and a laptop with two must hold every process."""


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: a tensor-parallel group whose ranks are placed together on one node."""

    worker_id: str
    role: RoleName
    ranks: tuple[WorkerSettings, ...]
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of the node, each a key and what Ray selects by."""

    @property
    def uses_gpu(self) -> bool:
        return self.ranks[0].engine.device == "cuda"

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that one rank books from Ray."""
        return {"CPU": CPU_SHARE, "GPU": 1.0} if self.uses_gpu else {"CPU": CPU_SHARE}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of all ranks."""
        return [self.bundle for _ in self.ranks]


@dataclass(frozen=True)
class ClusterPlan:
    """Every process of a cluster."""

    workers: tuple[WorkerPlan, ...]
    router: RouterSettings
    """Settings of the first router."""
    num_routers: int = 1

    @property
    def journal(self) -> str | None:
        """File in which routers keep their journal, which goes with the cluster; None: there is none."""
        state = self.router.state
        return None if state is None or "://" in state else state

    def with_journal(self, path: str) -> ClusterPlan:
        """The plan of a cluster that has its journal there already; empty: it has none yet."""
        return replace(self, router=replace(self.router, state=path)) if path and self.journal else self

    def named_routers(self) -> list[tuple[str, RouterSettings]]:
        """All have the same settings: on one machine they share their ports."""
        return [(f"router-{number}" if number else "router", self.router) for number in range(self.num_routers)]


def plan_cluster(config: ServingConfig, *, num_gpus: int, num_cores: int | None, may_grow: bool = False) -> ClusterPlan:
    """`num_cores`: of the one machine that holds every rank; None when Ray spreads them over several. `may_grow`: nodes
    may still come, so that workers wait for GPUs that are not there yet.

    Raises ConfigError when the roles name more GPUs than there are, or routers are to be on several machines of one.
    """
    if config.placement.routers == "spread" and config.router.replicas > 1 and num_cores is not None:
        raise ConfigError(
            f"metadata.serving.placement.routers is spread, and this is one machine for {config.router.replicas} "
            "routers; use head, or serve in a Ray of several machines: baton serve --address auto"
        )
    devices = _devices(config, num_gpus, may_grow=may_grow)
    num_ranks = sum(config.role(role).devices for role in ROLES if devices[role] == "cpu")
    threads = max(1, num_cores // num_ranks) if num_cores is not None and num_ranks else None
    workers = tuple(
        plan_worker(config, role, number, device=devices[role], threads=threads if devices[role] == "cpu" else None)
        for role in ROLES
        for number in range(config.role(role).num_workers)
    )
    return ClusterPlan(workers, _plan_router(config), config.router.replicas)


def plan_routers(config: ServingConfig, journal: str = "") -> list[tuple[str, RouterSettings]]:
    """The routers of a configuration by name. `journal`: the file that the cluster has, if it has one already."""
    return ClusterPlan((), _plan_router(config), config.router.replicas).with_journal(journal).named_routers()


def _devices(config: ServingConfig, num_gpus: int, *, may_grow: bool) -> dict[RoleName, DeviceName]:
    """The kind of device that each role's workers run on. Raises ConfigError for more GPUs than there are or may be."""
    devices = {role: found_device(config.engine_of(role), "cuda" if num_gpus else "cpu") for role in ROLES}
    on_gpus = [role for role in ROLES if devices[role] == "cuda"]
    if may_grow and all(config.engine_of(role).device == "cuda" for role in on_gpus):
        return devices
    needed = {role: config.role(role).devices for role in on_gpus}
    if sum(needed.values()) > num_gpus:
        split = " + ".join(f"{count} {role}" for role, count in needed.items())
        raise ConfigError(
            f"metadata.serving.roles name {sum(needed.values())} devices ({split}), and Ray sees {num_gpus} GPUs; "
            "lower `devices`, add GPUs, or set engine.device: cpu"
        )
    return devices


def found_device(engine: EngineSection, found: DeviceName) -> DeviceName:
    """`found`: what stands for `auto` where the cluster runs."""
    return found if engine.device == "auto" else engine.device


def weight_forms(config: ServingConfig) -> str:
    """Returns the forms of weights by role where they differ, in type, in rounding, or because a kind of device has
    types of its own; else an empty string."""
    forms = {
        role: f"{model.dtype} {model.quantization} on {config.engine_of(role).device}"
        for role in ROLES
        for model in [config.model_of(role)]
    }
    return "" if len(set(forms.values())) == 1 else ", ".join(f"{role} {form}" for role, form in forms.items())


def plan_worker(
    config: ServingConfig,
    role: RoleName,
    number: int = 0,
    *,
    worker_id: str = "",
    device: DeviceName | None = None,
    threads: int | None = None,
) -> WorkerPlan:
    """One worker of a role, named after both unless it has a name. `device`: in place of the configuration's;
    `threads`: where that leaves them open; None: as the process finds."""
    worker_id = worker_id or f"{role}-{number}"
    tp_size = config.role(role).tensor_parallel
    step_log = str(Path(config.log_dir) / f"{worker_id}.steps.jsonl") if config.log_dir else None
    engine = config.engine_of(role)
    engine = replace(engine, device=device or engine.device, threads=engine.threads or threads)
    ranks = tuple(
        WorkerSettings(
            worker_id=worker_id,
            role=role,
            model=replace(config.model_of(role), tool_format="auto", chat_template=None),  # which routers read
            weight_forms=weight_forms(config),
            engine=engine,
            transfer=config.transfer,
            slo=config.rebalance.slo,
            metrics=config.metrics,
            internal_tls=config.internal_tls,
            tp_rank=tp_rank,
            tp_size=tp_size,
            expert_parallel=config.role(role).expert_parallel,
            split_latents=config.role(role).split_latents,
            metrics_port=0 if config.metrics.workers else None,
            step_log=step_log if tp_rank == 0 else None,
            insecure=config.router.insecure,
            has_keys=config.auth.keys_file is not None,
            allowed_hosts=config.router.allowed_hosts,
        )
        for tp_rank in range(tp_size)
    )
    return WorkerPlan(worker_id, role, ranks, _labels(config, role))


def _labels(config: ServingConfig, role: RoleName) -> tuple[tuple[str, str], ...]:
    pairs = (text.partition("=") for text in config.labels_of(role))
    return tuple((key, value) for key, _, value in pairs)


def _batch_store(config: ServingConfig) -> str | None:
    """Routers on one machine reach the same file; on several they share what is in Redis, or nothing."""
    http_port = config.router.http_port
    if config.router.batch_store is not None:
        return config.router.batch_store
    if config.redis is not None:
        return config.redis
    if config.placement.routers == "spread":
        return ""
    return f"{STATE_FOLDER}/batches-{http_port}.db" if http_port else None


def _state(config: ServingConfig) -> str | None:
    """Routers on one machine share a file, which no other cluster has: at a free port it gets a name of its own."""
    if config.state == "memory" or (config.state is None and config.placement.routers == "spread"):
        return None
    name = config.router.port or f"free-{secrets.token_hex(4)}"
    return config.state or f"{STATE_FOLDER}/journal-{name}.db"


def _plan_router(config: ServingConfig) -> RouterSettings:
    return RouterSettings(
        model=config.model,
        router=replace(config.router, batch_store=_batch_store(config)),
        engine=config.engine_of("decode"),
        transfer=config.transfer,
        slo=config.rebalance.slo,
        auth=config.auth,
        tls=config.tls,
        internal_tls=config.internal_tls,
        state=_state(config),
        needs_prefill=config.roles.prefill.num_workers > 0,
        drain_timeout_s=config.rebalance.drain_timeout_s,
        metrics_port=0 if config.metrics.router else None,
    )
