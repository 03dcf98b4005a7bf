"""The record of what a worker computed when its process ended by itself: real processes that die in each way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.crash_record import SIZE_BYTES, Crash, CrashReader, CrashRecord

PROGRAM = """
import ctypes, os, signal, sys
from cluster.crash_record import CrashRecord
record = CrashRecord("abc")
record.follow_signals()
record.step_begins(["gen-1", "gen-2"])
print(record.path, flush=True)
way = sys.stdin.readline().strip()
if way == "segfault":
    ctypes.string_at(0)
elif way == "abort":
    os.abort()
elif way == "failed step":
    record.failed("a step failed: RuntimeError: out of memory")
elif way == "out of memory":
    taken = []
    while True:
        taken.append(b"x" * (1 << 20))
elif way == "between steps":
    record.rests()
    ctypes.string_at(0)
else:
    signal.pause()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        yield popen
        popen.kill()


def end(process: subprocess.Popen[str], way: str) -> Crash | None:
    """Ends the process that way, and reads its record as a router does: opened before, read afterwards."""
    assert process.stdin is not None and process.stdout is not None
    reader = CrashReader.open(process.stdout.readline().strip(), "abc")
    assert reader is not None and reader.read() is None, "it lives"
    if way == "killed":
        process.kill()
    else:
        process.stdin.write(f"{way}\n")
        process.stdin.flush()
    process.wait(30)
    crash = reader.read()
    reader.close()
    return crash


@pytest.mark.parametrize(
    ("way", "cause"),
    [("segfault", "Segmentation fault"), ("abort", "Aborted"), ("failed step", "RuntimeError: out of memory")],
)
def test_a_process_that_ends_by_itself_names_the_requests_of_its_step(
    way: str, cause: str, process: subprocess.Popen[str]
) -> None:
    crash = end(process, way)
    assert crash is not None and crash.request_ids == {"gen-1", "gen-2"} and cause in crash.cause


def test_one_that_ends_between_steps_names_nobody(process: subprocess.Popen[str]) -> None:
    crash = end(process, "between steps")
    assert crash is not None and not crash.request_ids


def test_one_that_is_killed_from_outside_has_no_cause(process: subprocess.Popen[str]) -> None:
    assert end(process, "killed") is None
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes get 64 MiB."""
    number = f"baton-test-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group, limit = (v1 / number, "memory.limit_in_bytes") if v1.is_dir() else (v2 / number, "memory.max")
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_one_that_the_kernel_ends_for_want_of_memory_ended_by_itself(
    small_group: Path, process: subprocess.Popen[str]
) -> None:
    (small_group / "cgroup.procs").write_text(str(process.pid))
    crash = end(process, "out of memory")
    assert process.returncode == -signal.SIGKILL
    assert crash is not None and crash.request_ids == {"gen-1", "gen-2"} and "out-of-memory killer" in crash.cause


def test_one_that_is_killed_from_outside_after_another_ran_out_of_memory_has_no_cause(
    small_group: Path, process: subprocess.Popen[str]
) -> None:
    (small_group / "cgroup.procs").write_text(str(process.pid))
    assert process.stdout is not None
    reader = CrashReader.open(process.stdout.readline().strip(), "abc")
    assert reader is not None
    hungry = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); bytearray(os.urandom(1 << 20)) * 128"
    other = subprocess.run([sys.executable, "-c", hungry, str(small_group / "cgroup.procs")])
    assert other.returncode == -signal.SIGKILL
    assert reader.read() is None, "it lives"
    reader.lives()
    process.kill()
    process.wait(30)
    assert reader.read() is None
    reader.close()


def test_the_requests_of_each_step_replace_those_of_the_last() -> None:
    record = CrashRecord("abc")
    reader = CrashReader.open(record.path, "abc")
    assert reader is not None
    many = {f"gen-{number:024d}" for number in range(300)}
    for names in ({"a" * 40, "b"}, {"b"}, many, {"c"}):
        record.step_begins(names)
        record.failed("x")
        crash = reader.read()
        assert crash is not None and crash.request_ids == names
    record.step_begins({f"gen-{number:024d}" for number in range(2 * SIZE_BYTES // 28)})
    crash = reader.read()
    assert crash is not None and len(crash.request_ids) > 8000, "as many as there is room for"
    reader.close()


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/status", "/proc/1/fd/99999", "", "relative"])
def test_what_is_no_record_of_that_process_is_not_read(path: str) -> None:
    assert CrashReader.open(path, "abc") is None


def test_the_record_of_another_process_under_the_same_number_is_not_read() -> None:
    assert CrashReader.open(CrashRecord("abc").path, "abd") is None
