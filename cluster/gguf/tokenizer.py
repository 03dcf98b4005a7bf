"""Says in tokenizer.json's and tokenizer_config.json's fields what a GGUF file says of a tokenizer.

A file that carries its tokenizer.json (`tokenizer.huggingface.json`) is believed. Of others, two kinds are read:
byte-level BPE (`gpt2`), whose rule for splitting text has only a name in the file; and BPE of SentencePiece (`llama`),
whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.errors import CheckpointError
from cluster.gguf.header import GgufHeader

_PREFIX = "tokenizer."
_CONTROL, _USER_DEFINED, _UNKNOWN, _BYTE = 3, 4, 2, 6
"""Types of tokens."""
_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"),
}
"""The rules that split text before bytes are merged, by `tokenizer.ggml.pre`."""
_BYTE_LEVEL = ("gpt-2", "gpt2")
"""Names of the rule that `ByteLevel` has itself."""


def tokenizer_definition(header: GgufHeader) -> bytes:
    """Returns the content of a tokenizer.json. Raises CheckpointError that names the file and the key."""
    given = header.metadata.get(f"{_PREFIX}huggingface.json")
    if isinstance(given, str):
        return given.encode("utf-8")
    return json.dumps(_Vocabulary(header).definition()).encode("utf-8")


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Returns the fields of a tokenizer_config.json: special tokens and the chat template."""
    values = header.metadata
    fields: dict[str, Any] = {}
    if isinstance(template := values.get(f"{_PREFIX}chat_template"), str):
        named = values.get(f"{_PREFIX}chat_templates")
        others = {str(name): values.get(f"{_PREFIX}chat_template.{name}") for name in _items(named)}
        fields["chat_template"] = {"default": template, **others} if others else template
    tokens = values.get(f"{_PREFIX}ggml.tokens")
    for name in ("bos", "eos", "unknown", "padding"):
        number = values.get(f"{_PREFIX}ggml.{name}_token_id")
        if isinstance(tokens, tuple) and type(number) is int and 0 <= number < len(tokens):
            fields[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = str(tokens[number])
    return fields


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, tuple) else ()


class _Vocabulary:
    def __init__(self, header: GgufHeader) -> None:
        self._path, self._values = header.path, header.metadata
        self._tokens = [str(token) for token in self._tuple("tokens")]
        types = self._get("token_type")
        self._types: Sequence[Any] = types if isinstance(types, tuple) else (1,) * len(self._tokens)
        if not self._tokens or len(self._types) != len(self._tokens):
            raise self._wrong(f"{len(self._tokens)} tokens and {len(self._types)} token_type")

    def definition(self) -> dict[str, Any]:
        kind = self._get("model")
        if kind == "gpt2":
            parts = self._byte_level()
        elif kind == "llama":
            parts = self._sentencepiece()
        else:
            raise self._wrong(f"{_PREFIX}ggml.model {kind!r} is not supported; Baton reads gpt2 and llama")
        added = [
            {"id": number, "content": token, "special": kind == _CONTROL, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        return {"version": "1.0", "added_tokens": added, "post_processor": self._template(), **parts}

    def _byte_level(self) -> dict[str, Any]:
        rule = self._get("pre")
        if rule not in _SPLITS and rule not in _BYTE_LEVEL:
            known = ", ".join((*_BYTE_LEVEL, *_SPLITS))
            raise self._wrong(f"{_PREFIX}ggml.pre {rule!r} is not supported; Baton splits text as {known} do")
        merges = [str(merge).split(" ") for merge in self._tuple("merges")]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        splits: dict[str, Any] = {**byte_level, "use_regex": True}
        if rule in _SPLITS:
            split = {"type": "Split", "pattern": {"Regex": _SPLITS[str(rule)]}, "behavior": "Isolated", "invert": False}
            splits = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
        ignores = rule in ("llama3", "llama-v3", "llama-bpe")
        return {
            "normalizer": {"type": "NFC"} if "qwen" in str(rule) else None,
            "pre_tokenizer": splits,
            "decoder": {**byte_level, "use_regex": True},
            "model": self._model(merges) | {"ignore_merges": ignores},
        }

    def _sentencepiece(self) -> dict[str, Any]:
        scores = self._tuple("scores")
        if len(scores) != len(self._tokens):
            raise self._wrong(f"{len(self._tokens)} tokens and {len(scores)} scores")
        if any(isinstance(score, str) for score in scores):
            raise self._wrong(f"{_PREFIX}ggml.scores must be numbers (are {scores[0]!r} and others)")
        has_prefix = self._get("add_space_prefix") is not False
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
        unknown = self._get("unknown_token_id")
        known = type(unknown) is int and 0 <= unknown < len(self._tokens)
        options = {"unk_token": self._tokens[unknown] if known else None, "fuse_unk": True, "byte_fallback": True}
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "model": self._model(self._merges(scores)) | options,
        }

    def _merges(self, scores: Sequence[Any]) -> list[list[str]]:
        """Every way to make a piece of two, in the order of the pieces' scores: the best first."""
        left_out = (_CONTROL, _UNKNOWN, _BYTE, _USER_DEFINED)
        ranks = {
            token: (-float(score), number)
            for number, (token, kind, score) in enumerate(zip(self._tokens, self._types, scores, strict=True))
            if kind not in left_out
        }
        known = set(self._tokens)
        merges = []
        for token, rank in ranks.items():
            ways = [(token[:at], token[at:]) for at in range(1, len(token))]
            merges += [(rank, [left, right]) for left, right in ways if left in known and right in known]
        return [pair for _, pair in sorted(merges, key=lambda merge: merge[0])]

    def _model(self, merges: list[list[str]]) -> dict[str, Any]:
        vocabulary: dict[str, int] = {}
        for number, token in enumerate(self._tokens):
            vocabulary.setdefault(token, number)
        return {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [pair for pair in merges if len(pair) == 2],
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }

    def _template(self) -> dict[str, Any] | None:
        """Returns the tokens that are put before and behind a text, where the file asks for them."""
        default = self._get("model") == "llama"
        ends = []
        for name, is_default in (("bos", default), ("eos", False)):
            number, wanted = self._get(f"{name}_token_id"), self._get(f"add_{name}_token")
            has_token = type(number) is int and 0 <= number < len(self._tokens)
            ends.append(number if has_token and (is_default if wanted is None else wanted) else None)
        if ends == [None, None]:
            return None
        first, last = (
            [] if end is None else [{"SpecialToken": {"id": self._tokens[end], "type_id": 0}}] for end in ends
        )
        specials = {
            self._tokens[end]: {"id": self._tokens[end], "ids": [end], "tokens": [self._tokens[end]]}
            for end in ends
            if end is not None
        }
        texts = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
        single = [*first, texts[0], *last]
        pair = [*single, *(first and [{"SpecialToken": {**first[0]["SpecialToken"], "type_id": 1}}]), texts[1], *last]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}

    def _get(self, name: str) -> Any:
        return self._values.get(f"{_PREFIX}ggml.{name}")

    def _tuple(self, name: str) -> tuple[Any, ...]:
        value = self._get(name)
        if not isinstance(value, tuple):
            raise self._wrong(f"has no {_PREFIX}ggml.{name}, which its tokenizer needs")
        return value

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")
