"""constraints.txt, pyproject.toml and the locks: what `make setup` on a fresh clone asks pip for can be had, and the
locks leave nothing out."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
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


def locked(*names: str) -> dict[str, Requirement]:
    """What these locks pin, by name; each has a hash."""
    found: dict[str, Requirement] = {}
    for name in names:
        text = (ROOT / f"{name}.lock").read_text(encoding="utf-8").replace("\\\n", "")
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            pin, *hashes = line.split(" --hash=")
            assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each.strip()) for each in hashes), line
            requirement = Requirement(pin)
            locked_before = found.get(canonicalize_name(requirement.name), requirement)
            assert locked_before == requirement, f"{requirement.name} is locked to two versions"
            found[canonicalize_name(requirement.name)] = requirement
    return found


def installed_with(wanted: Requirement, seen: set[tuple[str, str]]) -> set[str]:
    """The package and all that it needs here, as what is installed says."""
    names = {canonicalize_name(wanted.name)}
    for extra in ("", *wanted.extras):
        if (canonicalize_name(wanted.name), extra) in seen:
            continue
        seen.add((canonicalize_name(wanted.name), extra))
        for text in importlib.metadata.requires(wanted.name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                names |= installed_with(needed, seen)
    return names


def test_each_package_is_pinned_once_to_one_version() -> None:
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert not {name for name in names if names.count(name) > 1}
    assert not [str(pin) for pin in pins() if [each.operator for each in pin.specifier] != ["=="]]


def test_whatever_is_asked_for_is_pinned_to_a_version_in_its_range() -> None:
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins()}
    assert not {str(each) for each in wanted() if canonicalize_name(each.name) not in pinned}, "no pin"
    wrong = {str(r): v for r in wanted() if (v := pinned[canonicalize_name(r.name)]) not in r.specifier}
    assert not wrong, "pinned to what is not wanted"


def test_locks_pin_the_versions_of_constraints() -> None:
    pinned = {canonicalize_name(pin.name): pin.specifier for pin in pins()}
    every = locked("requirements", "requirements-cuda", "requirements-dev")
    differ = {
        name: str(lock.specifier) for name, lock in every.items() if pinned.get(name, lock.specifier) != lock.specifier
    }
    assert not differ, "run `make lock`"
    assert set(pinned) <= set(every), "run `make lock`"


@pytest.mark.parametrize(("files", "extra"), [(("requirements",), ""), (("requirements", "requirements-dev"), "dev")])
def test_a_lock_leaves_nothing_out(files: tuple[str, ...], extra: str) -> None:
    """It is installed with --no-deps. torch is had from elsewhere, and what its build for CUDA brings is beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    texts = [*project["project"]["dependencies"]]
    for name in [extra, "otel"] if extra else []:
        texts += project["project"]["optional-dependencies"][name]
    asked = [Requirement(text) for text in texts if not text.startswith("baton")]
    seen: set[tuple[str, str]] = set()
    needed = {Requirement(text).name for text in project["build-system"]["requires"]}
    needed = needed.union(*(installed_with(each, seen) for each in asked))
    assert needed - set(locked(*files)) <= set(locked("requirements-cuda")), "run `make lock`"
