"""Grammars of constrained output, compiled and followed in processes of their own (`cluster.grammar_process`).

    GrammarProcesses      starts the process that forks, again whenever it has ended
      .compile            a GrammarProcess for one grammar, within a limit of time and memory
        .ask, .answer     which tokens may follow, asked for ahead and collected later

A grammar that crashes the native compiler, or takes too long or too much memory, ends its own process: that is a
GrammarFailed. A process that was ended from outside is a GrammarLost: compiling the grammar again, and giving the new
process the tokens so far, leads to the same masks. Nothing here knows requests, fields or samplers.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.grammar_forker import GrammarForker
from cluster.grammar_protocol import (
    ANSWER,
    ASK,
    COMPILE,
    COMPILED,
    DROP,
    GOOD,
    KEY,
    MOST_ROWS,
    OUT_OF_MEMORY,
    ROW,
    receive_frame,
    row_bytes,
    send_frame,
)


class GrammarFailed(ValueError):
    """The grammar cannot be compiled or followed; the fault is its own."""


class GrammarTooSlow(GrammarFailed):
    """It takes too long, on a processor as busy as this one."""


class GrammarLost(Exception):
    """The process of the grammar was ended from outside; another may go on."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of the process of one grammar."""

    compile_s: float = 2.0
    follow_s: float = 1.0
    """Time for one mask."""
    memory_bytes: int = 256 << 20
    """Address space beyond what the process begins with."""
    niceness: int = 0


class GrammarProcesses:
    """The processes of one tokenizer's grammars. From any thread."""

    def __init__(self, definition: Callable[[], str], vocab_size: int, limits: GrammarLimits | None = None) -> None:
        """`definition` reads the content of tokenizer.json, when the first grammar comes. Tokens of the model that it
        does not have stand for no text."""
        self._definition = definition
        self.vocab_size = vocab_size
        self.limits = limits or GrammarLimits()
        self._forker: GrammarForker | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def compile(self, text: str, kind: str = "grammar") -> GrammarProcess:
        """Blocks until the grammar is compiled. `kind`: a field of SamplingParams, or the library's own text.

        Raises GrammarFailed; GrammarLost when its process was ended from outside twice.
        """
        try:
            return self._compiled(text, kind)
        except GrammarLost:
            return self._compiled(text, kind)

    def num_live(self) -> int:
        """Processes that follow a grammar."""
        forker = self._forker
        return 0 if forker is None else forker.num_live

    def close(self) -> None:
        """Ends every process."""
        with self._lock:
            self._is_closed = True
            if self._forker is not None:
                self._forker.close()
            self._forker = None

    def _compiled(self, text: str, kind: str) -> GrammarProcess:
        process = GrammarProcess(self._running(), self)
        try:
            process.compile(text, kind)
        except BaseException:
            process.close()
            raise
        return process

    def _running(self) -> GrammarForker:
        with self._lock:
            if self._is_closed:
                raise GrammarLost("the processes of grammars were ended")
            if self._forker is None or self._forker.has_ended:
                self._forker = GrammarForker(self._definition(), self.vocab_size)
            return self._forker


@dataclass(eq=False)
class AskedRow:
    """A row whose mask was asked for; its mask lies in `slot` once it is answered."""

    slot: int
    is_answered: bool = False
    is_accepting: bool = False
    is_forgotten: bool = False
    problem: str = ""


class GrammarProcess:
    """The process of one grammar. Used by one thread at a time."""

    def __init__(self, forker: GrammarForker, owner: GrammarProcesses) -> None:
        self._forker = forker
        self._limits = owner.limits
        self.end_token_ids = forker.end_token_ids
        """Tokens that the library takes for the end of any output."""
        self.forker_pid = forker.pid
        self.pid = 0
        self.grammar = ""
        """The library's own text, where the process made it of something else."""
        self._stride = row_bytes(owner.vocab_size)
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            try:
                fd = os.memfd_create("masks")
                given.callback(os.close, fd)
                self._data, theirs = socket.socketpair()
                given.enter_context(theirs)
                kept.enter_context(self._data)
                os.ftruncate(fd, self._stride * MOST_ROWS)
                self._masks = mmap.mmap(fd, self._stride * MOST_ROWS)
                self._number = forker.fork([theirs.fileno(), fd])
            except OSError as error:
                raise GrammarLost(f"no process could be started for a grammar: {error}") from error
            kept.pop_all()
        self._free_slots = list(range(MOST_ROWS))
        self._waiting: deque[AskedRow] = deque()
        self._outgoing = bytearray()
        self._dropped: list[int] = []
        self._incoming = b""
        self._keys = itertools.count(1)
        self._failure: Exception | None = None
        self._suspect: AskedRow | None = None
        """The row that the process was at when it ended by a fault of the grammar."""

    def compile(self, text: str, kind: str) -> None:
        """Raises GrammarFailed or GrammarLost."""
        name, limits = kind.encode(), self._limits
        head = COMPILE.pack(limits.memory_bytes, limits.niceness, len(name))
        self._data.settimeout(limits.compile_s)
        try:
            send_frame(self._data, head + name + text.encode())
            reply = receive_frame(self._data)
        except TimeoutError:
            raise GrammarTooSlow(f"it takes more than {limits.compile_s:g} s to compile; simplify it") from None
        except (OSError, EOFError):
            raise self._end("compiling") from None
        status, self.pid = COMPILED.unpack_from(reply)
        text = reply[COMPILED.size :].decode(errors="replace")
        if status != GOOD:
            raise GrammarFailed(text)
        self.grammar = text
        self._data.settimeout(limits.follow_s)

    def new_key(self) -> int:
        """A name for one sequence of tokens."""
        return next(self._keys)

    def ask(self, key: int, num_read: int, token_ids: Sequence[int]) -> AskedRow | None:
        """Notes a row to ask about: the `num_read` tokens that it was asked about before, and these new ones.

        Nothing is sent before `flush`. None: too many rows wait to be collected.
        """
        if not self._free_slots:
            return None
        row = AskedRow(self._free_slots.pop())
        self._outgoing += ROW.pack(key, row.slot, num_read, len(token_ids))
        self._outgoing += struct.pack(f"<{len(token_ids)}I", *token_ids)
        self._waiting.append(row)
        return row

    def forget(self, key: int, row: AskedRow | None) -> None:
        """Notes that nobody asks about a sequence any more, nor collects its row."""
        self._dropped.append(key)
        if row is not None:
            row.is_forgotten = True
            if row.is_answered:
                self._free_slots.append(row.slot)

    def flush(self) -> None:
        """Sends what was noted."""
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self._send(bytes([DROP]) + b"".join(KEY.pack(key) for key in dropped))
        if self._outgoing:
            payload, self._outgoing = bytes([ASK]) + self._outgoing, bytearray()
            self._send(payload)

    def answer(self, row: AskedRow) -> bytes:
        """Waits for a row's mask, a bit for each token, and frees its slot.

        Raises GrammarFailed where the row does not fit, or the process ended while it was at this row, by a fault of
        the grammar; GrammarLost where the process ended for another reason: its other rows may go on in a new one.
        """
        self.flush()
        while not row.is_answered:
            self._read_answers()
            if self._failure is not None and not row.is_answered:
                raise self._failure if row is self._suspect else GrammarLost(str(self._failure))
        self._free_slots.append(row.slot)
        if row.problem:
            raise GrammarFailed(row.problem)
        return self._masks[row.slot * self._stride : (row.slot + 1) * self._stride]

    def close(self) -> None:
        """Ends the process."""
        self._forker.kill(self._number)
        self._data.close()

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self.close()

    def _send(self, payload: bytes) -> None:
        """Sends a request; a failure shows where the answer is missing."""
        with contextlib.suppress(OSError):
            send_frame(self._data, payload)

    def _read_answers(self) -> None:
        """Waits for some, or for the end of the process."""
        if self._failure is not None:
            return
        part = b""
        try:
            part = self._data.recv(1 << 16)
        except TimeoutError:
            self._failure = GrammarTooSlow(f"it takes more than {self._limits.follow_s:g} s to follow")
        except OSError:
            self._failure = self._end("following")
        if not part:
            self._failure = self._failure or self._end("following")
            self._suspect = self._waiting[0] if isinstance(self._failure, GrammarFailed) else None
            return
        data, at = self._incoming + part, 0
        while at + ANSWER.size <= len(data):
            is_accepting, problem_bytes = ANSWER.unpack_from(data, at)
            end = at + ANSWER.size + problem_bytes
            if end > len(data):
                break
            row = self._waiting.popleft()
            row.is_answered, row.is_accepting = True, is_accepting
            row.problem = data[at + ANSWER.size : end].decode(errors="replace")
            if row.is_forgotten:
                self._free_slots.append(row.slot)
            at = end
        self._incoming = data[at:]

    def _end(self, doing: str) -> Exception:
        """Why the process ended."""
        status = self._forker.exit_status(self._number)
        if status is None:
            return GrammarLost("the process that follows grammars has ended")
        code = os.waitstatus_to_exitcode(status)
        if code in (OUT_OF_MEMORY, -signal.SIGABRT):
            mib = self._limits.memory_bytes >> 20
            return GrammarFailed(f"{doing} it takes more than {mib} MiB of memory; simplify it")
        if code in (0, -signal.SIGKILL, -signal.SIGTERM):
            return GrammarLost("the process of the grammar was ended")
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return GrammarFailed(f"{doing} it crashed the compiler ({name}); simplify it")
