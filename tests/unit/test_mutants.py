"""Mutants of a module: which there are, what they change, and what is left alone."""

from __future__ import annotations

import ast

from mutant_forks import ROOT
from mutant_traces import MODULES
from mutants import mutants_of, names_of, sample

SOURCE = b'''\
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sys


def run(items: list[int | None], most: int = -1) -> int:
    """Counts."""
    assert most != 0, most
    logger.info("%d", len(items) + 1)
    if len(items) > most and not items:
        raise ValueError(f"{most + 1} at most" + "!")
    items.append(min(3, most))
    items.sort()
    return 2 - len([x for x in items if x is not None])
'''


def changes(source: bytes) -> set[tuple[int, str]]:
    found = set()
    for mutant in mutants_of("run.py", source):
        removed, added = mutant.diff(source).split("\n")
        found.add((mutant.lines[0], added.removeprefix("+ ")))
        assert removed.startswith("- ") and ast.parse(mutant.source(source))
    return found


def test_a_module_has_a_mutant_for_each_comparison_sign_condition_and_call_that_stands_alone() -> None:
    assert changes(SOURCE) == {
        (7, "def run(items: list[int | None], most: int = 1) -> int:"),
        (11, "if len(items) >= most and not items:"),
        (11, "if len(items) > most or not items:"),
        (11, "if len(items) > most and (items):"),
        (13, "pass"),
        (13, "items.append(max(3, most))"),
        (14, "pass"),
        (15, "return 2 + len([x for x in items if x is not None])"),
        (15, "return 2 - len([x for x in items if x is None])"),
    }


def test_the_same_seed_draws_the_same_mutants_and_each_of_them_is_python() -> None:
    drawn = sample(ROOT, MODULES, seed=3, count=40)
    assert drawn == sample(ROOT, MODULES, seed=3, count=40) and len(drawn) == 40
    assert drawn.keys() != sample(ROOT, MODULES, seed=4, count=40).keys()
    for mutant in drawn.values():
        ast.parse(mutant.source((ROOT / mutant.path).read_bytes()))


def test_a_mutant_keeps_its_name_when_other_lines_change() -> None:
    changed = SOURCE.replace(b"    items.sort()\n", b"    items.sort()\n    items.sort()\n")
    before, after = (names_of(mutants_of("run.py", source), source) for source in (SOURCE, changed))
    assert set(after) - set(before) == {"run.py dropped call items.sort() 0 pass 1"} and set(before) < set(after)
