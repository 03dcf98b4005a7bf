"""Prepares a rank of a worker: device, threads, tensor-parallel group, weights, KV pool and transfer engine."""

from __future__ import annotations

import hashlib
import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported without saying so

from cluster.errors import ConfigError
from cluster.pb import rank_pb2
from cluster.program import Report, give_way
from cluster.protocol import spoken
from cluster.settings import WorkerSettings
from cluster.text import format_bytes
from cluster.transports import shares_pages
from engine.attention.registry import choose_attention
from engine.cpu_runtime import compute_with, end_helpers, keep_freed_memory, return_freed_memory
from engine.kv.pool import cell_size, choose_page_copies, choose_pool_copies
from engine.layers.ops import choose_kernels
from engine.memory import (
    Activations,
    MemoryDemand,
    MemoryPlan,
    available_bytes,
    estimate_activations,
    plan_memory,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)
from engine.model_cost import ModelFlops, WeightForm, choose_form
from engine.model_runner import ModelRunner
from engine.models.config import ModelConfig
from engine.profiling import measure_activations
from engine.quantization.interface import Kernels
from engine.sampling.sampler import Sampler
from engine.tp import TPGroup, make_process_group
from kv_transfer.fault_injection import Faults
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_engine import TransferEngine
from kv_transfer.transports.interface import PoolMemory, connect_store
from kv_transfer.transports.selection import make_pool, supported

RENDEZVOUS_TIMEOUT_S = 120.0
_WHOLE_BYTES = 8 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096
NOT_STARTED = "measured when a worker starts"


@dataclass(frozen=True)
class Resolved:
    """Settings after a look at the machine and the checkpoint."""

    settings: WorkerSettings
    config: ModelConfig
    model: str
    device: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    transports: tuple[str, ...]
    """Transports that this worker can use, best first."""
    weights_revision: str
    """Names the weights as they are served: the checkpoint's digest, the type, and what they are rounded to."""

    @property
    def digest(self) -> str:
        """`on`, `sampled` or `off`."""
        if self.settings.transfer.digest != "auto":
            return self.settings.transfer.digest
        return "on" if self.device == "cpu" else "sampled"

    @property
    def weight_form(self) -> WeightForm:
        """The form in which each rank keeps its weights; may compile Baton's kernels. Raises ConfigError without those
        that are wanted."""
        return choose_form(
            self.config,
            dtype=self.dtype,
            device=self.device,
            quantization=self.settings.model.quantization,
            kernels=self._kernels,
        )

    @property
    def _kernels(self) -> Kernels | None:
        dtype: torch.dtype = getattr(torch, self.dtype)
        engine, device = self.settings.engine, torch.device(self.device)
        return choose_kernels(engine.kernels, device, dtype, self.config.head_dim, engine.deterministic)[0]

    @cached_property
    def block_size(self) -> int:
        """Tokens of one KV block; auto: what suits the attention. Raises ConfigError as `weight_form` does."""
        engine = self.settings.engine
        if engine.block_size != "auto":
            return engine.block_size
        dtype, kv_dtype = getattr(torch, self.dtype), getattr(torch, self.kv_dtype)
        device = torch.device(self.device)
        return choose_attention(engine.attention, device, dtype, self._kernels, kv_dtype=kv_dtype)[0].block_size

    def led_by(self, start: rank_pb2.Start) -> Resolved:
        """The same with what rank 0 has resolved for all ranks."""
        return replace(self, settings=self.settings.with_values(block_size=start.block_size or self.block_size))

    @property
    def demand(self) -> MemoryDemand:
        """Raises ConfigError as `weight_form` does."""
        settings = self.settings
        return MemoryDemand(
            config=self.config,
            form=self.weight_form,
            tp_size=settings.tp_size,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            kv_cache_tokens=settings.engine.kv_cache_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=settings.engine.num_seqs,
            max_num_batched_tokens=settings.engine.max_num_batched_tokens,
            memory_utilization=settings.engine.memory_utilization,
        )

    @property
    def work(self) -> ModelFlops:
        """Operations and bytes of a step on each rank. Raises ConfigError as `weight_form` does."""
        return ModelFlops.of(self.config, self.settings.tp_size, self.weight_form, self.kv_dtype)

    @property
    def product_form(self) -> tuple[torch.dtype, str, Kernels | None]:
        """How weights are multiplied: the type computed in, what they are rounded to, and Baton's kernels, if used."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        quantization = "int4" if self.weight_form.keeps_codes else self.settings.model.quantization
        return dtype, quantization, self._kernels

    @property
    def layout(self) -> KvLayout:
        return KvLayout(
            num_layers=self.config.num_hidden_layers,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=cell_size(self.config.head_dim, getattr(torch, self.kv_dtype)),
            dtype=self.kv_dtype,
            tp_size=self.settings.tp_size,
            block_size=self.block_size,
            model=f"{self.model}@{self.weights_revision}",
        )


def resolve(settings: WorkerSettings) -> Resolved:
    """Raises ConfigError and CheckpointError for what could not be served; cheap, before any weight is read."""
    device = resolve_device(settings.engine.device)
    config = ModelConfig.from_folder(settings.model.path)
    dtype = resolve_dtype(config, settings.model.dtype, device)
    rounded = [settings.model.quantization] if settings.model.quantization != "none" else []
    return Resolved(
        settings=settings.with_values(device=device),
        config=config,
        model=settings.model.name or Path(settings.model.path).resolve().name,
        device=_own_device(settings, device),
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(settings.engine.kv_cache_dtype, dtype, device),
        max_model_len=resolve_max_model_len(config, settings.model.max_model_len),
        transports=supported(device, settings.transfer.transport),
        weights_revision="+".join((checkpoint_digest(Path(settings.model.path)), dtype, *rounded)),
    )


def _own_device(settings: WorkerSettings, device: str) -> str:
    """`cuda:N` where there are several GPUs. Raises ConfigError for a GPU that is not there."""
    if device != "cuda" or (torch.cuda.device_count() == 1 and not settings.gpu):
        return device
    number, count = settings.tp_rank if settings.gpu is None else settings.gpu, torch.cuda.device_count()
    if number >= count:
        rank = f"tensor-parallel rank {settings.tp_rank} of {settings.worker_id}"
        raise ConfigError(
            f"gpu: {rank} is to use GPU {number}, and this process sees {count}; see CUDA_VISIBLE_DEVICES and "
            "tensor_parallel"
        )
    return f"cuda:{number}"


@dataclass(frozen=True)
class LoadedRank:
    """A rank that is ready to serve."""

    runner: ModelRunner
    transfer_engine: TransferEngine
    plan: MemoryPlan
    """Equal on every rank of the group."""
    resolved: Resolved
    """Without the transports that this rank's KV pool is not made for."""


def load_rank(resolved: Resolved, start: rank_pb2.Start, report: Report, sampler: Sampler | None = None) -> LoadedRank:
    """Joins the tensor-parallel group, reads this rank's slices, and makes its KV pool and transfer engine. `sampler`:
    rank 0's, whose choices may become a part of steps.

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
        store, settings.tp_rank, settings.tp_size, resolved.device, host=settings.host, timeout_s=RENDEZVOUS_TIMEOUT_S
    )
    runner = ModelRunner(
        settings.model.path,
        tp=tp,
        device=resolved.device,
        dtype=resolved.dtype,
        block_size=resolved.block_size,
        attention=settings.engine.attention,
        quantization=settings.model.quantization,
        kv_cache_dtype=settings.engine.kv_cache_dtype,
        kernels=settings.engine.kernels,
        deterministic=settings.engine.deterministic,
        graphs_up_to=0 if settings.engine.enforce_eager else settings.engine.num_seqs,
        sampler=sampler,
        report=report,
    )
    plan = size_pool(resolved.demand, runner, tp)
    memory = make_pool(resolved.transports, runner.device, partial(runner.make_pool, plan.num_blocks))
    transfer_engine = _make_transfer_engine(resolved, runner, memory)
    transfer_engine.warm_up()
    end_helpers()  # steps run on other threads
    transports = tuple(name for name in resolved.transports if memory is not None or not shares_pages(name))
    return LoadedRank(runner, transfer_engine, plan, replace(resolved, transports=transports))


def _make_transfer_engine(resolved: Resolved, runner: ModelRunner, memory: PoolMemory | None) -> TransferEngine:
    settings = resolved.settings
    return TransferEngine(
        runner.kv,
        resolved.layout,
        settings.tp_rank,
        timeout_s=settings.transfer.timeout_s,
        host=settings.host,
        digest=resolved.digest,
        faults=_faults_of(settings),
        page_kernel=choose_page_copies(settings.engine.kernels, runner.device),
        pool_kernel=choose_pool_copies(settings.engine.kernels, runner.device),
        memory=memory,
    )


def ready_for_steps(resolved: Resolved) -> None:
    """Prepares the calling thread, which computes steps from now on."""
    compute_with(threads_of(resolved.settings))
    use_device(resolved.device)
    if resolved.device == "cpu":
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
    )


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


def group_start(resolved: Resolved, incarnation: str, store_address: str) -> rank_pb2.Start:
    """What rank 0 has the other ranks begin with."""
    return rank_pb2.Start(
        incarnation=incarnation,
        store_address=store_address,
        protocol=spoken(),
        block_size=resolved.block_size,
    )


def checkpoint_digest(folder: Path) -> str:
    """Names the weights of a folder: its config, and of each file name, size, the first 8 MiB and samples of the rest.

    Samples are evenly spaced, so that a file costs at most a few hundred short reads whatever its size: a checkpoint
    that was trained further has another digest, and one with a few numbers changed by hand may not.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as weights:
            digest.update(f"{file.name}:{size}".encode() + weights.read(_WHOLE_BYTES))
            for begin in range(_WHOLE_BYTES, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                weights.seek(begin)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def check_memory(demand: MemoryDemand) -> None:
    """Before any weight is read: raises ConfigError for a model that could not fit if activations took nothing."""
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
    """For the log of a worker that has started."""
    how = "measured" if plan.activations_are_measured else f"estimated: {plan.activations_why}"
    is_bounded = plan.decided_by == "kv_cache_tokens" and plan.num_tokens < plan.tokens_that_fit
    bounded = f", as kv_cache_tokens says; {plan.tokens_that_fit} tokens would fit" if is_bounded else ""
    return (
        f"memory of each rank: weights {format_bytes(plan.weight_bytes)}, "
        f"activations {format_bytes(plan.activation_bytes)} ({how}), KV pool {format_bytes(plan.pool_bytes)}, "
        f"of {format_bytes(plan.budget_bytes)}; KV pool: {plan.num_blocks} blocks of {plan.block_size} tokens, "
        f"{plan.kv_bytes_per_token} bytes a token{bounded}"
    )


def _all_ranks(value: int, tp: TPGroup, device: torch.device) -> list[int]:
    """Every rank's value."""
    values: list[int] = tp.all_gather(torch.tensor([value], dtype=torch.int64, device=device)).tolist()
    return values
