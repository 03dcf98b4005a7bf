"""Decides which requests of browsers an HTTP server answers: only those that its own pages send, under a name of its
own.

A site that somebody looks at can point its own name at this machine (DNS rebinding) and so read what is open on
loopback, or have the browser post to it. The Host header names the server as the browser knows it, Origin the page that
asks. Programs that send neither are no browsers.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass

from cluster.errors import PermissionDenied

_LONGEST_SHOWN = 100


@dataclass(frozen=True)
class OwnSite:
    """The names of one HTTP server. Numeric addresses, `localhost` and the machine's own name are always among them."""

    names: frozenset[str] = frozenset()
    """Further ones."""
    has_any: bool = False
    """Every name is one: whoever asks has a key, or TLS shows that the name leads here."""

    @classmethod
    def of(cls, names: Collection[str], *, is_protected: bool) -> OwnSite:
        """`is_protected`: by keys or TLS, so that every name is one unless some are given."""
        return cls(frozenset(name.lower() for name in names), is_protected and not names)

    def check(self, host: str | None, origin: str | None) -> None:
        """Checks one request by its two headers, None where there is none. Raises PermissionDenied."""
        if host is not None and not self._is_own(_name_of(host)):
            raise PermissionDenied(
                f"{host[:_LONGEST_SHOWN]!r} is no name of this server; call it by a numeric address or as localhost, "
                "or name it in router.allowed_hosts"
            )
        if origin is None:
            return
        page = origin.partition("://")[2]
        is_same = host is not None and page.lower() == host.lower()
        if not is_same and _name_of(page) not in self.names:
            raise PermissionDenied(
                f"a page of {origin[:_LONGEST_SHOWN]!r} asks for this, which is another site; ask from a program or "
                "from a page of this server, or name the site's host in router.allowed_hosts"
            )

    def _is_own(self, name: str) -> bool:
        if self.has_any or name in self.names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == socket.gethostname().lower()
        return True


def _name_of(authority: str) -> str:
    """The host of `host:port`, lower case, without brackets."""
    host, colon, port = authority.rpartition(":")
    is_split = bool(colon) and (port.isdigit() or not port) and (":" not in host or host.endswith("]"))
    name = host if is_split else authority
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()
