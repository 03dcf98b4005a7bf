"""The model's tokenizer: text and chats to ids, ids to text.

Owns the folder's tokenizer.json, tokenizer_config.json and the choice of detokenizer. Knows nothing of requests.
All of it may be called from several threads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from cluster.errors import CheckpointError
from cluster.model_folder import read_model_file, read_model_json
from router.api.chat import Prompt
from router.api.chat_template import ChatTemplate
from router.api.infill import Infill, infill_of
from router.stream.detokenizer import CONTEXT_TOKENS, ByteDetokenizer, Detokenizer, WindowDetokenizer

_TAIL_TOKENS = 16
_BEFORE = "☺"
"""Stands before a text that is to be encoded as if another text came before it."""


@dataclass(frozen=True)
class Encoded:
    """Ids, and for each the characters [start, end) of the text that it stands for."""

    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class Tokenizer:
    """`sha256` names tokenizer.json's content."""

    def __init__(self, definition: bytes, chat_template: ChatTemplate) -> None:
        """Raises CheckpointError when `definition` is not a tokenizer.json."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat_template = chat_template
        self.sha256 = hashlib.sha256(definition).hexdigest()
        self._is_byte_level = _is_byte_level(json.loads(definition).get("decoder"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Special tokens by their text, which no other token has a part of."""
        self._special_ids = frozenset(self.special_ids.values())
        self.infill = infill_of(self._tokenizer.token_to_id)
        """How a text between two is asked for; None: the tokenizer has no marks for that."""
        is_asked = self.infill is not None
        self._adds_space = is_asked and any("▁" in piece for piece in self._tokenizer.encode(_BEFORE).tokens)
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        """Those, and other tokens that text is split at first."""
        self._bytes_of: dict[int, bytes] = {}
        self._whole: dict[int, str] = {}
        """Whole characters by token, as `ByteDetokenizer` has them."""

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | None = None) -> Tokenizer:
        """`chat_template`: a file in place of the model's own templates. Raises CheckpointError."""
        path = folder / "tokenizer.json"
        try:
            definition = read_model_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); the router needs it") from error
        config = read_model_json(folder / "tokenizer_config.json", required=False)
        return cls(definition, ChatTemplate.from_folder(folder, config, Path(chat_template) if chat_template else None))

    @property
    def definition(self) -> str:
        """The content of a tokenizer.json with the same tokens."""
        return str(self._tokenizer.to_str())

    @property
    def num_tokens(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Encoded(tuple(encoding.ids), tuple(encoding.offsets))

    def encode_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Encoded:
        """Encodes a text, or renders a chat and encodes that; the template writes the special tokens itself. Of a text
        to be filled in between two, no token has offsets. Raises the errors of `ChatTemplate.render`."""
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, Infill):
            assert self.infill is not None, "validate has refused it"
            begin = self.encode("", add_special_tokens=add_special_tokens).token_ids
            before = self.encode(prompt.prefix, add_special_tokens=False).token_ids
            return Encoded((*begin, *self.infill.arrange(before, self._encode_behind(prompt.suffix))), ())
        text = self.chat_template.render(prompt)
        return self.encode(text, add_special_tokens=False)

    def _encode_behind(self, text: str) -> tuple[int, ...]:
        """Encodes a text without the space that SentencePiece puts before the first word of one."""
        if not self._adds_space:
            return self.encode(text, add_special_tokens=False).token_ids
        found = self.encode(_BEFORE + text, add_special_tokens=False)
        pairs = zip(found.token_ids, found.offsets, strict=True)
        return tuple(token_id for token_id, (start, _) in pairs if start >= len(_BEFORE))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def tail(self, token_ids: Sequence[int]) -> str:
        """The text of the last of these ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids[-_TAIL_TOKENS:]), skip_special_tokens=False))

    def written(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of ids that follow others, special tokens written out. What is cut off of a character is U+FFFD."""
        if self._is_byte_level:
            detokenizer = self.new_detokenizer((), self.special_ids)
            return detokenizer.push(token_ids) + detokenizer.flush()
        names = {token_id: text for text, token_id in self.special_ids.items()}
        context = list(before[-CONTEXT_TOKENS:])
        num_before = len(self._decode_keeping(names, context))
        return self._decode_keeping(names, [*context, *token_ids])[num_before:]

    def new_detokenizer(self, prompt_token_ids: Sequence[int], kept: Iterable[str] = ()) -> Detokenizer:
        """A detokenizer for one sequence that continues this prompt. Special tokens have no text in it, except those of
        `kept`."""
        names = {self.special_ids[text]: text for text in kept if text in self.special_ids}
        if self._is_byte_level and not names:
            return ByteDetokenizer(self._token_bytes, self._whole)
        if self._is_byte_level:
            texts = {token_id: text.encode() for token_id, text in names.items()}
            return ByteDetokenizer(lambda token_id: texts.get(token_id) or self._token_bytes(token_id))
        decode = self.decode if not names else partial(self._decode_keeping, names)
        return WindowDetokenizer(decode, prompt_token_ids[-CONTEXT_TOKENS:], self._special_ids - names.keys())

    def _decode_keeping(self, names: Mapping[int, str], token_ids: Sequence[int]) -> str:
        runs = groupby(token_ids, key=names.get)
        return "".join(self.decode(list(run)) if name is None else name * len(list(run)) for name, run in runs)

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one token by itself, in UTF-8 or a part of it; for a special token, its name."""
        if token_id in self._special_ids or not self._is_byte_level:
            piece = self._tokenizer.id_to_token(token_id) if token_id in self._special_ids else self.decode([token_id])
            return (piece or "").encode("utf-8")
        return self._token_bytes(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes_of.get(token_id)
        if known is None:
            piece = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
            known = self._bytes_of[token_id] = b"" if piece is None else _piece_bytes(piece)
        return known


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders", [])
        return len(inner) == 1 and _is_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """A piece with any character outside the alphabet is an added token, and stands for itself."""
    values = [_BYTE_OF.get(character) for character in piece]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else piece.encode("utf-8")
