"""The settings of a worker after a look at the machine and the checkpoint, before any weight is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from cluster.config.source import read_text
from cluster.config.timed import timed_obstacles
from cluster.errors import ConfigError
from cluster.model_folder import model_name, read_model_file, weight_files
from cluster.pb import rank_pb2
from cluster.settings import WorkerSettings
from engine.attention.registry import choose_attention
from engine.kv.pool import cell_size
from engine.layers.ops import choose_kernels
from engine.memory import (
    MemoryDemand,
    resolve_block_size,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)
from engine.model_cost import ModelFlops, WeightForm, choose_form
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.quantization.interface import Kernels
from engine.timed_runner import timed_config
from kv_transfer.layout import KvLayout
from kv_transfer.transports.selection import supported

_WHOLE_BYTES = 8 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096


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
    """Names the weights as they are served: the checkpoint's digest, the type, and what they are rounded to; of all
    roles where those differ, since a request then goes from one form to the other."""

    @property
    def is_timed(self) -> bool:
        """Whether steps are waited for instead of computed."""
        return self.settings.engine.timed_steps.is_on

    @property
    def prefix_format(self) -> str:
        """The type of the KV cache; empty where a prefix would not travel as it is, or is not kept."""
        is_exact = self.settings.transfer.wire_format == "native" and self.settings.engine.enable_prefix_cache
        return self.layout.dtype if is_exact else ""

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
        """Tokens of one KV block; auto: what suits the attention and has room for a recurrent state. Raises ConfigError
        as `weight_form` does, and for a size that has no such room."""
        engine = self.settings.engine
        if engine.block_size != "auto":
            return self._with_room(engine.block_size, engine.block_size)
        dtype, kv_dtype = getattr(torch, self.dtype), getattr(torch, self.kv_dtype)
        device, extras = torch.device(self.device), self.config.attention_extras
        backend, _ = choose_attention(engine.attention, device, dtype, self._kernels, kv_dtype=kv_dtype, extras=extras)
        return self._with_room(None, backend.block_size)

    def _with_room(self, wanted: int | None, preferred: int) -> int:
        return resolve_block_size(self.config, self.settings.tp_size, self.kv_dtype, wanted, preferred)

    def led_by(self, start: rank_pb2.Start) -> Resolved:
        """Returns these settings with what rank 0 has resolved for all ranks."""
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
            kv_host_bytes=settings.engine.kv_host_bytes if settings.engine.enable_prefix_cache else 0,
            kv_disk_bytes=settings.engine.kv_disk_bytes if settings.engine.enable_prefix_cache else 0,
        )

    @property
    def work(self) -> ModelFlops:
        """Operations and bytes of a step on each rank. Raises ConfigError as `weight_form` does."""
        return ModelFlops.of(self.config, self.settings.tp_size, self.weight_form, self.kv_dtype)

    @property
    def product_form(self) -> tuple[torch.dtype, str, Kernels | None]:
        """The type that products are computed in, what weights are rounded to, and Baton's kernels, if used."""
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
            num_planes=self.config.num_kv_planes,
            num_token_shares=self.config.num_token_shares,
            layer_windows=self.config.layer_windows if any(self.config.layer_windows) else (),
            state_layers=self.config.state_layers,
            state=None if self.config.delta_net is None else self.config.delta_net.state,
        )


def resolve(settings: WorkerSettings) -> Resolved:
    """Raises ConfigError and CheckpointError for what could not be served; cheap, before any weight is read."""
    if settings.engine.timed_steps.is_on:
        return _resolve_timed(settings)
    device = resolve_device(settings.engine.device)
    config = read_model(settings.model.path, settings.engine.model_impl)
    config = config.divided(settings.tp_size, settings.expert_parallel, settings.split_latents)
    if settings.engine.deterministic:
        config.check_deterministic()
    dtype = resolve_dtype(config, settings.model.dtype, device)
    rounded = [settings.model.quantization] if settings.model.quantization != "none" else []
    form = [settings.weight_forms] if settings.weight_forms else [dtype, *rounded]
    return Resolved(
        settings=settings.with_values(device=device),
        config=config,
        model=_model_name(settings),
        device=_own_device(settings, device),
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(settings.engine.kv_cache_dtype, dtype, device),
        max_model_len=resolve_max_model_len(config, settings.model.max_model_len),
        transports=supported(device, settings.transfer.transport),
        weights_revision="+".join((checkpoint_digest(Path(settings.model.path)), *form)),
    )


def _resolve_timed(settings: WorkerSettings) -> Resolved:
    """Resolves a worker that computes nothing: what concerns only computing is as it costs least."""
    engine, transfer = settings.engine, settings.transfer
    for key, why in timed_obstacles(engine.device, transfer.wire_format, {"tensor_parallel": settings.tp_size}):
        raise ConfigError(f"{key}: {why}")
    config = timed_config(read_model(settings.model.path, settings.engine.model_impl))
    script = engine.timed_steps.script
    answers = "" if script is None else f"+{hashlib.sha256(read_text(script).encode()).hexdigest()[:16]}"
    return Resolved(
        settings=settings.with_values(kernels="torch", deterministic=False, quantization="none"),
        config=config,
        model=_model_name(settings),
        device=engine.device,
        dtype=config.dtype,
        kv_dtype=config.dtype,
        max_model_len=resolve_max_model_len(config, settings.model.max_model_len),
        transports=supported(engine.device, transfer.transport),
        weights_revision=f"{checkpoint_digest(Path(settings.model.path))}+timed{answers}",
    )


def _model_name(settings: WorkerSettings) -> str:
    return settings.model.name or model_name(Path(settings.model.path))


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


def checkpoint_digest(folder: Path) -> str:
    """Names the weights of a folder: its config, and of each file name, size, the first 8 MiB and samples of the rest.

    Samples are evenly spaced, so that a file costs at most a few hundred short reads whatever its size: a checkpoint
    that was trained further has another digest, and one with a few numbers changed by hand may not.
    """
    digest = hashlib.sha256(read_model_file(folder / "config.json"))
    for file in weight_files(folder):
        size = file.stat().st_size
        with file.open("rb") as weights:
            digest.update(f"{file.name}:{size}".encode() + weights.read(_WHOLE_BYTES))
            for begin in range(_WHOLE_BYTES, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                weights.seek(begin)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
