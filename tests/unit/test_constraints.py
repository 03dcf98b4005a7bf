"""constraints.txt and pyproject.toml: what `make setup` on a fresh clone asks pip for can be had."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
BUILT_FOR_TORCH = {"flash-attn"}
"""Whichever version there is for the torch that is installed."""


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    found = [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]
    return [each for each in found if each.name not in BUILT_FOR_TORCH | {"baton"}]


def test_each_package_is_pinned_once_to_one_version() -> None:
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert not {name for name in names if names.count(name) > 1}
    assert not [str(pin) for pin in pins() if [each.operator for each in pin.specifier] != ["=="]]


def test_whatever_is_asked_for_is_pinned_to_a_version_in_its_range() -> None:
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins()}
    assert not {str(each) for each in wanted() if canonicalize_name(each.name) not in pinned}, "no pin"
    wrong = {str(r): v for r in wanted() if (v := pinned[canonicalize_name(r.name)]) not in r.specifier}
    assert not wrong, "pinned to what is not wanted"
