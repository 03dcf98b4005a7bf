"""Length-prefixed protobuf frames over TCP, between rank 0 and the other ranks; a closed socket is an error."""

from __future__ import annotations

import struct
from typing import TypeVar

from google.protobuf.message import Message

from cluster.errors import Unavailable
from worker.sockets import RankConnection

_HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

M = TypeVar("M", bound=Message)


def write_frame(sock: RankConnection, message: Message) -> None:
    data = message.SerializeToString()
    sock.sendall(_HEADER.pack(len(data)) + data)


def read_frame(sock: RankConnection, message_type: type[M]) -> M:
    """Raises Unavailable when the peer closes, ValueError for a frame larger than any we send."""
    (size,) = _HEADER.unpack(_read_exactly(sock, _HEADER.size))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a rank frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
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
