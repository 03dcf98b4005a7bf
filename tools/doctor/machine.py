"""Checks of this machine as workers would find it: GPUs, NCCL, attention, kernels, memory, shared memory.

Compares what `worker.examine` found with what the configuration asks for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from cluster.config.schema import ROLES
from cluster.text import count_of, format_bytes
from controller.local_ray import OBJECT_STORE_BYTES
from tools.doctor.bounded import Part
from tools.doctor.check import Finding, check, ok, problem, skipped, warning
from tools.doctor.subject import Subject

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
_NCCL_SHM_BYTES = 1_000_000_000
"""Shared memory of ranks on one machine that cannot reach one another directly."""
_CPU_TORCH = "install a torch with CUDA and its driver: `make setup EXTRAS=dev,cuda`"


@check()
def device(subject: Subject) -> Iterator[Finding]:
    """GPUs that torch sees against `engine.device` and the devices of both roles; a driver that torch does not use."""
    torch, gpus = subject.machine("torch"), subject.machine("gpus")
    for part in (torch, gpus):
        if "refused" in part:
            yield problem(f"torch cannot be used here: {part['refused']}", _CPU_TORCH)
            return
    wanted, found = subject.serving.engine.device, gpus["found"]
    build = f"torch {torch['found']['version']}"
    needed = sum(subject.serving.role(role).devices for role in ROLES)
    if not found and wanted == "cuda":
        yield problem(
            f"engine.device is cuda, and {build} sees no GPU here",
            f"set engine.device: cpu, or {_CPU_TORCH}, and check that nvidia-smi lists the GPU",
        )
    elif not found and _has_driver():
        yield warning(f"there is an NVIDIA driver here, but {build} sees no GPU: the CPU computes", _CPU_TORCH)
    elif not found or wanted == "cpu":
        beside = f"; {count_of(len(found), 'GPU')} not used" if found else ""
        yield ok(f"the CPU computes (engine.device: {wanted}), with {build}, {count_of(_num_cores(), 'core')}{beside}")
    elif len(found) < needed:
        yield warning(
            f"the roles name {count_of(needed, 'device')}, and this machine has {count_of(len(found), 'GPU')}",
            f"set devices of both roles to {len(found)} together, or join machines with the other GPUs by `ray up`",
        )
    else:
        names = ", ".join(f"{g['name']} ({format_bytes(g['free_bytes'])} free)" for g in found)
        yield ok(f"{count_of(len(found), 'GPU')} for {count_of(needed, 'device')}: {names}; {build}", gpus=found)


@check()
def nccl(subject: Subject) -> Iterator[Finding]:
    """NCCL, where GPUs of several machines or tensor parallelism on GPUs need it."""
    if not uses_gpu(subject):
        yield skipped("no worker computes on a GPU, so nobody uses NCCL")
        return
    config = subject.serving
    part = subject.machine("nccl")
    version = part.get("found", {}).get("version")
    if version is not None:
        yield ok(f"NCCL {version}")
        return
    reason = part.get("refused", "this build of torch has no NCCL")
    groups = [role for role in ROLES if config.role(role).num_workers and config.role(role).tensor_parallel > 1]
    if config.transfer.transport == "nccl" or groups:
        by = "transfer.transport is nccl" if not groups else f"{groups[0]} has tensor_parallel above 1"
        yield problem(f"{reason}, and {by}", _CPU_TORCH)
    else:
        yield warning(f"{reason}: KV between machines travels through host memory (gloo)", _CPU_TORCH)


@check()
def flash_attn(subject: Subject) -> Iterator[Finding]:
    """Whether flash-attn is there and can be imported: one that was built for another torch cannot."""
    config, part = subject.serving, subject.machine("flash_attn")
    is_wanted = config.engine.attention == "flash_attn"
    if not uses_gpu(subject) and not is_wanted:
        yield skipped("no worker computes on a GPU, so nobody uses flash-attn")
    elif "refused" in part:
        build = subject.machine("torch").get("found", {}).get("version", "of unknown version")
        remedy = f"build it against torch {build}: pip install --force-reinstall --no-build-isolation flash-attn"
        yield (problem if is_wanted else warning)(str(part["refused"]), remedy)
    elif part["found"]["version"] is None:
        remedy = "pip install --no-build-isolation flash-attn, or `make setup EXTRAS=dev,cuda`"
        if is_wanted:
            yield problem("engine.attention is flash_attn, and flash-attn is not installed", remedy + ", or use auto")
        else:
            yield warning("flash-attn is not installed: Baton's own kernels compute attention, or torch's", remedy)
    else:
        yield ok(f"flash-attn {part['found']['version']}")


@check()
def attention(subject: Subject) -> Iterator[Finding]:
    """The attention that each role's workers would compute with, and why."""
    answers = yield from _answers(subject, "attention", "set engine.attention: auto")
    for role, answer in answers:
        found = f"{role}: {answer['name']} ({answer['why']})"
        if answer["name"] == "cpu" and uses_gpu(subject):
            yield warning(f"{found}, on a GPU", "set model.dtype: bfloat16, or install torch 2.11 or newer")
        else:
            yield ok(found)


@check()
def kernels(subject: Subject) -> Iterator[Finding]:
    """Baton's own kernels; on a CPU, compiles them as a worker's start would, if nobody has yet."""
    refused = "install a C++ compiler (Debian: g++), or set kernels: auto"
    answers = yield from _answers(subject, "kernels", refused)
    for role, answer in answers:
        if answer["are_native"] or uses_gpu(subject) or subject.serving.engine.kernels == "torch":
            yield ok(f"{role}: {'native' if answer['are_native'] else 'torch'} ({answer['why']})")
        else:
            remedy = "install a C++ compiler (Debian: apt install g++)"
            yield warning(f"{role}: torch alone computes, which is slower ({answer['why']})", remedy)


@check()
def transport(subject: Subject) -> Iterator[Finding]:
    """The transports that could carry KV from this machine, by `transfer.transport`."""
    remedy = "set transfer.transport: auto"
    answers = yield from _answers(subject, "transports", remedy, needs_device=False)
    for role, usable in answers:
        if usable:
            yield ok(f"{role}: {', '.join(usable)}, best first", transports=usable)
        else:
            yield problem(f"{role}: no transport can be used here", "set transfer.transport: gloo")


@check()
def memory(subject: Subject) -> Iterator[Finding]:
    """Whether each worker's weights, KV pool and host memory fit, as `baton config explain` has them, and all of them
    together."""
    if _runs(subject) and not _has_no_device(subject):
        yield skipped(f"the cluster runs, at {subject.cluster.address}, and has its memory; see `kv-pools`")
        return
    total = host_bytes = 0
    remedy = "see `baton config explain`; lower kv_cache_tokens, or raise tensor_parallel"
    answers = yield from _answers(subject, "memory", remedy)
    for role, plan in answers:
        roles = subject.serving.roles
        num_ranks = roles.prefill.devices if role == "prefill" else roles.decode.devices
        takes = plan["weight_bytes"] + plan["activation_bytes"] + plan["pool_bytes"]
        total += num_ranks * takes
        host_bytes += num_ranks * plan["host_bytes"]
        if plan["host_bytes"]:
            size = format_bytes(num_ranks * plan["host_bytes"])
            yield ok(f"{role}: {size} of host memory for KV that the pools evict", host_bytes=plan["host_bytes"])
        tokens = plan["num_blocks"] * plan["block_size"]
        yield ok(
            f"{role}: {count_of(num_ranks, 'rank')} of {format_bytes(takes)}, with a KV pool of {tokens:,} tokens each",
            rank_bytes=takes,
            pool_tokens=tokens,
        )
    free = _available_bytes()
    total = host_bytes + (0 if uses_gpu(subject) else total)
    if total > free:
        yield warning(
            f"all workers take {format_bytes(total)} together, and this machine has {format_bytes(free)} free",
            "name fewer devices, lower engine.kv_cache_tokens or engine.kv_host_bytes, or join more machines",
        )


@check()
def kv_disk(subject: Subject) -> Iterator[Finding]:
    """Whether the folder of the KV that workers keep on a disk can be written, and has room for all of them."""
    num_ranks = {str(role): subject.serving.role(role).devices for role in ROLES}
    answers = yield from _answers(subject, "memory", "see `memory`")
    by_path: dict[str, list[tuple[str, Any]]] = {}
    for role, plan in answers:
        if plan["disk_bytes"]:
            by_path.setdefault(plan["disk_path"], []).append((role, plan))
    if answers and not by_path:
        yield skipped("no worker keeps KV on a disk: engine.kv_disk_bytes is 0")
    for path, plans in by_path.items():
        plan, needed = plans[0][1], sum(num_ranks[role] * plan["disk_bytes"] for role, plan in plans)
        found = f"{path}: {format_bytes(needed)} for KV of {', '.join(role for role, _ in plans)} workers"
        if not plan["disk_is_writable"]:
            yield problem(f"{found}; it cannot be written", "chown or chmod it, or name another engine.kv_disk_path")
        elif needed > plan["disk_free_bytes"]:
            free = format_bytes(plan["disk_free_bytes"])
            remedy = "lower engine.kv_disk_bytes, free some space, or name another engine.kv_disk_path"
            yield warning(f"{found}, and {free} free: what does not fit is computed again", remedy, needed_bytes=needed)
        else:
            yield ok(f"{found}, of {format_bytes(plan['disk_free_bytes'])}", needed_bytes=needed)


@check()
def kv_key(subject: Subject) -> Iterator[Finding]:
    """The file with the key that encrypts KV on the disk and in the store: whether workers would take it, and whether
    both roles have the same."""
    remedy = "make one, the same on every node: (umask 077; head -c 32 /dev/urandom > FILE)"
    answers = yield from _answers(subject, "kv_key", remedy, needs_device=False)
    given = [(role, answer) for role, answer in answers if answer is not None]
    if answers and not given:
        yield skipped("no KV is encrypted: engine.kv_key_file is not set")
    for role, answer in given:
        found = f"{role}: {answer['path']} holds {answer['size_bytes']} bytes"
        used = ["on the disk"] * answer["has_disk"] + ["in the store"] * answer["has_store"]
        if used:
            yield ok(f"{found}, for KV {' and '.join(used)}", size_bytes=answer["size_bytes"])
        else:
            yield warning(f"{found}; nothing is encrypted with it", "set engine.kv_disk_bytes or kv_store_bytes")
    if len({answer["name"] for _, answer in given}) > 1 and all(answer["has_store"] for _, answer in given):
        remedy = "name one file as engine.kv_key_file for both"
        yield warning("the roles have different keys: neither finds what the other has put in the store", remedy)


@check()
def shared_memory(subject: Subject) -> Iterator[Finding]:
    """/dev/shm, which Ray and NCCL use, and memory for the slots of hand-offs.

    Slots lie in ordinary memory, not in /dev/shm.
    """
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        remedy = f"mount it: mount -t tmpfs tmpfs {SHARED_MEMORY}"
        yield problem(f"{SHARED_MEMORY} cannot be used: {error.strerror}", remedy)
        return
    needed = OBJECT_STORE_BYTES + (_NCCL_SHM_BYTES if uses_gpu(subject) else 0)
    found = f"{SHARED_MEMORY}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < needed:
        whose = "Ray's object store and NCCL need" if uses_gpu(subject) else "Ray's object store needs"
        yield problem(
            f"{found}; {whose} {format_bytes(needed)}",
            f"remove what was left in {SHARED_MEMORY}, or enlarge it: docker run --shm-size=2g, or "
            f"mount -o remount,size=2G {SHARED_MEMORY}",
            free_bytes=usage.free,
        )
    else:
        yield ok(found, free_bytes=usage.free)
    yield from _slots(subject)


def uses_gpu(subject: Subject) -> bool:
    """Whether workers would compute on a GPU here, or are asked to."""
    wanted = subject.serving.engine.device
    return wanted == "cuda" or (wanted == "auto" and bool(subject.machine("torch").get("found", {}).get("sees_gpu")))


def _answers(
    subject: Subject, name: str, remedy: str, *, needs_device: bool = True
) -> Generator[Finding, None, list[tuple[str, Any]]]:
    """Returns the answers of `worker.examine` by role, and reports its refusals, with this remedy."""
    if needs_device and _has_no_device(subject):
        yield skipped("there is no device to compute on; see `device`")
        return []
    parts = subject.workers(name)
    for role, part in parts:
        if "refused" in part:
            yield problem(f"{role}: {part['refused']}", remedy)
    return [(role, part["found"]) for role, part in parts if "refused" not in part]


def _has_no_device(subject: Subject) -> bool:
    return any("refused" in part for _, part in subject.workers("device"))


def _runs(subject: Subject) -> bool:
    """Whether the configured cluster runs, so that its workers hold memory here already."""
    return not subject.cluster.why_not and subject.cluster.is_configured


def _slots(subject: Subject) -> Iterator[Finding]:
    """Memory of the senders' slots: each sender has some for every pair that it keeps open."""
    parts: dict[str, Part] = dict(subject.workers("memory"))
    plan = parts.get("prefill", {}).get("found")
    if plan is None or uses_gpu(subject) or _runs(subject):
        return
    config = subject.serving
    num_pairs = min(config.transfer.max_pairs, config.roles.decode.num_workers)
    size = plan["slot_bytes_per_pair"] * num_pairs * config.roles.prefill.devices
    free = _available_bytes()
    if size > free:
        yield problem(
            f"slots of all hand-offs take {format_bytes(size)}, and {format_bytes(free)} are free",
            "lower transfer.chunk_tokens, num_slots or max_pairs",
        )
    else:
        yield ok(f"slots of all hand-offs: {format_bytes(size)} of {format_bytes(free)} free", slot_bytes=size)


def _has_driver() -> bool:
    return NVIDIA_DRIVER.exists()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
