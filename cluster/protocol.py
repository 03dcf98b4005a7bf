"""The versions of the protocol inside a cluster: what each process says of itself, and how one is refused by name.

One number stands for everything that Baton's processes exchange: calls between router, workers and controller, the
commands of ranks, hand-offs, settings, and records in stores. Each side of a handshake says the range that it speaks
(`1-2`); two that have a number in common understand each other, and otherwise each refuses the other, with both ranges
and the one to upgrade. When the numbers must be raised is in docs/contributing.md. Clients' APIs have no part in this.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from cluster import rpc
from cluster.errors import IncompatibleProtocol
from cluster.token import token_gates, token_metadata

log = logging.getLogger(__name__)

VERSION = 1
"""The version of this build."""
OLDEST = 1
"""The oldest version that this build still speaks."""

HEADER = "x-baton-protocol"
_UNSAID = "1-1"
"""The range that a process speaks which says nothing: it is older than the handshake."""
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


def spoken() -> str:
    """The versions that this process speaks, as `OLDEST-VERSION`."""
    return f"{OLDEST}-{VERSION}"


def check_protocol(peer: str, peer_speaks: str, own: str, own_speaks: str | None = None) -> None:
    """`peer` and `own` name the two sides, the ranges are as `spoken` makes them; None: this process's, empty: that of
    a process older than the handshake. Raises IncompatibleProtocol."""
    theirs, ours = _parsed(peer_speaks, peer), _parsed(spoken() if own_speaks is None else own_speaks, own)
    if theirs[0] <= ours[1] and ours[0] <= theirs[1]:
        return
    older = own if theirs[0] > ours[1] else peer
    raise IncompatibleProtocol(
        f"{peer} speaks protocol {_shown(theirs)}; {own} speaks {_shown(ours)}: upgrade {older} first"
    )


def inside_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of each call inside a cluster: the versions that this process speaks, and its token, if there is one."""
    return (*token_metadata(token), (HEADER, spoken()))


class ProtocolGate(rpc.CallGate):
    """Refuses callers that speak no version of this process's, but of the services named open. `who`: whose port it is.
    `may_be_silent`: callers need not say what they speak, since they may be people's own programs."""

    def __init__(self, who: str, open_services: Iterable[str] = (), *, may_be_silent: bool = False) -> None:
        self._who = who
        self._open = frozenset(open_services)
        self._may_be_silent = may_be_silent
        self._refused = ""

    def check_call(self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        said = next((value for name, value in metadata if name == HEADER), "")
        text = said if isinstance(said, str) else said.decode(errors="replace")
        if service in self._open or (self._may_be_silent and not text):
            return
        try:
            check_protocol(self._who, spoken(), "its caller", text)
        except IncompatibleProtocol as error:
            if error.message != self._refused:  # a caller that comes again and again is told of once
                self._refused = error.message
                log.warning("%s was refused: %s", method, error.message)
            raise


def inside_gates(
    token: str, who: str, open_services: Iterable[str] = (), greeting_services: Iterable[str] = ()
) -> tuple[rpc.CallGate, ...]:
    """The interceptors of a server that only the cluster's own processes call. `greeting_services`: their first message
    says the version, which they check. gRPC may tell a caller that writes at once to a stream that is refused before it
    is read of an internal error instead of the refusal."""
    return (*token_gates(token, who, open_services), ProtocolGate(who, (*open_services, *greeting_services)))


def _parsed(speaks: str, who: str) -> tuple[int, int]:
    """(Oldest, newest). Raises IncompatibleProtocol."""
    match = _RANGE.fullmatch(speaks or _UNSAID)
    if match is None:
        raise IncompatibleProtocol(f"{who} says that it speaks {speaks[:24]!r}, which is no range of protocol versions")
    return int(match[1]), int(match[2])


def _shown(versions: tuple[int, int]) -> str:
    oldest, newest = versions
    return str(newest) if oldest == newest else f"{oldest} to {newest}"
