"""The rank protocol's connections: protobuf frames on TCP without delay, in TLS where the cluster's processes use it.

Plain sockets and not gRPC, since every step of a tensor-parallel group waits for its frame to reach the other ranks: a
frame is one `sendall` on the engine thread, without an event loop or a completion queue between the two processes.

A connection is read by one thread while others write. An `ssl.SSLSocket` may not be used so: here the TLS state is
apart from the socket, is held only while bytes go through it, and never while a thread waits for the network.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from cluster.errors import Unavailable
from cluster.pb import rank_pb2
from cluster.tls import INTERNAL_NAME, InternalTls
from cluster.token import is_token

_READ_BYTES = 64 * 1024
_HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
_MAX_HELLO_BYTES = 64 * 1024
HELLO_S = 5.0
"""Seconds that a peer that connects may take to say who it is; the next one waits for that long."""

M = TypeVar("M", bound=Message)


class RankConnection(Protocol):
    """A connection that frames are written to and read from; `socket.socket` is one."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...

    def settimeout(self, value: float | None, /) -> None:
        """Seconds for which a call waits for the peer; None: for ever."""
        ...

    def close(self) -> None: ...


class TlsConnection:
    """TLS over a connected socket: one thread reads, any thread writes. Both sides show a certificate.

    Invariant: records leave in the order in which they were made, since `_write_lock` is held over both.
    """

    def __init__(self, sock: socket.socket, tls: InternalTls, *, is_server: bool) -> None:
        """Shakes hands within the socket's timeout. Raises Unavailable, and closes the socket, where the peer is not of
        the cluster or does not answer."""
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.server.context() if is_server else tls.client.context()
        name = None if is_server else INTERNAL_NAME
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server, server_hostname=name)
        self._state_lock = threading.Lock()
        self._write_lock = threading.Lock()
        try:
            self._shake_hands()
        except OSError as error:
            sock.close()
            raise _broken(error) from error

    def sendall(self, data: bytes) -> None:
        with self._write_lock:
            left = memoryview(data)
            while left:
                with self._state_lock:
                    left = left[self._tls.write(left) :]
                self._flush()

    def recv(self, size: int) -> bytes:
        """Up to `size` bytes, at least one; b"" at the end of the connection. Raises Unavailable for bytes that are not
        the peer's."""
        while True:
            with self._state_lock:
                try:
                    return self._tls.read(size)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return b""
                except ssl.SSLError as error:
                    raise _broken(error) from error
            self._receive()

    def settimeout(self, value: float | None) -> None:
        self._sock.settimeout(value)

    def close(self) -> None:
        self._sock.close()

    def _shake_hands(self) -> None:
        """A refusal is sent to the peer before it is raised here."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            except ssl.SSLError:
                self._flush()
                raise
            else:
                self._flush()
                return

    def _flush(self) -> None:
        with self._state_lock:
            data = self._outgoing.read()
        if data:
            self._sock.sendall(data)

    def _receive(self) -> None:
        """Waits for bytes from the peer, or for its end."""
        data = self._sock.recv(_READ_BYTES)
        with self._state_lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()


def _broken(error: OSError) -> Unavailable:
    what = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
    return Unavailable(f"no TLS with a peer of the rank protocol: {what}; both need a certificate of internal_tls.ca")


def connect(address: str, timeout_s: float, tls: InternalTls | None = None) -> RankConnection:
    """A connection to host:port that sends small frames at once. `timeout_s`: until it stands."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    connection = _ready(sock, tls, is_server=False)
    sock.settimeout(None)
    return connection


def accept(listener: socket.socket, tls: InternalTls | None = None) -> RankConnection:
    """The next peer of a listener, whose `hello` comes next. Raises TimeoutError when none comes within the listener's
    timeout, and Unavailable for one that shakes no hands within HELLO_S."""
    sock, _ = listener.accept()
    sock.settimeout(HELLO_S)
    return _ready(sock, tls, is_server=True)


def hello(connection: RankConnection, token: str = "") -> rank_pb2.RankHello:
    """Reads who that peer is; from then on reading waits for as long as it takes. Raises Unavailable, and closes the
    connection, for one that is silent for HELLO_S or not of the cluster."""
    try:
        said = read_frame(connection, rank_pb2.RankReply, _MAX_HELLO_BYTES).hello
    except (OSError, ValueError, DecodeError, Unavailable) as error:
        connection.close()
        why = f"said nothing for {HELLO_S:g} s" if isinstance(error, TimeoutError) else f"is none: {error}"
        raise Unavailable(f"a process connected as a tensor-parallel rank and {why}; it is turned away") from error
    if not is_token(token, said.token):
        connection.close()
        raise Unavailable(
            "a process connected as a tensor-parallel rank without the token of this cluster; it is turned away"
        )
    connection.settimeout(None)
    return said


def _ready(sock: socket.socket, tls: InternalTls | None, *, is_server: bool) -> RankConnection:
    """Within the socket's timeout, which stays."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if tls is None else TlsConnection(sock, tls, is_server=is_server)


def write_frame(sock: RankConnection, message: Message) -> None:
    sock.sendall(frame_of(message))


def frame_of(message: Message) -> bytes:
    """A frame's bytes, for who sends one to several ranks."""
    data = message.SerializeToString()
    return _HEADER.pack(len(data)) + data


def read_frame(sock: RankConnection, message_type: type[M], most_bytes: int = MAX_FRAME_BYTES) -> M:
    """Raises Unavailable when the peer closes, ValueError for a frame larger than any we send."""
    (size,) = _HEADER.unpack(_read_exactly(sock, _HEADER.size))
    if size > most_bytes:
        raise ValueError(f"a rank frame of {size} bytes is over the limit of {most_bytes}")
    message = message_type()
    message.ParseFromString(_read_exactly(sock, size))
    return message


def _read_exactly(sock: RankConnection, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise Unavailable("a tensor-parallel rank closed its connection")
        data += chunk
    return bytes(data)
