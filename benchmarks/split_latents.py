"""What it costs that ranks divide latents among them: steps of a DeepSeek of 200 M parameters, whole against split.

    python -m benchmarks.split_latents [--ranks 2] [--dtype float32] [--rounds 15]

Ranks are processes of one thread each, with `expert_parallel`. Both ways are computed in turn by the same
ranks. A line has the medians of rank 0's steps, in all and of its processor, which other programs disturb less, and the
medians of the ratios of neighbours.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.multiprocessing as processes
import typer
from safetensors.torch import save_file
from torch.distributed import TCPStore

from engine.json_fields import Fields
from engine.model_runner import ModelRunner
from engine.models.registry import read_config
from engine.models.tensors import declared_tensors
from engine.step_input import SequenceSlice, StepInput, build_step
from engine.tp import make_process_group

_MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
_BLOCK_SIZE = 16
_STEPS = ((1, 1, 128), (1, 1, 1024), (8, 1, 1024), (1, 1, 8192), (2, 1, 8192), (1, 128, 128), (1, 128, 2048))
"""Sequences, new tokens of each, tokens of each in all."""


def make_folder(folder: Path) -> Path:
    """Writes the model, with random weights that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in declared_tensors(read_config(Fields(dict(_MODEL), "config.json"))):
        weight = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        weights[name] = weight if name.endswith("bias") else weight.bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return folder


def step_of(num_sequences: int, num_new: int, length: int) -> StepInput:
    """Sequences over blocks of their own, one after another."""
    width = -(-length // _BLOCK_SIZE)
    tables = [tuple(range(s * width, (s + 1) * width)) for s in range(num_sequences)]
    new = tuple(range(3, 3 + num_new))
    return build_step([SequenceSlice(new, length - num_new, table, True) for table in tables], _BLOCK_SIZE)


def measure(rank: int, ranks: int, port: int, folder: str, dtype: str, rounds: int) -> None:
    """One rank; the first prints."""
    torch.set_num_threads(1)
    tp = make_process_group(TCPStore("127.0.0.1", port, ranks, rank == 0), rank, ranks, "cpu")
    blocks = max(count * -(-length // _BLOCK_SIZE) for count, _, length in _STEPS)
    how: dict[str, Any] = {"device": "cpu", "dtype": dtype, "block_size": _BLOCK_SIZE, "expert_parallel": ranks}
    runners = [ModelRunner(folder, tp=tp, num_blocks=blocks, split_latents=split, **how) for split in (False, True)]
    if rank == 0:
        sizes = [runner.kv[:, :, 0].nbytes / _BLOCK_SIZE for runner in runners]
        print(f"KV of a token on each of {ranks} ranks: {sizes[0]:,.0f} bytes whole, {sizes[1]:,.0f} split", flush=True)
    for shape in _STEPS:
        step = step_of(*shape)
        found = [_took(runners, step) for _ in range(rounds + 1)][1:]
        if rank:
            continue
        told = []
        for clock in ("wall", "cpu"):
            times = [[1000 * one[clock] for one in pair] for pair in found]
            ratio = statistics.median(split / whole for whole, split in times)
            whole, split = (statistics.median(took) for took in zip(*times, strict=True))
            told.append(f"{clock} {whole:8.2f} ms whole, {split:8.2f} ms split, {ratio:.2f} times")
        print(f"{shape[0]} x {shape[1]} of {shape[2]:,} tokens: {'; '.join(told)}", flush=True)


def _took(runners: list[ModelRunner], step: StepInput) -> list[dict[str, float]]:
    """Seconds of the step by each, in turn."""
    took = []
    for runner in runners:
        wall, cpu = time.perf_counter(), time.process_time()
        runner.forward(step)
        took.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    return took


def main(
    ranks: Annotated[int, typer.Option(min=2, max=8)] = 2,
    dtype: Annotated[str, typer.Option()] = "float32",
    rounds: Annotated[int, typer.Option(min=1)] = 15,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # holds the port's number free
        port = store.port
        del store
        processes.spawn(measure, (ranks, port, folder, dtype, rounds), nprocs=ranks)


if __name__ == "__main__":
    typer.run(main)
