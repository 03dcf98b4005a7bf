"""Prepares a rank of a worker: device, threads, tensor-parallel group, weights, KV pool and transfer engine."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported without saying so

from cluster.config.schema import EngineSection
from cluster.errors import ConfigError, IncompatibleProtocol
from cluster.pb import rank_pb2
from cluster.program import Report, give_way
from cluster.protocol import check_protocol, spoken
from cluster.settings import WorkerSettings
from cluster.text import format_bytes
from cluster.transports import shares_pages
from engine.cpu_runtime import compute_with, end_helpers, keep_freed_memory, return_freed_memory
from engine.kv.block_manager import BlockManager
from engine.kv.pool import choose_page_copies, choose_pool_copies
from engine.kv.retaining_blocks import RetainingBlocks
from engine.kv.stored_blocks import StoredBlocks
from engine.kv.tiered_blocks import TieredBlocks
from engine.memory import (
    Activations,
    MemoryDemand,
    MemoryPlan,
    available_bytes,
    estimate_activations,
    plan_memory,
)
from engine.model_cost import describe_weights
from engine.model_runner import ModelRunner
from engine.models.experts import ExpertsConfig
from engine.profiling import measure_activations
from engine.sampling.sampler import Sampler
from engine.tp import JoinedGroup, TPGroup, make_process_group
from kv_transfer.block_store import StoreObjects
from kv_transfer.bucket_store import store_at
from kv_transfer.disk_slots import DiskFolder
from kv_transfer.fault_injection import Faults
from kv_transfer.sealed import KvSecret
from kv_transfer.tier_copies import TierCopies
from kv_transfer.timed_wire import TimedWire
from kv_transfer.transfer_engine import TransferEngine
from kv_transfer.transports.interface import PoolMemory, connect_store
from kv_transfer.transports.selection import make_pool
from worker.group import TokenChooser
from worker.rank import OVERLAP_TOKENS, Runner
from worker.resolved import Resolved

RENDEZVOUS_TIMEOUT_S = 120.0
KV_DISK_PATH = "~/.cache/baton/kv"
NOT_STARTED = "measured when a worker starts"


@dataclass(frozen=True)
class LoadedRank:
    """A rank that is ready to serve."""

    runner: Runner
    transfer_engine: TransferEngine
    plan: MemoryPlan
    """Equal on every rank of the group."""
    resolved: Resolved
    """Without the transports that this rank's KV pool is not made for."""
    chooser: TokenChooser
    """Used by rank 0."""
    choices: tuple[str, ...]
    """The choices that were made for it, for the log."""
    long_tokens: int = OVERLAP_TOKENS
    """The engine thread does not wait for a step of so many tokens."""


def load_rank(resolved: Resolved, start: rank_pb2.Start, report: Report) -> LoadedRank:
    """Joins the tensor-parallel group, reads this rank's slices, and makes its KV pool and transfer engine.

    Raises ConfigError, on every rank alike, when the KV pool does not fit beside them.
    """
    resolved = resolved.led_by(start)
    settings = resolved.settings
    compute_with(threads_of(settings))
    use_device(resolved.device)
    if resolved.device == "cpu":
        keep_freed_memory()
    # Under names that no stranger knows: torch's store serves whoever connects.
    names = f"{settings.cluster_token}/{start.incarnation}"
    store = PrefixStore(names, connect_store(start.store_address, RENDEZVOUS_TIMEOUT_S))
    tp = make_process_group(
        store,
        settings.tp_rank,
        settings.tp_size,
        resolved.device,
        host=settings.host,
        timeout_s=RENDEZVOUS_TIMEOUT_S,
        obstacle=memory_obstacle(settings, start),
    )
    sampler = Sampler(resolved.config.vocab_size, settings.engine.kernels)
    runner = ModelRunner(
        settings.model.path,
        tp=tp,
        device=resolved.device,
        dtype=resolved.dtype,
        block_size=resolved.block_size,
        attention=settings.engine.attention,
        model_impl=settings.engine.model_impl,
        quantization=settings.model.quantization,
        kv_cache_dtype=settings.engine.kv_cache_dtype,
        kernels=settings.engine.kernels,
        deterministic=settings.engine.deterministic,
        graphs_up_to=0 if settings.engine.enforce_eager else settings.engine.num_seqs,
        sampler=sampler if settings.tp_rank == 0 else None,
        report=report,
        expert_parallel=settings.expert_parallel,
        expert_rebalance_tokens=settings.engine.expert_rebalance_tokens,
        split_latents=settings.split_latents,
    )
    plan = size_pool(resolved.demand, runner, tp)
    memory = make_pool(resolved.transports, runner.device, partial(runner.make_pool, plan.num_blocks))
    transfer_engine = make_transfer_engine(resolved, runner.kv, plan, memory)
    open_disk(resolved, plan, transfer_engine.tier, start)
    open_store(resolved, transfer_engine.tier)
    transfer_engine.warm_up()
    if settings.tp_rank == 0:
        sampler.warm_up(runner.device)
    end_helpers()  # steps run on other threads
    resolved = with_transports_of(resolved, memory)
    choices = _choices_of(runner, plan, settings, tp)
    return LoadedRank(runner, transfer_engine, plan, resolved, sampler, choices)


def memory_obstacle(settings: WorkerSettings, start: rank_pb2.Start) -> str:
    """Why ranks do not share memory for their collectives, the same on each of them; empty: nothing is in the way."""
    if not start.shares_memory:
        return "a rank runs an older Baton"
    return "engine.kernels is torch" if settings.engine.kernels == "torch" else ""


def with_transports_of(resolved: Resolved, memory: PoolMemory | None) -> Resolved:
    """Leaves out transports that share pages where the KV pool does not lie in memory that can be shared."""
    transports = tuple(name for name in resolved.transports if memory is not None or not shares_pages(name))
    return replace(resolved, transports=transports)


def _choices_of(runner: ModelRunner, plan: MemoryPlan, settings: WorkerSettings, tp: JoinedGroup) -> tuple[str, ...]:
    why = "" if runner.device.type == "cpu" else f" ({runner.attention_reason})"
    return (
        memory_line(plan),
        f"weights: {describe_weights(runner.config, settings.tp_size, runner.weight_form)}",
        f"attention: {runner.attention_name}{why}; Baton's own kernels: {runner.kernels_reason}",
        f"CUDA graphs: {runner.graphs_reason}",
        *((f"collectives of {tp.size} ranks: {tp.origin}",) if tp.size > 1 else ()),
        *_experts_line(runner.config.experts, settings.engine.expert_rebalance_tokens),
    )


def _experts_line(experts: ExpertsConfig | None, rebalance_tokens: int) -> tuple[str, ...]:
    """Says where experts are, and whether they move; nothing of a model without any."""
    if experts is None:
        return ()
    if experts.num_groups == 1:
        return ("experts: each sliced over all ranks",)
    how = f"anew by load every {rebalance_tokens} tokens" if rebalance_tokens else "once"
    return (f"experts: {experts.num_experts} in {experts.num_groups} groups of ranks, placed {how}",)


def make_blocks(plan: MemoryPlan, engine: EngineSection, tier: TierCopies | None) -> BlockManager:
    """The books of a worker's KV pool, and of the tiers below it if there are any. `tier`: rank 0's."""
    pool = plan.num_blocks, plan.block_size, engine.enable_prefix_cache, plan.groups
    blocks: RetainingBlocks = RetainingBlocks(*pool)
    tiered: TieredBlocks | None = None
    if plan.num_host_blocks:
        num_host, num_disk, policy = plan.num_host_blocks, plan.num_disk_blocks, engine.kv_store_policy
        if tier is not None and tier.store is not None:
            tiered = StoredBlocks(*pool, num_slots=num_host, num_disk_slots=num_disk, policy=policy)
        else:
            tiered = TieredBlocks(*pool, num_slots=num_host, num_disk_slots=num_disk)
        blocks = tiered
    blocks.session_share = engine.kv_session_share if engine.enable_prefix_cache else 0.0
    if tiered is not None and tier is not None and tier.disk is not None:
        tiered.find_again(tier.disk.keys())
    return blocks


def kv_disk_path(engine: EngineSection) -> Path:
    """The folder of the KV that workers keep on a disk."""
    return Path(engine.kv_disk_path or KV_DISK_PATH).expanduser()


def disk_folder(resolved: Resolved, number: int = 0) -> DiskFolder | None:
    """Where the ranks of this worker keep KV on a disk; None: nowhere. `number`: as of `DiskFolder`. Raises
    ConfigError."""
    engine = resolved.settings.engine
    if not (engine.kv_disk_bytes and engine.enable_prefix_cache):
        return None
    path = kv_disk_path(engine)
    try:
        return DiskFolder(path, resolved.layout, number, resolved.settings.role, kv_secret(engine))
    except OSError as error:
        raise ConfigError(f"kv_disk_path: {path} cannot be used: {error.strerror}") from error


def open_disk(resolved: Resolved, plan: MemoryPlan, tier: TierCopies | None, start: rank_pb2.Start) -> None:
    """Gives a rank's tier the disk that rank 0 has claimed. Raises ConfigError."""
    folder = disk_folder(resolved, start.disk_number) if start.disk_number and tier is not None else None
    if folder is None or tier is None or not plan.num_disk_blocks:
        return
    rank, sizes = resolved.settings.tp_rank, (plan.num_disk_blocks, tier.block_bytes)
    tier.open_disk = lambda number: folder.open(number, rank, *sizes)
    try:
        tier.disk = tier.open_disk(start.disk_number)
    except OSError as error:
        raise ConfigError(f"kv_disk_path: KV cannot be kept there: {error.strerror}") from error


def open_store(resolved: Resolved, tier: TierCopies | None) -> None:
    """Gives a rank's tier its part of the store. Raises ConfigError."""
    engine, rank = resolved.settings.engine, resolved.settings.tp_rank
    if tier is None or not (engine.kv_store_bytes and engine.enable_prefix_cache):
        return
    store = store_at(engine.kv_store_path or "")
    form = resolved.settings.transfer.wire_format
    sizes = tier.block_bytes, engine.kv_store_bytes
    tier.store = StoreObjects(store, resolved.layout, form, rank, *sizes, kv_secret(engine))


def kv_secret(engine: EngineSection) -> KvSecret | None:
    """What KV outside of the process is encrypted with, if it is. Raises ConfigError."""
    return None if engine.kv_key_file is None else KvSecret.read(Path(engine.kv_key_file))


def make_transfer_engine(
    resolved: Resolved, kv: torch.Tensor, plan: MemoryPlan, memory: PoolMemory | None, wire: TimedWire | None = None
) -> TransferEngine:
    """The transfers of a rank with this KV pool, in memory that others can map if there is any."""
    settings = resolved.settings
    return TransferEngine(
        kv,
        resolved.layout,
        settings.tp_rank,
        timeout_s=settings.transfer.timeout_s,
        host=settings.host,
        digest=resolved.digest,
        faults=_faults_of(settings),
        page_kernel=choose_page_copies(settings.engine.kernels, kv.device),
        pool_kernel=choose_pool_copies(settings.engine.kernels, kv.device),
        memory=memory,
        wire=wire,
        num_tier_slots=plan.num_host_blocks,
    )


def ready_for_steps(resolved: Resolved) -> None:
    """Prepares the calling thread, which computes steps from now on."""
    compute_with(threads_of(resolved.settings))
    use_device(resolved.device)
    if resolved.device == "cpu" and not resolved.is_timed:
        give_way()


def use_device(device: str) -> None:
    """Makes a GPU with a number the calling thread's own, so that nothing takes memory of another one's."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


def threads_of(settings: WorkerSettings) -> int:
    """CPU threads of this rank: as set, else this machine's cores shared by the worker's ranks."""
    if settings.engine.threads is not None:
        return settings.engine.threads
    return max(1, len(os.sched_getaffinity(0)) // settings.tp_size)


def _faults_of(settings: WorkerSettings) -> Faults | None:
    """Each rank draws faults of its own, the same in each run."""
    if not settings.transfer_faults:
        return None
    return Faults(settings.transfer_faults, zlib.crc32(f"{settings.worker_id}/{settings.tp_rank}".encode()))


def rank_hello(settings: WorkerSettings, device: str) -> rank_pb2.RankHello:
    return rank_pb2.RankHello(
        tp_rank=settings.tp_rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=device,
        token=settings.cluster_token,
        protocol=spoken(),
        takes_unread_tokens=True,
        splits_latents=settings.split_latents,
        shares_memory=True,
    )


def check_rank(said: rank_pb2.RankHello, settings: WorkerSettings) -> None:
    """Raises IncompatibleProtocol, at rank 0, for another rank that would not do what these settings say."""
    name = f"rank {said.tp_rank} of worker {settings.worker_id}"
    check_protocol(name, said.protocol, "its rank 0")
    if said.splits_latents != settings.split_latents:
        raise IncompatibleProtocol(f"{name} does not split latents as rank 0 does: upgrade it first")


def overlaps_steps(wanted: str, device: str, hellos: Sequence[rank_pb2.RankHello]) -> tuple[bool, str]:
    """Whether a step is launched before the one before it is read, as engine.async_steps wants it; or why not.

    `hellos`: every rank's. One that does not take unread tokens would compute with row numbers instead.
    """
    if wanted == "off":
        return False, "not wanted"
    if wanted == "auto" and not device.startswith("cuda"):
        return False, f"on {device} it would only compute what is thrown away"
    older = [str(h.tp_rank) for h in hellos if not h.takes_unread_tokens]
    if older:
        return False, f"rank {', '.join(older)} runs an older Baton, which takes no tokens from rank 0's device"
    return True, ""


def group_start(resolved: Resolved, incarnation: str, store_address: str, disk_number: int = 0) -> rank_pb2.Start:
    """Returns what rank 0 has the other ranks begin with."""
    return rank_pb2.Start(
        incarnation=incarnation,
        store_address=store_address,
        protocol=spoken(),
        block_size=resolved.block_size,
        disk_number=disk_number,
    )


def check_memory(demand: MemoryDemand) -> None:
    """Raises ConfigError, before any weight is read, for a model that could not fit if activations took nothing."""
    nothing = Activations(0, is_measured=False, why="")
    plan_memory(demand, free_bytes=available_bytes(demand.device, demand.tp_size), activations=nothing)


def expect_memory(demand: MemoryDemand) -> MemoryPlan:
    """The plan of a worker that would start now, with an estimate of its activations. Raises ConfigError."""
    free = available_bytes(demand.device, demand.tp_size)
    return plan_memory(demand, free_bytes=free, activations=estimate_activations(demand, NOT_STARTED))


def size_pool(demand: MemoryDemand, runner: ModelRunner, tp: TPGroup) -> MemoryPlan:
    """Sizes the KV pool once the weights are loaded: the memory beside them and the largest step, as measured.

    Called on every rank of the group at once. All ranks come to the same plan, since they exchange what they have
    found: the least memory counts, and the largest step. Raises ConfigError, on every rank alike.
    """
    return_freed_memory()
    _all_ranks(0, tp, runner.device)  # each has loaded
    left = min(_all_ranks(available_bytes(demand.device, demand.tp_size), tp, runner.device))
    own = measure_activations(runner, demand)
    sizes = _all_ranks(own.size_bytes, tp, runner.device)
    is_measured = all(_all_ranks(own.is_measured, tp, runner.device))
    why = own.why if is_measured or not own.is_measured else "another rank could not measure"
    activations = Activations(max(sizes), is_measured, why)
    return plan_memory(demand, free_bytes=left + demand.weight_bytes, activations=activations)


def memory_line(plan: MemoryPlan) -> str:
    """Returns a line for the log of a worker that has started."""
    how = "measured" if plan.activations_are_measured else f"estimated: {plan.activations_why}"
    is_bounded = plan.decided_by == "kv_cache_tokens" and plan.num_tokens < plan.tokens_that_fit
    bounded = f", as kv_cache_tokens says; {plan.tokens_that_fit} tokens would fit" if is_bounded else ""
    below = ""
    if plan.num_host_blocks:
        size = format_bytes(plan.num_host_blocks * plan.block_bytes)
        below = f"; below it {plan.num_host_blocks} in host memory, {size}, and {plan.num_disk_blocks} on a disk"
    return (
        f"memory of each rank: weights {format_bytes(plan.weight_bytes)}, "
        f"activations {format_bytes(plan.activation_bytes)} ({how}), KV pool {format_bytes(plan.pool_bytes)}, "
        f"of {format_bytes(plan.budget_bytes)}; KV pool: {plan.num_blocks} blocks of {plan.block_size} tokens, "
        f"{plan.kv_bytes_per_token} bytes a token{bounded}{below}"
    )


def _all_ranks(value: int, tp: TPGroup, device: torch.device) -> list[int]:
    """Every rank's value."""
    values: list[int] = tp.all_gather(torch.tensor([value], dtype=torch.int64, device=device)).tolist()
    return values
