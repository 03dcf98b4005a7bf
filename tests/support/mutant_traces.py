"""Which unit tests run which lines of the modules that mutants are made of, and for how long.

A test file is traced once, and again when it has changed; what is known is kept in build/mutants/traces.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from mutant_forks import BUILD, forked, run_pytest

MODULES = (
    "cluster/failure_detector.py",
    "cluster/lifecycle.py",
    "cluster/prefix_hash.py",
    "decode_worker/receiver.py",
    "decode_worker/scheduler.py",
    "engine/kv/block_manager.py",
    "engine/kv/pool.py",
    "engine/sequence.py",
    "engine/step_budget.py",
    "kv_transfer/header.py",
    "kv_transfer/layout.py",
    "kv_transfer/page_lists.py",
    "kv_transfer/pages.py",
    "prefill_worker/scheduler.py",
    "prefill_worker/sender.py",
    "router/queue/admission.py",
    "router/queue/fair_order.py",
    "router/queue/pressure.py",
    "router/queue/quota.py",
    "router/queue/waiting_queue.py",
    "router/routing/demand.py",
    "router/routing/load_tracker.py",
    "router/routing/lost_workers.py",
    "router/routing/migration.py",
    "router/routing/prefix_index.py",
    "router/routing/retry.py",
    "router/routing/running_requests.py",
    "router/stream/journal.py",
    "router/stream/output.py",
    "router/stream/request.py",
    "router/stream/resume.py",
    "worker/decode_role.py",
    "worker/handoff_connection.py",
    "worker/handoffs.py",
    "worker/prefill_role.py",
    "worker/reporter.py",
    "worker/step_pipeline.py",
)
TESTS = {
    "": "test_model_check",
    "cluster": "test_cluster_(failure_detector|lifecycle|prefix_hash)",
    "decode_worker": "",
    "engine": "test_engine_(allocator|block_manager|cache_events|kv_groups|prompt_scores|sequence|step_budget)",
    "kv_transfer": "test_kv_(digest|header|layout|pages|shared_pages|states)",
    "prefill_worker": "",
    "router": "test_router_(activity|admission|attempts|demand|failures|fair_order|idle|journal|load_tracker|moves|"
    "output|overload|preadmission|prefix_index|pressure|quota|random_failures|readers|request|resume|retry|rewind|slow_clients|stalls|"
    "succession|suspects|take_over|waiting_again)",
    "worker": "test_(decode_role|prefill_role|worker_(cache_reporter|core|handoff|simulation|step_pipeline))",
}
"""By folder of tests/unit, how the names of the files begin that every mutant may meet."""
MORE_TESTS = {
    "kv_transfer": "test_kv_(codec|ring|transfer_engine|wire)",
    "router": "test_router_(connections|detokenizer|drain|gate|known|metrics|policies|prompt|sessions|slow|spread|stop|"
    "weights)",
    "worker": "test_worker_(metrics|progress|prompt|sentinel|service|shared)",
}
"""Those that only survivors meet."""
FILE_S, TRACE_S = 150.0, 45.0
"""Longest trace of a test file, by the clock and in seconds of processor."""
TEST_S, MUTANT_S = 8.0, 60.0
"""Longest test that a mutant meets, and longest sum of its tests, in seconds of their traced run."""
MORE_TEST_S, MORE_MUTANT_S = 60.0, 150.0
"""The same for a mutant that survived."""

Lines = dict[str, set[int]]


class _Tracer:
    """Collects which lines of the modules a test runs, in every thread."""

    def __init__(self, tree: Path) -> None:
        self._paths = {str(tree / path): path for path in MODULES}
        self.lines: Lines = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = self._paths.get(frame.f_code.co_filename)
        if path is None:
            return None
        seen = self.lines[path]
        seen.add(frame.f_lineno)

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            self.lines[path].add(frame.f_lineno)
            return line

        return line


class _Traced:
    """Writes down each test's seconds and lines, as far as it got."""

    def __init__(self, tree: Path) -> None:
        self._tracer = _Tracer(tree)
        self._began = time.process_time()
        self.tests: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """One case of each test first: not all of a long file may be traced."""
        seen: Counter[str] = Counter()
        turns = {}
        for item in items:
            name = item.nodeid.partition("[")[0]
            turns[item.nodeid] = seen[name]
            seen[name] += 1
        items.sort(key=lambda item: turns[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._tracer.lines = defaultdict(set)
        began = time.process_time()
        sys.settrace(self._tracer)
        threading.settrace(self._tracer)
        try:
            return (yield)  # type: ignore[return-value]
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            lines = {path: sorted(lines) for path, lines in self._tracer.lines.items()}
            if item.nodeid not in self.tests:
                self.tests[item.nodeid] = {"seconds": round(time.process_time() - began, 4), "lines": lines}
            if time.process_time() - self._began > TRACE_S:
                item.session.shouldstop = "the trace is long enough"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = {"seconds": 1e9, "lines": {}}


@cache
def _moved(before: str, after: str) -> dict[int, int]:
    """The lines of one source that another has as well, each with its number there."""
    blocks = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_matching_blocks()
    return {a + i + 1: b + i + 1 for a, b, size in blocks for i in range(size)}


class Traces:
    """`tree`: the copy in which tests run; `again`: those too that only survivors meet."""

    def __init__(self, tree: Path, *, again: bool) -> None:
        self._tree = tree
        self._again = again
        self._sources = {path: self._keep(path) for path in MODULES}

    def _keep(self, path: str) -> str:
        """Keeps a module's source, whose lines traces name, under the digest that it returns."""
        source = (self._tree / path).read_bytes()
        digest = hashlib.sha256(source).hexdigest()[:12]
        (BUILD / "sources").mkdir(parents=True, exist_ok=True)
        (BUILD / "sources" / digest).write_bytes(source)
        return digest

    def _lines_now(self, path: str, digest: str, lines: list[int]) -> list[int]:
        if digest == self._sources[path]:
            return lines
        moved = _moved((BUILD / "sources" / digest).read_text(), (self._tree / path).read_text())
        return [moved[line] for line in lines if line in moved]

    def _test_files(self) -> list[str]:
        folders = [*TESTS.items(), *(MORE_TESTS.items() if self._again else ())]
        paths = [
            str(path.relative_to(self._tree))
            for name, begin in folders
            for path in sorted((self._tree / "tests" / "unit" / name).glob("test_*.py"))
            if re.match(begin, path.stem)
        ]
        return list(dict.fromkeys(paths))

    def _trace_path(self, path: str) -> Path:
        digest = hashlib.sha256((self._tree / path).read_bytes()).hexdigest()[:12]
        return BUILD / "traces" / f"{Path(path).stem}-{digest}.json"

    def _trace(self, path: str) -> dict[str, Any]:
        plugin = _Traced(self._tree)
        run_pytest(plugin, path)
        return plugin.tests

    def trace_all(self, is_time_left: Callable[[], bool]) -> bool:
        """Traces the files that have no trace yet; false when time is up before the last."""
        (BUILD / "traces").mkdir(parents=True, exist_ok=True)
        for path in self._test_files():
            kept = self._trace_path(path)
            if kept.exists() and (kept.stat().st_size or time.time() - kept.stat().st_mtime < FILE_S):
                continue
            if not is_time_left():
                return False
            began = time.monotonic()
            kept.touch()  # so that the other share leaves it
            tests = forked(self._tree, lambda path=path: self._trace(path), FILE_S)  # type: ignore[misc]
            kept.write_text(json.dumps({"sources": self._sources, "tests": tests or {}}))
            print(f"traced {path}: {len(tests or {})} tests, {time.monotonic() - began:.1f} s", flush=True)
        return True

    def read(self) -> dict[str, Any]:
        """The seconds and lines of each test, by name."""
        tests: dict[str, Any] = {}
        for kept in (self._trace_path(path) for path in self._test_files()):
            if not kept.exists() or not kept.stat().st_size:
                continue
            trace = json.loads(kept.read_text())
            for name, test in trace["tests"].items():
                if test["seconds"] < (MORE_TEST_S if self._again else TEST_S):
                    digests = trace["sources"]
                    lines = {p: self._lines_now(p, digests[p], ls) for p, ls in test["lines"].items() if p in digests}
                    tests[name] = {"seconds": test["seconds"], "lines": lines}
        return tests

    def reaching(self, path: str, lines: range, traces: dict[str, Any]) -> dict[str, float]:
        """The seconds of each test that runs one of these lines, or the module where they run when it is imported,
        cheapest first, as many as a mutant may meet."""
        of_module = {name: test for name, test in traces.items() if path in test["lines"]}
        found = {name: test for name, test in of_module.items() if not set(lines).isdisjoint(test["lines"][path])}
        chosen, total, most = {}, 0.0, MORE_MUTANT_S if self._again else MUTANT_S
        for name, test in sorted((found or of_module).items(), key=lambda item: item[1]["seconds"]):
            total += test["seconds"]
            if total < most:
                chosen[name] = test["seconds"]
        return chosen
