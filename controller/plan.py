"""From a configuration to the processes that serve it: which workers there are, and what each process is told.

Pure and without Ray: the machine's cores and GPUs are arguments. What only the running cluster knows (the address of
a node, of a group's rank 0) is filled in by whoever starts the processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster.config import ServingConfig
from cluster.errors import ConfigError
from cluster.settings import RouterSettings, WorkerSettings

RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = ("prefill", "decode")

ROUTER_PORT_STEP = 10
BATCH_FOLDER = "~/.local/state/baton"
"""Where files and batches are kept unless the configuration says otherwise."""
CPU_SHARE = 0.01
"""Ray CPUs that a process books. Ray's CPUs are tickets, not cores, and a laptop with two must hold every process."""


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: a tensor-parallel group whose ranks are placed together on one node."""

    worker_id: str
    role: RoleName
    ranks: tuple[WorkerSettings, ...]
    labels: tuple[tuple[str, str], ...] = ()
    """Of the node, each a key and what Ray selects by."""

    @property
    def uses_gpu(self) -> bool:
        return self.ranks[0].device == "cuda"

    @property
    def bundle(self) -> dict[str, float]:
        """What one rank books from Ray."""
        return {"CPU": CPU_SHARE, "GPU": 1.0} if self.uses_gpu else {"CPU": CPU_SHARE}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Each rank's."""
        return [self.bundle for _ in self.ranks]


@dataclass(frozen=True)
class ClusterPlan:
    """Every process of a cluster."""

    workers: tuple[WorkerPlan, ...]
    router: RouterSettings
    """Of the first one."""
    num_routers: int = 1
    are_routers_spread: bool = False
    """Each on a node of its own."""

    def named_routers(self) -> list[tuple[str, RouterSettings]]:
        """Each with its ports, ROUTER_PORT_STEP apart where they share a node; 0 stays any free one."""
        first = self.router
        routers = []
        for number in range(self.num_routers):
            step = 0 if self.are_routers_spread else number * ROUTER_PORT_STEP
            port, http_port = first.port and first.port + step, first.http_port and first.http_port + step
            name = f"router-{number}" if number else "router"
            routers.append((name, replace(first, port=port, http_port=http_port)))
        return routers


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
    device = "cuda" if may_grow and config.engine.device == "cuda" else _device(config, num_gpus)
    num_ranks = sum(config.role(role).devices for role in ROLES)
    threads = config.engine.threads
    if threads is None and num_cores is not None and device == "cpu":
        threads = max(1, num_cores // num_ranks)
    workers = tuple(
        plan_worker(config, role, number, device=device, threads=threads)
        for role in ROLES
        for number in range(config.role(role).num_workers)
    )
    return ClusterPlan(workers, _plan_router(config), config.router.replicas, config.placement.routers == "spread")


def _device(config: ServingConfig, num_gpus: int) -> str:
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
    config: ServingConfig, role: RoleName, number: int = 0, *, device: str | None = None, threads: int | None = None
) -> WorkerPlan:
    """One worker of a role. `device` None: what the configuration says, `auto` included, for the process to resolve."""
    worker_id = f"{role}-{number}"
    tp_size = config.role(role).tensor_parallel
    engine, transfer = config.engine, config.transfer
    step_log = str(Path(config.log_dir) / f"{worker_id}.steps.jsonl") if config.log_dir else None
    ranks = tuple(
        WorkerSettings(
            worker_id=worker_id,
            role=role,
            model_path=config.model.path,
            model_name=config.model.name or "",
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            max_model_len=config.model.max_model_len,
            device=device or config.engine.device,
            tp_rank=tp_rank,
            tp_size=tp_size,
            block_size=config.block_size(role),
            kv_cache_dtype=engine.kv_cache_dtype,
            kv_cache_tokens=config.kv_cache_tokens(role),
            memory_utilization=engine.memory_utilization,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            tpot_slo_s=config.rebalance.slo.tpot_ms / 1000,
            enable_prefix_cache=engine.enable_prefix_cache,
            threads=threads,
            attention=engine.attention,
            kernels=engine.kernels,
            enforce_eager=engine.enforce_eager,
            transport=transfer.transport,
            wire_format=transfer.wire_format,
            digest=transfer.digest,
            chunk_tokens=transfer.chunk_tokens,
            num_slots=transfer.num_slots,
            max_pairs=transfer.max_pairs,
            transfer_timeout_s=transfer.timeout_s,
            heartbeat_s=transfer.heartbeat_s,
            suspect_after_s=transfer.suspect_after_s,
            dead_after_s=transfer.dead_after_s,
            metrics_port=0 if config.metrics.workers else None,
            peak_tflops=config.metrics.peak_tflops,
            peak_gb_per_s=config.metrics.peak_gb_per_s,
            step_log=step_log if tp_rank == 0 else None,
            internal_tls_cert=config.internal_tls.cert,
            internal_tls_key=config.internal_tls.key,
            internal_tls_ca=config.internal_tls.ca,
            insecure=config.router.insecure,
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
    if config.state is not None:
        return config.state
    if config.placement.routers == "spread":
        return ""
    return f"{BATCH_FOLDER}/batches-{http_port}.db" if http_port else None


def _plan_router(config: ServingConfig) -> RouterSettings:
    router = config.router
    return RouterSettings(
        model_path=config.model.path,
        model_name=config.model.name or "",
        host=router.host,
        port=router.port,
        http_port=router.http_port,
        keys_file=config.auth.keys_file,
        batch_store=_batch_store(config),
        max_file_bytes=router.max_file_bytes,
        needs_prefill=config.roles.prefill.num_workers > 0,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        policy=router.policy,
        ttft_slo_s=config.rebalance.slo.ttft_ms / 1000,
        tpot_slo_s=config.rebalance.slo.tpot_ms / 1000,
        max_running_requests=router.max_running_requests,
        max_queued_requests=router.max_queued_requests,
        max_running_tokens=router.max_running_tokens,
        max_queued_tokens=router.max_queued_tokens,
        queue_timeout_s=router.queue_timeout_s,
        max_queue_wait_s=router.max_queue_wait_s,
        stalled_client_timeout_s=router.stalled_client_timeout_s,
        stream_messages_per_s=router.stream_messages_per_s,
        max_message_bytes=router.max_message_bytes,
        dead_after_s=config.transfer.dead_after_s,
        metrics_port=0 if config.metrics.router else None,
        tls_cert=config.tls.cert,
        tls_key=config.tls.key,
        tls_client_ca=config.tls.client_ca,
        internal_tls_cert=config.internal_tls.cert,
        internal_tls_key=config.internal_tls.key,
        internal_tls_ca=config.internal_tls.ca,
        state=config.state,
        resume_window_s=router.resume_window_s,
        trace_endpoint=router.trace_endpoint,
        trace_sample=router.trace_sample,
        insecure=router.insecure,
    )
