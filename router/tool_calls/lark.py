"""Text of a grammar in llguidance's dialect of Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


class Lark:
    """A grammar that is being written."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """`special_ids`: the model's special tokens, which no text stands for."""
        self._special_ids = special_ids
        self._rules: dict[str, str] = {}
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

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule under a name like this one, and returns its name. A name in capitals is a token's."""
        number = 0
        while (unique := f"{name}_{number}" if number else name) in self._rules:
            number += 1
        self._rules[unique] = f"{unique}{options}: {body}"
        return unique

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for the JSON of a schema."""
        return self.rule("json", f"%json {json.dumps(schema)}")

    def text_without(self, *marks: str) -> str:
        """A token for any text, also none, in which no mark is. Special tokens are in no text."""
        wrong = [mark for mark in marks if not self.is_special(mark)]
        return self.rule("TEXT", " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){_escaped(mark)}(?s:.*)/" for mark in wrong)]))

    def text_not_beginning(self, *marks: str) -> str:
        """A token for any text, also none, that does not begin with a mark."""
        wrong = [mark for mark in marks if not self.is_special(mark)]
        return self.rule("TEXT", " & ".join(["/(?s:.*)/", *(f"~/{_escaped(mark)}(?s:.*)/" for mark in wrong)]))

    def text_up_to(self, mark: str) -> str:
        """A rule for any text up to the first such mark, and it."""
        if self.is_special(mark):
            return self.rule("up_to", f"{self.text_without()} {self.literal(mark)}")
        return self.rule("up_to", f"/(?s:.*){_escaped(mark)}/", "[lazy]")

    def grammar(self, start: str) -> str:
        """The grammar whose outputs are `start`, as llguidance takes it."""
        text = "\n".join([f"start: {start}", *self._rules.values()])
        return json.dumps({"grammars": [{"lark_grammar": text}]})


def _escaped(text: str) -> str:
    return re.sub(r"([^\w<> ])", lambda found: f"\\x{ord(found[1]):02x}" if ord(found[1]) < 128 else found[1], text)
