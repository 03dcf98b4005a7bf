"""`benchmarks.gpu` runs parts in processes, within limits, and goes on where it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import Outcome, Part, Results, judge, run_parts

KEY = {"revision": "r1", "device": "cpu"}


def fake(name: str, limit_s: float = 60.0) -> Part:
    return Part(name, "a part of the tests", limit_s, "fake_gpu_part")


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run in a folder of the test."""
    path = f"{gpu.ROOT}:{gpu.ROOT / 'tests' / 'support'}"
    monkeypatch.setattr(gpu, "_python_path", lambda: path)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)


def run(
    folder: Path, *parts: Part, budget_s: float = 60.0, is_again: bool = False, key: dict[str, str] = KEY
) -> list[Outcome]:
    return list(run_parts(parts, "cpu", budget_s, Results(folder, key, ()), folder, is_again=is_again))


def test_findings_are_written_as_they_come_and_a_failed_part_names_what_failed(tmp_path: Path) -> None:
    good, bad = run(tmp_path, fake("good"), fake("bad"))
    assert (good.status, good.error) == ("ok", "")
    assert [(each["name"], each["value"]) for each in good.findings] == [("one", 1), ("two", 2)]
    assert bad.status == "failed" and bad.error.startswith("broken: ZeroDivisionError")
    assert bad.findings[1] == {"name": "after", "value": 3}
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    kinds = [line.get("status", "began" if "began" in line else "found") for line in lines]
    assert kinds == ["began", "found", "found", "ok", "began", "found", "found", "failed"]
    assert all(line["revision"] == "r1" for line in lines)


def test_a_part_that_has_ended_is_not_run_again_for_the_same_sources(tmp_path: Path) -> None:
    count = tmp_path / "fake_gpu_part.count"
    (first,) = run(tmp_path, fake("good"))
    (again,) = run(tmp_path, fake("good"))
    assert again.findings == first.findings and count.read_text() == "x"
    run(tmp_path, fake("good"), is_again=True)
    run(tmp_path, fake("good"), key={**KEY, "revision": "r2"})
    assert count.read_text() == "xxx"


@pytest.mark.parametrize("path", ["router/api/service.py", "tests/unit/engine/test_engine_triton_ops.py"])
def test_a_change_of_what_a_part_runs_makes_its_results_old(tmp_path: Path, path: str) -> None:
    before = gpu.revision()
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("changed")
    assert gpu.revision() != before


def test_results_of_another_folder_count_and_a_line_that_was_cut_off_does_not(tmp_path: Path) -> None:
    run(tmp_path, fake("good"))
    whole = tmp_path / "results.jsonl"
    whole.write_text(whole.read_text() + '{"revision": "r1", "device": "cpu", "part": "bad", "fou')
    results = Results(tmp_path / "other", KEY, [whole])
    assert list(results.known) == ["good"] and len(results.known["good"].findings) == 2


def test_a_late_part_is_ended_and_keeps_what_it_has_found(tmp_path: Path) -> None:
    (late,) = run(tmp_path, fake("late", limit_s=1.0))
    assert late.status == "late" and not late.is_final
    assert Results(tmp_path, KEY, ()).known["late"].findings == late.findings
    run(tmp_path, fake("late", limit_s=1.0))
    assert len(Results(tmp_path, KEY, ()).known["late"].findings) == 1
    assert not psutil.pid_exists(late.findings[0]["pid"])


def test_a_finding_that_another_process_has_written_into_costs_nothing_but_itself(tmp_path: Path) -> None:
    """The thread that reads ended there, and the part stood still once its output was full."""
    (torn,) = run(tmp_path, fake("torn"))
    assert torn.status == "ok" and torn.findings == [{"name": "whole", "value": 1}]
    assert "an error of another process" in (tmp_path / "parts.log").read_text()


def test_nobody_waits_for_what_has_left_a_part_and_holds_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LAST_WORDS_S", 0.2)
    (leaving,) = run(tmp_path, fake("leaving"))
    left = psutil.Process(leaving.findings[0]["pid"])
    assert leaving.status == "ok" and left.is_running()
    left.kill()


def test_nobody_waits_for_a_process_that_the_driver_does_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        pid = 1
        waited: ClassVar[list[float]] = []

        def wait(self, timeout_s: float) -> None:
            self.waited.append(timeout_s)
            raise subprocess.TimeoutExpired("a part", timeout_s)

    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    gpu._kill_group(Stuck())  # type: ignore[arg-type]
    assert Stuck.waited == [gpu.LAST_WORDS_S]


def test_a_run_that_is_told_to_end_takes_its_part_along(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    log = tmp_path / "results.jsonl"

    def end_it() -> None:
        while not (log.exists() and '"found"' in log.read_text()):
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        gpu.end_with_parts()
        threading.Thread(target=end_it, daemon=True).start()
        with pytest.raises(SystemExit):
            run(tmp_path, fake("late"))
    finally:
        signal.signal(signal.SIGTERM, before)
    found = [json.loads(line)["found"] for line in log.read_text().splitlines() if '"found"' in line]
    assert not psutil.pid_exists(found[0]["pid"])


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    (left,) = run(tmp_path, fake("good"), budget_s=12.0)
    assert left.status == "not run" and "of 12 s were left" in left.error
    assert not (tmp_path / "results.jsonl").exists()


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    (missing,) = run(tmp_path, fake("missing"))
    assert missing.status == "missing" and not missing.is_final
    assert missing.error == "grpc_health_that_is_not_there is not installed: pip install grpc_health_that_is_not_there"
    assert judge(1, ["ModuleNotFoundError: No module named 'grpc_health.v1'\n"], [], 1)[1].endswith(
        "pip install grpcio-health-checking"
    )


def test_a_machine_without_a_gpu_ends_the_run(tmp_path: Path) -> None:
    outcomes = run(tmp_path, fake("absent"), fake("good"))
    assert [outcome.status for outcome in outcomes] == ["no device"]
    assert outcomes[0].error == "there is no CUDA device here"


TESTS = """
import pytest
def test_good(record_property): record_property("registers", 40)
def test_bad(): assert 1 == 2, "no"
@pytest.mark.skip(reason="no device")
def test_left_out(): pass
"""


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_part_of_tests_names_what_failed_and_was_recorded_in_one_process_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_processes: int
) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "pytest.ini").write_text("[pytest]")
    part = Part("these", "tests", 60, tests="test_these.py", is_parallel=True)
    command = part.command("cuda", 60)
    assert command[command.index("-n") + 1].isdigit()
    command[command.index("-n") + 1] = str(num_processes)
    monkeypatch.setattr(Part, "command", lambda *_: command)
    (outcome,) = run(tmp_path, part)
    found = {each["name"].rpartition("::")[2]: each for each in outcome.findings}
    assert outcome.status == "failed" and "no" in outcome.error
    assert found["test_good"]["registers"] == 40 and "no" in found["test_bad"]["error"]
    assert found["tests"] == {"name": "tests", "passed": 1, "failed": 1, "skipped": 1, "why_skipped": {"no device": 1}}


def test_all_parts_fit_in_ten_minutes() -> None:
    assert sum(part.limit_s for part in gpu.PARTS) <= 600


def test_every_test_that_the_page_names_is_there() -> None:
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "gpu.md").read_text()
    for name in re.findall(r"tests/[\w/]+\.py", page):
        assert (root / name).is_file(), name
    rows = re.findall(r"`(tests/[\w/]+\.py)`: `(test_\w+)`", page)
    assert len(rows) > 10
    for name, test in rows:
        assert f"def {test}(" in (root / name).read_text(), test
