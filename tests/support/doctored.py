"""What tests of `baton doctor` share: a cluster.yaml with things broken on purpose, and what a check said."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from cluster_fixture import BUNDLED_MODEL

from tools.doctor.catalogue import CHECKS
from tools.doctor.contact import Asked
from tools.doctor.examination import examine
from tools.doctor.findings import CheckResult, Finding, Result

Sections = dict[str, Any]


def write_config(folder: Path, ray_part: Sections | None = None, **sections: Any) -> Path:
    """A cluster.yaml over the bundled model, or another; ports are any free ones unless given."""
    serving: Sections = {
        "model": {"path": str(BUNDLED_MODEL), "dtype": "float32"},
        "engine": {"device": "cpu", "kernels": "torch", "kv_cache_tokens": 16384},
        "router": {"port": 0, "http_port": None},
        "admin": {"port": 0},
    }
    for name, section in sections.items():
        is_section = isinstance(section, dict) and name in serving
        serving[name] = {**serving[name], **section} if is_section else section
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster_name": "baton", **(ray_part or {}), "metadata": {"serving": serving}}))
    return path


def copy_model(folder: Path) -> Path:
    """The bundled model, to be broken."""
    copied = folder / "model"
    shutil.copytree(BUNDLED_MODEL, copied)
    return copied


def ask(path: Path, *names: str, limit_s: float = 60.0, **asked: Any) -> dict[str, CheckResult]:
    """The outcomes of these checks by name; of all of them without any."""
    wanted = [check for check in CHECKS if not names or check.name in names]
    assert len(wanted) == len(names or CHECKS), f"unknown among {names}"
    outcomes = examine(Asked(path, is_file_named=True, limit_s=limit_s, **asked), wanted)
    return {outcome.check.name: outcome for outcome in outcomes}


def the_problem(outcome: CheckResult) -> Finding:
    """Its only problem, which comes with a remedy."""
    return the_only(outcome, Result.PROBLEM)


def the_warning(outcome: CheckResult) -> Finding:
    return the_only(outcome, Result.WARNING)


def the_only(outcome: CheckResult, result: Result) -> Finding:
    found: Sequence[Finding] = [finding for finding in outcome.findings if finding.result is result]
    assert len(found) == 1, outcome
    assert found[0].remedy, f"nothing is said of what to do: {found[0]}"
    return found[0]
