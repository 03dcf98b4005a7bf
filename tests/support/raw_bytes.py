"""Bytes below gRPC: what a client sends, recorded at a tap, then damaged and sent again on raw connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from random import Random
from typing import Self

from benchmarks.nonsense import damage
from cluster.address import parse_address
from tools.client import BatonClient

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_OPENINGS = (
    *(b"", b"\0", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", PREFACE),
    PREFACE + b"\0\0\0\x04\0\0\0\0\0",
)


@dataclass(frozen=True)
class Recording:
    """What a client sent that made one good call, its connection's opening included."""

    sent: bytes

    @classmethod
    def of(cls, address: str) -> Self:
        """Makes a call through a tap in front of a router."""
        seen = bytearray()

        def pass_on(source: socket.socket, target: socket.socket, seen: bytearray | None) -> None:
            with contextlib.suppress(OSError):  # either side has closed
                while data := source.recv(65536):
                    if seen is not None:
                        seen.extend(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = BatonClient(f"127.0.0.1:{listener.getsockname()[1]}")
            calling = threading.Thread(target=client.models)
            calling.start()
            here, _ = listener.accept()
            with here, socket.create_connection(parse_address(address)) as there:
                taps = [
                    threading.Thread(target=pass_on, args=(here, there, seen)),
                    threading.Thread(target=pass_on, args=(there, here, None)),
                ]
                for tap in taps:
                    tap.start()
                calling.join(20)
                client.close()
                for tap in taps:
                    tap.join(20)
        assert seen.startswith(PREFACE) and b"ListModels" in seen
        return cls(bytes(seen))


def attack(address: str, recording: Recording, random: Random) -> None:
    """One connection that sends what it should not, hears whatever comes, and goes."""
    if random.random() < 0.6:
        data = damage(random, recording.sent)
    else:
        data = random.choice(_OPENINGS) + random.randbytes(random.randrange(300))
    with socket.create_connection(parse_address(address), timeout=20) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        if random.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(0.002)
        sock.recv(4096)
