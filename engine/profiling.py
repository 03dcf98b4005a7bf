"""Measures the memory that the largest step takes beside weights and pool, by running it before the pool is made.

The step runs through one layer of each kind, since a layer leaves nothing behind but the residual, over a small cache
whose blocks stand in many tables. A GPU runs all of it. A CPU, where that would delay the start, runs a part; the rest
is computed from its shapes. Every rank of a group must call at once, since the step has collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.cpu_runtime import return_freed_memory
from engine.memory import Activations, MemoryDemand, StepLimits, estimate_activations, estimate_bytes
from engine.model_cost import multiplied_elements
from engine.model_runner import ModelRunner
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.step_input import StepInput

_MAX_CONTEXT_ON_CPU = 16_384
"""A longer context would delay a start; the measurement is then scaled up to it, which overestimates."""
_MAX_WORK_ON_CPU = 40_000_000_000
"""Multiplications and additions of the layers; half as many each for the logits to sample from and those to score."""
_MIN_TOKENS = 32
_MIN_ROWS = 4
_NUM_TOP = 20
_CLEAR_PEAK = "5"  # proc(5), /proc/pid/clear_refs
_PROBE = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=64,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 0.1},
    top_logprobs=_NUM_TOP,
)
"""Uses everything for which sampling takes memory."""


def measure_activations(runner: ModelRunner, demand: MemoryDemand) -> Activations:
    """Runs the largest step that `demand` allows, or a part of it, with sampling and scores of prompt tokens.

    Returns the estimate where nothing can be measured.
    """
    on_cpu = runner.device.type == "cpu"
    context = min(demand.max_model_len, _MAX_CONTEXT_ON_CPU) if on_cpu else demand.max_model_len
    size = step_to_try(demand, context) if on_cpu else demand.largest_step
    num_blocks, num_groups = -(-size.num_tokens // demand.block_size), len(demand.config.kv_groups)
    rehearsal = runner.rehearsal(num_blocks, context)
    rehearsal.kv.zero_()  # touched now, so that it is not counted
    step = make_step(size, context, demand.block_size, num_blocks, num_groups)
    sampler = Sampler(demand.config.vocab_size, runner.kernels)
    rows = [SampleRow(_PROBE, i, (0,), [0]) for i in range(size.num_seqs)]

    def work() -> None:
        sampler.sample(rehearsal.forward(step), rows)

    peak, why = _peak_on_cpu(work) if on_cpu else _peak_on_cuda(work, runner.device)
    if peak is None:
        return estimate_activations(demand, why)
    grown = peak + untried_bytes(demand, size, peak)
    if size != demand.largest_step:
        why += f", in a step of {size.num_tokens:,} tokens and {size.num_seqs} sequences"
    return Activations(-(-grown * demand.max_model_len // context), is_measured=True, why=why)


def step_to_try(demand: MemoryDemand, context: int) -> StepLimits:
    """The part of the largest step that a CPU computes in less than a second."""
    config, tp_size, whole = demand.config, demand.tp_size, demand.largest_step
    share = len(config.layer_kinds) / config.num_hidden_layers  # of the layers, which are computed
    attention = 2 * context * config.num_attention_heads * config.head_dim // tp_size
    of_token = int(2 * share * (multiplied_elements(config, tp_size) + config.num_hidden_layers * attention))
    of_row = 4 * config.hidden_size * config.vocab_size // tp_size
    num_rows = max(_MIN_ROWS, _MAX_WORK_ON_CPU // of_row)
    num_seqs = min(whole.num_seqs, num_rows)
    num_tokens = min(whole.num_tokens, max(_MIN_TOKENS, _MAX_WORK_ON_CPU // of_token), num_seqs * context)
    return StepLimits(num_tokens, min(num_seqs, num_tokens), min(whole.num_scored, num_rows))


def untried_bytes(demand: MemoryDemand, tried: StepLimits, peak: int) -> int:
    """Bytes that the rest of the largest step takes by its shapes, scaled up if `peak` was above the estimate."""
    said = estimate_bytes(demand, tried)
    rest = estimate_bytes(demand, demand.largest_step) - said
    return max(rest, rest * peak // said)


def make_step(size: StepLimits, context: int, block_size: int, num_blocks: int, num_groups: int = 1) -> StepInput:
    """A step over a cache of `num_blocks` that hold its tokens.

    The first sequence is a chunk at the end of a whole context; the others begin, with one token if the first leaves
    no more. All of them ask for logits. Rows that are scored may be the same many times over.
    """
    num_tokens, num_seqs = size.num_tokens, size.num_seqs
    lengths = []
    left = num_tokens
    for after in range(num_seqs - 1, -1, -1):
        lengths.append(min(context, left - after))
        left -= lengths[-1]
    assert left == 0, f"{num_tokens} tokens are more than {num_seqs} contexts of {context}"
    starts = [context - lengths[0]] + [0] * (num_seqs - 1)
    width = -(-context // block_size)
    rows = np.arange(num_tokens, dtype=np.int32)
    ends = np.cumsum(lengths)
    scored = np.zeros((size.num_scored, 3), dtype=np.int32)
    scored[:, 0] = np.arange(size.num_scored) % num_tokens
    scored[:, 2] = _NUM_TOP
    return StepInput(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32),
        slot_mapping=np.tile(rows, num_groups),
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        seqlens_k=np.array([s + n for s, n in zip(starts, lengths, strict=True)], dtype=np.int32),
        block_tables=np.tile(np.arange(width, dtype=np.int32) % num_blocks, (num_groups * num_seqs, 1)),
        logits_indices=(ends - 1).astype(np.int32),
        block_copies=np.empty((0, 2), dtype=np.int32),
        scored=scored,
    )


def _peak_on_cuda(work: Callable[[], None], device: torch.device) -> tuple[int | None, str]:
    """The most that torch's allocator held, plus the growth outside it: communicators and libraries' workspaces."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held, outside = torch.cuda.memory_allocated(device), _outside_torch(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    grown = max(0, _outside_torch(device) - outside)
    torch.cuda.empty_cache()
    return peak + grown, "measured by torch's allocator and the driver"


def _outside_torch(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _peak_on_cpu(work: Callable[[], None]) -> tuple[int | None, str]:
    """The rise of the process's resident memory, without the code of libraries.

    None, and why, where the system does not report it. `work` runs in any case: other ranks wait in it.
    """
    return_freed_memory()
    reason = _reset_peak()
    before = _resident()
    work()
    after = _resident()
    return_freed_memory()  # the pool lies in fresh pages, which cost nothing until they are used
    if reason:
        return None, reason
    if before is None or after is None:
        return None, "/proc/self/status does not name this process's memory"
    code = max(0, after["RssFile"] - before["RssFile"])
    return max(0, after["VmHWM"] - before["VmRSS"] - code), "measured by the process's resident memory"


def _reset_peak() -> str:
    """Empty, or why the record of the process's peak cannot be reset."""
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")
    except OSError as error:
        return f"this system does not reset the record of a process's peak memory ({error})"
    return ""


def _resident() -> dict[str, int] | None:
    """Bytes by the names of proc(5); None where one of them is missing."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    wanted = ("VmHWM", "VmRSS", "RssFile")
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted)}
    return found if len(found) == len(wanted) else None
