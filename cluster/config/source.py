"""Where a mistake is in the operator's file, and how it is shown: `file:line:column: key: what`, the line, a caret.

Owns the text and the list of problems found so far. Knows no key of the schema.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_LINE = 140


@dataclass(frozen=True)
class SourcePosition:
    """A position in the file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake: `key` is the full dotted path, empty when the file as a whole is meant."""

    place: SourcePosition | None
    key: str
    what: str


class ConfigSource:
    """The text of one file and the problems found in it."""

    def __init__(self, filename: str, text: str, *, shows_lines: bool = True) -> None:
        """`shows_lines` False: problems are told without the line, which may hold a secret."""
        self.filename = filename
        self._shows_lines = shows_lines
        self._lines = text.splitlines()
        self._problems: list[ConfigProblem] = []

    def report(self, place: SourcePosition | None, key: str, what: str) -> None:
        self._problems.append(ConfigProblem(place, key, what))

    def has_problem(self, key: str) -> bool:
        """True when something was found wrong at this key or at a section that contains it."""
        return any(f"{key}.".startswith(f"{problem.key}.") for problem in self._problems)

    @property
    def num_problems(self) -> int:
        return len(self._problems)

    def render(self) -> str:
        """Every problem, in the order of the file."""
        start = SourcePosition(0, 0)
        ordered = sorted(self._problems, key=lambda p: ((p.place or start).line, (p.place or start).column))
        return "\n".join(self._render(problem) for problem in ordered)

    def _render(self, problem: ConfigProblem) -> str:
        what = f"{problem.key}: {problem.what}" if problem.key else problem.what
        if problem.place is None:
            return f"{self.filename}: {what}"
        head = f"{self.filename}:{problem.place.line}:{problem.place.column}: {what}"
        return head + self._excerpt(problem.place)

    def _excerpt(self, place: SourcePosition) -> str:
        """The line and a caret under the column; of a very long line, the part around the column."""
        if not self._shows_lines or not 1 <= place.line <= len(self._lines):
            return ""
        line = "".join(c if c.isprintable() else " " for c in self._lines[place.line - 1])
        first = max(0, place.column - _MAX_LINE // 2) if len(line) > _MAX_LINE else 0
        return f"\n    {line[first : first + _MAX_LINE].rstrip()}\n    {' ' * (place.column - 1 - first)}^"


def clip(text: str, limit: int = 60) -> str:
    """A value as an error shows it: on one line and short."""
    flat = "".join(c if c.isprintable() else "?" for c in text)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
