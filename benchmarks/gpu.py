"""What Baton does on this machine's GPU, in ten minutes at most: one command, run before any other work there.

    python -m benchmarks.gpu                    every part, then build/gpu/results.json and a table
    python -m benchmarks.gpu --only speed       one of them; repeat it for several
    python -m benchmarks.gpu --device cpu       the same program with tiny sizes, where there is no GPU
    python -m benchmarks.gpu --check            what can be checked without one (`make gpu-check`)

Each part is a process with a limit of its own. It prints what it finds as it finds it (`found`), one line of JSON each,
which goes to `results.jsonl` at once: a part that does not end in time keeps what it has found. A part that has ended
is not run again while no source has changed. Loads no torch itself. docs/gpu.md says how to read the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_part import MARK, NO_DEVICE
from cluster.program import ExitCode

ROOT = Path(__file__).resolve().parent.parent
LEAST_S = 10.0
"""A part is not started with less time than this."""
SPARE_S = 5.0
"""Of the whole budget, for this program's own end."""
LAST_WORDS_S = 5.0
"""For the end of a process that was killed, and of its output: one that hangs in the driver may never end, and what has
left its session may hold its output open. Nobody waits longer for either."""
SLOWER_ON_CPU = 4
"""Limits on a CPU, which other programs may use, too."""
MOST_PROCESSES = 8
"""Test processes that share the GPU, where pytest-xdist is installed: kernels are compiled on the processor."""
KERNEL_TESTS = "tests/unit/engine/test_engine_triton_*.py"
COMPILING_TESTS = "tests/unit/engine/test_engine_triton_compile.py"
TRANSFER_TESTS = "tests/gpu/test_gpu_kv_*.py"
TRACING_TESTS = "tests/unit/engine/test_engine_*trac*.py"
WHEELS = {
    "grpc_health": "grpcio-health-checking",
    "grpc_status": "grpcio-status",
    "grpc_reflection": "grpcio-reflection",
    "google.rpc": "googleapis-common-protos",
    "google": "protobuf",
    "grpc": "grpcio",
    "yaml": "pyyaml",
    "multipart": "python-multipart",
    "python_multipart": "python-multipart",
    "prometheus_client": "prometheus-client",
}
"""Packages whose name is not that of their module."""


@dataclass(frozen=True)
class Part:
    """One process. `tests`: a pattern of test files; else `module` is run with the part's name."""

    name: str
    what: str
    limit_s: float
    module: str = ""
    tests: str = ""
    but: str = ""
    """Test files that are another part's."""
    is_parallel: bool = False
    """Its tests may share the GPU."""

    def command(self, device: str, seconds: float) -> list[str]:
        if self.tests:
            files = sorted({*ROOT.glob(self.tests)} - {*(ROOT.glob(self.but) if self.but else ())})
            names = [str(path.relative_to(ROOT)) for path in files]
            options = ["-q", "-c", "tests/gpu/pytest.ini", "-p", "benchmarks.gpu_part", "-p", "no:cacheprovider"]
            if self.is_parallel and device != "cpu" and importlib.util.find_spec("xdist"):
                options += ["-n", str(min(MOST_PROCESSES, len(os.sched_getaffinity(0))))]
            return ["pytest", *options, *names] if names else []
        return [self.module, self.name, "--device", device, "--seconds", f"{seconds:.0f}"]


PARTS = (
    Part("ceilings", "versions, wheels that are missing, copy rate, products", 30, "benchmarks.gpu_engine"),
    Part("kernels", "Baton's kernels", 105, tests=KERNEL_TESTS, but=COMPILING_TESTS, is_parallel=True),
    Part("tests", "the engine (tests/gpu)", 75, tests="tests/gpu/test_*.py", but=TRANSFER_TESTS, is_parallel=True),
    Part("transfers", "the transfers (tests/gpu)", 65, tests=TRANSFER_TESTS),
    Part("graphs", "CUDA graphs against eager steps, and their memory", 50, "benchmarks.gpu_engine"),
    Part("speed", "decode and prefill of an 8B shape, and one step's kernels", 100, "benchmarks.gpu_engine"),
    Part("loading", "weights from a file to the device, against disk, memory and bus", 30, "benchmarks.gpu_loading"),
    Part("links", "CUDA IPC, Gloo, NCCL and TP 2 between two processes", 55, "benchmarks.gpu_links"),
    Part("handoff", "two workers, one hand-off, tokens as of one worker", 45, "benchmarks.gpu_workers"),
    Part("router", "a router in front of both workers", 45, "benchmarks.gpu_workers"),
)

CHECKS = (
    Part("imports", "what a machine must have", 200, tests="tests/unit/test_bare_machine.py"),
    Part("compiled", "every kernel for A100 and H100: registers, spills", 900, "benchmarks.gpu_check"),
    Part("traces", "every variant of a step, traced with tensors that lie on no GPU", 600, tests=TRACING_TESTS),
)
"""The parts of `--check`, which need torch's CUDA build and no GPU."""


@dataclass
class Outcome:
    """What came of one part."""

    part: str
    status: str = ""
    """`ok`, `failed`, `late` (ended at its limit), `missing` (a package), `no device` or `not run`."""
    seconds: float = 0.0
    error: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        return self.status in ("ok", "failed")


class Results:
    """`results.jsonl`, to which everything is appended as it comes, and what earlier runs have left there."""

    def __init__(self, folder: Path, key: dict[str, str], earlier: Sequence[Path]) -> None:
        """`key`: what a result is a result of; those with another one do not count."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._key = folder / "results.jsonl", key
        self.known: dict[str, Outcome] = {}
        for path in (*earlier, self.path):
            if path.exists():
                self._read(path)

    def append(self, part: str, **what: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps({**self._key, "part": part, **what}), file=file)

    def _read(self, path: Path) -> None:
        begun: dict[str, Outcome] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                told = json.loads(line)
            except ValueError:  # cut off
                continue
            if any(told.get(name) != value for name, value in self._key.items()):
                continue
            part = told["part"]
            outcome = begun.setdefault(part, Outcome(part))
            if told.get("began"):
                begun[part] = Outcome(part)
            elif "found" in told:
                outcome.findings.append(told["found"])
            else:
                outcome.status, outcome.seconds, outcome.error = told["status"], told["seconds"], told["error"]
                self.known[part] = begun.pop(part)


def revision() -> str:
    """Names the sources: a result counts while none of them has changed."""
    digest = hashlib.sha256()
    for name in (
        "benchmarks",
        "cluster",
        "engine",
        "kv_transfer",
        "prefill_worker",
        "decode_worker",
        "worker",
        "router",
        "tools",
        "tests",
    ):
        for path in sorted((ROOT / name).rglob("*.py")):
            if name != "tests" or path.parent.name in ("gpu", "support", "engine"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def run_part(part: Part, device: str, limit_s: float, results: Results, log: Path) -> Outcome:
    """Runs one to its end, or to its limit; it and what it started are gone then."""
    outcome, began = Outcome(part.name), time.monotonic()
    command = part.command(device, limit_s)
    if not command:
        outcome.status, outcome.error = "not run", f"there are no files {part.tests}"
        results.append(part.name, status=outcome.status, seconds=0.0, error=outcome.error)
        return outcome
    results.append(part.name, began=True)
    # A part that runs tests begins afresh, also where a test of Baton's has begun it.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    said: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output, log.open("a", encoding="utf-8") as file:
            print(f"== {part.name}: {' '.join(command)}", file=file)
            for line in output:
                text, finding = _finding_in(line)
                if finding is not None:
                    outcome.findings.append(finding)
                    results.append(part.name, found=finding)
                if text:
                    said.append(text)
                    file.write(text)
                    file.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _kill_group(process)
        reader.join(LAST_WORDS_S)
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.status, outcome.error = judge(code, said, outcome.findings, limit_s)
    if part.tests and device != "cpu" and outcome.status == "ok" and not outcome.findings[-1].get("passed"):
        outcome.status, outcome.error = "failed", "every test was skipped"
    results.append(part.name, status=outcome.status, seconds=outcome.seconds, error=outcome.error)
    return outcome


def judge(code: int | None, said: list[str], findings: list[dict[str, Any]], limit_s: float) -> tuple[str, str]:
    """The status and the error of a part by its exit code (None: it was ended), its output and its findings."""
    text = "".join(said)
    if code is None:
        return "late", f"ended after its {limit_s:.0f} s; what it had found by then counts"
    if code == NO_DEVICE:
        return "no device", _last_line(said)
    missing = re.findall(r"No module named '([\w.]+)'", text) if code else []
    if missing:
        package = next(
            (WHEELS[name] for name in (missing[-1], missing[-1].split(".")[0]) if name in WHEELS), missing[-1]
        )
        return "missing", f"{missing[-1]} is not installed: pip install {package}"
    wrong = [f"{found['name']}: {found['error']}" for found in findings if "error" in found]
    if code or wrong:
        return "failed", "; ".join(wrong[:3]) or _last_line(said)
    return "ok", ""


def _finding_in(line: str) -> tuple[str, dict[str, Any] | None]:
    """A line of a part's output: what stands before a finding, and that. Pytest may have begun a line of dots. One that
    is cut off, or that another process has written into, is text."""
    text, mark, told = line.partition(MARK)
    if not mark:
        return line, None
    try:
        return text, json.loads(told)
    except ValueError:
        return line, None


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a part, its own processes only: it leads a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)


def end_with_parts() -> None:
    """A run that is asked to end takes the part that it runs along, which has a session of its own."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _last_line(said: list[str]) -> str:
    lines = [line.strip() for line in said if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]))


def run_parts(
    parts: Sequence[Part], device: str, budget_s: float, results: Results, folder: Path, *, is_again: bool
) -> Iterator[Outcome]:
    """Each part's outcome, as it is there; those that have one for these sources are not run."""
    ends = time.monotonic() + budget_s - SPARE_S
    for part in parts:
        known = results.known.get(part.name)
        if known is not None and known.is_final and not is_again:
            yield known
            continue
        left_s = ends - time.monotonic()
        if left_s < LEAST_S:
            yield Outcome(part.name, "not run", error=f"{max(0.0, left_s):.0f} s of {budget_s:.0f} s were left")
            continue
        limit_s = min(part.limit_s * (SLOWER_ON_CPU if device == "cpu" else 1), left_s)
        print(f"{part.name}: {part.what} (up to {limit_s:.0f} s)", file=sys.stderr, flush=True)
        outcome = run_part(part, device, limit_s, results, folder / "parts.log")
        yield outcome
        if outcome.status == "no device":
            return


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """One row for each part, then one for each finding."""
    table = Table(title="parts")
    for column in ("part", "status", "s", ""):
        table.add_column(column, justify="right" if column == "s" else "left")
    for outcome in outcomes:
        table.add_row(outcome.part, outcome.status, f"{outcome.seconds:.0f}", outcome.error)
    console.print(table)
    for outcome in outcomes:
        if not outcome.findings:
            continue
        table = Table("finding", "values", title=outcome.part)
        for found in outcome.findings:
            values = {name: value for name, value in found.items() if name != "name"}
            rows = values.pop("rows", None)
            table.add_row(found["name"], ", ".join(f"{name} {value}" for name, value in values.items()))
            for row in rows or ():
                table.add_row("", ", ".join(f"{name} {value}" for name, value in row.items()))
        console.print(table)


def _list_parts(is_listed: bool) -> None:
    if is_listed:
        for part in (*PARTS, *CHECKS):
            typer.echo(f"{part.name:9} up to {part.limit_s:3.0f} s: {part.what}")
        raise typer.Exit


def main(
    only: Annotated[list[str] | None, typer.Option(help="A part; repeat it. Without it: every part.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the program out.")] = "cuda",
    check: Annotated[bool, typer.Option("--check", help="What can be checked without a GPU instead.")] = False,
    budget: Annotated[float, typer.Option(min=1, help="Seconds in all.")] = 580.0,
    out: Annotated[Path, typer.Option(help="Folder of results.jsonl, results.json and parts.log.")] = ROOT
    / "build"
    / "gpu",
    after: Annotated[list[Path] | None, typer.Option(help="A results.jsonl of another folder to go on from.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also run parts that have a result.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", callback=_list_parts, is_eager=True, help="Name the parts.")
    ] = False,
) -> None:
    """Measures and checks Baton on one GPU. Exits 0 when all is well, 1 when a part failed, was late or was not run,
    4 where there is no GPU."""
    parts, device = (CHECKS, "cpu") if check else (PARTS, device)
    chosen = [part for part in parts if not only or part.name in only]
    if unknown := set(only or ()) - {part.name for part in parts}:
        raise typer.BadParameter(f"--only {unknown.pop()}: use {', '.join(part.name for part in parts)}")
    results = Results(out, {"revision": revision(), "device": device}, after or ())
    outcomes = list(run_parts(chosen, device, budget, results, out, is_again=again))
    told = {"revision": revision(), "device": device, "parts": {o.part: vars(o) for o in outcomes}}
    (out / "results.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    show(outcomes, Console(width=None if sys.stdout.isatty() else 160, markup=False))
    print(f"all of it is in {out / 'results.json'}")
    if outcomes and outcomes[-1].status == "no device":
        typer.echo(f"error: {outcomes[-1].error}", err=True)
        raise typer.Exit(ExitCode.NOT_REACHABLE)
    if any(outcome.status != "ok" for outcome in outcomes):
        raise typer.Exit(ExitCode.FAILED)


if __name__ == "__main__":
    end_with_parts()
    typer.run(main)
