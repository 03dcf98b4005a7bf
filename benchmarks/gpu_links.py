"""KV and collectives between two processes, on one GPU or two: a part of `benchmarks.gpu`.

    python -m benchmarks.gpu_links links --device cuda

NCCL refuses two ranks on one GPU, as far as it takes them for processes of one host: with a NCCL_HOSTID each, they are
two hosts to it, and meet over sockets. That is no way to serve, but it runs the code. NVIDIA promises nothing of the
kind, so what fails here on one GPU fails by name and alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from benchmarks import kv_bandwidth
from benchmarks.gpu_engine import median_s
from benchmarks.gpu_part import Clock, attempt, run_named
from benchmarks.plain_cluster import ROOT, Program, ProgramFailed
from cluster.settings import JsonSettings
from cluster.transports import shares_pages
from engine.kv.pool import choose_page_copies
from engine.model_runner import ModelRunner
from engine.step_input import SequenceSlice, build_step
from engine.tp import SingleGroup, TPGroup, make_process_group
from kv_transfer import pages
from kv_transfer.actions import Range
from kv_transfer.transports.interface import connect_store, serve_store

MODEL = ROOT / "models" / "tiny-shakespeare"
PROMPT = tuple(range(3, 203))
RANK_S = 40.0
SEPARATE_HOSTS = ({"NCCL_HOSTID": "baton-0"}, {"NCCL_HOSTID": "baton-1"})


@dataclass(frozen=True)
class RankSettings(JsonSettings):
    """One of two tensor-parallel ranks."""

    rank: int
    device: str
    store_address: str


def links(device: str, clock: Clock) -> None:
    """Every transport that this device has, and a model on two tensor-parallel ranks."""
    is_cpu = device == "cpu"
    devices = (device, device) if is_cpu or torch.cuda.device_count() < 2 else ("cuda:0", "cuda:1")
    environments = ({}, {}) if is_cpu or devices[0] != devices[1] else SEPARATE_HOSTS
    for kernels in ("torch",) if is_cpu else ("auto", "torch"):
        name = f"copies of pages, engine.kernels {kernels}"
        attempt(name, lambda kernels=kernels: _copy_pages(torch.device(devices[0]), kernels, is_cpu))  # type: ignore[misc]
    for transport in ("shm", "shm_pages", "gloo") if is_cpu else ("cuda_pages", "cuda_ipc", "gloo", "nccl"):
        attempt(transport, lambda transport=transport: _move(transport, devices, environments, is_cpu))  # type: ignore[misc]
    attempt("tensor parallelism of 2", lambda: _compare_ranks(devices, environments))


def _copy_pages(device: torch.device, kernels: str, is_small: bool) -> dict[str, Any]:
    """Gigabytes a second that a chunk's gather and scatter read and write, and their share of a copy of as much."""
    num_layers, num_tokens = (2, 64) if is_small else (32, 2048)
    pool = torch.zeros((num_layers, 2, num_tokens // 8, 16, 8, 128), dtype=torch.bfloat16, device=device)
    table = torch.randperm(num_tokens // 8, generator=torch.Generator().manual_seed(0)).tolist()
    what, heads = Range(0, num_tokens, 0, num_layers), slice(0, 8)
    slot = torch.zeros((num_layers, 2, num_tokens, 8, 128), dtype=torch.bfloat16, device=device)
    other, kernel = torch.empty_like(slot), choose_page_copies(kernels, device)
    works = {
        "gather": lambda: pages.gather(pool, table, what, heads, slot, kernel),
        "scatter": lambda: pages.scatter(pool, table, what, heads, slot, kernel),
        "copy": lambda: other.copy_(slot),
    }
    rates = {name: 2 * slot.nbytes / median_s(work, device) / 1e9 for name, work in works.items()}
    told = {f"{name}_gb_s": float(f"{rate:.3g}") for name, rate in rates.items()}
    shares = {f"{name}_of_copy": round(rates[name] / rates["copy"], 3) for name in ("gather", "scatter")}
    return {**told, **shares, "mb": slot.nbytes >> 20}


def _move(
    transport: str, devices: tuple[str, str], environments: tuple[dict[str, str], dict[str, str]], is_small: bool
) -> dict[str, Any]:
    plan = kv_bandwidth.Plan(
        transports=(transport,),
        devices=devices,
        chunk_sizes=(64,) if is_small else (1024,),
        num_tokens=256 if is_small else 8192,
        passes=1 if is_small else 4,
        digest="sampled",
        environments=environments,
    )
    measured = kv_bandwidth.measure(plan, range(1 if is_small else 3))
    (chunk,) = plan.chunk_sizes
    rates = {name: kv_bandwidth.median_rate(measured, name, chunk) for name in (transport, "copy")}
    told = {"gb_s": round(rates[transport], 2), "copy_gb_s": round(rates["copy"], 2)}
    num_copies = 1 if shares_pages(transport) else 2
    return told | {"devices": " ".join(devices), "of_copy": round(num_copies * rates[transport] / rates["copy"], 3)}


def _compare_ranks(devices: tuple[str, str], environments: tuple[dict[str, str], dict[str, str]]) -> dict[str, Any]:
    """Both ranks' logits against those of one rank."""
    store, address = serve_store("127.0.0.1")
    with contextlib.ExitStack() as stack:
        ranks = []
        for number, (device, environment) in enumerate(zip(devices, environments, strict=True)):
            settings = RankSettings(number, device, address)
            ranks.append(Program("benchmarks.gpu_links", settings, environment=environment))
            stack.callback(ranks[-1].stop)
        told = [rank.expect("done") for rank in ranks]
    del store
    difference, largest = (max(each[name] for each in told) for name in ("difference", "largest"))
    if not difference <= 0.05 * largest:
        raise ProgramFailed(f"logits of two ranks differ by {difference:.3g}, where the largest is {largest:.3g}")
    return {"difference": float(f"{difference:.3g}"), "largest": float(f"{largest:.3g}"), "devices": " ".join(devices)}


def run_rank(settings: RankSettings) -> None:
    """Prints how far the logits of both ranks are from those of a single one; ends when it is told to."""
    torch.set_num_threads(1)
    store = PrefixStore("tp", connect_store(settings.store_address, RANK_S))
    group = make_process_group(store, settings.rank, 2, settings.device, timeout_s=RANK_S)
    single, shared = (_logits(tp, settings.device) for tp in (SingleGroup(), group))
    difference, largest = ((single - shared).abs().max().item(), single.abs().max().item())
    print(json.dumps({"event": "done", "difference": difference, "largest": largest}), flush=True)
    sys.stdin.read()  # the other rank may still need this one's communicator


def _logits(tp: TPGroup, device: str) -> torch.Tensor:
    """Of a prompt and of two decode steps after it, the second of which takes its token from rank 0's device."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    runner = ModelRunner(MODEL, tp=tp, device=device, dtype=dtype, block_size=16, num_blocks=32, graphs_up_to=2)
    table = tuple(range(20))
    rows = []
    sampled = torch.tensor([9], dtype=torch.int32, device=device) if tp.rank == 0 else None
    for tokens, start in ((PROMPT, 0), ((7,), len(PROMPT)), ((-1,), len(PROMPT) + 1)):
        step = build_step([SequenceSlice(tokens, start, table, True)], 16)
        rows.append(runner.run(step, sampled=sampled if step.has_unread_tokens else None).logits.clone())
    return torch.cat(rows).float().cpu()


if __name__ == "__main__":
    if sys.argv[1] == "--settings":
        run_rank(RankSettings.from_json(sys.argv[2]))
    else:
        run_named({"links": links})
