"""A served cluster whose workers are equal devices, and that goes from split to split, or steers itself, in between.

Knows no load.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cpu_share import equal_shares
from benchmarks.plain_cluster import ProgramFailed
from benchmarks.served_cluster import ServedCluster
from benchmarks.simulated_cluster import OfferedLoad, configured, slowed
from benchmarks.timed_cluster import calibrate
from cluster.pb import admin_pb2
from tools.client import AdminClient

CHANGE_S = 60.0
MAX_NUM_SEQS = 64
LONE = OfferedLoad(0, 200, 2, 0.0, 0.0, seed=0)
"""Requests that measure a message."""
_KIND = admin_pb2.ClusterEvent


class SteeredCluster:
    def __init__(self, file: Path, values: dict[str, object], share: float, served: ServedCluster, admin: AdminClient):
        self.address, self.config = served.address, configured(file, values)
        self._file, self._values, self._share = file, values, share
        self._served = served
        self._admin = admin

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, file: Path, values: dict[str, object], share: float, slower: float = 1.0
    ) -> Iterator[SteeredCluster]:
        """`values`: keys of the file that are set anew. Each worker has `share` of a core; 0: what it gets. Timed steps
        and objectives take `slower` times longer. Raises ProgramFailed, NoControlGroups."""
        values = {"engine.max_num_seqs": MAX_NUM_SEQS, "engine.threads": 1, **values}
        values |= slowed(configured(file, values), slower)
        with contextlib.ExitStack() as stack:
            served = stack.enter_context(ServedCluster.running(file, values))
            admin = stack.enter_context(AdminClient(served.admin_address))
            if share > 0:
                pids = {p.name: list(p.pids) for p in admin.cluster().processes if p.name != "router"}
                stack.enter_context(equal_shares(pids, share))
            yield cls(file, values, share, served, admin)

    def described(self) -> dict[str, Any]:
        """What `benchmarks/steered_simulated.py` has to know of it. To be asked while it is idle: where steps are
        timed, a message is measured."""
        is_timed = self.config.engine.timed_steps.is_on
        profile = calibrate(self.address, self.config, LONE) if is_timed else None
        file = str(self._file.resolve())
        return {"config": file, "values": self._values, "share": self._share, "profile": profile}

    def steer(self, num_prefill: int, num_decode: int, *, auto: bool = False) -> None:
        """Goes to a split, and stays there, or goes on from there by itself. Raises ProgramFailed."""
        split = {"roles.prefill.devices": num_prefill, "roles.decode.devices": num_decode}
        self._change({"rebalance.mode": "fixed", **split})
        if auto:
            self._change({"rebalance.mode": "auto"})

    def num_moves(self) -> int:
        """That `mode: auto` has asked for since it began."""
        return self._admin.cluster().auto.num_moves

    def split(self) -> tuple[int, int]:
        cluster = self._admin.cluster()
        return cluster.num_prefill, cluster.num_decode

    def last_event(self) -> int:
        return self._admin.cluster().last_sequence

    def reasons(self, after: int) -> list[str]:
        """Why it moved, or did not, since that event."""
        last = self.last_event()
        told = []
        for event in self._admin.events(after, timeout_s=1.0):
            if event.kind == _KIND.KIND_AUTO:
                told.append(event.text)
            if event.sequence >= last:
                break
        return told

    def _change(self, values: dict[str, object]) -> None:
        """Edits the file and returns when that is done; an edit that changes nothing is done at once."""
        text = self._served.file.read_text(encoding="utf-8")
        after = self.last_event()
        version = self._admin.cluster().version
        self._served.edit(values)
        if self._served.file.read_text(encoding="utf-8") == text and self._agrees(values):
            return
        until = time.monotonic() + CHANGE_S
        for event in self._admin.events(after, timeout_s=CHANGE_S):
            if event.kind == _KIND.KIND_CHANGED and event.version > version:
                return
            is_ours = "was edited" in event.text  # and not what mode: auto asked for at the same moment
            if (event.kind in (_KIND.KIND_FAILED, _KIND.KIND_REFUSED) and is_ours) or time.monotonic() > until:
                raise ProgramFailed(f"{values} did not come about: {event.text}")
        raise ProgramFailed(f"{values} did not come about within {CHANGE_S:g} s")

    def _agrees(self, values: dict[str, object]) -> bool:
        split = self.split()
        wanted = values.get("roles.prefill.devices", split[0]), values.get("roles.decode.devices", split[1])
        return split == wanted
