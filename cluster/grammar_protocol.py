"""The protocol between `cluster.grammar` and its processes (`cluster.grammar_process`): fixed structures, no object is
unpickled.

Control socket, whole messages: HELLO with descriptors and a JSON answer once; then FORK with descriptors of a data
socket and of a child's memory, KILL, and FORK back with the number and the exit status of a child that has ended.
Data socket of a child, frames with a length: the grammar, COMPILED back.
Questions, frames of words of 32 bits for any number of children, which the process that forks passes on. Of each row:

    number of the child, slot of the sequence, number of the question, tokens read before, new tokens, ends
    the new tokens, then the tokens that may end an output (with the first question of a sequence)

Answers lie in the child's memory, which both map: a word for each slot, twice the number of the question that was
answered there last, plus one for a problem; behind them the latest question answered of all; then what is allowed in
each slot, a bit for each token, or the text of the problem. An event counter says that there are some. Both sides rely
on a processor that shows writes in their order, as x86-64 does.
"""

from __future__ import annotations

import mmap
import socket
import struct
from array import array

MOST_ROWS = 4096
"""Sequences that one process follows at one time."""
OUT_OF_MEMORY = 3
"""Exit code of a process whose Python found no memory; native code aborts."""

CONTROL_BYTES = 4096
HELLO = struct.Struct("<I")
CONTROL = struct.Struct("<cQi")
FORK, KILL = b"F", b"K"
FRAME = struct.Struct("<I")
COMPILE = struct.Struct("<QdII")
COMPILED = struct.Struct("<cI")
GOOD, BAD = b"G", b"B"
HEAD_WORDS = 6
"""Words of a row before its tokens."""
DROP = 0
"""Number of the question with which a sequence is forgotten."""
MOST_QUESTIONS = (1 << 31) - 1
"""Numbers of questions go from 1 to this and begin again."""
LATEST = MOST_ROWS
"""Word that holds the latest question answered."""
MASKS_AT = -(-4 * (MOST_ROWS + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
PROBLEM = struct.Struct("<H")
MOST_PROBLEM_BYTES = 1000


def row_bytes(vocab_size: int) -> int:
    """Bytes of one mask: a bit for each token, in words of 32."""
    return 4 * -(-vocab_size // 32)


def slot_bytes(vocab_size: int) -> int:
    """Bytes of a slot, which holds a mask or the text of a problem."""
    return max(row_bytes(vocab_size), 4 * -(-(PROBLEM.size + MOST_PROBLEM_BYTES) // 4))


def words_of(frame: bytes) -> array[int]:
    """The words of a frame of questions."""
    words = array("I")
    words.frombytes(frame)
    return words


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
