"""Mutants of a module: the same source with one comparison, sign or condition turned, or with one call dropped.

What is left alone changes nothing that tests should hold: annotations, f-strings (whose parts have no positions before
Python 3.12), assertions, what an error says, lines for the log, and what only a type checker reads.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SIGNS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
}
EXTREMES = {"min": "max", "max": "min"}
LOGGERS = {"log", "logger", "_log", "_logger"}


@dataclass(frozen=True)
class Mutant:
    """Replaces the bytes [start, stop) of the module at `path`."""

    path: str
    kind: str
    start: int
    stop: int
    text: str
    lines: range
    """Numbers of the lines that a test runs when it reaches the change."""

    def source(self, before: bytes) -> bytes:
        return before[: self.start] + self.text.encode() + before[self.stop :]

    def diff(self, before: bytes) -> str:
        old, new = before.decode().splitlines(), self.source(before).decode().splitlines()
        lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[3:]
        return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines)


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _stop(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _mutant(self, kind: str, node: ast.AST, start: int, stop: int, text: str) -> Mutant:
        lines = range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
        return Mutant(self._path, kind, start, stop, text, lines)

    def _between(self, kind: str, node: ast.AST, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Mutant]:
        """Replaces the operator that stands between two operands, beside brackets and comments."""
        begin, end = self._stop(left), self._start(right)
        if (at := self._source.find(old.encode(), begin, end)) >= 0:
            yield self._mutant(kind, node, at, at + len(old), new)

    def _replaced(self, kind: str, node: ast.AST, text: str) -> Iterator[Mutant]:
        yield self._mutant(kind, node, self._start(node), self._stop(node), text)

    def _text(self, node: ast.AST) -> str:
        return self._source[self._start(node) : self._stop(node)].decode()

    def _negated(self, test: ast.expr) -> Iterator[Mutant]:
        if not isinstance(test, ast.BoolOp | ast.Compare):  # these have mutants of their own
            yield from self._replaced("condition", test, f"(not ({self._text(test)}))")

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                operands = [left, *comparators]
                for i, op in enumerate(ops):
                    old, new = COMPARISONS[type(op)]
                    yield from self._between("comparison", node, operands[i], operands[i + 1], old, new)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
                yield from self._between("sign", node, left, right, *SIGNS[type(op)])
            case ast.AugAssign(target=left, op=op, value=right) if isinstance(op, ast.Add | ast.Sub):
                yield from self._between("sign", node, left, right, *SIGNS[type(op)])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                yield from self._replaced("sign", node, self._text(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from self._replaced("condition", node, f"({self._text(operand)})")
            case ast.BoolOp(op=op, values=values):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for left, right in pairwise(values):
                    yield from self._between("condition", node, left, right, old, new)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from self._negated(test)
            case ast.comprehension(ifs=ifs):
                for test in ifs:
                    yield from self._negated(test)
            case ast.Call(func=ast.Name(id=name) as func) if name in EXTREMES:
                yield from self._replaced("comparison", func, EXTREMES[name])
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                yield from self._replaced("dropped call", node, "pass")
            case _:
                pass


def _is_for_the_log(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in LOGGERS
        case ast.Expr(value=value):
            return _is_for_the_log(value)
        case _:
            return False


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is below it, without what is left alone."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Raise():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
    if _is_for_the_log(node):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _parts(part)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a module, in the order of its source."""
    finder = _Finder(path, source)
    return [mutant for node in _parts(ast.parse(source)) for mutant in finder.of(node)]


def names_of(mutants: Sequence[Mutant], source: bytes) -> list[str]:
    """Names of one module's mutants, in their order, that stay as they are when other lines change."""
    seen: Counter[str] = Counter()
    names = []
    for mutant in mutants:
        begin, end = source.rfind(b"\n", 0, mutant.start) + 1, source.find(b"\n", mutant.start)
        line = source[begin:end].decode()
        at = mutant.start - begin - (len(line) - len(line.lstrip()))
        name = f"{mutant.path} {mutant.kind} {line.strip()} {at} {mutant.text}"
        names.append(f"{name} {seen[name]}")
        seen[name] += 1
    return names


def sample(root: Path, paths: Sequence[str], seed: int, count: int) -> dict[str, Mutant]:
    """`count` mutants of the modules by name, each as likely as any other; the same for the same sources and seed, and
    nearly the same when some lines have changed."""
    found: dict[str, Mutant] = {}
    for path in sorted(paths):
        source = (root / path).read_bytes()
        mutants = mutants_of(path, source)
        found |= zip(names_of(mutants, source), mutants, strict=True)
    turns = {name: blake2b(f"{seed} {name}".encode()).digest() for name in found}
    return {name: found[name] for name in sorted(found, key=turns.__getitem__)[:count]}
