"""A copy of the tree, in which mutants are written, and forks of this process, in which pytest runs there.

The libraries are imported once, before the forks; what the tree holds is imported in each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
LIBRARIES = ("grpc", "numpy", "openai", "prometheus_client", "starlette", "tokenizers", "torch", "transformers", "yaml")
"""The libraries that every run has already."""
CPU_S, DATA_BYTES = 180, 8 << 30
"""What one fork may use."""
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def import_libraries() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for library in LIBRARIES:
        importlib.import_module(library)


def forked(tree: Path, work: Callable[[], Any], wall_s: float) -> Any:
    """Returns what `work` returns in a child whose working directory is `tree`, or None when it had to be killed."""
    answer = BUILD / f"{tree.name}.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        os.chdir(tree)
        output = os.open(BUILD / f"{tree.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests" / "support")]
        for module in [name for name in sys.modules if name.startswith("mutant")]:
            del sys.modules[module]
        try:
            answer.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    deadline = time.monotonic() + wall_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return json.loads(answer.read_text()) if answer.exists() else None


def run_pytest(plugin: object, *arguments: str) -> int:
    return int(
        pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=30", *QUIET, *arguments], [plugin])
    )


def copy_tree(tree: Path) -> None:
    """Brings the copy up to date with the tracked and new files of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        source, target = ROOT / name, tree / name
        if not target.exists() or target.stat().st_mtime_ns != source.stat().st_mtime_ns:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for old in {path.relative_to(tree) for path in tree.rglob("*.py")} - {Path(name) for name in names}:
        (tree / old).unlink()
