"""Text of a grammar in llguidance's dialect of Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


class Lark:
    """A grammar that is being written."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """`special_ids`: the model's special tokens, which no text stands for."""
        self._special_ids = special_ids
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """The names of rules by all else that they are."""
        self._inner: dict[str, str] = {}
        """Grammars of their own, by name."""
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def is_special(self, text: str) -> bool:
        """Whether it is one special token."""
        return text in self._special_ids

    def literal(self, text: str) -> str:
        """An expression for just this text; special tokens in it are tokens."""
        parts, at = [], 0
        for found in self._special.finditer(text) if self._special is not None else ():
            if found.start() > at:
                parts.append(json.dumps(text[at : found.start()]))
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(json.dumps(text[at:]))
        return " ".join(parts)

    def split(self, text: str) -> tuple[str, str]:
        """The text before its first special token, and the rest of it."""
        found = self._special.search(text) if self._special is not None else None
        at = len(text) if found is None else found.start()
        return text[:at], text[at:]

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule under a name like this one, unless there is one with its body, and returns its name. A name in
        capitals is a token's."""
        key = f"{name}{options}: {body}"
        if key not in self._names:
            unique = f"{name}_{len(self._rules)}"
            self._names[key], self._rules[unique] = unique, f"{unique}{options}: {body}"
        return self._names[key]

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for the JSON of a schema."""
        return self.rule("json", f"%json {json.dumps(schema)}")

    def several(self, begin: str, rest: str, between: str = "") -> str:
        """An expression for what follows a text with which each of several begins, one or more of them."""
        separator = f"{json.dumps(between)} " if between else ""
        return f"{rest} ({separator}{self.literal(begin)} {rest})*"

    def text_without(self, *marks: str) -> str:
        """A token for any text, also none, in which no mark is, be it written out."""
        return self.rule(
            "TEXT", " & ".join(["/(?s:.*)/", *([f"~/(?s:.*)({_any_of(marks)})(?s:.*)/"] if marks else [])])
        )

    def text_not_beginning(self, starts: Sequence[str], *marks: str) -> str:
        """A token for any text, also none, that does not begin with one of `starts` and in which no mark is."""
        return self.rule("TEXT", " & ".join([self.text_without(*marks), *_not_beginning(starts)]))

    def text_up_to(self, mark: str, *, starts: Sequence[str] = (), most_tokens: int | None = None) -> str:
        """An expression for any text up to the first such mark, and it. The text begins with none of `starts`.
        `most_tokens`: it has no more."""
        if self.is_special(mark):
            text = self.text_not_beginning(starts, mark)
            if most_tokens is not None:
                text = self.rule("limited", text, f"[max_tokens={most_tokens}]")
            return f"{text} {self.literal(mark)}"
        if most_tokens is not None:
            # A lexeme with `stop` and `max_tokens` would say it in one line, but the library panics when it computes
            # what may follow a part of the stop. A grammar's limit is looked at where a lexeme ends, one token late.
            begun = " | ".join(json.dumps(mark[:end]) for end in range(1, len(mark)))
            other = f"/[^{_escaped(mark[0])}]+/"
            self._inner["unmarked"] = f"start: (other | BEGUN)*\nother[max_tokens=1]: {other}\nBEGUN: {begun}"
            limited = self.rule("limited", "@unmarked", f"[max_tokens={max(0, most_tokens - 1)}]")
            return f"{limited} {self.literal(mark)}"
        head, rest = self.split(mark)
        text = self.rule("TEXT", " & ".join([f"/(?s:.*){_escaped(head)}/", *_not_beginning(starts)]))
        return f"{text} {self.literal(rest)}" if rest else self.rule("up_to", text, "[lazy]")

    def grammar(self, start: str) -> str:
        """The grammar whose outputs are `start`, as llguidance takes it."""
        text = "\n".join([f"start: {start}", *self._rules.values()])
        inner = [{"name": name, "lark_grammar": each} for name, each in self._inner.items()]
        return json.dumps({"grammars": [{"lark_grammar": text}, *inner]})


def _escaped(text: str) -> str:
    return re.sub(r"([^\w<> ])", lambda found: f"\\x{ord(found[1]):02x}" if ord(found[1]) < 128 else found[1], text)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(map(_escaped, texts))


def _not_beginning(starts: Sequence[str]) -> list[str]:
    return [f"~/({_any_of(starts)})(?s:.*)/"] if starts else []
