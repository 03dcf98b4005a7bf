"""A Python that finds only some of the installed packages, and what those need: as on a machine that has no others.

It is a virtual environment of links, so programs that it starts are as bare as it is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_bare_python(folder: Path, names: Iterable[str]) -> Path:
    """The interpreter of a new environment with these distributions. Raises PackageNotFoundError for one of `names`
    that is not installed here; what they need only where it is installed is left out."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for found in _with_needs(names):
        _link(found, site)
    return folder / "bin" / "python"


def _with_needs(names: Iterable[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    wanted = [(name, True) for name in names]
    while wanted:
        name, is_named = wanted.pop()
        name = canonicalize_name(name)
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            if is_named:
                raise
            continue
        needs = (Requirement(text) for text in found[name].requires or ())
        wanted += [(need.name, False) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def _link(found: Distribution, site: Path) -> None:
    """Links a distribution's files: whole folders, but those that several distributions share (`google`)."""
    for file in found.files or ():
        if file.parts[0] == "..":  # a program, beside the interpreter
            continue
        source = Path(str(found.locate_file(file.parts[0])))
        is_shared = source.is_dir() and source.suffix != ".dist-info" and not (source / "__init__.py").exists()
        parts = file.parts[:2] if is_shared else file.parts[:1]
        target = site.joinpath(*parts)
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(Path(*parts)))))
