"""Grammars of constrained output, compiled and followed in processes of their own (`cluster.grammar_process`).

    GrammarProcesses      starts the process that forks, again whenever it has ended
      .compile            a GrammarProcess for one grammar, within a limit of time and memory
        .ask, .wait       which tokens may follow, asked for ahead and collected later

A grammar that crashes the native compiler, or takes too long or too much memory, ends its own process: that is a
GrammarFailed. A process that was ended from outside is a GrammarLost: compiling the grammar again, and giving the new
process the tokens so far, leads to the same masks. Nothing here knows requests, fields or samplers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.grammar_forker import GrammarForker
from cluster.grammar_protocol import (
    COMPILE,
    COMPILED,
    DROP,
    GOOD,
    LATEST,
    MASKS_AT,
    MOST_QUESTIONS,
    MOST_ROWS,
    OUT_OF_MEMORY,
    PROBLEM,
    receive_frame,
    row_bytes,
    send_frame,
    slot_bytes,
)

MOST_WAITING = 5
_LOOK_AGAIN_S = 0.01
"""Until it is known how a process ended that is gone."""


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
    """Processor time to compile; it may take `MOST_WAITING` times as long beside other work."""
    follow_s: float = 1.0
    """Processor time for one mask, as before."""
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


class GrammarProcess:
    """The process of one grammar. Followed by the one thread that follows all of these processes."""

    def __init__(self, forker: GrammarForker, owner: GrammarProcesses) -> None:
        self._forker = forker
        self._questions = forker.questions
        self._limits = owner.limits
        self.forker_pid = forker.pid
        self.pid = 0
        self.grammar = ""
        """The library's own text, where the process made it of something else."""
        self._slot_bytes, self._row_bytes = slot_bytes(owner.vocab_size), row_bytes(owner.vocab_size)
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            try:
                fd = os.memfd_create("masks")
                given.callback(os.close, fd)
                self._data, theirs = socket.socketpair()
                given.enter_context(theirs)
                kept.enter_context(self._data)
                size_bytes = MASKS_AT + self._slot_bytes * MOST_ROWS  # only what is written takes memory
                os.ftruncate(fd, size_bytes)
                self._memory = memoryview(mmap.mmap(fd, size_bytes))
                self._number = forker.fork([theirs.fileno(), fd])
            except OSError as error:
                raise GrammarLost(f"no process could be started for a grammar: {error}") from error
            kept.pop_all()
        self._answered = self._memory[:MASKS_AT].cast("I")
        self._free_slots = list(range(MOST_ROWS))[::-1]
        self._asked = [DROP] * MOST_ROWS
        """The question asked last in each slot."""
        self._num_asked = 0
        self._dropped: list[int] = []
        self._failure: Exception | None = None
        self._suspect = DROP
        """The question that the process was at when it ended by a fault of the grammar."""

    def compile(self, text: str, kind: str) -> None:
        """Raises GrammarFailed or GrammarLost."""
        name, limits = kind.encode(), self._limits
        head = COMPILE.pack(limits.memory_bytes, limits.compile_s, limits.niceness, len(name))
        most_s = MOST_WAITING * limits.compile_s
        self._data.settimeout(most_s)
        try:
            send_frame(self._data, head + name + text.encode())
            reply = receive_frame(self._data)
        except TimeoutError:
            raise GrammarTooSlow(f"it takes more than {most_s:g} s to compile on a busy machine; simplify it") from None
        except (OSError, EOFError):
            raise self._end("compiling") from None
        status, self.pid = COMPILED.unpack_from(reply)
        text = reply[COMPILED.size :].decode(errors="replace")
        if status != GOOD:
            raise GrammarFailed(text)
        self.grammar = text
        self._data.close()

    def begin(self) -> int | None:
        """Takes a slot for one sequence of tokens, until `drop`; None where too many have one."""
        self._forget_dropped()
        return self._free_slots.pop() if self._free_slots else None

    def drop(self, slot: int) -> None:
        """Gives a slot up, whether or not its last question was answered. From any thread."""
        self._dropped.append(slot)

    def ask(self, slot: int, num_read: int, token_ids: Sequence[int], ends: Iterable[int] = ()) -> None:
        """Notes a question: what may follow the `num_read` tokens of the one before, and these new ones?

        With the first one go the tokens that may end an output that is whole. Nothing is sent before `flush`.
        """
        if self._dropped:
            self._forget_dropped()
        question = self._asked[slot] = self._num_asked = self._num_asked % MOST_QUESTIONS + 1
        own_ends = () if num_read else tuple(ends)
        self._questions.extend((self._number, slot, question, num_read, len(token_ids), len(own_ends)))
        self._questions.extend(token_ids)
        self._questions.extend(own_ends)

    def ask_next(self, slot: int, num_read: int, token_id: int) -> None:
        """Notes a question as `ask` does, after one token more than before."""
        if self._dropped:
            self._forget_dropped()
        question = self._asked[slot] = self._num_asked = self._num_asked % MOST_QUESTIONS + 1
        self._questions.extend((self._number, slot, question, num_read, 1, 0, token_id))

    def flush(self) -> None:
        """Sends what was noted, for this grammar and all others of its tokenizer."""
        self._forker.flush()

    def mask(self, slot: int) -> memoryview:
        """Where a slot's answer is once `wait` has returned "", a bit for each token, until the next question."""
        begin = MASKS_AT + slot * self._slot_bytes
        return self._memory[begin : begin + self._row_bytes]

    def has_mask(self, slot: int) -> bool:
        """Whether the answer to a slot's last question is there, and tokens can follow."""
        return self._answered[slot] == 2 * self._asked[slot]

    def wait(self, slot: int) -> str:
        """Waits for the answer to a slot's last question. Returns "", or why nothing can follow.

        Raises GrammarFailed where the process ended while it was at this question, by a fault of the grammar;
        GrammarLost where it ended for another reason: its other sequences may go on in a new one.
        """
        question = self._asked[slot]
        if (answered := self._answered[slot]) >> 1 != question:
            self._await(slot, question)
            answered = self._answered[slot]
        if not answered & 1:
            return ""
        begin = MASKS_AT + slot * self._slot_bytes
        (size_bytes,) = PROBLEM.unpack_from(self._memory, begin)
        return bytes(self._memory[begin + PROBLEM.size :][:size_bytes]).decode(errors="replace")

    def close(self) -> None:
        """Ends the process."""
        self._forker.kill(self._number)
        self._data.close()

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self.close()

    def _forget_dropped(self) -> None:
        while self._dropped:
            slot = self._dropped.pop()
            self._questions.extend((self._number, slot, DROP, 0, 0, 0))
            self._free_slots.append(slot)

    def _await(self, slot: int, question: int) -> None:
        """Returns when it is answered. Raises as `wait`."""
        self._forker.flush()
        latest, began = -1, 0.0
        used_s: float | None = None
        follow_s = self._limits.follow_s
        while self._answered[slot] >> 1 != question:
            if self._failure is not None:
                raise self._failure if question == self._suspect else GrammarLost(str(self._failure))
            if self._answered[LATEST] != latest:
                latest, began, used_s = self._answered[LATEST], time.monotonic(), _processor_s(self.pid)
            waited_s = time.monotonic() - began
            left_s = follow_s - waited_s
            if left_s <= 0:
                now_s = _processor_s(self.pid)
                left_s = _LOOK_AGAIN_S if now_s is None or used_s is None else follow_s - (now_s - used_s)
            if left_s <= 0 or waited_s >= MOST_WAITING * follow_s:
                self._fail(GrammarTooSlow(f"it takes more than {follow_s:g} s to follow"))
            elif not self._forker.has_exited(self._number):
                self._forker.wait(left_s)
            elif self._answered[slot] >> 1 != question:
                self._fail(self._end("following"))

    def _fail(self, failure: Exception) -> None:
        """Answers nothing any more; a fault of the grammar is that of the oldest question without an answer."""
        self._failure = failure
        if isinstance(failure, GrammarFailed):
            both = zip(self._asked, self._answered, strict=False)
            waiting = [asked for asked, answered in both if asked != answered >> 1]
            self._suspect = max(waiting, key=lambda asked: (self._num_asked - asked) % MOST_QUESTIONS, default=DROP)

    def _end(self, doing: str) -> Exception:
        """Why the process ended."""
        status = self._forker.exit_status(self._number)
        if status is None:
            return GrammarLost("the process that follows grammars has ended")
        code = os.waitstatus_to_exitcode(status)
        if code in (OUT_OF_MEMORY, -signal.SIGABRT):
            mib = self._limits.memory_bytes >> 20
            return GrammarFailed(f"{doing} it takes more than {mib} MiB of memory; simplify it")
        if code == -signal.SIGPROF:
            return GrammarTooSlow(f"it takes more than {self._limits.compile_s:g} s to compile; simplify it")
        if code in (0, -signal.SIGKILL, -signal.SIGTERM):
            return GrammarLost("the process of the grammar was ended")
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return GrammarFailed(f"{doing} it crashed the compiler ({name}); simplify it")


def _processor_s(pid: int) -> float | None:
    """Returns what a process has had of processors; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
