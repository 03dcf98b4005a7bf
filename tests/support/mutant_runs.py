"""Runs random mutants of the modules that own memory, order or quotas, and prints those that no test notices.

    make mutants SEED=1 COUNT=200               goes on where it was cut off; SURVIVORS=1 tries the survivors again
    python tests/support/mutant_runs.py --seed 1 --count 200 --seconds 200 --share 0/2

Each mutant is written into a copy of the tree (build/mutants) and meets the unit tests that run its lines, cheapest
first, up to the first that fails. Which tests run which lines is traced once for each test file, and again when that
file changes. One process has imported the libraries; every run is a fork of it, so torch is imported once. Mutmut and
cosmic-ray would do it for one module and one command; neither draws from a seed across modules, drops calls, or orders
tests by what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from mutant_forks import BUILD, copy_tree, forked, import_libraries, run_pytest
from mutant_traces import MODULES, Traces
from mutants import Mutant, sample

GROUPS = (2, 6, 200)
"""Test files that a mutant meets at once, one number after another: importing them costs more than their tests."""
WALL_S = 300.0
"""Longest that a mutant may take with one group; it counts as noticed then, as one that hangs. A single test that hangs
is ended after 30 s, so this is for the sum of a large group on a busy machine."""


class _Chosen:
    """Runs the chosen tests only, cheapest first, and keeps the first failure."""

    def __init__(self, tests: dict[str, float]) -> None:
        self._tests = tests
        self.failure: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._tests]
        items.sort(key=lambda item: self._tests[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failure is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = " ".join(str(crash.message).split())[:160] if crash else ""
            self.failure = f"{report.nodeid}: {why}"


class Runs:
    """The mutants of one seed, what each met, and the time that is left."""

    def __init__(self, seed: int, count: int, share: str, seconds: float, again: bool) -> None:
        self._again = again
        self._share, self._num_shares = (int(number) for number in share.split("/"))
        self._deadline = time.monotonic() + seconds
        self._tree = BUILD / f"tree-{self._share}"
        self._results_path = BUILD / f"results-{seed}.jsonl"
        copy_tree(self._tree)
        self._mutants = sample(self._tree, MODULES, seed, count)
        self.results: dict[str, dict[str, Any]] = {}
        self._traces = Traces(self._tree, again=again)
        self._read_results()

    @property
    def is_time_left(self) -> bool:
        return time.monotonic() < self._deadline

    def _read_results(self) -> None:
        if self._results_path.exists():
            for line in self._results_path.read_text().splitlines():
                result = json.loads(line)
                self.results[result["name"]] = result

    def _groups(self, mutant: Mutant, tests: dict[str, float]) -> Iterator[dict[str, float]]:
        """The tests, by file: first the files that noticed most mutants of this module, then those of its name."""
        kills = Counter(
            result["by"].split("::")[0]
            for result in self.results.values()
            if result["path"] == mutant.path and result["outcome"] == "noticed"
        )
        files: dict[str, dict[str, float]] = defaultdict(dict)
        for name, seconds in tests.items():
            files[name.split("::")[0]][name] = seconds
        stem = Path(mutant.path).stem
        ranked = sorted(files, key=lambda file: (-kills[file], stem not in file, sum(files[file].values())))
        for size in GROUPS:
            if ranked:
                yield {name: s for file in ranked[:size] for name, s in files[file].items()}
            ranked = ranked[size:]

    # One mutant

    def _meet(self, tests: dict[str, float]) -> str | None:
        sys.dont_write_bytecode = True
        plugin = _Chosen(tests)
        status = run_pytest(plugin, "-x", *sorted({name.split("::")[0] for name in tests}))
        return plugin.failure or (f"exit {status}: no module of tests imports" if status not in (0, 5) else "")

    def run(self, name: str, mutant: Mutant, traces: dict[str, Any]) -> dict[str, Any]:
        target = self._tree / mutant.path
        before, written_at = target.read_bytes(), target.stat().st_mtime_ns
        tests, began = self._traces.reaching(mutant.path, mutant.lines, traces), time.monotonic()
        result = {
            "name": name,
            "path": mutant.path,
            "line": mutant.lines[0],
            "kind": mutant.kind,
            "diff": mutant.diff(before),
            "outcome": "survived" if tests else "reached by no test",
            "by": "",
        }
        target.write_bytes(mutant.source(before))
        os.utime(target, (mutant.start, mutant.start))  # so that no bytecode of another mutant is taken for its own
        try:
            for group in self._groups(mutant, tests):
                why = forked(self._tree, lambda group=group: self._meet(group), WALL_S)  # type: ignore[misc]
                if why != "":
                    result |= {"outcome": "noticed" if why else "hung", "by": why or ""}
                    break
        finally:
            target.write_bytes(before)
            os.utime(target, ns=(written_at, written_at))
        return {**result, "num_tests": len(tests), "seconds": round(time.monotonic() - began, 1)}

    def run_all(self) -> bool:
        """Runs the mutants of this share that have not been run; false when time is up before the last."""
        if not self._traces.trace_all(lambda: self.is_time_left):
            return False
        traces = self._traces.read()
        for name, mutant in self._mutants.items():
            known = self.results.get(name)
            is_due = known is None or (self._again and known["outcome"] in ("survived", "reached by no test"))
            if not is_due or crc32(name.encode()) % self._num_shares != self._share:
                continue
            if not self.is_time_left:
                return False
            result = self.run(name, mutant, traces)
            self.results[result["name"]] = result
            with self._results_path.open("a") as results:
                results.write(json.dumps(result) + "\n")
            print(f"{result['outcome']}: {_title(result)}  [{result['by'][:100]}] {result['seconds']} s", flush=True)
        return True

    def report(self) -> None:
        self._read_results()
        results = [self.results[name] for name in self._mutants if name in self.results]
        for result in results:
            if result["outcome"] not in ("noticed", "hung"):
                print(f"\n{_title(result)}, {result['outcome']} ({result['num_tests']} tests)\n{result['diff']}")
        counts = Counter(result["outcome"] for result in results)
        print(f"\n{len(results)} of {len(self._mutants)} mutants: {dict(counts)}")


def _title(result: dict[str, Any]) -> str:
    return f"{result['path']}:{result['line']} {result['kind']}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so many seconds")
    parser.add_argument("--share", default="0/1", help="0/2 and 1/2 do one half each, side by side")
    parser.add_argument("--survivors", action="store_true", help="run again those that were not noticed")
    parser.add_argument("--report", action="store_true", help="only print what is known")
    parser.add_argument("--quiet", action="store_true", help="print no survivors; exit with 3 when something is left")
    arguments = parser.parse_args()
    runs = Runs(arguments.seed, arguments.count, arguments.share, arguments.seconds, arguments.survivors)
    if not arguments.report:
        import_libraries()
        is_done = runs.run_all()
        if arguments.quiet:
            sys.exit(0 if is_done else 3)
    runs.report()


if __name__ == "__main__":
    main()
