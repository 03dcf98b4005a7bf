"""The processes that compile and follow grammars with llguidance, away from those that serve.

    python -m cluster.grammar_process FD     loads a tokenizer's tokens once, and forks
      one process for each grammar           compiles it, then follows it: tokens in, masks of allowed tokens out

`cluster.grammar` is the other end. Native code that crashes, or takes too much time or memory, ends the process of its
own grammar and no other. Forking is cheap and safe here: the process has one thread and little memory. All processes
end with the one that started them, whose socket closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from cluster.grammar_protocol import (
    ANSWER,
    ASK,
    BAD,
    COMPILE,
    COMPILED,
    CONTROL,
    CONTROL_BYTES,
    FORK,
    GOOD,
    HELLO,
    KEY,
    KILL,
    OUT_OF_MEMORY,
    ROW,
    receive_frame,
    row_bytes,
    send_frame,
)

_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_WHITESPACE = r"[ \t\r\n]{1,32}"
"""Whitespace between the parts of JSON: bounded, since a model that likes line breaks would write nothing else."""
_PR_SET_PDEATHSIG = 1
_PARENT_GONE = 1


def main(control: socket.socket) -> None:
    """Forks a process for each request on the socket, reports how each ended, and returns when the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the parent ends this process
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this ends before what serves
    hello, fds, _, _ = socket.recv_fds(control, CONTROL_BYTES, 1)
    (vocab_size,) = HELLO.unpack(hello)
    with open(fds[0], encoding="utf-8") as file:
        file.seek(0)
        definition = file.read()
    try:
        vocabulary = LLTokenizer(definition, n_vocab=vocab_size)
    except ValueError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    control.send(json.dumps({"end_token_ids": list(vocabulary.eos_tokens)}).encode())
    del definition
    gc.freeze()
    gc.disable()
    _Forker(control, vocabulary).run()


class _Forker:
    """The process that forks."""

    def __init__(self, control: socket.socket, vocabulary: LLTokenizer) -> None:
        self._control = control
        self._vocabulary = vocabulary
        self._numbers: dict[int, int] = {}
        """Number of each live child, by its pid."""
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker

    def run(self) -> None:
        with DefaultSelector() as selector:
            selector.register(self._control, EVENT_READ)
            selector.register(self._woken, EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    self._woken.recv(4096)
                    self._report_ended()
                if self._control in ready and not self._obey():
                    signal.set_wakeup_fd(-1)
                    return

    def _obey(self) -> bool:
        """Carries out one message; False at the end of the socket."""
        try:
            message, fds, _, _ = socket.recv_fds(self._control, CONTROL_BYTES, 2)
        except ConnectionResetError:  # the other end died
            return False
        if not message:
            return False
        operation, number, _ = CONTROL.unpack(message)
        if operation == KILL:
            for pid in [pid for pid, n in self._numbers.items() if n == number]:
                os.kill(pid, signal.SIGKILL)
        elif operation == FORK:
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                self._become_child(parent, fds)
            self._numbers[pid] = number
            for fd in fds:
                os.close(fd)
        return True

    def _become_child(self, parent: int, fds: list[int]) -> None:
        """Never returns."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_PARENT_GONE)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._control, self._woken, self._waker):
                each.close()
            data_fd, mask_fd = fds
            follow(socket.socket(fileno=data_fd), mask_fd, self._vocabulary)
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        except (OSError, EOFError):
            code = 0  # the other end has closed
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _report_ended(self) -> None:
        while self._numbers:
            pid, status, _usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._numbers.pop(pid)
            with contextlib.suppress(ConnectionError):  # the other end has just died
                self._control.send(CONTROL.pack(FORK, number, status))


def follow(data: socket.socket, mask_fd: int, vocabulary: LLTokenizer) -> None:
    """Compiles one grammar and answers what may follow tokens until the socket closes."""
    frame = receive_frame(data)
    memory_bytes, niceness, kind_bytes = COMPILE.unpack_from(frame)
    os.nice(niceness)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # never preempts the thread that has just asked
    kind, text = (part.decode() for part in (frame[COMPILE.size :][:kind_bytes], frame[COMPILE.size + kind_bytes :]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + memory_bytes,) * 2)
    try:
        grammar = text if kind == "grammar" else _grammar_of(kind, text)
        start = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if start.is_error():
            raise ValueError(start.get_error())
    except (ValueError, RecursionError) as error:
        send_frame(data, COMPILED.pack(BAD, os.getpid()) + str(error).encode(errors="replace"))
        return
    send_frame(data, COMPILED.pack(GOOD, os.getpid()) + (b"" if kind == "grammar" else grammar.encode()))
    with mmap.mmap(mask_fd, 0) as masks:
        _Follower(data, masks, start, row_bytes(vocabulary.vocab_size)).run()


class _Follower:
    """The matchers of one grammar, by the keys that the other end gives them."""

    def __init__(self, data: socket.socket, masks: mmap.mmap, start: LLMatcher, stride: int) -> None:
        self._data = data
        self._masks = masks
        self._start = start
        self._stride = stride
        self._matchers: dict[int, LLMatcher] = {}

    def run(self) -> None:
        while True:
            frame = receive_frame(self._data)
            if frame[0] == ASK:
                self._answer_rows(frame)
            else:
                for (key,) in KEY.iter_unpack(frame[1:]):
                    self._matchers.pop(key, None)

    def _answer_rows(self, frame: bytes) -> None:
        at = 1
        while at < len(frame):
            key, slot, num_read, num_new = ROW.unpack_from(frame, at)
            at += ROW.size
            tokens = list(struct.unpack_from(f"<{num_new}I", frame, at))
            at += 4 * num_new
            self._answer(key, slot, num_read, tokens)

    def _answer(self, key: int, slot: int, num_read: int, tokens: list[int]) -> None:
        matcher = self._matchers[key] if num_read else self._start.deep_copy()
        self._matchers[key] = matcher
        problem = b""
        if matcher.consume_tokens(tokens):
            begin = slot * self._stride
            self._masks[begin : begin + self._stride] = matcher.compute_bitmask()[: self._stride]
        if matcher.is_error():
            problem = matcher.get_error().partition("\n")[0].encode()[:1000] or b"the tokens do not fit"
        self._data.sendall(ANSWER.pack(not problem and matcher.is_accepting(), len(problem)) + problem)


def _grammar_of(kind: str, text: str) -> str:
    """The library's own text for a constraint of a field of SamplingParams. Raises ValueError."""
    match kind:
        case "json_schema" | "json_object":
            schema = "{}" if text.strip() == "true" else text  # the library gives no options to `true`
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
        case "regex" | "choice":
            return grammar_from(kind, text)
        case "grammar_ebnf":
            return grammar_from("ebnf", text)
    raise ValueError(f"no constraint is called {kind}")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
