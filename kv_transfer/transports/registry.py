"""Which transport a pair of workers uses, decided once per pair, and the module that makes the pair.

`cluster.transports` names the transports. Each is a module of that name in this folder with two functions:
`make_pair(meeting)`, one side of a pair once the other side is there, and `obstacle()`, why this machine cannot use it.

Each worker sends with its hello what it could use, best first; the receiver picks the sender's best that it shares.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from cluster.errors import ConfigError, FailedPrecondition
from cluster.transports import BEST_FIRST, TRANSPORT_NAMES, transports_of
from kv_transfer.failures import TransferFailed

if TYPE_CHECKING:  # torch is loaded with the first pair, not to answer what could be used
    from kv_transfer.transports.interface import Meeting, Pair


class Transport(Protocol):
    """A module of this folder."""

    def make_pair(self, meeting: Meeting) -> Pair:
        """Blocks until the other side is there. Raises TransferFailed."""
        ...

    def obstacle(self) -> str | None:
        """Why this machine cannot use the transport, or None."""
        ...


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
        return tuple(name for name in fitting if obstacle(name) is None)
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


def pick(sender: Sequence[str], receiver: Sequence[str], *, is_same_host: bool) -> tuple[str, str]:
    """The transport for a pair, and why: the first of the sender's that the receiver has too and the place allows.

    Raises FailedPrecondition, naming both lists, when there is none.
    """
    where = "both workers are on one host" if is_same_host else "the workers are on different hosts"
    passed_over: list[str] = []
    for name in sender:
        if name not in receiver:
            passed_over.append(f"the receiver has no {name}")
        elif not is_same_host and name in BEST_FIRST and BEST_FIRST[name].needs_same_host:
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
