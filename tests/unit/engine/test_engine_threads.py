"""How many threads compute, and that one thread of a process at a time has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import cpu_runtime

ROOT = Path(__file__).resolve().parents[3]
needs_openmp = pytest.mark.skipif(cpu_runtime._openmp() is None, reason="torch has no OpenMP that gives threads back")

NICENESS = """
import os, threading, torch
from cluster.program import give_way
from engine.cpu_runtime import compute_with

def niceness():
    return sorted(os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task"))

compute_with(1)
before = niceness()
def work():
    compute_with(2)
    give_way()
    torch.ones(1 << 20).add_(1)
    seen.append(niceness())
seen = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert seen == [sorted([*before, 19, 19])], (before, seen)
print("as told")
"""

PROGRAM = """
import os, threading, torch
from engine.cpu_runtime import compute_alone, compute_with, end_helpers

def work():
    torch.ones(1 << 20).add_(1)

def count():
    return len(os.listdir("/proc/self/task"))

def on_thread(*steps):
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    thread.join()

def wait_for(wanted):
    until = os.times().elapsed + 20
    while count() != wanted:
        assert os.times().elapsed < until, (wanted, count())

compute_with(3)
work()  # torch has threads beside OpenMP's, and the first parallel work finds all of them
most = count()
end_helpers()
wait_for(most - 2)
before = count()
work()
assert count() == before + 2, (before, count())
end_helpers()
wait_for(before)
seen = []
on_thread(compute_alone, work, lambda: seen.append(count()))
assert seen == [before + 1], (before, seen)
on_thread(lambda: compute_with(2), work, lambda: seen.append(count()), end_helpers)
assert seen[1:] == [before + 2], (before, seen)
wait_for(before)
work()
assert count() == before + 2, (before, count())
print("as told")
"""


@needs_openmp
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted through /proc")
@pytest.mark.parametrize("program", [PROGRAM, NICENESS], ids=["count", "niceness"])
def test_threads_are_as_many_as_asked_for_and_given_back_and_go_last_where_they_give_way(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert ended.stdout.strip() == "as told", ended.stderr
