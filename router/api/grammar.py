"""Constraints on a request's output, compiled to one grammar that workers can follow.

A grammar is tried with the model's own tokens before its request is queued. That takes about a millisecond, and up to a
second for a hostile one, so it belongs on a thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

from cluster.grammar import LONGEST_GRAMMAR, new_matcher, new_vocabulary
from cluster.pb import generation_pb2 as pb
from router.api.violations import Violations

MOST_CHOICES = 1024
_LONGEST_PROBLEM = 300
_WHITESPACE = r"[ \t\r\n]{1,32}"
"""Whitespace between the parts of JSON: bounded, since a model that likes line breaks would write nothing else."""

_ANY_OBJECT = '{"type": "object"}'

CheckGrammar = Callable[[str], None]
"""Raises ValueError for a grammar that cannot be followed."""


class Grammars:
    """Tries grammars with one tokenizer. From any thread."""

    def __init__(self, definition: Callable[[], str], vocab_size: int) -> None:
        """`definition` reads the content of tokenizer.json, when the first grammar comes."""
        self._definition = definition
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raises ValueError for one that cannot be followed."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = new_vocabulary(self._definition(), self._vocab_size)
        new_matcher(self._vocabulary, grammar)


def read_constraint(params: pb.SamplingParams, check: CheckGrammar, wrong: Violations) -> str:
    """The grammar of `params`; empty where there is none, or where it is wrong, which is added to `wrong`."""
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return ""
    field = f"sampling.{kind}"
    choices = params.choice.choices
    if not wrong.at_most(field, choices, MOST_CHOICES, "choices"):
        return ""
    if kind == "choice":
        text = json.dumps(list(choices), ensure_ascii=False) if choices else ""
    else:
        text = _ANY_OBJECT if kind == "json_object" else getattr(params, kind)
    if not 0 < len(text) <= LONGEST_GRAMMAR:
        wrong.add(field, f"must be 1 to {LONGEST_GRAMMAR} characters long (got {len(text)})")
        return ""
    try:
        grammar = _grammar_of(kind, text)
        check(grammar)
    except ValueError as error:
        wrong.add(field, f"cannot be followed: {_shorten(str(error))}")
        return ""
    return grammar


def _grammar_of(kind: str, text: str) -> str:
    match kind:
        case "json_schema" | "json_object":
            schema: str | dict[str, Any] = (
                {} if text.strip() == "true" else text
            )  # the library gives no options to `true`
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return grammar_from("regex", text)
        case "choice":
            return grammar_from("choice", text)
        case "grammar_ebnf":
            return grammar_from("ebnf", text)
    raise AssertionError(f"no constraint is called {kind}")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_PROBLEM else line[:_LONGEST_PROBLEM] + "…"
