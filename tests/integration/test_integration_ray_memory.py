"""What the private Ray of a `baton serve` keeps of calls that have ended: little.

A Ray of its own in a process of its own: `make smoke`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.battery, pytest.mark.timeout(300)]

PROGRAM = """
import json, os
import psutil
from controller import local_ray

def daemon(name):
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if any(os.path.basename(word) == name for word in command[:4]):
            return process
    raise AssertionError(name)

with local_ray.started(num_cpus=2):
    import ray

    class Actor:
        def pid(self):
            return os.getpid()

    actor_class = ray.remote(Actor).options(num_cpus=0.01, max_restarts=0)
    gcs = daemon("gcs_server")
    actor = actor_class.remote()
    for _ in range(300):
        ray.get(actor.pid.remote())
    before = gcs.memory_info().rss
    for _ in range(3000):
        ray.get(actor.pid.remote())
    print(json.dumps((gcs.memory_info().rss - before) / 3000))
"""


def test_calls_leave_nothing_behind_in_ray() -> None:
    """Ray's own settings keep 3 KiB of each call, up to 100,000."""
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) < 1000, "bytes a call"
