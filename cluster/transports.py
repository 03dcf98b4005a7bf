"""The transports that can carry KV between two workers: their names, and which workers each one connects.

Declared once, for the configuration and its checks, metric labels, the doctor and the workers. An entry here and the
module of that name in `kv_transfer/transports/` make a transport.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

TransportName = Literal["auto", "shm", "gloo", "cuda_ipc", "nccl"]
TRANSPORT_NAMES: tuple[str, ...] = tuple(name for name in get_args(TransportName) if name != "auto")


@dataclass(frozen=True)
class TransportTraits:
    """The workers that a transport connects."""

    devices: frozenset[str]
    """Kinds of devices whose memory it carries."""
    needs_same_host: bool


BEST_FIRST: dict[str, TransportTraits] = {
    "shm": TransportTraits(frozenset({"cpu"}), needs_same_host=True),
    "cuda_ipc": TransportTraits(frozenset({"cuda"}), needs_same_host=True),
    "nccl": TransportTraits(frozenset({"cuda"}), needs_same_host=False),
    "gloo": TransportTraits(frozenset({"cpu", "cuda"}), needs_same_host=False),
}
"""In the order in which `auto` prefers them."""


def transports_of(device_kind: str) -> tuple[str, ...]:
    """Returns the transports that carry the memory of `cpu` or `cuda` devices, best first."""
    return tuple(name for name, traits in BEST_FIRST.items() if device_kind in traits.devices)
