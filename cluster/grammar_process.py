"""The processes that compile and follow grammars with llguidance, away from those that serve.

    python -m cluster.grammar_process FD     loads a tokenizer's tokens once, forks, and passes questions on
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
import sys
import traceback
from array import array
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from cluster.grammar_protocol import (
    BAD,
    COMPILE,
    COMPILED,
    CONTROL,
    CONTROL_BYTES,
    DROP,
    FORK,
    FRAME,
    GOOD,
    HEAD_WORDS,
    HELLO,
    KILL,
    LATEST,
    MASKS_AT,
    MOST_PROBLEM_BYTES,
    OUT_OF_MEMORY,
    PROBLEM,
    receive_frame,
    row_bytes,
    send_frame,
    slot_bytes,
    words_of,
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
_NOTHING = b"no token of this model can follow"
_PR_SET_PDEATHSIG = 1
_PARENT_GONE = 1


def main(control: socket.socket) -> None:
    """Forks a process for each request on the socket, reports how each ended, and returns when the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the parent ends this process
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this ends before what serves
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # nor preempts the thread that has just asked
    hello, (definition_fd, questions_fd, answers_fd), _, _ = socket.recv_fds(control, CONTROL_BYTES, 3)
    (vocab_size,) = HELLO.unpack(hello)
    with open(definition_fd, encoding="utf-8") as file:
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
    _Forker(control, socket.socket(fileno=questions_fd), answers_fd, vocabulary).run()


class _Child:
    """A child, and what it was not sent yet of the questions to it."""

    def __init__(self, pid: int, questions: socket.socket) -> None:
        self.pid = pid
        self.questions = questions
        self._unsent = bytearray()
        questions.setblocking(False)

    def send(self, payload: bytes = b"") -> bool:
        """Sends what it takes without waiting. Returns whether that was all."""
        self._unsent += payload
        try:
            del self._unsent[: self.questions.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has died
            self._unsent.clear()
        return not self._unsent


class _Forker:
    """The process that forks."""

    def __init__(
        self, control: socket.socket, questions: socket.socket, answers_fd: int, vocabulary: LLTokenizer
    ) -> None:
        self._control = control
        self._questions = questions
        self._answers_fd = answers_fd
        self._vocabulary = vocabulary
        self._children: dict[int, _Child] = {}
        """Those that live, by their numbers."""
        self._selector = DefaultSelector()
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker

    def run(self) -> None:
        selector = self._selector
        for each in (self._control, self._woken, self._questions):
            selector.register(each, EVENT_READ)
        while True:
            ready = {key.fileobj: key.data for key, _ in selector.select()}
            if self._woken in ready:
                self._woken.recv(4096)
                self._report_ended()
            if self._control in ready and not self._obey():
                signal.set_wakeup_fd(-1)
                return
            for child in ready.values():
                if child is not None and child.send():
                    selector.unregister(child.questions)
            if self._questions in ready and not self._pass_on():
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
            if number in self._children:
                os.kill(self._children[number].pid, signal.SIGKILL)
        elif operation == FORK:
            mine, theirs = socket.socketpair()
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                self._become_child(parent, theirs, mine, fds)
            theirs.close()
            self._children[number] = _Child(pid, mine)
            for fd in fds:
                os.close(fd)
        return True

    def _pass_on(self) -> bool:
        """Gives each child its rows of one frame; False at the end of the socket."""
        try:
            words = words_of(receive_frame(self._questions))
        except (OSError, EOFError):
            return False
        rows: dict[int, array[int]] = {}
        at = 0
        while at < len(words):
            end = at + HEAD_WORDS + words[at + 4] + words[at + 5]
            rows.setdefault(words[at], array("I")).extend(words[at:end])
            at = end
        for number, of_child in rows.items():
            child = self._children.get(number)
            if child is not None and not child.send(FRAME.pack(of_child.itemsize * len(of_child)) + of_child.tobytes()):
                with contextlib.suppress(KeyError):  # it waits already
                    self._selector.register(child.questions, EVENT_WRITE, child)
        return True

    def _become_child(self, parent: int, questions: socket.socket, not_mine: socket.socket, fds: list[int]) -> None:
        """Never returns."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_PARENT_GONE)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            others = [child.questions for child in self._children.values()]
            for each in (self._control, self._woken, self._waker, self._questions, not_mine, *others):
                each.close()
            data_fd, memory_fd = fds
            follow(socket.socket(fileno=data_fd), questions, memory_fd, self._answers_fd, self._vocabulary)
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
        while self._children:
            pid, status, _usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            number = next(number for number, child in self._children.items() if child.pid == pid)
            with contextlib.suppress(KeyError):  # it does not wait
                self._selector.unregister(self._children[number].questions)
            self._children.pop(number).questions.close()
            with contextlib.suppress(ConnectionError):  # the other end has just died
                self._control.send(CONTROL.pack(FORK, number, status))


def follow(
    data: socket.socket, questions: socket.socket, memory_fd: int, answers_fd: int, vocabulary: LLTokenizer
) -> None:
    """Compiles one grammar and answers what may follow tokens until the sockets close."""
    frame = receive_frame(data)
    memory_bytes, compile_s, niceness, kind_bytes = COMPILE.unpack_from(frame)
    os.nice(niceness)
    kind, text = (part.decode() for part in (frame[COMPILE.size :][:kind_bytes], frame[COMPILE.size + kind_bytes :]))
    memory = mmap.mmap(memory_fd, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + memory_bytes,) * 2)
    signal.setitimer(signal.ITIMER_PROF, compile_s)  # whose signal ends this process: how busy the machine is must not
    try:
        grammar = text if kind == "grammar" else _grammar_of(kind, text)
        start = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if start.is_error():
            raise ValueError(start.get_error())
        signal.setitimer(signal.ITIMER_PROF, 0)
    except (ValueError, RecursionError) as error:
        send_frame(data, COMPILED.pack(BAD, os.getpid()) + str(error).encode(errors="replace"))
        return
    send_frame(data, COMPILED.pack(GOOD, os.getpid()) + (b"" if kind == "grammar" else grammar.encode()))
    data.close()
    _Follower(questions, memory, answers_fd, start, vocabulary).run()


class _Follower:
    """The matchers of one grammar, by the slots of their sequences."""

    def __init__(
        self, questions: socket.socket, memory: mmap.mmap, answers_fd: int, start: LLMatcher, vocabulary: LLTokenizer
    ) -> None:
        self._questions = questions
        self._memory = memory
        self._head = memoryview(memory)[:MASKS_AT].cast("I")
        self._answers_fd = answers_fd
        self._start = start
        self._vocab_size = vocabulary.vocab_size
        self._own_ends = list(vocabulary.eos_tokens)
        """Tokens that the library takes for the end of any output, which a request may not."""
        self._slot_bytes, self._row_bytes = slot_bytes(self._vocab_size), row_bytes(self._vocab_size)
        self._followed: dict[int, tuple[LLMatcher, list[int]]] = {}
        """The matcher of each sequence, and the tokens that may end it."""

    def run(self) -> None:
        while True:
            words = words_of(receive_frame(self._questions)).tolist()
            at = 0
            while at < len(words):
                _, slot, question, num_read, num_new, num_ends = words[at : at + HEAD_WORDS]
                at += HEAD_WORDS
                tokens, ends = words[at : at + num_new], words[at + num_new : at + num_new + num_ends]
                at += num_new + num_ends
                if question == DROP:
                    self._followed.pop(slot, None)
                    continue
                if not num_read:
                    self._followed[slot] = self._start.deep_copy(), ends
                self._answer(slot, question, tokens)
            os.eventfd_write(self._answers_fd, 1)

    def _answer(self, slot: int, question: int, tokens: list[int]) -> None:
        matcher, ends = self._followed[slot]
        begin = MASKS_AT + slot * self._slot_bytes
        problem = b""
        if matcher.consume_tokens(tokens):
            mask = bytearray(matcher.compute_bitmask()[: self._row_bytes])
            for token_id in self._own_ends:
                mask[token_id >> 3] &= ~(1 << (token_id & 7))
            if matcher.is_accepting():
                for token_id in ends:
                    if token_id < self._vocab_size:
                        mask[token_id >> 3] |= 1 << (token_id & 7)
            self._memory[begin : begin + self._row_bytes] = bytes(mask)
            problem = b"" if mask.count(0) < len(mask) else _NOTHING
        if matcher.is_error():
            said = matcher.get_error().partition("\n")[0]
            problem = _NOTHING if said == "NoExtensionBias" else said.encode() or b"the tokens do not fit"
        if problem:
            text = PROBLEM.pack(len(problem[:MOST_PROBLEM_BYTES])) + problem[:MOST_PROBLEM_BYTES]
            self._memory[begin : begin + len(text)] = text
        self._head[slot] = 2 * question + bool(problem)
        self._head[LATEST] = question


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
