"""The GPU path starts on a machine that has the packages of tests/gpu-check-requirements.txt and no others."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from bare_machine import make_bare_python
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ONLY_WITH_CUDA = {"triton"}
"""Packages that torch brings where it is built for CUDA."""

IMPORT_ALL = """
import importlib, pathlib
for folder in {folders!r}:
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        if path.stem != "__main__" and ({has_triton} or path.parent.name != "triton"):
            parts = path.with_suffix("").parts
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
"""
FOLDERS = ("engine", "kv_transfer", "prefill_worker", "decode_worker", "worker")


def names_of_requirements() -> list[str]:
    """Those of them that are installed here."""
    text = (ROOT / "tests" / "gpu-check-requirements.txt").read_text(encoding="utf-8")
    names = [Requirement(line).name for line in text.splitlines() if line and not line.startswith("#")]
    return [name for name in names if name not in ONLY_WITH_CUDA or is_installed(name)]


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("bare"), names_of_requirements())


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_a_bare_machine_has_nothing_else(bare_python: Path) -> None:
    for name in ("ray", "redis", "llguidance", "pytest_asyncio", "starlette", "flash_attn"):
        ended = run(bare_python, "-c", f"import {name}")
        assert f"No module named '{name}'" in ended.stderr


def test_engine_transfers_and_workers_can_be_imported_on_a_bare_machine(bare_python: Path) -> None:
    ended = run(bare_python, "-c", IMPORT_ALL.format(folders=FOLDERS, has_triton=is_installed("triton")))
    assert ended.returncode == 0, ended.stderr


def test_a_worker_can_be_started_by_hand_on_a_bare_machine(bare_python: Path) -> None:
    ended = run(bare_python, "-m", "worker", "--worker-id", "w", "--role", "decode", "--model-path", "/nowhere")
    assert ended.returncode == 3 and "/nowhere" in ended.stderr, ended.stderr


def test_the_tests_for_gpus_are_collected_on_a_bare_machine(bare_python: Path) -> None:
    ended = run(bare_python, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "test_gpu_engine.py" in ended.stdout and "error" not in ended.stdout.lower()


def test_a_grammar_without_its_library_is_refused_with_the_remedy(bare_python: Path) -> None:
    code = (
        "from cluster.grammar import GrammarProcesses\n"
        "from pathlib import Path\n"
        "text = Path('models/tiny-shakespeare/tokenizer.json').read_text()\n"
        "try:\n"
        "    GrammarProcesses(lambda: text, 1024).compile('[0-9]+', 'regex')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    ended = run(bare_python, "-c", code)
    assert ended.returncode == 0, ended.stderr
    assert "llguidance" in ended.stdout and "pip install" in ended.stdout
