"""How fast KV moves between two ranks, by transport and chunk size, and how fast this machine copies and streams.

Two processes (`kv_peer`), each with the paged cache of a 160M-parameter model. A run measures, for each chunk size in
turn and right after one another: a plain copy by one process, by both at once, a plain TCP socket over loopback, and
each transport. Rates are bytes of KV per second from the first gather to the last scatter; every transport's first move
is not measured, and what it brought is compared with what was sent.

A transport through memory is held against the plain copy of one process, and counted twice: each byte is gathered once
and scattered once; where pages are shared it is copied once, and counted so. A transport through a network is held
against the socket, which moves as many bytes from memory to memory: by itself, from slot to slot, and once more as a
whole, with gather, digest and scatter.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.kv_peer import TOKEN_BYTES, PeerSettings
from benchmarks.plain_cluster import Program
from cluster.transports import shares_pages
from kv_transfer.transports.interface import serve_store

HOST = "127.0.0.1"
NUM_SLOTS = 4
THROUGH_MEMORY = ("shm", "cuda_ipc", "nccl")
COPIED_ONCE = ("shm_pages", "cuda_pages")
THROUGH_NETWORK = ("gloo",)


@dataclass
class Rates:
    """Of one run: GB/s by chunk size. `copy`, `copies` and `socket` are what the transports are compared with."""

    by_name: dict[str, dict[int, float]] = field(default_factory=dict)

    def note(self, name: str, chunk_tokens: int, rate: float) -> None:
        self.by_name.setdefault(name, {})[chunk_tokens] = rate

    def ratio(self, name: str, chunk_tokens: int) -> float:
        """Of a transport, or of `slots_name` of it."""
        rate = self.by_name[name][chunk_tokens]
        if name in THROUGH_MEMORY:
            return 2 * rate / self.by_name["copy"][chunk_tokens]
        if name in COPIED_ONCE:
            return rate / self.by_name["copy"][chunk_tokens]
        return rate / self.by_name["socket"][chunk_tokens]


def slots_name(transport: str) -> str:
    """What a transport by itself is called."""
    return f"{transport}_slots"


@dataclass(frozen=True)
class Plan:
    """What is moved, and how."""

    transports: tuple[str, ...]
    devices: tuple[str, str] = ("cpu", "cpu")
    """The sender's and the receiver's."""
    chunk_sizes: tuple[int, ...] = (64, 256, 1024)
    num_tokens: int = 4096
    """Of the prompt in the cache."""
    passes: int = 4
    """How often the prompt is moved, one chunk after another, in one measurement."""
    digest: str = "on"
    environments: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))
    """Variables of the sender and of the receiver."""


class Peers:
    """The two processes."""

    def __init__(self, sender: Program, receiver: Program, plan: Plan) -> None:
        self._sender = sender
        self._receiver = receiver
        self._plan = plan
        self._num_bytes = plan.passes * plan.num_tokens * TOKEN_BYTES

    def open(self) -> None:
        """A pair for each transport and chunk size; each has moved the prompt once, and whole."""
        for transport in self._plan.transports:
            for chunk_tokens in self._plan.chunk_sizes:
                name = _pair_name(transport, chunk_tokens)
                self._both("open", pair=name, transport=transport, chunk_tokens=chunk_tokens)
                self._both("move", pair=name, chunk_tokens=chunk_tokens, passes=1)
                self._receiver.tell({"do": "check"})
                if not self._receiver.expect("done")["is_whole"]:
                    raise self._receiver.failure(f"{name} did not bring what was sent")
                if transport in THROUGH_NETWORK:
                    name = _pair_name(slots_name(transport), chunk_tokens)
                    self._both("open slots", pair=name, transport=transport, chunk_tokens=chunk_tokens)
                    self._both("move slots", pair=name, chunk_tokens=chunk_tokens, passes=1)

    def run(self) -> Rates:
        """One run."""
        rates, plan = Rates(), self._plan
        for chunk_tokens in plan.chunk_sizes:
            self._sender.tell({"do": "copy", "passes": plan.passes})
            rates.note("copy", chunk_tokens, self._rate([self._sender.expect("done")]))
            rates.note("copies", chunk_tokens, self._rate(self._both("copy", passes=plan.passes)))
            if plan.devices == ("cpu", "cpu"):
                streamed = self._both("stream", chunk_tokens=chunk_tokens, passes=plan.passes)
                rates.note("socket", chunk_tokens, self._rate(streamed))
            for transport in plan.transports:
                name = _pair_name(transport, chunk_tokens)
                moved = self._both("move", pair=name, chunk_tokens=chunk_tokens, passes=plan.passes)
                rates.note(transport, chunk_tokens, self._rate(moved))
                if transport in THROUGH_NETWORK:
                    name = slots_name(transport)
                    pair = _pair_name(name, chunk_tokens)
                    moved = self._both("move slots", pair=pair, chunk_tokens=chunk_tokens, passes=plan.passes)
                    rates.note(name, chunk_tokens, self._rate(moved))
        return rates

    def _both(self, do: str, **what: Any) -> list[dict[str, Any]]:
        """The receiver is told first, so that it is ready when the sender begins."""
        for peer in (self._receiver, self._sender):
            peer.tell({"do": do, **what})
        return [peer.expect("done") for peer in (self._sender, self._receiver)]

    def _rate(self, answers: list[dict[str, Any]]) -> float:
        """From the sender's, or the only one's, beginning to the last end."""
        took_s: float = max(a["ended"] for a in answers) - answers[0]["began"]
        return self._num_bytes / took_s / 1e9


@contextlib.contextmanager
def running_peers(plan: Plan) -> Iterator[Peers]:
    """Both processes, ready. Raises ProgramFailed."""
    with contextlib.ExitStack() as stack:
        store, store_address = serve_store(HOST)
        grants = [stack.enter_context(end) for end in socket.socketpair()]
        tcp = [stack.enter_context(end) for end in _tcp_pair()]
        programs = []
        for is_sender in (True, False):
            side = 0 if is_sender else 1
            settings = PeerSettings(
                is_sender=is_sender,
                device=plan.devices[side],
                num_tokens=plan.num_tokens,
                num_slots=NUM_SLOTS,
                digest=plan.digest,
                store_address=store_address,
                grants_fd=grants[side].fileno(),
                tcp_fd=tcp[side].fileno(),
                pool_of=next((name for name in plan.transports if shares_pages(name)), ""),
            )
            fds = (settings.grants_fd, settings.tcp_fd)
            programs.append(Program("benchmarks.kv_peer", settings, fds, plan.environments[side]))
            stack.callback(programs[-1].stop)
        for program in programs:
            program.expect("ready")
        for end in (*grants, *tcp):
            end.close()  # one that dies is noticed by the other
        yield Peers(programs[0], programs[1], plan)
        del store


def measure(plan: Plan, runs: Iterable[int]) -> list[Rates]:
    """One `Rates` for each of `runs`. Raises ProgramFailed."""
    with running_peers(plan) as peers:
        peers.open()
        return [peers.run() for _ in runs]


def median_ratio(measured: list[Rates], transport: str, chunk_tokens: int) -> float:
    """Of each run's own ratio: a machine that is busy for a while moves it little."""
    return statistics.median(rates.ratio(transport, chunk_tokens) for rates in measured)


def median_rate(measured: list[Rates], name: str, chunk_tokens: int) -> float:
    return statistics.median(rates.by_name[name][chunk_tokens] for rates in measured)


def gpu_plan(plan: Plan) -> Plan | None:
    """The same between GPUs, or on the only one; None where there is none."""
    import torch

    match torch.cuda.device_count() if torch.cuda.is_available() else 0:
        case 0:
            return None
        case 1:
            return replace(plan, transports=("cuda_ipc",), devices=("cuda:0", "cuda:0"), digest="sampled")
    return replace(plan, transports=("cuda_ipc", "nccl"), devices=("cuda:0", "cuda:1"), digest="sampled")


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """A connection over loopback. Its buffers are the kernel's to grow, which is faster than any fixed size."""
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def _pair_name(transport: str, chunk_tokens: int) -> str:
    return f"{transport}-{chunk_tokens}"
