"""Addresses as text: which of them cannot leave the machine, how a host and a port are joined and split, whether a port
is free, and how much each network holds.

Apart from `cluster.rpc` so that reading a configuration loads no gRPC.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from enum import Enum

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""The address at which a router of this machine serves gRPC, unless configured otherwise."""
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
"""The address at which the controller serves the AdminService, unless configured otherwise."""
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that listen on every address of a machine, and the address to reach each from that machine."""


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses; any other name may resolve to anything and is False."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def network_of(host: str) -> bytes:
    """Returns the party that an address stands for: an IPv4 address, the /64 of an IPv6 one, other text as it is."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return host.encode()
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]


class PortSharing(Enum):
    """Whether two processes may listen at one port at the same time, each taking some of the connections."""

    NONE = "none"
    FIRST = "first"
    """Nobody listens there now, or holds the port (`hold_port`); others may join later."""
    JOINED = "joined"
    """Joins the processes that listen there, if there are any."""


class PlacesPerNetwork:
    """Counts what each network holds at one time. `most`: of one network; None: any number."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._num_taken = Counter[bytes]()

    def take(self, network: bytes) -> bool:
        """Returns False where the network has as many as it may."""
        if self.most is not None and self._num_taken[network] >= self.most:
            return False
        self._num_taken[network] += 1
        return True

    def give_back(self, network: bytes) -> None:
        self._num_taken[network] -= 1
        if not self._num_taken[network]:
            del self._num_taken[network]


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def address_here(host: str, port: int) -> str:
    """The address at which a listener of this machine is reached from it."""
    return format_address(ANY_HOST.get(host, host), port)


def parse_address(text: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port` or `[v6]:port`; raises ValueError with the form expected."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_bracketed = len(host) == len(bare) + 2
    is_host = bool(bare) and "/" not in bare and (is_bracketed or ":" not in bare) and not any(map(str.isspace, bare))
    if not colon or not is_host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"{text!r} is not an address; write HOST:PORT, such as {DEFAULT_ADDRESS}")
    return bare, int(port)


def hold_port(host: str, port: int, *, is_joined: bool = False) -> socket.socket:
    """Binds a port, 0: any free one, without listening there: until the socket is closed, processes of this user that
    share it (`PortSharing.JOINED`) may listen there, and nobody else.

    Raises OSError where somebody else has it, unless `is_joined`: those who listen there are known.
    """
    if port and not is_joined and (error := listen_error(host, port)) is not None:
        raise error
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind(address)
        except OSError:  # connections of a listener that has ended may be left
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
    except OSError:
        held.close()
        raise
    return held


def listen_error(host: str, port: int) -> OSError | None:
    """The error of listening there now, or None. Only the listener's own bind is conclusive."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
