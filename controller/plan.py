"""From a configuration to the processes that serve it: which workers there are, and the settings of each process.

Pure and without Ray: the machine's cores and GPUs are arguments. What only the running cluster knows (the address of
a node, of a group's rank 0) is filled in by `controller.launchers`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config.choices import DeviceName
from cluster.config.schema import ROLES, RoleName, ServingConfig
from cluster.errors import ConfigError
from cluster.settings import RouterSettings, WorkerSettings

STATE_FOLDER = "~/.local/state/baton"
"""Where batches and the journal of streams are kept unless the configuration says otherwise."""
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
    device: DeviceName = "cuda" if may_grow and config.engine.device == "cuda" else _device(config, num_gpus)
    num_ranks = sum(config.role(role).devices for role in ROLES)
    threads = max(1, num_cores // num_ranks) if num_cores is not None and device == "cpu" else None
    threads = config.engine.threads or threads
    workers = tuple(
        plan_worker(config, role, number, device=device, threads=threads)
        for role in ROLES
        for number in range(config.role(role).num_workers)
    )
    return ClusterPlan(workers, _plan_router(config), config.router.replicas)


def plan_routers(config: ServingConfig, journal: str = "") -> list[tuple[str, RouterSettings]]:
    """The routers of a configuration by name. `journal`: the file that the cluster has, if it has one already."""
    return ClusterPlan((), _plan_router(config), config.router.replicas).with_journal(journal).named_routers()


def _device(config: ServingConfig, num_gpus: int) -> DeviceName:
    wanted = config.engine.device
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return "cpu"
    needed = {role: config.role(role).devices for role in ROLES}
    if sum(needed.values()) > num_gpus:
        split = " + ".join(f"{count} {role}" for role, count in needed.items())
        raise ConfigError(
            f"metadata.serving.roles name {sum(needed.values())} devices ({split}), and Ray sees {num_gpus} GPUs; "
            "lower `devices`, add GPUs, or set engine.device: cpu"
        )
    return "cuda"


def plan_worker(
    config: ServingConfig,
    role: RoleName,
    number: int = 0,
    *,
    worker_id: str = "",
    device: DeviceName | None = None,
    threads: int | None = None,
) -> WorkerPlan:
    """One worker of a role, named after both unless it has a name. `device` and `threads` None: what the configuration
    says, also for the process to resolve."""
    worker_id = worker_id or f"{role}-{number}"
    tp_size = config.role(role).tensor_parallel
    step_log = str(Path(config.log_dir) / f"{worker_id}.steps.jsonl") if config.log_dir else None
    engine = replace(
        config.engine,
        device=device or config.engine.device,
        threads=threads or config.engine.threads,
        block_size=config.block_size(role),
        kv_cache_tokens=config.kv_cache_tokens(role),
    )
    ranks = tuple(
        WorkerSettings(
            worker_id=worker_id,
            role=role,
            model=config.model,
            engine=engine,
            transfer=config.transfer,
            slo=config.rebalance.slo,
            metrics=config.metrics,
            internal_tls=config.internal_tls,
            tp_rank=tp_rank,
            tp_size=tp_size,
            metrics_port=0 if config.metrics.workers else None,
            step_log=step_log if tp_rank == 0 else None,
            insecure=config.router.insecure,
            has_keys=config.auth.keys_file is not None,
            allowed_hosts=config.router.allowed_hosts,
        )
        for tp_rank in range(tp_size)
    )
    return WorkerPlan(worker_id, role, ranks, _labels(config))


def _labels(config: ServingConfig) -> tuple[tuple[str, str], ...]:
    pairs = (text.partition("=") for text in config.placement.labels)
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
        engine=config.engine,
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
