"""`python -m worker.check_model FOLDER MODEL_IMPL [NEEDS [ROLES]]`: refuses a model folder that workers could not
serve, before any is started. NEEDS is `weights`, the default, or `config` for steps that are timed, which need no
weights. ROLES is JSON: by role the settings of its workers (`RoleWorkers`). Reads no weights, and loads neither torch
nor transformers.

Ends with an error and an exit code as `cluster.program` has them. Where what reads models is not installed, as on a
machine that only starts a cluster, it finds nothing wrong: the workers look for themselves.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import CheckpointError, ConfigError
from cluster.program import ExitCode, free_memory_bytes
from cluster.text import format_bytes

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

_GPUS = Path("/proc/driver/nvidia/gpus")
_ASK_MEMORY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_ASK_S = 5.0


@dataclass(frozen=True)
class RoleWorkers:
    """The settings of one role's workers that are looked at before any is started."""

    tensor_parallel: int
    expert_parallel: int
    split_latents: bool
    device: str
    dtype: str
    quantization: str
    memory_utilization: float
    are_here: bool
    """Whether they run on this machine, whose memory they then have to fit in."""
    kv_key_file: str | None = None


def main(folder: str, model_impl: str, needs: str = "weights", roles: str = "{}") -> int:
    try:
        tensors = importlib.import_module("engine.models.tensors")
        config = tensors.check_folder(Path(folder), model_impl, needs_weights=needs == "weights")
        for role, workers in json.loads(roles).items() if config is not None and needs == "weights" else ():
            _check_role(config, role, RoleWorkers(**workers))
    except ModuleNotFoundError:
        return ExitCode.DONE
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    return ExitCode.DONE


def _check_role(config: ModelConfig, role: str, workers: RoleWorkers) -> None:
    """Raises ConfigError with the role and the numbers that would do, or with the file of a key that is none."""
    if workers.are_here and workers.kv_key_file is not None:
        secret = importlib.import_module("kv_transfer.sealed").KvSecret
        secret.read(Path(workers.kv_key_file)).cipher(b"")
    try:
        config = config.divided(workers.tensor_parallel, workers.expert_parallel, workers.split_latents)
    except ConfigError as error:
        raise ConfigError(f"roles.{role}.{error}") from None
    if workers.are_here:
        _check_memory(config, role, workers)


def _check_memory(config: ModelConfig, role: str, workers: RoleWorkers) -> None:
    """Refuses weights that cannot fit whatever kernels make of them. Workers plan the rest, and see what is free of a
    GPU: here it counts whole."""
    least = importlib.import_module("engine.models.shapes").least_weight_bytes
    is_gpu = workers.device.startswith("cuda") or (workers.device == "auto" and _GPUS.is_dir())
    whole = _gpu_bytes() if is_gpu else free_memory_bytes() // workers.tensor_parallel
    if whole is None:
        return
    dtype = config.dtype if workers.dtype == "auto" else workers.dtype
    budget = int(whole * workers.memory_utilization)
    own = least(config, workers.tensor_parallel, dtype, workers.quantization)
    if own <= budget:
        return
    what = (
        f"roles.{role}: model.path: weights of at least {format_bytes(own)} do not fit in the {format_bytes(budget)} "
        f"that each rank may take, with tensor_parallel {workers.tensor_parallel} and engine.memory_utilization "
        f"{workers.memory_utilization:g}"
    )
    if not is_gpu:
        more = int((own - budget) * workers.tensor_parallel / workers.memory_utilization)
        raise ConfigError(f"{what}: free {format_bytes(more)} more, or set model.quantization")
    for size in range(workers.tensor_parallel + 1, config.num_attention_heads + 1):
        is_divided = config.allows_tp_size(size) and size % workers.expert_parallel == 0
        if is_divided and least(config, size, dtype, workers.quantization) <= budget:
            raise ConfigError(f"{what}: set tensor_parallel to at least {size}, or model.quantization")
    remedy = "no tensor_parallel holds it on such GPUs; set model.quantization, or use larger ones"
    raise ConfigError(f"{what}: {remedy}")


def _gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None where nothing says it."""
    try:
        done = subprocess.run(_ASK_MEMORY, capture_output=True, text=True, timeout=_ASK_S, check=True)
        return min(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
