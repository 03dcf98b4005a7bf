"""What tests of `baton doctor` share: a cluster.yaml with things broken on purpose, and what a check said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_fixture import BUNDLED_MODEL

import router.examine
import worker.examine
from cluster.settings import WorkerSettings
from tools.doctor import subject
from tools.doctor.catalogue import CHECKS
from tools.doctor.check import CheckResult, Finding, Result, examine
from tools.doctor.subject import DoctorOptions

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


def ask(path: Path, *names: str, limit_s: float = 60.0, **options: Any) -> dict[str, CheckResult]:
    """The results of these checks by name; without names, of all checks."""
    wanted = [check for check in CHECKS if not names or check.name in names]
    assert len(wanted) == len(names or CHECKS), f"unknown among {names}"
    results = examine(DoctorOptions(path, is_file_named=True, limit_s=limit_s, **options), wanted)
    return {result.check.name: result for result in results}


class RunHere:
    """In the place of `ProgramRun`: what the program answers, found in this process, which has loaded torch, once
    somebody asks for it."""

    def __init__(self, module: str, arguments: Sequence[str] = (), request: Any = None, *, limit_s: float) -> None:
        self._module, self._arguments, self._request = module, arguments, json.dumps(request)

    @cached_property
    def _answer(self) -> Any:
        if self._module == "router.examine":
            folder, *template = self._arguments
            return router.examine.examine(Path(folder), *template)
        asked = [WorkerSettings.from_json(json.dumps(values)) for values in json.loads(self._request)["workers"]]
        return worker.examine.examine(asked)

    def answer(self) -> Any:
        return json.loads(json.dumps(self._answer))

    def close(self) -> None:
        pass


def ask_here(path: Path, *names: str, **options: Any) -> dict[str, CheckResult]:
    """As `ask`, without processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "ProgramRun", RunHere)
        return ask(path, *names, **options)


def the_problem(result: CheckResult) -> Finding:
    """Its only problem, which comes with a remedy."""
    return the_only(result, Result.PROBLEM)


def the_warning(result: CheckResult) -> Finding:
    return the_only(result, Result.WARNING)


def the_only(result: CheckResult, kind: Result) -> Finding:
    found: Sequence[Finding] = [finding for finding in result.findings if finding.result is kind]
    assert len(found) == 1, result
    assert found[0].remedy, f"nothing is said of what to do: {found[0]}"
    return found[0]
