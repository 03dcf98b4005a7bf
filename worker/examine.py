"""`python -m worker.examine`: reports what workers would find on this machine, without reading weights.

Reads `{"workers": [WorkerSettings, ...]}` from stdin and writes JSON to stdout. For `baton doctor` an object: torch,
GPUs, NCCL and flash-attn as they are, the checkpoint's files, and for each worker what it would choose; every part is
an object of its own, `{"found": ...}` or, where a worker would refuse it, `{"refused": "why"}`.

`python -m worker.examine memory`, for `baton config explain`, writes a list instead: for each worker the fields of its
`MemoryPlan`, and what follows from them. Its question has `"mean_tokens": N or null` as well, and it ends with an error
and an exit code as `cluster.program` has them where a worker could not be served.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed

from cluster.config.schema import EngineSection
from cluster.errors import BatonError, CheckpointError, ConfigError
from cluster.model_folder import weight_files
from cluster.program import ExitCode, free_memory_bytes
from cluster.settings import WorkerSettings
from engine.attention.registry import choose_attention
from engine.gguf_checkpoint import open_checkpoint
from engine.layers.ops import TorchOps, choose_ops
from engine.memory import MemoryPlan, resolve_device, resolve_dtype, resolve_kv_dtype
from engine.model_cost import describe_weights
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.quantization.interface import TritonProducts
from kv_transfer.transports.selection import supported
from worker.loading import expect_memory, kv_disk_path, kv_secret
from worker.resolved import checkpoint_digest, resolve

Part = dict[str, Any]
DEFAULT_MEAN_TOKENS = 1024


def examine(workers: list[WorkerSettings]) -> dict[str, Any]:
    """The whole answer."""
    folder = Path(workers[0].model.path) if workers else None
    return {
        "torch": _part(_torch),
        "gpus": _part(_gpus),
        "nccl": _part(_nccl),
        "flash_attn": _flash_attn(),
        "checkpoint": None if folder is None else _part(lambda: _checkpoint(folder)),
        "workers": [{"role": settings.role, **_worker(settings)} for settings in workers],
    }


def _part(look: Callable[[], Any]) -> Part:
    try:
        return {"found": look()}
    except BatonError as error:
        return {"refused": error.message}
    except Exception as error:  # drivers and torch fail in any way
        return {"refused": f"{type(error).__name__}: {error}"}


def _torch() -> dict[str, Any]:
    return {"version": torch.__version__, "cuda": torch.version.cuda, "sees_gpu": torch.cuda.is_available()}


def _gpus() -> list[dict[str, Any]]:
    """Free memory is what the driver says now, whoever holds the rest."""
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        found.append({"name": name, "capability": f"{major}.{minor}", "free_bytes": free, "total_bytes": total})
    return found


def _nccl() -> dict[str, Any]:
    """`version` None: this torch was built without."""
    if not torch.distributed.is_nccl_available():
        return {"version": None}
    nccl: Any = torch.cuda.nccl
    return {"version": ".".join(map(str, nccl.version()))}


def _flash_attn() -> Part:
    """`version` None: not installed. One that is and cannot be imported is refused: built for another torch, say."""
    if importlib.util.find_spec("flash_attn") is None:
        return {"found": {"version": None}}
    try:
        installed = version("flash-attn")
    except PackageNotFoundError:
        installed = "of unknown version"
    try:
        module = importlib.import_module("flash_attn")
        module.flash_attn_varlen_func  # noqa: B018 (what Baton calls)
    except Exception as error:  # a foreign binary may fail in any way
        return {"refused": f"flash-attn {installed} cannot be imported: {type(error).__name__}: {error}"}
    return {"found": {"version": installed}}


def _checkpoint(folder: Path) -> dict[str, Any]:
    with open_checkpoint(folder) as checkpoint:
        files = checkpoint.files
        sizes = sum(path.stat().st_size for path in weight_files(folder) if path.name in files)
        return {
            "num_files": len(files),
            "num_tensors": checkpoint.num_tensors,
            "size_bytes": sizes,
            "revision": checkpoint_digest(folder),
        }


def _worker(settings: WorkerSettings) -> dict[str, Part]:
    """Parts that need the device are refused with the device's reason."""
    device = _part(lambda: resolve_device(settings.engine.device))
    kind = device.get("found", "")
    wanted = kind or ("cuda" if settings.engine.device.startswith("cuda") else "cpu")
    return {
        "device": device,
        "sizes": _part(lambda: _sizes(settings)),
        "kv_key": _part(lambda: _kv_key(settings.engine)),
        "transports": _part(lambda: supported(wanted, settings.transfer.transport)),
        "attention": _part(lambda: _attention(settings, kind)) if kind else device,
        "kernels": _part(lambda: _kernels(settings, kind)) if kind else device,
        "memory": _part(lambda: _memory(settings)) if kind else device,
    }


def _model(settings: WorkerSettings) -> ModelConfig:
    """Reads the model once: that of transformers' own code takes seconds."""
    config = _read(settings.model.path, settings.engine.model_impl)
    return config.with_split_latents(settings.tp_size) if settings.split_latents else config


@cache
def _read(path: str, model_impl: str) -> ModelConfig:
    return read_model(path, model_impl)


def _sizes(settings: WorkerSettings) -> dict[str, Any]:
    config = _model(settings)
    config.check_tp_size(settings.tp_size)
    return {"architecture": config.architecture, "max_position_embeddings": config.max_position_embeddings}


def _attention(settings: WorkerSettings, device: str) -> dict[str, str]:
    dtype, engine = _dtype(settings, device), settings.engine
    kv_dtype = resolve_kv_dtype(engine.kv_cache_dtype, str(dtype).removeprefix("torch."), device)
    kernels = TritonProducts(engine.deterministic) if device != "cpu" else None
    block_size = None if engine.block_size == "auto" else engine.block_size
    backend, why = choose_attention(
        engine.attention,
        torch.device(device),
        dtype,
        kernels,
        block_size,
        getattr(torch, kv_dtype),
        extras=_model(settings).attention_extras,
    )
    return {"name": backend.name, "why": why}


def _kernels(settings: WorkerSettings, device: str) -> dict[str, Any]:
    engine, head_dim = settings.engine, _model(settings).head_dim
    dtype = _dtype(settings, device)
    ops, _, why = choose_ops(engine.kernels, torch.device(device), dtype, head_dim, engine.deterministic)
    return {"are_native": not isinstance(ops, TorchOps), "why": why}


def _memory(settings: WorkerSettings) -> dict[str, Any]:
    """Memory of each rank, and of its hand-off slots for each pair."""
    resolved = resolve(settings)
    plan = expect_memory(resolved.demand)
    slots = settings.transfer.num_slots * settings.transfer.chunk_tokens * plan.kv_bytes_per_token
    sizes = {"pool_bytes": plan.pool_bytes, "slot_bytes_per_pair": slots}
    return {**dataclasses.asdict(plan), **sizes, **_below(settings, plan)}


def _below(settings: WorkerSettings, plan: MemoryPlan) -> dict[str, Any]:
    """What the rank takes of host memory and of a disk for KV below its pool, and what is there: of a disk what is free
    or holds such KV already."""
    below: dict[str, Any] = {"host_bytes": plan.host_bytes, "disk_bytes": plan.disk_bytes}
    if plan.host_bytes:
        below["host_free_bytes"] = free_memory_bytes()
    if plan.disk_bytes:
        path = kv_disk_path(settings.engine)
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        kept = sum(file.stat().st_blocks * 512 for file in path.glob("*/*.rank*"))
        below |= {"disk_path": str(path), "disk_free_bytes": shutil.disk_usage(there).free + kept}
        below["disk_is_writable"] = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return below


def _kv_key(engine: EngineSection) -> dict[str, Any] | None:
    """None: no KV is encrypted. Of the key no more than its length, and a name that is equal where it is."""
    if (secret := kv_secret(engine)) is None:
        return None
    secret.cipher(b"")
    told = {"path": engine.kv_key_file, "size_bytes": secret.size_bytes, "name": secret.namespace(b"").hex()}
    return {**told, "has_disk": engine.kv_disk_bytes > 0, "has_store": engine.kv_store_bytes > 0}


def _dtype(settings: WorkerSettings, device: str) -> torch.dtype:
    config = _model(settings)
    dtype: torch.dtype = getattr(torch, resolve_dtype(config, settings.model.dtype, device))
    return dtype


def explain_memory(settings: WorkerSettings, mean_tokens: int | None) -> dict[str, Any]:
    """One worker's memory, of each of its ranks. `mean_tokens`: of a request, prompt and output together.

    Raises ConfigError and CheckpointError for what could not be served, like the worker itself.
    """
    resolved = resolve(settings)
    resolved.config.check_tp_size(settings.tp_size)
    if mean_tokens is None:
        mean_tokens = min(DEFAULT_MEAN_TOKENS, resolved.max_model_len)
    if mean_tokens > resolved.max_model_len:
        raise ConfigError(f"--mean-tokens: {mean_tokens} is more than max_model_len {resolved.max_model_len}")
    demand = resolved.demand
    plan = expect_memory(demand)
    return {
        "device": resolved.device,
        "dtype": resolved.dtype,
        "quantization": settings.model.quantization,
        "weights": describe_weights(resolved.config, settings.tp_size, demand.form),
        "kv_dtype": resolved.kv_dtype,
        "tensor_parallel": settings.tp_size,
        "memory_utilization": settings.engine.memory_utilization,
        "max_num_seqs": settings.engine.num_seqs,
        "max_num_batched_tokens": settings.engine.max_num_batched_tokens,
        **dataclasses.asdict(plan),
        "num_tokens": plan.num_tokens,
        "pool_bytes": plan.pool_bytes,
        **_below(settings, plan),
        "tokens_that_fit": plan.tokens_that_fit,
        "mean_tokens": mean_tokens,
        "requests_at_mean": plan.num_requests(mean_tokens),
    }


def _explain_all(workers: list[WorkerSettings], mean_tokens: int | None) -> int:
    explained: list[dict[str, Any]] = []
    problems: list[tuple[str, BatonError]] = []
    for settings in workers:
        try:
            explained.append(explain_memory(settings, mean_tokens))
        except BatonError as error:
            problems.append((settings.role, error))
    if not problems:
        print(json.dumps(explained))
        return ExitCode.DONE
    print("error: " + "; ".join(f"{role} workers: {error}" for role, error in problems), file=sys.stderr)
    are_of_config = all(isinstance(error, ConfigError | CheckpointError) for _, error in problems)
    return ExitCode.BAD_CONFIG if are_of_config else ExitCode.FAILED


def main(arguments: list[str]) -> int:
    asked = json.load(sys.stdin)
    workers = [WorkerSettings.from_json(json.dumps(values)) for values in asked["workers"]]
    if arguments == ["memory"]:
        return _explain_all(workers, asked["mean_tokens"])
    print(json.dumps(examine(workers)))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
