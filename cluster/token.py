"""The token of a cluster: what its own processes, and the commands of the user who started it, show one another.

Every listener that can change a cluster, or be given work past the router, asks for it: ports on loopback are open to
all users of a machine. The controller makes the token, hands it to the processes in their settings, and leaves it for
commands in a file that only its user can read. A process that was started by hand asks for none unless its environment
has one.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from cluster import rpc
from cluster.address import is_loopback, parse_address
from cluster.errors import PermissionDenied
from cluster.program import replace_text
from cluster.settings import TOKEN_VARIABLE

HEADER = "x-baton-cluster-token"
_FOLDER = "~/.local/state/baton"


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that shows the token; none without one."""
    return ((HEADER, token),) if token else ()


def is_token(token: str, shown: str | bytes) -> bool:
    """Compared in constant time; anything is right where there is none."""
    given = shown.encode() if isinstance(shown, str) else shown
    return not token or hmac.compare_digest(token.encode(), given)


class TokenGate(rpc.CallGate):
    """Refuses calls that do not show the token, but of the services named open. `who`: whose port this is."""

    def __init__(self, token: str, who: str, open_services: Iterable[str] = ()) -> None:
        self._token = token
        self._who = who
        self._open = frozenset(open_services)

    def check_call(self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        shown = [value for name, value in metadata if name == HEADER]
        if service not in self._open and not is_token(self._token, shown[0] if len(shown) == 1 else ""):
            raise PermissionDenied(
                f"{self._who} wants the token of its cluster: run the command as the user who started the cluster, on "
                f"that machine, or put the token into {TOKEN_VARIABLE}"
            )


def token_gates(token: str, who: str, open_services: Iterable[str] = ()) -> tuple[TokenGate, ...]:
    """The interceptors of a server; none without a token."""
    return (TokenGate(token, who, open_services),) if token else ()


def token_file(port: int) -> Path:
    """Returns where the controller leaves the token for commands that call its AdminService at that port."""
    return Path(_FOLDER).expanduser() / f"admin-{port}.token"


def leave_token(port: int, token: str) -> None:
    """Writes the token into the file where this user's commands find it. Raises OSError."""
    file = token_file(port)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_text(file, token, 0o600)


def find_token(address: str) -> str:
    """The token for the AdminService at HOST:PORT: of the environment, else the file of a controller on this machine;
    empty where there is none that this user can read."""
    try:
        host, port = parse_address(address)
        return os.environ.get(TOKEN_VARIABLE, "").strip() or (token_file(port).read_text() if is_loopback(host) else "")
    except (OSError, ValueError):
        return ""
