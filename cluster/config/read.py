"""How a schema declares its fields (`bounded`, RUN_TIME), and how YAML nodes are held against it: types, limits and
unknown keys; every mistake is reported, none raised.

Knows no single key: the dataclasses of a schema, such as `cluster.config.schema`, say what may stand where.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from cluster.config.choices import ALIASES
from cluster.config.overrides import RoleOverrides, shared
from cluster.config.source import ConfigSource, SourcePosition, clip, entries, join, nearest, place_of

T = TypeVar("T")
DAY_S = 86_400.0
"""The longest limit of most times."""
_TAG = "tag:yaml.org,2002:"
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]{0,40})")
_WANTED: dict[type, str] = {
    int: "must be a whole number",
    float: "must be a number",
    bool: "must be true or false",
    str: "must be a string",
}


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, both inclusive unless `above` is set, which excludes itself."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None


RUN_TIME = {"is_run_time": True}
"""Metadata of a field that may change while the cluster runs, with all below it."""

ROLLING = {"is_rolling": True}
"""Metadata of a field for which, with all below it, running workers or routers give way to new ones."""
FIXED = {"is_fixed": True}
"""Metadata of a field below such a one that only a restart of the cluster changes."""


def bounded(
    default: float | str | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    is_run_time: bool = False,
    is_fixed: bool = False,
    shared_why: str = "",
) -> Any:
    """A dataclass field with a default and the limits that a reader checks. `shared_why`: why roles cannot differ."""
    marks = (RUN_TIME if is_run_time else {}) | (FIXED if is_fixed else {}) | (shared(shared_why) if shared_why else {})
    return field(default=default, metadata={"bounds": Bounds(at_least, above, at_most), **marks})


@dataclass(frozen=True)
class FieldKind:
    """The values that one field accepts."""

    base: type
    """int, float, bool or str; a section's dataclass."""
    choices: tuple[str, ...]
    """The strings that may stand there; beside a number, in its place."""
    is_optional: bool
    bounds: Bounds
    is_list: bool = False
    """A list of such values."""

    @property
    def section(self) -> type | None:
        return self.base if dataclasses.is_dataclass(self.base) else None


def kinds_of(section: type) -> dict[str, FieldKind]:
    """The fields of a section in order."""
    hints = typing.get_type_hints(section)
    found = {}
    for f in dataclasses.fields(section):
        arguments = alternatives(hints[f.name])
        inner = next(a for a in arguments if a is not type(None))
        is_list = typing.get_origin(inner) is tuple
        inner = typing.get_args(inner)[0] if is_list else inner
        choices = tuple(name for a in (inner, *arguments[1:]) for name in _names_in(a))
        base = str if _names_in(inner) else inner
        bounds = f.metadata.get("bounds", Bounds())
        found[f.name] = FieldKind(base, choices, type(None) in arguments, bounds, is_list)
    return found


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of `A | B`; of any other type itself."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _names_in(hint: Any) -> tuple[str, ...]:
    """The strings of a Literal; none of another type."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


class ConfigReader:
    """Reads sections and remembers where each key's value stands."""

    def __init__(self, source: ConfigSource, schema: type) -> None:
        self._source = source
        self._homes = _homes(schema)
        self.places: dict[str, SourcePosition] = {}

    def read_section(self, section: type[T], path: str, node: yaml.Node) -> T:
        """The section with defaults wherever the file says nothing or something wrong (which is then reported)."""
        self.places[path] = place_of(node)
        values: dict[str, Any] = {}
        if _is_null(node):
            node = _empty_mapping(node)
        if isinstance(node, yaml.MappingNode):
            self._read_fields(section, path, node, values)
        else:
            self._source.report(place_of(node), path, f"must be a mapping of keys to values (got {_shown(node)})")
        for name, kind in kinds_of(section).items():
            if name not in values and _is_required(section, name):
                values[name] = () if kind.is_list else "" if kind.section is None else kind.section("")
        return section(**values)

    def _read_fields(self, section: type, path: str, node: yaml.MappingNode, values: dict[str, Any]) -> None:
        """Fills `values` with what could be read; a required section that is missing is reported key by key."""
        given = self._known_keys(section, path, node)
        for name, kind in kinds_of(section).items():
            key = join(path, name)
            value = given.get(name)
            if value is None and _is_required(section, name):
                if kind.section is None:
                    self._source.report(place_of(node), key, "is missing")
                    continue
                value = _empty_mapping(node)
            if value is not None:
                self.places[key] = place_of(value)
                self._read(kind, key, value, name, values)

    def _known_keys(self, section: type, path: str, node: yaml.MappingNode) -> dict[str, yaml.Node]:
        """The known keys of a mapping (the last of doubled ones, reported elsewhere); others are reported."""
        known = kinds_of(section)
        for key, key_node, _ in entries(node):
            if key not in known:
                self._source.report(place_of(key_node), join(path, clip(key)), self._unknown(key, known, section))
        return {key: value for key, _, value in entries(node) if key in known}

    def _unknown(self, key: str, known: Iterable[str], section: type) -> str:
        if issubclass(section, RoleOverrides) and key in section.common_only:
            return f"cannot differ between the roles: {section.common_only[key]}; set {section.at}.{key} for both"
        if key == "<<":
            return "merge keys are not read here; write the keys out"
        close = nearest(key, known)
        if close:
            return f'unknown key; did you mean "{close}"?'
        elsewhere = self._homes.get(key) or self._homes.get(nearest(key, self._homes) or "")
        if elsewhere:
            return f'unknown key; did you mean "{elsewhere}"?'
        return f"unknown key; known here: {', '.join(known)}"

    def _read(self, kind: FieldKind, key: str, node: yaml.Node, name: str, values: dict[str, Any]) -> None:
        """Puts the value into `values`, or reports why it cannot be."""
        if kind.section is not None:
            values[name] = self.read_section(kind.section, key, node)
            return
        if kind.is_list:
            self._read_list(kind, key, node, name, values)
            return
        try:
            value = _scalar(kind, node)
            _check_bounds(kind.bounds, value)
        except ValueError as error:
            what, *hint = error.args
            self._source.report(place_of(node), key, f"{what} (got {_shown(node)}){''.join(hint)}")
        else:
            values[name] = value

    def _read_list(self, kind: FieldKind, key: str, node: yaml.Node, name: str, values: dict[str, Any]) -> None:
        """Each item as a value of its own; those that cannot be read are reported and left out."""
        if kind.is_optional and _is_null(node):
            return
        if not isinstance(node, yaml.SequenceNode):
            self._source.report(place_of(node), key, f"must be a list (got {_shown(node)}), such as [{_shown(node)}]")
            return
        items: list[Any] = []
        for number, item in enumerate(node.value):
            read: dict[str, Any] = {}
            self._read(dataclasses.replace(kind, is_list=False), f"{key}[{number}]", item, name, read)
            items.extend(read.values())
        values[name] = tuple(items)


def _scalar(kind: FieldKind, node: yaml.Node) -> Any:
    """The value; ValueError says what it must be and, as a second argument, what may have been meant."""
    wanted = _wanted(kind)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(wanted)
    if _is_null(node):
        if kind.is_optional:
            return None
        raise ValueError(f"{wanted}; leave the key out for its default")
    tag, is_plain = node.tag.removeprefix(_TAG), node.style is None
    if kind.choices and (kind.base is str or node.value in kind.choices):
        return _choice(kind.choices, node.value, wanted)
    if kind.base is bool and tag == "bool" and is_plain:
        return bool(node.value.lower() in ("true", "yes", "on"))
    if kind.base is str and tag == "str":
        if not node.value.strip():
            raise ValueError("must not be empty")
        return node.value
    if kind.base is int and tag == "int" and is_plain and _WHOLE.fullmatch(node.value):
        return int(node.value)
    if kind.base is float and is_plain and tag in ("int", "float", "str"):
        return _finite(node.value, wanted)
    raise ValueError(wanted + _remedy(kind, tag, is_plain))


def _wanted(kind: FieldKind) -> str:
    if not kind.choices:
        return _WANTED[kind.base]
    *others, last = kind.choices
    if kind.base is not str:
        return f"{_WANTED[kind.base]} or {last}"
    return f"must be {', '.join(others)} or {last}" if others else f"must be {last}"


def _remedy(kind: FieldKind, tag: str, is_plain: bool) -> str:
    if kind.base is str and is_plain:
        return ", in quotes"
    return ", without quotes" if kind.base is not str and not is_plain else ""


def _choice(choices: tuple[str, ...], value: str, wanted: str) -> str:
    if value in choices:
        return value
    close = ALIASES.get(value.lower()) or nearest(value, choices)
    raise ValueError(wanted, *([f'; did you mean "{close}"?'] if close in choices else []))


def _finite(text: str, wanted: str) -> float:
    """Also `1e3`, which YAML takes for a string; `.nan` and `.inf` are YAML's spellings of what is refused."""
    plain = text.lower().replace("_", "")
    try:
        value = float(plain.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as error:
        raise ValueError(wanted) from error
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _check_bounds(bounds: Bounds, value: Any) -> None:
    if value is None or isinstance(value, (str, bool)):
        return
    if bounds.at_least is not None and value < bounds.at_least:
        raise ValueError(f"must be at least {bounds.at_least:g}")
    if bounds.above is not None and value <= bounds.above:
        raise ValueError(f"must be above {bounds.above:g}")
    if bounds.at_most is not None and value > bounds.at_most:
        raise ValueError(f"must be at most {bounds.at_most:.15g}")


def _shown(node: yaml.Node) -> str:
    """The value as it stands in the file, with its type where that is the mistake."""
    if not isinstance(node, yaml.ScalarNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    tag = node.tag.removeprefix(_TAG)
    if _is_null(node):
        return "null"
    if node.style is not None:
        return f'"{clip(node.value)}", a string' if tag == "str" else f"{clip(node.value)}, tagged {clip(node.tag)}"
    remark = {"int": "", "float": "", "str": "", "bool": ", a boolean"}.get(tag, f", tagged {clip(node.tag)}")
    return clip(node.value) + remark


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"


def _is_required(section: type, name: str) -> bool:
    f = next(f for f in dataclasses.fields(section) if f.name == name)
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _empty_mapping(node: yaml.Node) -> yaml.MappingNode:
    return yaml.MappingNode(_TAG + "map", [], node.start_mark, node.end_mark)


def _homes(schema: type, prefix: str = "") -> dict[str, str]:
    """Key name -> its full path, for keys written into the wrong section; of several, the first."""
    found: dict[str, str] = {}
    for name, kind in kinds_of(schema).items():
        path = join(prefix, name)
        found.setdefault(name, path)
        if kind.section is not None:
            found = _homes(kind.section, path) | found
    return found
