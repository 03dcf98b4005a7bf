"""Bounds of what a client may send as a constraint: rules, references, nesting, length.

The compiler of grammars (llguidance) is native code that recurses: what is too deep or too large is refused before the
compiler sees it. Nothing here recurses, and everything takes time linear in the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

LONGEST_GRAMMAR = 256 * 1024
"""Characters of any constraint."""
LONGEST_REGEX = 32 * 1024
"""Characters of a regular expression: compiling one may take time quadratic in its length."""
MOST_RULES = 1000
MOST_REFERENCES = 500
"""Definitions that the `$ref`s of one schema name."""
DEEPEST = 128
"""Levels of nested brackets; an object in an object of a JSON schema takes two."""

_JSON_TOKENS = re.compile(r'(?P<literal>"(?:[^"\\]|\\.)*+"?)|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)
_REGEX_TOKENS = re.compile(r"(?P<literal>\\.|\[(?:[^\]\\]|\\.)*+\]?)|(?P<open>\()|(?P<close>\))", re.DOTALL)
_LITERAL = r'(?P<literal>"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)*+/?'
_RULE = r"(?P<rule>(?<=[\w\]}-])[ \t]*:(?::=)?)"
_GRAMMAR_TOKENS = (
    re.compile(_LITERAL + rf"|\[(?:[^\]\\]|\\.)*+\]?)|{_RULE}|(?P<open>[({{])|(?P<close>[)}}])", re.DOTALL),
    re.compile(_LITERAL + rf")|{_RULE}|(?P<open>\[)|(?P<close>\])", re.DOTALL),
)
"""Brackets outside strings and expressions: once without what may be a character class, once only square ones."""


def check_bounds(kind: str, text: str) -> None:
    """Raises ValueError with the value, the limit and the remedy. `kind`: a field of SamplingParams."""
    longest = LONGEST_REGEX if kind == "regex" else LONGEST_GRAMMAR
    if not 0 < len(text) <= longest:
        raise ValueError(f"must be 1 to {longest} characters long (got {len(text)})")
    match kind:
        case "json_schema":
            _check_tokens(text, _JSON_TOKENS)
            _check_references(text)
        case "regex":
            _check_tokens(text, _REGEX_TOKENS)
        case "grammar_ebnf":
            for tokens in _GRAMMAR_TOKENS:
                _check_tokens(text, tokens)
            _check_number_of_references(text.count('"$ref"'))


def _check_tokens(text: str, tokens: re.Pattern[str]) -> None:
    """Counts rules, and brackets that are open at one time within a rule."""
    num_rules = depth = 0
    for token in tokens.finditer(text):
        match token.lastgroup:
            case "open":
                depth += 1
                if depth > DEEPEST:
                    raise ValueError(f"is nested more than {DEEPEST} levels deep; make it flatter")
            case "close":
                depth = max(0, depth - 1)
            case "rule":
                num_rules, depth = num_rules + 1, 0
    if num_rules > MOST_RULES:
        raise ValueError(f"has {num_rules} rules, and may have {MOST_RULES}; join or leave out some")


def _check_references(text: str) -> None:
    """Text that is no JSON is left to the compiler, whose words name the place."""
    try:
        schema = json.loads(text)
    except ValueError:
        return
    targets: set[str] = set()
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str):
                targets.add(target)
            left += value.values()
        elif isinstance(value, list):
            left += value
    _check_number_of_references(len(targets))


def _check_number_of_references(number: int) -> None:
    if number > MOST_REFERENCES:
        remedy = "write definitions where they are used, or leave out some"
        raise ValueError(f"refers to {number} definitions, and may refer to {MOST_REFERENCES}; {remedy}")
