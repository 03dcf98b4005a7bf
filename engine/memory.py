"""How much fits: devices, types, context length and the number of KV blocks, decided before anything is allocated.

Pure arithmetic over a `ModelConfig` and a number of free bytes; the only look at the machine is `available_bytes`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cluster.errors import ConfigError
from engine.config import DTYPES, ModelConfig
from engine.kv_cache import KV_CACHE_DTYPES, POOL_DTYPES, cell_size

_USABLE_SHARE = 0.9
_CPU_DEFAULT_REQUESTS = 4
_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5 + 2 / 32, "fp8": 1.0}
_GPU_WORKSPACE_BYTES = 1 << 30  # activations of one step, communicators, the allocator's slack


def resolve_device(wanted: str) -> str:
    """`auto` becomes `cuda` where there is one. Raises ConfigError for a device that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = wanted.split(":", 1)[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device: {wanted!r} is unknown; use auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {wanted} is not available here; use cpu, or a torch build and driver with CUDA")
    return wanted


def resolve_dtype(config: ModelConfig, wanted: str, device: str) -> str:
    """`auto` becomes the checkpoint's. Raises ConfigError for a type that the device cannot compute in."""
    name = config.dtype if wanted == "auto" else wanted
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    if name == "bfloat16" and device.startswith("cuda") and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype: this GPU cannot compute in bfloat16; use float16 or float32")
    return name


def resolve_kv_dtype(wanted: str, dtype: str, device: str) -> str:
    """The KV pool's type, as torch names it: `auto` becomes the one that is computed in. Raises ConfigError."""
    if wanted not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype: {wanted!r} is unknown; use {', '.join(KV_CACHE_DTYPES)}")
    if wanted == "fp8" and device.startswith("cpu"):
        raise ConfigError("kv_cache_dtype: fp8 is for GPUs; use int8 on a CPU, which is as small and nearer")
    return POOL_DTYPES.get(wanted, dtype)


def resolve_max_model_len(config: ModelConfig, wanted: int | None) -> int:
    """None becomes max_position_embeddings, which is also the most that can be asked for."""
    most = config.max_position_embeddings
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise ConfigError(
            f"max_model_len: {wanted} is not between 1 and the checkpoint's max_position_embeddings {most}"
        )
    return wanted


def plan_num_blocks(
    config: ModelConfig,
    *,
    tp_size: int,
    dtype: str,
    device: str,
    block_size: int,
    kv_cache_tokens: int | None,
    max_model_len: int,
    max_num_seqs: int,
    quantization: str = "none",
    keeps_codes: bool = False,
    kv_cache_dtype: str = "auto",
    free_bytes: int | None = None,
) -> int:
    """Blocks of this rank's KV pool: `kv_cache_tokens` if given, else what fits (GPU) or four long requests (CPU).

    `free_bytes` before the weights are loaded; None: ask the device. Raises ConfigError, naming the tokens that fit,
    when memory cannot hold the pool or the pool cannot hold one request of max_model_len.
    """
    free = available_bytes(device) if free_bytes is None else free_bytes
    is_cuda = device.startswith("cuda")
    weights = weight_bytes(config, tp_size, dtype, quantization, keeps_codes)
    reserved = weights + 2 * 4 * max_num_seqs * config.vocab_size
    room = int(free * _USABLE_SHARE) - reserved - (_GPU_WORKSPACE_BYTES if is_cuda else 0)
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, dtype, device)
    fitting = max(0, room // kv_bytes_per_token(config, tp_size, kv_dtype)) // block_size
    if kv_cache_tokens is not None:
        wanted = kv_cache_tokens // block_size
    elif is_cuda:
        wanted = fitting
    else:
        wanted = min(fitting, -(-_CPU_DEFAULT_REQUESTS * max_model_len // block_size))
    if wanted > fitting:
        raise ConfigError(
            f"kv_cache_tokens: {kv_cache_tokens} do not fit in memory beside the weights; "
            f"{fitting * block_size} would: lower kv_cache_tokens, or raise tensor_parallel"
        )
    if wanted * block_size < max_model_len:
        cause = "memory" if kv_cache_tokens is None else f"kv_cache_tokens {kv_cache_tokens}"
        raise ConfigError(
            f"max_model_len: one request of {max_model_len} tokens does not fit in the KV pool; {cause} with blocks of "
            f"{block_size} holds {wanted * block_size}: set max_model_len to at most {wanted * block_size}, or "
            f"kv_cache_tokens to at least {-(-max_model_len // block_size) * block_size}"
        )
    return wanted


def kv_bytes_per_token(config: ModelConfig, tp_size: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in all layers on one rank, in a pool of this type."""
    heads = len(config.kv_head_range(0, tp_size))
    head_bytes = cell_size(config.head_dim, getattr(torch, kv_dtype)) * _element_bytes(kv_dtype)
    return 2 * config.num_hidden_layers * heads * head_bytes


def weight_bytes(
    config: ModelConfig, tp_size: int, dtype: str, quantization: str = "none", keeps_codes: bool = False
) -> int:
    """Bytes of one rank's weights, to within the few that norms, biases and scales take."""
    embedding = -(-config.vocab_size // tp_size) * config.hidden_size * _element_bytes(dtype)
    # A head that is tied to the embedding shares its memory only while both are of one type.
    is_shared = config.tie_word_embeddings and quantization == "none"
    multiplied = multiplied_bytes(config, tp_size, dtype, quantization, keeps_codes)
    return multiplied + (0 if is_shared else embedding)


def multiplied_bytes(
    config: ModelConfig, tp_size: int, dtype: str, quantization: str = "none", keeps_codes: bool = False
) -> int:
    """Bytes of those that every step multiplies with: all but the embedding, which is looked up.

    `keeps_codes` as `Packing.keeps_codes` says for the checkpoint's packing.
    """
    size, inner = config.hidden_size, config.intermediate_size // tp_size
    attended = config.num_attention_heads * config.head_dim // tp_size
    kv = len(config.kv_head_range(0, tp_size)) * config.head_dim
    element_bytes = _QUANTIZED_BYTES.get(quantization, _element_bytes(dtype))

    def each(num_inputs: int, is_cut: bool) -> float:
        packing = config.packing if keeps_codes else None
        kept = None if packing is None else packing.kept_bytes(num_inputs, is_cut)
        return element_bytes if kept is None else kept

    column_parallel = (attended + 2 * kv + 2 * inner) * each(size, False)
    row_parallel = attended * each(attended, tp_size > 1) + inner * each(inner, tp_size > 1)
    head = -(-config.vocab_size // tp_size) * element_bytes
    return int(size * (config.num_hidden_layers * (column_parallel + row_parallel) + head))


def available_bytes(device: str) -> int:
    """Memory that can still be taken on a device: what the driver, or the system and the container, leave free."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    free = [_system_bytes(), _container_bytes()]
    return min(count for count in free if count is not None)


def _system_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> int | None:
    """What a cgroup (version 2) leaves; None where there is no limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.exists() and used.exists()) or (text := limit.read_text().strip()) == "max":
        return None
    return max(0, int(text) - int(used.read_text()))


def _element_bytes(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize
