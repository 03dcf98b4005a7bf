"""The schema as a table: every key with its type, limits, default and meaning, read from the dataclasses themselves.

`python -m cluster.config.reference` prints docs/configuration.md; a test compares the two. Needs the source files
(docstrings of fields exist nowhere else), so it is for documentation, not for serving.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.config.diff import is_run_time, rolling_keys
from cluster.config.overrides import RoleOverrides
from cluster.config.read import FieldKind, kinds_of
from cluster.config.schema import ROLES, ServingConfig
from cluster.config.source import join

_INTRODUCTION = """\
# Configuration

Baton reads `metadata.serving` of [cluster.yaml](../cluster.yaml); the rest of that file is Ray's. Check a file with
`baton config validate cluster.yaml`: it reports every mistake at once, with line and column. Unknown keys are refused.
`baton config explain cluster.yaml` shows how each worker would share out this machine's memory.
A key that is left out has the default below; the shipped file spells out all of them. Keys marked *run-time* may change
while the cluster serves, and so may those marked *rolling*, for which workers, or routers, are replaced one at a time
([rebalance.md](rebalance.md)); the others are read when `baton serve` starts.

This page is made from the schema: `python -m cluster.config.reference > docs/configuration.md`.
"""


@dataclass(frozen=True)
class KeyInfo:
    """One key as an operator sees it; `path` is relative to metadata.serving."""

    path: str
    type: str
    default: str
    doc: str


def reference() -> tuple[KeyInfo, ...]:
    """Every key that holds a value, in the order of the schema; what a role overrides is declared in its section."""
    return tuple(_keys(ServingConfig, ""))


def _overrides_doc(path: str, section: type[RoleOverrides]) -> str:
    """Returns what a role may set of a section, as a paragraph: types and meanings are that section's."""
    why = "; ".join(f"`{name}`: {reason}" for name, reason in section.common_only.items())
    doc = inspect.cleandoc(section.__doc__ or "")
    listed = ", ".join(f"`{name}`" for name in kinds_of(section))
    return (
        f"## metadata.serving.{path}, and the same of {ROLES[1]}\n\n{' '.join(doc.split())} Keys: {listed}, each as in "
        f"`{section.at}`, and as that where it is null or left out. What cannot differ between the roles: {why}.\n"
    )


def render_reference() -> str:
    """docs/configuration.md."""
    parts = [_INTRODUCTION]
    for section, doc, kind in _sections(ServingConfig, ""):
        if issubclass(kind, RoleOverrides) and section.startswith(f"roles.{ROLES[0]}."):
            parts.append(_overrides_doc(section, kind))
        rows = [key for key in reference() if key.path.rpartition(".")[0] == section]
        if rows:
            parts.append(f"## {'metadata.serving' + ('.' + section if section else '')}\n\n{doc}\n")
            parts.append("| key | type | default | meaning |\n|---|---|---|---|")
            parts.extend(f"| `{k.path.rpartition('.')[2]}` | {k.type} | {k.default} | {k.doc} |" for k in rows)
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _sections(section: type, path: str) -> Iterator[tuple[str, str, type]]:
    yield path, inspect.cleandoc(section.__doc__ or ""), section
    for name, kind in kinds_of(section).items():
        if kind.section is not None:
            yield from _sections(kind.section, join(path, name))


def _keys(section: Any, path: str) -> Iterator[KeyInfo]:
    if issubclass(section, RoleOverrides):
        return
    docs = field_docs(section)
    defaults = {f.name: f.default for f in dataclasses.fields(section)}
    for name, kind in kinds_of(section).items():
        if kind.section is not None:
            yield from _keys(kind.section, join(path, name))
        else:
            key = join(path, name)
            mark = " *Run-time.*" if is_run_time(key) else " *Rolling.*" if key in rolling_keys() else ""
            yield KeyInfo(key, _type_text(kind), _default_text(defaults[name]), docs.get(name, "") + mark)


def field_docs(section: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line."""
    module = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = module.body[0].body if isinstance(module.body[0], ast.ClassDef) else []
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def _type_text(kind: FieldKind) -> str:
    names = {int: "whole number", float: "number", bool: "true or false", str: "string"}
    text = ", ".join(f"`{choice}`" for choice in kind.choices)
    if not text or kind.base is not str:
        text += (" or " if text else "") + names[kind.base]
    bounds = kind.bounds
    if bounds.above is not None:
        text += f" above {bounds.above:g}"
    if bounds.at_least is not None:
        text += f" from {bounds.at_least:g}"
    if bounds.at_most is not None:
        text += f" to {bounds.at_most:.15g}"
    return ("list of " if kind.is_list else "") + text + (" or null" if kind.is_optional else "")


def _default_text(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{'null' if default is None else str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(render_reference(), end="")
