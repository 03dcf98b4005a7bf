"""Tokens to text while they come: never half a UTF-8 character, and a constant amount of work for each token.

Two ways, chosen by the tokenizer's decoder. `ByteDetokenizer`: each token is bytes (byte-level BPE), so an incremental
UTF-8 decoder gives exactly what a decode of the whole would. `WindowDetokenizer`: any other decoder, asked about a
small window of tokens. Knows no sequence and no stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Tokens of the prompt that a window begins with, so that a word's leading space survives."""
MOST_HELD_TOKENS = 8
"""A character has at most 4 bytes; that many tokens without a whole character are not valid UTF-8, and are let go."""


class Detokenizer(Protocol):
    """The deltas of `push` and `flush`, joined, are the text of all tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens; may be empty."""
        ...

    def flush(self) -> str:
        """What was held back, as no token will follow: U+FFFD for an unfinished character."""
        ...


class ByteDetokenizer:
    """For decoders that turn each token into bytes by itself."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1:
            return self._decoder.decode(bytes_of(token_ids[0]))
        return self._decoder.decode(b"".join([bytes_of(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: text of (tokens before + new tokens) minus text of the tokens before.

    Equal to the decode of the whole for every valid text; a decoder that judges a long run of byte tokens as one may
    replace more characters in an invalid one.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = (), silent: Container[int] = ()
    ) -> None:
        """`context` are the last tokens of the prompt; `silent` ids have no text."""
        self._decode = decode
        self._silent = silent
        self._window = list(context)
        self._num_before = len(self._window)
        self._text_before = decode(self._window) if self._window else ""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._silent])

    def flush(self) -> str:
        return self._emit(self._decode(self._window)) if len(self._window) > self._num_before else ""

    def _push(self, token_id: int) -> str:
        """One by one: a decoder may judge a run of bytes as one, and a character that is whole must leave it first."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_before <= MOST_HELD_TOKENS:
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        delta = text[len(self._text_before) :]
        if delta:
            self._window = self._window[self._num_before :]
            self._num_before = len(self._window)
            self._text_before = self._decode(self._window)
        return delta
