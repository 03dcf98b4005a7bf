"""Which transport a pair of workers uses: decided once per pair, from what each side has and where it runs.

    shm        CPU workers of one host      gloo    any workers, any hosts, through host memory
    cuda_ipc   GPU workers of one host      nccl    GPU workers, any hosts

Each worker says at the hello what it could use, best first; the receiver picks the sender's best that it shares.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import cache

from cluster.errors import ConfigError, FailedPrecondition

TRANSPORTS = ("shm", "gloo", "cuda_ipc", "nccl")
BEST_FIRST = {"cpu": ("shm", "gloo"), "cuda": ("cuda_ipc", "nccl", "gloo")}
SAME_HOST_ONLY = ("shm", "cuda_ipc")


def supported(device: str, wanted: str, obstacle: Callable[[str], str | None] | None = None) -> tuple[str, ...]:
    """What a worker on `device` (`cpu`, `cuda` or `cuda:N`) can use, best first; a `wanted` one alone unless `auto`.

    `obstacle` tells why this machine cannot use a transport; None asks the machine. Raises ConfigError.
    """
    obstacle = obstacle or machine_obstacle
    kind = device.partition(":")[0]
    if wanted == "auto":
        return tuple(name for name in BEST_FIRST[kind] if obstacle(name) is None)
    if wanted not in TRANSPORTS:
        raise ConfigError(f"transport: {wanted!r} is none of auto, {', '.join(TRANSPORTS)}")
    if wanted not in BEST_FIRST[kind]:
        memory, fitting = ("GPU" if kind == "cpu" else "CPU"), ", ".join(("auto", *BEST_FIRST[kind]))
        raise ConfigError(
            f"transport: {wanted} moves {memory} memory, but the device is {device}; use one of {fitting}"
        )
    why = obstacle(wanted)
    if why is not None:
        raise ConfigError(f"transport: {wanted} cannot be used here: {why}; use auto or gloo")
    return (wanted,)


def pick(sender: Sequence[str], receiver: Sequence[str], *, is_same_host: bool) -> tuple[str, str]:
    """The transport for a pair, and why: the first of the sender's that the receiver has too and the place allows.

    Raises FailedPrecondition, naming both lists, when there is none.
    """
    where = "both workers are on one host" if is_same_host else "the workers are on different hosts"
    passed_over: list[str] = []
    for name in sender:
        if name not in receiver:
            passed_over.append(f"the receiver has no {name}")
        elif name in SAME_HOST_ONLY and not is_same_host:
            passed_over.append(f"{name} needs one host")
        else:
            return name, "; ".join([where, *passed_over])
    raise FailedPrecondition(
        f"no transport connects these workers: the sender has {', '.join(sender) or 'none'}, the receiver "
        f"{', '.join(receiver) or 'none'}, and {where}; set transport: auto on both"
    )


@cache
def host_id() -> str:
    """Equal for processes that can share memory: one boot of one kernel, one network namespace, one user."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            places = [boot.read().strip()]
        places += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    except OSError:
        return uuid.uuid4().hex  # it shares with nobody
    return " ".join([*places, f"uid:{os.geteuid()}"])


def machine_obstacle(transport: str) -> str | None:
    """Why this machine cannot use a transport, or None. Loads torch for those that need it."""
    if transport in SAME_HOST_ONLY and not (sys.platform == "linux" and hasattr(socket, "SOCK_SEQPACKET")):
        return f"it shares memory in a way that {sys.platform} does not have"
    if transport == "nccl":
        import torch.distributed

        return None if torch.distributed.is_nccl_available() else "this build of torch has no NCCL"
    return None
