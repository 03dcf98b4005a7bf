"""Whether a port can be listened on, asked before much else is begun. Light: the standard library only."""

from __future__ import annotations

import socket


def listen_error(host: str, port: int) -> OSError | None:
    """Why nobody could listen there now, or None. The listener's own bind has the last word."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
