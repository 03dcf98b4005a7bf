"""The transports that this machine can use, and the module that makes a transport's pair.

`cluster.transports` names the transports. Each is a module of that name in this folder with two functions:
`make_pair(meeting)`, one side of a pair once the other side is there, and `obstacle()`, why this machine cannot use it.
One that shares pages has a third, `new_memory(device)`, for a KV pool that other processes can map.
"""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from cluster.errors import ConfigError, TransferFailed
from cluster.transports import BEST_FIRST, TRANSPORT_NAMES, transports_of

if TYPE_CHECKING:  # torch is loaded with the first pair, not to answer what could be used
    import torch

    from kv_transfer.transports.interface import Meeting, Pair, PoolMemory

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """A module of this folder."""

    def make_pair(self, meeting: Meeting) -> Pair:
        """Blocks until the other side is there. Raises TransferFailed."""
        ...

    def obstacle(self) -> str | None:
        """Why this machine cannot use the transport, or None."""
        ...


class PageTransport(Transport, Protocol):
    """A module of a transport that shares pages."""

    def new_memory(self, device: torch.device) -> PoolMemory:
        """Returns memory for this worker's KV pool. Raises TransferFailed."""
        ...


def pool_memory(transports: Sequence[str], device: torch.device) -> PoolMemory | None:
    """Memory for the KV pool of a worker with these transports, if one of them shares pages; else None. Raises
    TransferFailed."""
    name = next((name for name in transports if BEST_FIRST[name].shares_pages), None)
    return None if name is None else cast(PageTransport, module_of(name)).new_memory(device)


def make_pool(
    transports: Sequence[str], device: torch.device, make: Callable[[Callable[[int], torch.Tensor] | None], None]
) -> PoolMemory | None:
    """Has a KV pool made in memory that other processes can map, if a transport shares pages; returns that memory.

    Where there is none, `make` is called without, and None is returned.
    """
    try:
        memory = pool_memory(transports, device)
        if memory is not None:
            make(memory.allocate)
            return memory
    except TransferFailed as error:
        logger.warning("the KV pool cannot be shared, its pages go through slots: %s", error.message)
    make(None)
    return None


def make_pair(transport: str, meeting: Meeting) -> Pair:
    """One side of a pair; returns once the other side is there. Raises TransferFailed."""
    if transport not in BEST_FIRST:
        raise TransferFailed(f"transport {transport!r} is none of {', '.join(TRANSPORT_NAMES)}")
    return module_of(transport).make_pair(meeting)


def module_of(transport: str) -> Transport:
    return cast(Transport, importlib.import_module(f"kv_transfer.transports.{transport}"))


def machine_obstacle(transport: str) -> str | None:
    """Why this machine cannot use a transport, or None."""
    return module_of(transport).obstacle()


def supported(device: str, wanted: str, obstacle: Callable[[str], str | None] = machine_obstacle) -> tuple[str, ...]:
    """Transports of a worker on `device` (`cpu`, `cuda` or `cuda:N`), best first; only `wanted` unless it is `auto`.

    `obstacle` returns why this machine cannot use a transport, or None. Raises ConfigError.
    """
    kind = device.partition(":")[0]
    fitting = transports_of(kind)
    if wanted == "auto":
        return tuple(name for name in fitting if BEST_FIRST[name].is_automatic and obstacle(name) is None)
    if wanted not in BEST_FIRST:
        raise ConfigError(f"transport: {wanted!r} is none of auto, {', '.join(TRANSPORT_NAMES)}")
    if wanted not in fitting:
        memory, choices = ("GPU" if kind == "cpu" else "CPU"), ", ".join(("auto", *fitting))
        raise ConfigError(
            f"transport: {wanted} moves {memory} memory, but the device is {device}; use one of {choices}"
        )
    why = obstacle(wanted)
    if why is not None:
        raise ConfigError(f"transport: {wanted} cannot be used here: {why}; use auto or gloo")
    return (wanted,)


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
