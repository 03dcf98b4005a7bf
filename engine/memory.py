"""What a model takes, in bytes, and in which types and on which device: told from its config before anything is read.

`engine.memory_plan` makes the sum of it. The only looks at the machine are `resolve_*` and `available_bytes`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.errors import ConfigError
from engine.kv.pool import KV_CACHE_DTYPES, POOL_DTYPES, cell_size
from engine.layers.matmul import keeps_plain, matrix_bytes, multiplies_plain, multiplies_quantized
from engine.models.config import DTYPES, ModelConfig
from engine.native import Native
from engine.native.tiles import INT4_ZEROS
from engine.quantization.formats import stored_bytes


@dataclass(frozen=True)
class WeightForm:
    """What decides in which form a rank keeps the weights of a model. Names are resolved."""

    dtype: str
    device: str = "cpu"
    quantization: str = "none"
    keeps_codes: bool = False
    """As `Packing.keeps_codes` says for the checkpoint's packing."""
    is_tiled: bool = False
    """Whether Baton's kernels multiply what is quantized, which is then padded for them."""
    is_plain_tiled: bool = False
    """Whether they multiply what is not."""

    @property
    def element_type(self) -> torch.dtype:
        return _torch_dtype(self.dtype)

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """What is kept of a weight [O, I]."""
        is_tiled = self.is_plain_tiled if self.quantization == "none" else self.is_tiled
        return matrix_bytes(shape, self.element_type, torch.device(self.device), self.quantization, is_tiled)


def choose_form(
    config: ModelConfig, *, dtype: str, device: str, quantization: str, kernels: Native | None
) -> WeightForm:
    """`kernels` as `engine.layers.ops.choose_native` gives them."""
    packing = config.packing
    keeps_codes = packing is not None and packing.keeps_codes(quantization, _torch_dtype(dtype), kernels)
    is_plain_tiled = quantization == "none" and multiplies_plain(kernels, _torch_dtype(dtype))
    return WeightForm(dtype, device, quantization, keeps_codes, multiplies_quantized(kernels), is_plain_tiled)


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


def kv_bytes_per_token(config: ModelConfig, tp_size: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in all layers on one rank, in a pool of this type."""
    heads = len(config.kv_head_range(0, tp_size))
    kind = _torch_dtype(kv_dtype)
    head_bytes = cell_size(config.head_dim, kind) * kind.itemsize
    return 2 * config.num_hidden_layers * heads * head_bytes


def weight_bytes(config: ModelConfig, tp_size: int, form: WeightForm) -> int:
    """Bytes that one rank's weights take once they are loaded, in every form that is kept of them.

    A head that is tied to the embedding shares its memory only as far as it is multiplied with as it lies there.
    """
    kind, place = form.element_type, torch.device(form.device)
    vocabulary = _vocabulary_shape(config, tp_size)
    embedding = vocabulary[0] * vocabulary[1] * kind.itemsize
    head = form.bytes_of(vocabulary)
    if config.tie_word_embeddings and keeps_plain(vocabulary, kind, place, form.quantization, form.is_plain_tiled):
        head -= embedding
    layer = sum(_linear_bytes(config, linear, form) for linear in _layer_linears(config, tp_size))
    vectors = config.num_hidden_layers * _layer_vector_elements(config, tp_size) + config.hidden_size
    return config.num_hidden_layers * layer + embedding + head + vectors * kind.itemsize


def multiplied_bytes(config: ModelConfig, tp_size: int, form: WeightForm) -> int:
    """Bytes of those that every step multiplies with, in one form: all but the embedding, which is looked up."""
    return layers_multiplied_bytes(config, tp_size, form) + head_multiplied_bytes(config, tp_size, form)


def layers_multiplied_bytes(config: ModelConfig, tp_size: int, form: WeightForm) -> int:
    """Of the matrices of all layers on one rank, in one form."""
    layer = sum(_linear_bytes(config, linear, form, is_read=True) for linear in _layer_linears(config, tp_size))
    return config.num_hidden_layers * layer


def head_multiplied_bytes(config: ModelConfig, tp_size: int, form: WeightForm) -> int:
    """Of one rank's rows of the head, in one form."""
    return _linear_bytes(config, _Linear(_vocabulary_shape(config, tp_size)), form, is_read=True)


def head_elements(config: ModelConfig, tp_size: int) -> int:
    """Of one rank's rows of the head."""
    return _Linear(_vocabulary_shape(config, tp_size)).num_elements


def largest_matrix_elements(config: ModelConfig, tp_size: int) -> int:
    """Of those that one rank multiplies with, the head included."""
    vocabulary = _Linear(_vocabulary_shape(config, tp_size))
    return max(linear.num_elements for linear in [*_layer_linears(config, tp_size), vocabulary])


def layer_elements(config: ModelConfig, tp_size: int) -> int:
    """Of the matrices of one layer on one rank."""
    return sum(linear.num_elements for linear in _layer_linears(config, tp_size))


@dataclass(frozen=True)
class _Linear:
    """One rank's matrix, as `engine.model` fuses them."""

    shape: tuple[int, int]
    """Outputs and inputs."""
    is_packed: bool = False
    """Whether a packed checkpoint has it in codes."""
    num_ranks: int = 1
    """Among which its inputs are divided."""

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]


def _linear_bytes(config: ModelConfig, linear: _Linear, form: WeightForm, is_read: bool = False) -> int:
    """What is kept of it; `is_read`: of one form, where it is kept in two."""
    packing = config.packing if linear.is_packed and form.keeps_codes else None
    group = None if packing is None else packing.kept_group(linear.shape[1], linear.num_ranks)
    if packing is not None and group is not None:
        order = linear.shape[1] * torch.int64.itemsize if packing.is_scattered(linear.shape[1]) else 0
        return stored_bytes(linear.shape, INT4_ZEROS, group, form.is_tiled) + order
    if is_read and form.quantization == "none" and not form.is_plain_tiled:
        return linear.num_elements * form.element_type.itemsize
    return form.bytes_of(linear.shape)


def _layer_linears(config: ModelConfig, tp_size: int) -> list[_Linear]:
    """Of one layer."""
    attended, kv = _head_widths(config, tp_size)
    inner = config.intermediate_size // tp_size
    hidden = config.hidden_size
    return [
        _Linear((attended + 2 * kv, hidden), is_packed=True),
        _Linear((hidden, attended), is_packed=True, num_ranks=tp_size),
        _Linear((2 * inner, hidden), is_packed=True),
        _Linear((hidden, inner), is_packed=True, num_ranks=tp_size),
    ]


def _vocabulary_shape(config: ModelConfig, tp_size: int) -> tuple[int, int]:
    """One rank's rows of the embedding, and of the head."""
    return -(-config.vocab_size // tp_size), config.hidden_size


def _layer_vector_elements(config: ModelConfig, tp_size: int) -> int:
    """Norms and biases of one rank in one layer."""
    attended, kv = _head_widths(config, tp_size)
    count = 2 * config.hidden_size
    if config.qk_norm:
        count += attended + kv
    if config.attention_bias:
        count += attended + 2 * kv
    if config.attention_output_bias:
        count += config.hidden_size
    if config.mlp_bias:
        count += 2 * config.intermediate_size // tp_size + config.hidden_size
    return count


def _head_widths(config: ModelConfig, tp_size: int) -> tuple[int, int]:
    """Elements of one token's query heads, and of its keys, on one rank."""
    num_kv_heads = len(config.kv_head_range(0, tp_size))
    return config.num_attention_heads * config.head_dim // tp_size, num_kv_heads * config.head_dim


def available_bytes(device: str, tp_size: int = 1) -> int:
    """Memory that one rank can still take: what the driver, or the system and the container, leave free.

    The ranks of a worker share a machine's memory, and have a GPU each.
    """
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    free = [_system_bytes(), _container_bytes()]
    return min(count for count in free if count is not None) // tp_size


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


def _torch_dtype(name: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, name)
    return kind
