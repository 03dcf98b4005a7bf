"""The transports that can carry KV between two workers: their names, which workers each one connects, and the choice.

Declared once, for the configuration and its checks, metric labels, the doctor and the workers. An entry here and the
module of that name in `kv_transfer/transports/` make a transport.

A worker sends with its hello what it could use, best first; the receiver picks the sender's best that it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cluster.errors import FailedPrecondition

TransportName = Literal["auto", "shm", "shm_pages", "gloo", "cuda_pages", "cuda_ipc", "nccl"]
TRANSPORT_NAMES: tuple[str, ...] = tuple(name for name in get_args(TransportName) if name != "auto")


@dataclass(frozen=True)
class TransportTraits:
    """The workers that a transport connects."""

    devices: frozenset[str]
    """Kinds of devices whose memory it carries."""
    needs_same_host: bool
    shares_pages: bool = False
    """The receiver copies out of the sender's own pages, for which both must have the same layout."""
    is_automatic: bool = True
    """`auto` may choose it."""


BEST_FIRST: dict[str, TransportTraits] = {
    "shm": TransportTraits(frozenset({"cpu"}), needs_same_host=True),
    "shm_pages": TransportTraits(frozenset({"cpu"}), needs_same_host=True, shares_pages=True, is_automatic=False),
    "cuda_pages": TransportTraits(frozenset({"cuda"}), needs_same_host=True, shares_pages=True),
    "cuda_ipc": TransportTraits(frozenset({"cuda"}), needs_same_host=True),
    "nccl": TransportTraits(frozenset({"cuda"}), needs_same_host=False),
    "gloo": TransportTraits(frozenset({"cpu", "cuda"}), needs_same_host=False),
}
"""In the order in which `auto` prefers them."""


def transports_of(device_kind: str) -> tuple[str, ...]:
    """Returns the transports that carry the memory of `cpu` or `cuda` devices, best first."""
    return tuple(name for name, traits in BEST_FIRST.items() if device_kind in traits.devices)


def shares_pages(transport: str) -> bool:
    """Whether the receiver copies out of the sender's own pages."""
    return transport in BEST_FIRST and BEST_FIRST[transport].shares_pages


def pick(
    sender: Sequence[str], receiver: Sequence[str], *, is_same_host: bool, page_obstacle: str = ""
) -> tuple[str, str]:
    """The transport for a pair, and why: the first of the sender's that the receiver has too and the place allows.

    `page_obstacle`: why one cannot copy out of the pages of the other, or nothing.

    Raises FailedPrecondition, naming both lists, when there is none.
    """
    where = "both workers are on one host" if is_same_host else "the workers are on different hosts"
    passed_over: list[str] = []
    for name in sender:
        if name not in receiver:
            passed_over.append(f"the receiver has no {name}")
        elif not is_same_host and name in BEST_FIRST and BEST_FIRST[name].needs_same_host:
            passed_over.append(f"{name} needs one host")
        elif page_obstacle and shares_pages(name):
            passed_over.append(f"{name} needs equal layouts: {page_obstacle}")
        else:
            return name, "; ".join([where, *passed_over])
    raise FailedPrecondition(
        f"no transport connects these workers: the sender has {', '.join(sender) or 'none'}, the receiver "
        f"{', '.join(receiver) or 'none'}, and {'; '.join([where, *passed_over])}; set transport: auto on both"
    )
