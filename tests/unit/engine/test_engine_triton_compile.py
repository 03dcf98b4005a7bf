"""Triton's kernels compile for the GPUs that Baton is for, on a machine without one, and keep to their registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has no build for this platform")

from engine.triton.compile_report import all_cases

ROOT = Path(__file__).resolve().parents[3]
ARCHS = (80, 90)


def run_compiling(*arguments: str, interpret: str = "0") -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one may interpret kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)


def usages(*options: str) -> list[dict[str, Any]]:
    result = run_compiling("-m", "engine.triton.compile_report", "--json", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def check(found: list[dict[str, Any]], names: set[str]) -> None:
    assert {(usage["case"], usage["arch"]) for usage in found} == {(name, arch) for name in names for arch in ARCHS}
    for usage in found:
        assert 0 < usage["registers"] <= 255 and usage["registers"] * usage["num_warps"] * 32 <= 65_536, usage
        assert usage["spilled"] <= usage["max_spilled"], usage


@pytest.mark.battery
@pytest.mark.timeout(300)
def test_the_first_case_of_each_module_compiles_for_every_gpu_within_its_registers() -> None:
    check(usages("--first"), {cases[0].name for cases in all_cases()})


@pytest.mark.battery
@pytest.mark.timeout(900)
def test_every_case_compiles_for_every_gpu_within_its_registers() -> None:
    check(usages(), {case.name for cases in all_cases() for case in cases})


def test_every_module_that_launches_kernels_has_cases_and_no_two_have_one_name() -> None:
    names = [case.name for cases in all_cases() for case in cases]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "engine" / "triton").glob("*.py")]
    launching = [text for text in texts if "@triton.jit" in text and re.search(r"^ +\w+\[.*\]\($", text, re.M)]

    assert len(names) == len(set(names))
    assert launching and all("\ndef cases() ->" in text for text in launching)


@pytest.mark.battery
def test_a_kernel_that_spills_more_than_its_case_allows_is_told(tmp_path: Path) -> None:
    """A report that reads nothing would find no spills anywhere."""
    (tmp_path / "spilling.py").write_text(SPILLING)
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport spilling\nspilling.main()"
    result = run_compiling("-c", code)

    assert result.returncode == 1, result.stderr
    usage = json.loads(result.stdout)
    assert usage["kernel"] == "wide" and usage["spilled"] > usage["max_spilled"] == 64


def test_interpreted_kernels_are_not_reported_as_compiled() -> None:
    result = run_compiling("-m", "engine.triton.compile_report", interpret="1")

    assert result.returncode == 2 and "TRITON_INTERPRET=1 is set" in result.stderr


SPILLING = """
import sys, torch, triton, triton.language as tl
from engine.triton import compile_report
from engine.triton.target import Case

@triton.jit
def wide(x, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(x + rows * N + columns)
    tl.store(x + rows * N + columns, tl.dot(a, a).to(a.dtype))  # 512 sums a thread

def main():
    numbers = torch.zeros(128, 128).half()
    compile_report.all_cases = lambda: [[Case("wide", lambda: wide[(1,)](numbers, 128, num_warps=1), 64)]]
    sys.argv = ["report", "--arch", "80", "--json"]
    sys.exit(compile_report.main())
"""
