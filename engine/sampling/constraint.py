"""Owns constrained output on a worker: which tokens may come next in a sequence whose output must fit a grammar.

That depends on the grammar and the tokens so far alone, so any worker that has the tokens can go on where they end, and
so can a new process of the grammar (`cluster.grammar`) after one that was lost. Masks are asked for when a step begins,
and collected when its logits are there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.grammar import GrammarFailed, GrammarLimits, GrammarLost, GrammarProcess, GrammarProcesses
from cluster.model_folder import has_model_file, read_model_file

Words = npt.NDArray[np.int32]
"""A bit for each token of the vocabulary, the lowest first: [W]."""

MAX_GRAMMARS = 32
"""Grammars whose processes are kept for further requests with the same one."""
MOST_FAULTS = 2
"""A grammar that ended its process so often is not followed any more."""
_COMPILE_THREADS = 4


class ConstraintFailed(Exception):
    """The output cannot go on: the tokens so far do not fit the grammar, or following it takes too much."""


class _Grammar:
    """A grammar with the process that follows it, which is replaced when it is lost."""

    def __init__(self, text: str, processes: GrammarProcesses) -> None:
        """Compiles it. Raises GrammarFailed or GrammarLost."""
        self._text = text
        self._processes = processes
        self._num_faults = 0
        self.process = processes.compile(text)

    def replace(self, lost: GrammarProcess) -> None:
        """Compiles it again, unless that was done since. Raises as before."""
        if self.process is lost:
            lost.close()
            if self._num_faults >= MOST_FAULTS:
                raise GrammarFailed(f"its process ended {self._num_faults} times by its fault")
            self.process = self._processes.compile(self._text)

    def count_fault(self) -> None:
        self._num_faults += 1


@dataclass(eq=False, slots=True)
class _Followed:
    """One sequence, as the process of its grammar knows it."""

    process: GrammarProcess
    slot: int
    words: Words
    """The process's memory of its latest answer."""
    num_read: int = 0
    """Tokens that the process has read."""
    is_asked: bool = False
    """Whether it was asked what may follow those, and the answer not collected."""


class Constraint:
    """The constraint of one request, for all its sequences. Used by one thread."""

    def __init__(self, grammar: _Grammar) -> None:
        self._grammar = grammar
        self._sequences: dict[int, _Followed] = {}

    def __del__(self) -> None:
        for followed in self._sequences.values():
            followed.process.drop(followed.slot)

    def ask(self, sequence_index: int, output_token_ids: Sequence[int], ends: Iterable[int]) -> None:
        """Notes that `allowed` will be called with the same arguments; send it with `flush`."""
        num_tokens = len(output_token_ids)
        followed = self._sequences.get(sequence_index)
        if followed is not None and 0 < followed.num_read == num_tokens - 1 and not followed.is_asked:
            process = followed.process
            if process is self._grammar.process:
                process.ask_next(followed.slot, followed.num_read, output_token_ids[-1])
                followed.num_read, followed.is_asked = num_tokens, True
                return
        followed = self._followed(sequence_index, num_tokens)
        if followed is not None and not followed.is_asked:
            num_read = followed.num_read
            followed.process.ask(followed.slot, num_read, output_token_ids[num_read:], ends)
            followed.num_read, followed.is_asked = num_tokens, True

    def flush(self) -> None:
        """Sends what was noted for any request."""
        self._grammar.process.flush()

    def allowed(self, sequence_index: int, output_token_ids: Sequence[int], ends: Iterable[int]) -> Words:
        """Which tokens may follow, until the next call for this sequence; `ends`, the same in every call, may where the
        output is whole. Raises ConstraintFailed."""
        followed = self._sequences.get(sequence_index)
        if (
            followed is not None
            and followed.is_asked
            and followed.num_read == len(output_token_ids)
            and followed.process.has_mask(followed.slot)
        ):
            followed.is_asked = False
            return followed.words
        while True:
            self.ask(sequence_index, output_token_ids, ends)
            followed = self._sequences.get(sequence_index)
            if followed is None:
                raise ConstraintFailed("too many sequences follow its grammar at one time")
            followed.is_asked = False
            try:
                problem = followed.process.wait(followed.slot)
            except GrammarFailed as failure:
                self._grammar.count_fault()
                raise ConstraintFailed(str(failure)) from failure
            except GrammarLost:
                self._replace(followed)
                continue
            if problem:
                raise ConstraintFailed(problem)
            return followed.words

    def _followed(self, sequence_index: int, num_tokens: int) -> _Followed | None:
        """The sequence, known anew where its process is another one, or has read more tokens than there are now; None
        where that follows too many."""
        followed, process = self._sequences.get(sequence_index), self._grammar.process
        if followed is not None:
            num_read = followed.num_read
            if followed.process is process and (
                num_read == num_tokens or (num_read < num_tokens and not followed.is_asked)
            ):
                return followed
            followed.process.drop(followed.slot)
            del self._sequences[sequence_index]
        slot = process.begin()
        if slot is None:
            return None
        words = np.frombuffer(process.mask(slot), dtype=np.int32)
        followed = self._sequences[sequence_index] = _Followed(process, slot, words)
        return followed

    def _replace(self, followed: _Followed) -> None:
        try:
            self._grammar.replace(followed.process)
        except (GrammarFailed, GrammarLost, OSError) as error:
            raise ConstraintFailed(str(error)) from error


class Constrainer:
    """Makes constraints for one model. From any thread."""

    def __init__(self, definition: Callable[[], str], vocab_size: int, limits: GrammarLimits | None = None) -> None:
        """`definition` reads the content of its tokenizer.json, when the first grammar comes."""
        self._processes = GrammarProcesses(definition, vocab_size, limits)
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[_Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, limits: GrammarLimits | None = None) -> Constrainer | None:
        """Returns None where there is no tokenizer: nothing can be constrained there."""
        path = folder / "tokenizer.json"
        return cls(lambda: read_model_file(path).decode("utf-8"), vocab_size, limits) if has_model_file(path) else None

    def new(self, grammar: str) -> Constraint:
        """Blocks until the grammar is compiled. Raises ValueError for one that cannot be followed."""
        return Constraint(self._grammar(grammar).result())

    def begin(self, grammar: str, done: Callable[[Constraint | Exception], None]) -> None:
        """Calls `done` when the grammar is compiled, here or from another thread; with a ValueError where it cannot be
        followed."""

        def tell(future: Future[_Grammar]) -> None:
            try:
                done(Constraint(future.result()))
            except Exception as error:
                done(error)

        self._grammar(grammar).add_done_callback(tell)

    def close(self) -> None:
        """Ends the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def _grammar(self, text: str) -> Future[_Grammar]:
        """The grammar, compiled once for all who want it at one time; failures are not kept."""
        with self._lock:
            found = self._compiled.get(text)
            if found is not None and not (found.done() and found.exception() is not None):
                self._compiled.move_to_end(text)
                return found
            self._compiled[text] = made = self._threads.submit(_Grammar, text, self._processes)
            self._compiled.move_to_end(text)
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
            return made
