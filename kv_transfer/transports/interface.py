"""A transport's pair: one side of one route, from one rank of a sending worker to one rank of a receiving worker.

A pair owns its slots: `num_slots` pieces of uint8 memory to gather into or to scatter from; what is sent from slot i
lands in the other side's slot i. Slots of one pair are never another's, so a pair fails, is closed and is made anew
without touching another. What a slot means, and when it may be used again, is known above (`transfer_engine`).

Life of a pair: made (both ranks meet, or TransferFailed within the timeout) -> sends and receives, posted in the same
order on both sides -> closed, by either side or after any failure. A pair that failed once is never used again. Once
`close` has returned, the transport touches no slot any more, holds none, and nobody waits on it.

The receiving worker serves a store at which both sides meet, under a key prefix that no other pair uses.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without saying so

from cluster.address import format_address, parse_address
from cluster.errors import ConfigError, TransferFailed

logger = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1


class TransferWork(Protocol):
    """One posted send or receive; to be kept until it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Blocks until the slot is filled (receive) or may be gathered into again (send).

        Raises TransferFailed, after which the pair must be closed: at once when the peer is gone or the pair is closed,
        else after the timeout.
        """
        ...


class Pair(Protocol):
    """One side of one route."""

    @property
    def slots(self) -> Sequence[Tensor]:
        """uint8 [slot_bytes] each, in host or device memory; none once the pair is closed."""
        ...

    @property
    def pages(self) -> Tensor | None:
        """The sender's KV pool at the receiver of a transport that shares pages; else None."""
        ...

    def send(self, slot: int, num_bytes: int, after: torch.cuda.Event | None = None) -> TransferWork:
        """Posts a send of the first bytes of a slot; raises TransferFailed when the pair is broken.

        `after` is the event at which a slot in the memory of a GPU is filled; None: it is. Nobody here waits for it.
        """
        ...

    def receive(self, slot: int, num_bytes: int) -> TransferWork:
        """Posts a receive into a slot; raises TransferFailed when the pair is broken."""
        ...

    def release(self, slot: int) -> None:
        """Reports that a slot's content was read; raises TransferFailed when the pair is broken.

        Where pages are shared, it succeeds only if the sender had not closed the pair by then: the proof that it held
        the pages until they were read.
        """
        ...

    def close(self) -> None:
        """Ends the pair for both sides and wakes all who wait on it. Idempotent, from any thread.

        Raises TransferFailed when it cannot be ended: then its slots may still be touched.
        """
        ...


class PoolMemory(Protocol):
    """Memory of this worker's KV pool that other processes of the host can map. Every method raises TransferFailed."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of zeros. To be called once."""
        ...

    def export(self) -> int:
        """A new file descriptor by which another process finds the memory; the caller closes it."""
        ...

    def attach(self, descriptor: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the pool of another process, mapped for as long as somebody refers to it."""
        ...


def serve_store(host: str) -> tuple[TCPStore, str]:
    """Serves the store at which pairs meet, on a free port of `host` only; returns it and its `host:port`.

    The store lives as long as the object. Left to itself TCPStore would listen on every address. Raises ConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"the pair store cannot listen on {host}: {error.strerror}; set host to an address of this machine"
            ) from error
        listener.listen(128)
        port: int = listener.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, format_address(host, port)


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """A client of a served store; a wait for a key fails after `timeout_s`. Raises TransferFailed."""
    try:
        host, port = parse_address(address)
        # TCPStore takes a refusal for a server that is not up yet and keeps trying; ours was up before it was named.
        socket.create_connection((host, port), timeout=timeout_s).close()
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError, ValueError) as error:
        raise TransferFailed(f"the pair store at {address} cannot be reached: {reason_of(error)}") from error


class StoreClients:
    """Connections to stores, kept for the next meeting at the same one; safe to use from any thread.

    Each serves one meeting at a time, since a client that waits for a key can do nothing else. They are kept because
    torch looks up the name of every address it connects to, which takes seconds where the name server is slow.
    """

    MAX_IDLE = 16

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: list[tuple[str, TCPStore]] = []  # least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def client(self, address: str) -> Iterator[TCPStore]:
        """A client of the store for the block; one in which the block failed is not kept. Raises TransferFailed."""
        store = self._take(address) or connect_store(address, self._timeout_s)
        yield store
        with self._lock:
            self._idle.append((address, store))
            del self._idle[: -self.MAX_IDLE]

    def clear(self) -> None:
        """Drops the connections that are not in use."""
        with self._lock:
            self._idle.clear()

    def _take(self, address: str) -> TCPStore | None:
        """A kept connection that is still one: another store may listen at the same address by now."""
        with self._lock:
            kept = next((entry for entry in self._idle if entry[0] == address), None)
            if kept is None:
                return None
            self._idle.remove(kept)
        try:
            kept[1].num_keys()
        except RuntimeError as error:
            logger.debug("the connection to the pair store at %s has ended: %s", address, reason_of(error))
            return None
        return kept[1]


def _is_wanted() -> bool:
    return True


@dataclass(frozen=True)
class Meeting:
    """The place where two ranks meet, and one side's part of the pair."""

    store_address: str
    stores: StoreClients
    prefix: str
    """Names the route and its pair's epoch."""
    is_sender: bool
    host: str
    """This side's own address."""
    device: torch.device
    """The device of this side's pages."""
    num_slots: int
    slot_bytes: int
    """Equal on both sides."""
    timeout_s: float
    is_wanted: Callable[[], bool] = _is_wanted
    """False: the pair is no longer wanted, so waiting for the other side ends."""
    pages: Tensor | None = None
    """This side's KV pool, [L, 2, N, B, H, D]; where pages are shared, the other side's differs in N alone."""
    memory: PoolMemory | None = None
    """The memory that this pool lies in; None: no other process can map it."""


def reason_of(error: Exception) -> str:
    """The first sentence of an error, without the source position of the library that raised it."""
    lines = re.sub(r"\[\S+\.(cc|cpp|h|hpp):\d+\]\s*", "", str(error)).strip().splitlines()
    return lines[0].split(". ")[0] if lines else type(error).__name__
