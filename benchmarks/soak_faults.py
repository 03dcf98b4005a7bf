"""What is done to a cluster during a soak: stops and cut links, which kill nothing, or kills; one at a time.

Each fault is proven: a stopped process is seen to stand still, a cut link has caught packets, a killed process is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.plain_cluster import ProgramFailed
from cluster.address import parse_address

STOP_WORKER_S = (1.0, 8.0)
"""Some of it is longer than transfer.dead_after_s."""
STOP_ROUTER_S = (0.5, 4.0)
CUT_S = (1.0, 6.0)
SEEN_S = 10.0
LOOK_EVERY_S = 0.05
DROPPED, REFUSED = "dropped_ports", "refused_ports"
"""Sets of ports."""


@dataclass(frozen=True)
class Target:
    """A process group of the cluster, as its controller names it."""

    name: str
    kind: str
    """prefill, decode, router or controller."""
    pids: tuple[int, ...]
    address: str
    is_ready: bool


class LinkCutter:
    """Drops or resets what goes to and from ports of this machine, by nftables: for a time that the kernel keeps, so
    that nothing stays cut when this process is killed. Use it as a context manager."""

    def __init__(self) -> None:
        self._table = f"baton_soak_{os.getpid()}"

    @staticmethod
    def missing() -> str:
        """Why links cannot be cut here, or nothing."""
        if os.geteuid() != 0:
            return "needs root"
        if shutil.which("nft") is None:
            return "needs nft"
        probe = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True)
        return f"nft does not work here: {probe.stderr.strip()}" if probe.returncode else ""

    def __enter__(self) -> LinkCutter:
        self._remove_stale()
        ways = ((DROPPED, "drop"), (REFUSED, "reject with tcp reset"))
        rules = "".join(
            f"iif lo tcp flags & rst == 0 tcp {end} @{name} counter {what};\n"
            for name, what in ways
            for end in ("dport", "sport")
        )
        sets = "".join(f"set {name} {{ type inet_service; flags timeout; }}\n" for name, _ in ways)
        chain = f"chain input {{ type filter hook input priority 0;\n{rules}}}\n"
        _nft(f"table inet {self._table} {{\n{sets}{chain}}}\n")
        return self

    def __exit__(self, *_: object) -> None:
        _nft(f"delete table inet {self._table}\n")

    def cut(self, port: int, seconds: float, *, resets: bool) -> None:
        name = REFUSED if resets else DROPPED
        _nft(f"add element inet {self._table} {name} {{ {port} timeout {round(1000 * seconds)}ms }}\n")

    def num_hit(self) -> int:
        """Packets that have been caught so far."""
        listed = subprocess.run(
            ["nft", "--json", "list", "table", "inet", self._table], capture_output=True, text=True, check=True
        )
        rules = [entry["rule"]["expr"] for entry in json.loads(listed.stdout)["nftables"] if "rule" in entry]
        return sum(part["counter"]["packets"] for expr in rules for part in expr if "counter" in part)

    @staticmethod
    def _remove_stale() -> None:
        """What a process that was killed has left; names carry their process."""
        listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            name = line.split()[-1]
            pid = name.removeprefix("baton_soak_")
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                _nft(f"delete table inet {name}\n")


class Faults:
    """A fault every so often, on a thread of its own. `targets` looks up whom; `keeps_still` is held during each."""

    def __init__(self, phase: str, targets: Callable[[], Sequence[Target]], every_s: float, seed: int) -> None:
        self.keeps_still = threading.Lock()
        self.failure: Exception | None = None
        self._targets, self._every_s = targets, every_s
        self._draw = random.Random(seed)
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._cutter: LinkCutter | None = None
        self._kinds = self._stops() if phase == "stops" else self._kills()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[Faults]:
        with contextlib.ExitStack() as stack:
            if not LinkCutter.missing():
                self._cutter = stack.enter_context(LinkCutter())
            self._thread.start()
            try:
                yield self
            finally:
                self._is_over.set()
                self._thread.join()

    def take_counts(self) -> Counter[str]:
        """What was done since this was last asked."""
        found = Counter[str]()
        while not self._done.empty():
            found[self._done.get()] += 1
        return found

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._every_s):
                with self.keeps_still:
                    if not self._is_over.is_set():
                        self._done.put(next(self._kinds))
        except Exception as error:  # told by the thread that reports
            self.failure = error

    def _stops(self) -> Iterator[str]:
        """Does a fault and says which, again and again."""
        while True:
            yield self._stop("worker", STOP_WORKER_S)
            if self._cutter is not None:
                yield self._cut(self._cutter, resets=False)
            yield self._stop("router", STOP_ROUTER_S)
            if self._cutter is not None:
                yield self._cut(self._cutter, resets=True)

    def _kills(self) -> Iterator[str]:
        for kind in itertools.cycle(("prefill", "decode", "router", "controller")):
            target = self._choose(lambda t, kind=kind: t.kind == kind)  # type: ignore[misc]
            if target is None:
                yield f"no {kind} to kill"
                continue
            process = psutil.Process(self._draw.choice(target.pids))
            process.kill()
            process.wait(SEEN_S)
            yield f"{kind} killed"

    def _stop(self, what: str, seconds: tuple[float, float]) -> str:
        target = self._choose(lambda t: (t.kind == "router") == (what == "router") and t.kind != "controller")
        if target is None:
            return f"no {what} to stop"
        process = psutil.Process(self._draw.choice(target.pids))
        process.send_signal(signal.SIGSTOP)
        try:
            _await(lambda: process.status() == psutil.STATUS_STOPPED, f"{target.name} does not stop")
            self._is_over.wait(self._draw.uniform(*seconds))
        finally:
            process.send_signal(signal.SIGCONT)
        return f"{what} stopped"

    def _cut(self, cutter: LinkCutter, *, resets: bool) -> str:
        target = self._choose(lambda t: t.kind in ("prefill", "decode"))
        if target is None:
            return "no link to cut"
        _, port = parse_address(target.address)
        before, seconds = cutter.num_hit(), self._draw.uniform(*CUT_S)
        cutter.cut(port, seconds, resets=resets)
        _await(lambda: cutter.num_hit() > before, f"nothing went to {target.name}")
        self._is_over.wait(seconds)
        return "links reset" if resets else "links cut"

    def _choose(self, fits: Callable[[Target], bool]) -> Target | None:
        ready = [target for target in self._targets() if target.is_ready and fits(target)]
        return self._draw.choice(ready) if ready else None


def _await(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SEEN_S
    while not condition():
        if time.monotonic() > end:
            raise ProgramFailed(f"{what} within {SEEN_S:g} s")
        time.sleep(LOOK_EVERY_S)


def _nft(script: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise ProgramFailed(f"nft: {done.stderr.strip()}\n{script}")
