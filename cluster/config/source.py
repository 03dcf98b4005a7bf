"""An operator's YAML file: its text, its nodes, and its mistakes, shown as `file:line:column: key: what` and the line.

Works on the node graph of `yaml.compose` with the safe loader: each value has its position, and nothing from the file
is ever constructed. Knows no key of a schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster.errors import ConfigError

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
        """`shows_lines` False: problems are shown without the line, which may hold a secret."""
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


def read_text(path: str | Path) -> str:
    """Raises ConfigError for a file that cannot be read as text."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def compose(source: ConfigSource, text: str, remedy: str) -> yaml.MappingNode:
    """The node graph of a single document with a mapping at its top; `remedy` says what to write where there is none.

    Bad YAML is raised at once as ConfigError, since nothing after it can be trusted.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces" if "\\t" in str(error.problem) else ""
        context = f" {error.context}" if error.context else ""
        place = SourcePosition(mark.line + 1, mark.column + 1) if mark else None
        source.report(place, "", f"is not valid YAML: {error.problem}{context}{hint}")
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = SourcePosition(before.count("\n") + 1, error.position - before.rfind("\n"))
        source.report(place, "", f"is not valid YAML: the character U+{error.character:04X} may not stand in a file")
    except RecursionError:
        source.report(None, "", "is not valid YAML: nested too deeply")
    else:
        if isinstance(root, yaml.MappingNode):
            return root
        what = "is empty" if root is None else "must be a mapping of keys to values at its top"
        source.report(place_of(root) if root else None, "", f"{what}; {remedy}")
    raise ConfigError(source.render())


def place_of(node: yaml.Node) -> SourcePosition:
    return SourcePosition(node.start_mark.line + 1, node.start_mark.column + 1)


def join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def entries(node: yaml.MappingNode) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """(key as text, key node, value node) of a mapping; a key that is itself a collection shows as `?`."""
    return [(k.value if isinstance(k, yaml.ScalarNode) else "?", k, v) for k, v in node.value]


def nearest(key: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(key.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def report_doubled_keys(source: ConfigSource, root: yaml.Node) -> None:
    """A key written twice: YAML readers silently take the last. Looks at the whole file, Ray's part included."""
    seen: set[int] = set()
    stack: list[tuple[str, yaml.Node]] = [("", root)]
    while stack:
        prefix, node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            first: dict[str, SourcePosition] = {}
            for key, key_node, value in entries(node):
                path = join(prefix, clip(key))
                if key in first and isinstance(key_node, yaml.ScalarNode):
                    source.report(place_of(key_node), path, f"is there twice; the first is in line {first[key].line}")
                first.setdefault(key, place_of(key_node))
                stack.append((path, value))
        elif isinstance(node, yaml.SequenceNode):
            stack.extend((f"{prefix}[{number}]", item) for number, item in enumerate(node.value))
