"""Programs in a shell: signals end them whichever thread the kernel gives them to, and nobody has to read them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent

_PROGRAM = """
import json, signal, sys, threading

from cluster.program import host_in_shell


class Waits:
    def __init__(self):
        self.ended = threading.Event()
        self.elsewhere = threading.Thread(target=threading.Event().wait, daemon=True)

    def prepare(self):
        return "{}"

    def start(self):
        self.elsewhere.start()
        return "{}"

    def wait(self):
        threading.Thread(target=self.interrupt, daemon=True).start()
        self.ended.wait()

    def interrupt(self):
        # Only when the main thread waits inside C does it miss what another thread is told.
        with open(f"/proc/self/task/{threading.main_thread().native_id}/stat") as stat:
            while stat.read().split()[2] != "S":
                stat.seek(0)
        signal.pthread_kill(self.elsewhere.ident, int(sys.argv[1]))

    def stop(self):
        self.ended.set()


sys.exit(host_in_shell(lambda settings, report: Waits(), "{}"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at a thread's state in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_gets_ends_a_program(number: signal.Signals) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(int(number))], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


_TALKS = """
import sys

from cluster.program import host_in_shell


class Talks:
    def __init__(self, report):
        self.report = report

    def prepare(self):
        return "{}"

    def start(self):
        return "{}"

    def wait(self):
        self.report("draining")

    def stop(self):
        pass


sys.exit(host_in_shell(lambda settings, report: Talks(report), "{}"))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_program_goes_on_where_nothing_can_be_written_to_stderr(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", _TALKS],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=60,
            stdout=subprocess.PIPE,
            stderr=full,
        )
    assert (ran.returncode, ran.stdout) == (0, b'{"event": "ready"}\n')
