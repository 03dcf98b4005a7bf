"""Two network namespaces with a link between them that can be cut, and links of their own to this one.

    here --------- near ==== far --------- here        ==== is the link that faults are done to

A process in `near` reaches one in `far` only over the link; this process reaches both whatever is done to it. Faults
are iptables rules in `far`; those of all links are rules of nftables where packets arrive, here for the devices of
these links alone. Their counters prove that they took effect. Needs root, `ip`, `iptables` and `nft`. Names and
addresses belong to this process alone; `close` removes everything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self


def missing() -> str:
    """Why namespaces cannot be had here, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in ("ip", "iptables", "nft", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)}"
    probe = subprocess.run(["unshare", "--net", "iptables", "-nL"], capture_output=True, text=True)
    return f"iptables does not work in a network namespace here: {probe.stderr.strip()}" if probe.returncode else ""


class Namespaces:
    """Use it as a context manager."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        network = f"198.18.{number}"  # set aside for tests of network devices (RFC 2544)
        mark = f"baton{os.getpid()}"
        self.near, self.far = f"{mark}n", f"{mark}f"
        self.near_host, self.far_host = f"{network}.1", f"{network}.2"
        self._links = (
            (self.near, f"{mark}a", f"{self.near_host}/30", self.far, f"{mark}b", f"{self.far_host}/30"),
            ("", f"{mark}c", f"{network}.5/30", self.near, f"{mark}d", f"{network}.6/30"),
            ("", f"{mark}e", f"{network}.9/30", self.far, f"{mark}g", f"{network}.10/30"),
        )
        self.here_host = f"{network}.9"
        """Address of this namespace towards `far`; `near` reaches it, too."""
        self._routes = (
            ("", self.near_host, f"{network}.6"),
            ("", self.far_host, f"{network}.10"),
            (self.near, self.here_host, f"{network}.5"),
        )
        self._table = mark
        self._faulty: set[str] = set()
        """Namespaces that have a table of nftables."""

    def __enter__(self) -> Self:
        _remove_stale()
        try:
            for name in (self.near, self.far):
                _run("ip", "netns", "add", name)
                _ip(name, "link", "set", "lo", "up")
            for space, device, address, other, peer, peer_address in self._links:
                _ip(space, "link", "add", device, "type", "veth", "peer", "name", peer, "netns", other)
                for where, what, which in ((space, device, address), (other, peer, peer_address)):
                    _ip(where, "address", "add", which, "dev", what)
                    _ip(where, "link", "set", what, "up")
            for space, host, via in self._routes:
                _ip(space, "route", "add", f"{host}/32", "via", via)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Devices first: those of a deleted namespace would stay for a moment. Routes go with their devices."""
        self._mend()
        for space, device, *_ in self._links:
            if not space and Path(f"/sys/class/net/{device}").exists():
                _ip(space, "link", "delete", device)
        for name in _present() & {self.near, self.far}:
            _run("ip", "netns", "delete", name)
        assert not _present() & {self.near, self.far}

    # Faults of all links, or of those to here

    def lose(self, percent: int) -> None:
        """So many TCP packets in a hundred are lost on each link, both ways."""
        for space in ("", self.near, self.far):
            self._drop(space, self._devices(space), f"meta l4proto tcp numgen random mod 100 < {percent}")

    def cut_off(self, *spaces: str) -> None:
        """Nothing passes between these and here; the link between `near` and `far` stays."""
        for _, here, _, there, device, _ in self._links[1:]:
            if there in spaces:
                self._drop("", [here], "")
                self._drop(there, [device], "")

    def num_lost(self) -> int:
        """Packets that were dropped so since the last `heal`."""
        tables = [_nft(space, "list", "table", "ip", self._table) for space in self._faulty]
        return sum(int(count) for table in tables for count in re.findall(r"counter packets (\d+)", table))

    def _devices(self, space: str) -> list[str]:
        ends = [end for (a, device, _, b, peer, _) in self._links for end in ((a, device), (b, peer))]
        return [device for where, device in ends if where == space]

    def _drop(self, space: str, devices: list[str], match: str) -> None:
        """What comes by these devices and matches."""
        self._faulty.add(space)
        _nft(space, "add", "table", "ip", self._table)
        _nft(space, "add", "chain", "ip", self._table, "arriving", "{ type filter hook input priority 0 ; }")
        for device in devices:
            _nft(space, "add", "rule", "ip", self._table, "arriving", f'iifname "{device}" {match} counter drop')

    def _mend(self) -> None:
        for space in self._faulty:
            _nft(space, "delete", "table", "ip", self._table)
        self._faulty.clear()

    # Faults in what `far` hears of `near`

    def drop_data(self, control_port: int) -> None:
        """Everything is dropped but what goes to `control_port` in `far`."""
        self._rule("INPUT", "--source", self.near_host, "-p", "tcp", "!", "--dport", str(control_port), "-j", "DROP")

    def drop_all(self) -> None:
        self._rule("INPUT", "--source", self.near_host, "-j", "DROP")

    def reset(self) -> None:
        """Every connection is reset at its next packet, both ways; the resets themselves pass."""
        reject = ("-p", "tcp", "!", "--tcp-flags", "RST", "RST", "-j", "REJECT", "--reject-with", "tcp-reset")
        self._rule("INPUT", "--source", self.near_host, *reject)
        self._rule("OUTPUT", "--destination", self.near_host, *reject)

    def heal(self) -> None:
        self._mend()
        _run("ip", "netns", "exec", self.far, "iptables", "--flush")

    def num_hit(self) -> int:
        """Packets that the rules have caught."""
        table = ("ip", "netns", "exec", self.far, "iptables", "--list-rules", "--verbose")
        rules = subprocess.run(table, capture_output=True, text=True, check=True).stdout.splitlines()
        counters = [rule.split(" -c ")[1].split()[0] for rule in rules if rule.startswith("-A ")]
        return sum(map(int, counters))

    def _rule(self, chain: str, *match: str) -> None:
        """The newest rule comes first."""
        _run("ip", "netns", "exec", self.far, "iptables", "--insert", chain, *match)


def _present() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def _remove_stale() -> None:
    """What a process that was killed has left; names carry their process."""
    for device in Path("/sys/class/net").iterdir():
        if _is_stale(device.name, "ce"):
            _run("ip", "link", "delete", device.name)
    for name in _present():
        if _is_stale(name, "nf"):
            _run("ip", "netns", "delete", name)
    for table in re.findall(r"table ip (\w+)", _nft("", "list", "tables", "ip")):
        if _is_stale(table, ""):
            _nft("", "delete", "table", "ip", table)


def _is_stale(name: str, kinds: str) -> bool:
    mark = re.fullmatch(rf"baton(\d+)[{kinds}]" if kinds else r"baton(\d+)", name)
    return mark is not None and not Path(f"/proc/{mark[1]}").exists()


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", *(["-n", namespace] if namespace else []), *arguments)


def _nft(namespace: str, *arguments: str) -> str:
    return _run(*(["ip", "netns", "exec", namespace] if namespace else []), "nft", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
