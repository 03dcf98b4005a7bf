"""Owns constrained output on a worker: which tokens may come next in a sequence whose output must fit a grammar.

That depends on the grammar and the tokens so far alone, so any worker that has the tokens can go on where they end. The
kept matchers only save reading the tokens again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from cluster.grammar import new_matcher, new_vocabulary

MAX_GRAMMARS = 64
"""Grammars kept ready for further requests with the same one."""


class ConstraintFailed(Exception):
    """The output cannot go on: the tokens so far do not fit the grammar, or following it takes too much."""


class Constraint:
    """The constraint of one request, for all its sequences. Used by one thread."""

    def __init__(self, start: LLMatcher, vocab_size: int, own_ends: Sequence[int]) -> None:
        """`own_ends`: tokens that the library takes for the end of any output, which the request may not."""
        self._start = start
        self._vocab_size = vocab_size
        self._own_ends = np.array(own_ends, dtype=np.int64)
        self._matchers: dict[int, tuple[LLMatcher, int]] = {}  # of each sequence, with how many tokens it has read

    def allowed(
        self, sequence_index: int, output_token_ids: Sequence[int], ends: Iterable[int]
    ) -> npt.NDArray[np.bool_]:
        """Which tokens may follow, bool [V]; `ends` may where the output is whole. Raises ConstraintFailed."""
        matcher, num_read = self._matchers.get(sequence_index) or (self._start.deep_copy(), 0)
        if num_read > len(output_token_ids):
            matcher, num_read = self._start.deep_copy(), 0
        if not matcher.consume_tokens(list(output_token_ids[num_read:])):
            raise _failure_of(matcher)
        self._matchers[sequence_index] = matcher, len(output_token_ids)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise _failure_of(matcher)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._own_ends] = False
        if matcher.is_accepting():
            allowed[[token_id for token_id in ends if 0 <= token_id < self._vocab_size]] = True
        if not allowed.any():
            raise ConstraintFailed("no token of this model can follow")
        return allowed


class Constrainer:
    """Makes constraints for one model. From any thread."""

    def __init__(self, definition: str, vocab_size: int) -> None:
        """`definition`: the content of its tokenizer.json. Raises ValueError."""
        self._vocabulary: LLTokenizer = new_vocabulary(definition, vocab_size)
        self._vocab_size = vocab_size
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> Constrainer | None:
        """None where there is no tokenizer that the library can use: nothing can be constrained there."""
        try:
            return cls((folder / "tokenizer.json").read_text(encoding="utf-8"), vocab_size)
        except (OSError, ValueError):
            return None

    def prepare(self, grammar: str) -> None:
        """Compiles a grammar ahead of `new`. Raises ValueError for one that cannot be followed."""
        with self._lock:
            if grammar in self._matchers:
                return
        matcher = new_matcher(self._vocabulary, grammar)
        with self._lock:
            self._matchers[grammar] = matcher
            while len(self._matchers) > MAX_GRAMMARS:
                self._matchers.popitem(last=False)

    def new(self, grammar: str) -> Constraint:
        """Raises as `prepare`."""
        self.prepare(grammar)
        with self._lock:
            matcher = self._matchers.get(grammar)
            if matcher is not None:
                self._matchers.move_to_end(grammar)
                matcher = matcher.deep_copy()
        if matcher is None:  # sixty-four others came between
            matcher = new_matcher(self._vocabulary, grammar)
        return Constraint(matcher, self._vocab_size, self._vocabulary.eos_tokens)


def _failure_of(matcher: LLMatcher) -> ConstraintFailed:
    """The first line of the library's error."""
    return ConstraintFailed(matcher.get_error().partition("\n")[0])
