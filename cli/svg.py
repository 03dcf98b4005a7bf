"""Charts as inline SVG without scripts: lines, steps, bands, dots and stacked bars, each value with its title.

A chart names colours as classes (`c-prefill`), which the page that holds it defines. Pure: values in, text out.
"""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 640.0, 64.0, 18.0, 16.0, 46.0
_BAR, _GAP, _NAMES = 26.0, 40.0, 150.0
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
Point = tuple[float, float]


class Tick(NamedTuple):
    value: float
    text: str


@dataclass(frozen=True)
class Axis:
    """The values from `low` to `high`, and what is written at some of them."""

    name: str
    low: float
    high: float
    ticks: tuple[Tick, ...]

    @classmethod
    def up_to(cls, name: str, high: float, count: int = 6, *, is_whole: bool = False) -> Axis:
        """From 0 to a round number of at least `high`, with round numbers between, or whole ones."""
        width = round_step(high / count, is_whole=is_whole)
        num = max(1, math.ceil(high / width - 1e-9))
        return cls(name, 0.0, num * width, tuple(Tick(n * width, number(n * width)) for n in range(num + 1)))


def round_step(least: float, *, is_whole: bool = False) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least this, or the smallest whole one."""
    if not 0 < least < math.inf or (is_whole and least <= 1):
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    steps = (step * power for step in _STEPS if not is_whole or step * power % 1 == 0)
    return next(step for step in steps if step >= least * (1 - 1e-9))


def number(value: float) -> str:
    """Four digits, without an exponent where that is short."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


class Chart:
    """Two axes and what is drawn between them, in the order of the calls."""

    def __init__(self, title: str, about: str, x: Axis, y: Axis, height: float = 300.0) -> None:
        """`about` tells what is shown to who does not see it."""
        self._x, self._y, self._height = x, y, height
        self._root = _root(title, about, height)
        for tick in y.ticks:
            at = self._y_of(tick.value)
            _add(self._root, "line", "grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at)
            _text(self._root, tick.text, _LEFT - 8, at + 4, "tick", "end")
        for tick in x.ticks:
            at = self._x_of(tick.value)
            _add(self._root, "line", "axis", x1=at, x2=at, y1=height - _BOTTOM, y2=height - _BOTTOM + 4)
            _text(self._root, tick.text, at, height - _BOTTOM + 17, "tick", "middle")
        bottom = height - _BOTTOM
        _add(self._root, "line", "axis", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=bottom, y2=bottom)
        _text(self._root, x.name, (_LEFT + _WIDTH - _RIGHT) / 2, height - 10, "name", "middle")
        middle = (_TOP + bottom) / 2
        name = _text(self._root, y.name, 14, middle, "name", "middle")
        name.set("transform", f"rotate(-90 14 {_round(middle)})")

    def line(self, points: Sequence[Point], colour: str) -> None:
        _add(self._root, "polyline", f"line {colour}", points=" ".join(map(self._at, points)))

    def band(self, lower: Sequence[Point], upper: Sequence[Point], colour: str) -> None:
        around = [*lower, *reversed(upper)]
        _add(self._root, "polygon", f"band {colour}", points=" ".join(map(self._at, around)))

    def dots(self, points: Iterable[tuple[float, float, str]], colour: str, radius: float = 4.0) -> None:
        """Each with its title."""
        for x, y, title in points:
            dot = _add(self._root, "circle", f"dot {colour}", cx=self._x_of(x), cy=self._y_of(y), r=radius)
            _titled(dot, title)

    def across(self, y: float, text: str) -> None:
        """A level that is asked for."""
        at = self._y_of(y)
        _add(self._root, "line", "asked", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at)
        _text(self._root, text, _WIDTH - _RIGHT - 4, at + 15, "label", "end")

    def down(self, x: float, text: str) -> None:
        """A value that is asked for."""
        at = self._x_of(x)
        _add(self._root, "line", "asked", x1=at, x2=at, y1=_TOP, y2=self._height - _BOTTOM)
        _text(self._root, text, at + 5, self._height - _BOTTOM - 7, "label", "start")

    def label(self, x: float, y: float, text: str, colour: str, anchor: str = "start") -> None:
        """Beside a point of what it names."""
        shift = {"start": 7, "end": -7}.get(anchor, 0)
        _text(self._root, text, self._x_of(x) + shift, self._y_of(y) - 6, f"label {colour}", anchor)

    @property
    def svg(self) -> str:
        return ElementTree.tostring(self._root, encoding="unicode")

    def _x_of(self, value: float) -> float:
        return _LEFT + (value - self._x.low) / (self._x.high - self._x.low) * (_WIDTH - _LEFT - _RIGHT)

    def _y_of(self, value: float) -> float:
        bottom = self._height - _BOTTOM
        return bottom - (value - self._y.low) / (self._y.high - self._y.low) * (bottom - _TOP)

    def _at(self, point: Point) -> str:
        return f"{_round(self._x_of(point[0]))},{_round(self._y_of(point[1]))}"


def steps(points: Sequence[tuple[float, float, float]]) -> list[Point]:
    """A line of levels, each from a begin to an end: (begin, end, level)."""
    return [corner for begin, end, level in points for corner in ((begin, level), (end, level))]


class BarPart(NamedTuple):
    name: str
    value: float
    colour: str


def stacked_bars(title: str, about: str, rows: Sequence[tuple[str, Sequence[BarPart]]], unit: str) -> str:
    """One bar a row on one scale, with the values written above its parts."""
    height = len(rows) * (_BAR + _GAP) + 8
    root = _root(title, about, height)
    widest = max(sum(part.value for part in parts) for _, parts in rows) or 1.0
    scale = (_WIDTH - _NAMES - _RIGHT) / widest
    for place, (name, parts) in enumerate(rows):
        top = place * (_BAR + _GAP) + _GAP - 8
        _text(root, name, _NAMES - 10, top + _BAR / 2 + 5, "name", "end")
        ends = itertools.accumulate((part.value for part in parts), initial=0.0)
        begins = [_NAMES + scale * end for end in ends][: len(parts)]
        texts = [f"{part.name} {number(part.value)} {unit}" for part in parts]
        for begin, part, text in zip(begins, parts, texts, strict=True):
            bar = _add(root, "rect", f"part {part.colour}", x=begin, y=top, width=scale * part.value, height=_BAR)
            _titled(bar, f"{name}: {text}")
        for at, text in zip(_apart(begins, texts), texts, strict=True):
            _text(root, text, at, top - 6, "tick", "start")
    return ElementTree.tostring(root, encoding="unicode")


def _apart(begins: Sequence[float], texts: Sequence[str]) -> list[float]:
    """Returns where the texts of one line begin, over their places or beside one another, left of the right edge."""
    widths = [6.4 * len(text) + 8 for text in texts]
    found, free = list(begins), 0.0
    for place, width in enumerate(widths):
        found[place] = free = max(free, found[place])
        free += width
    free = _WIDTH
    for place in reversed(range(len(found))):
        found[place] = free = min(found[place], free - widths[place])
    return found


def _root(title: str, about: str, height: float) -> ElementTree.Element:
    size = f"0 0 {_WIDTH:g} {height:g}"
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": size, "role": "img"})
    root.set("aria-label", f"{title}. {about}")
    ElementTree.SubElement(root, "desc").text = about
    return root


def _add(parent: ElementTree.Element, tag: str, style: str, **attributes: float | str) -> ElementTree.Element:
    values = {
        name.replace("_", "-"): value if isinstance(value, str) else _round(value) for name, value in attributes.items()
    }
    return ElementTree.SubElement(parent, tag, {"class": style, **values})


def _text(parent: ElementTree.Element, text: str, x: float, y: float, style: str, anchor: str) -> ElementTree.Element:
    element = _add(parent, "text", style, x=x, y=y, text_anchor=anchor)
    element.text = text
    return element


def _titled(element: ElementTree.Element, title: str) -> None:
    ElementTree.SubElement(element, "title").text = title


def _round(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
