"""Freed memory stays with the process, so that the next step finds it there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import resource, sys, torch
from engine.cpu_runtime import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    for _ in range(5):
        torch.ones(48 << 20, dtype=torch.uint8).add_(1)

torch.set_num_threads(1)
work()
before = faults()
work()
given_back = faults() - before
assert keep_freed_memory()
work()
before = faults()
work()
print(given_back, faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_that_is_freed_and_asked_for_again_is_not_fetched_anew() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    given_back, kept = map(int, ended.stdout.split())
    assert given_back > 5000 > 500 > kept, ended.stdout
