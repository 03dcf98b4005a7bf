"""The protocol between `cluster.grammar` and its processes (`cluster.grammar_process`): fixed structures, no object is
unpickled.

Control socket, whole messages: HELLO with the tokenizer's descriptor and a JSON answer once; then FORK with descriptors
of a data socket and of the masks, KILL, and FORK back with the number and the exit status of a child that has ended.
Data socket, frames with a length: the grammar, COMPILED back; then rows to ask about or to drop, an ANSWER for each.
"""

from __future__ import annotations

import socket
import struct

MOST_ROWS = 256
"""Rows whose masks one process keeps until they are collected."""
OUT_OF_MEMORY = 3
"""Exit code of a process whose Python found no memory; native code aborts."""

CONTROL_BYTES = 4096
HELLO = struct.Struct("<I")
CONTROL = struct.Struct("<cQi")
FORK, KILL = b"F", b"K"
FRAME = struct.Struct("<I")
COMPILE = struct.Struct("<QII")
COMPILED = struct.Struct("<cI")
GOOD, BAD = b"G", b"B"
ASK, DROP = ord("A"), ord("D")
ANSWER = struct.Struct("<?H")
KEY = struct.Struct("<Q")
ROW = struct.Struct("<QIII")
"""Key, slot of the mask, tokens that were read before, new tokens; these follow."""


def row_bytes(vocab_size: int) -> int:
    """Bytes of one mask: a bit for each token, in words of 32."""
    return 4 * -(-vocab_size // 32)


def send_frame(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(FRAME.pack(len(payload)) + payload)


def receive_frame(sock: socket.socket) -> bytes:
    """Raises EOFError when the other end has closed, OSError when it died."""
    (size,) = FRAME.unpack(_receive(sock, FRAME.size))
    return _receive(sock, size)


def _receive(sock: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
