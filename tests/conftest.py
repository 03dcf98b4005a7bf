"""Rules of every test run: their order, one CPU thread for torch, Ctrl-C that is heard, and nothing left behind.

At the end every process that descends from this one, or carries this session's mark in its environment (daemons do,
after their parent has gone), is named, killed, and fails the run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from nursery import close_nursery

if TYPE_CHECKING:  # its client is installed where a test uses it, not on every machine with a GPU
    from benchmarks.redis_server import RedisServer

MARK = "BATON_TEST_SESSION"

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Triton reads it when it is imported: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ[MARK] = uuid.uuid4().hex
with contextlib.suppress(ImportError):  # a machine that only checks its GPU need not have it
    import hypothesis

    # An example takes what a busy machine makes of it; where a hundred are needed, a test says so.
    hypothesis.settings.register_profile("baton", deadline=None, max_examples=40)
    hypothesis.settings.load_profile("baton")
# A shell has what it starts in the background ignore SIGINT, and what a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# While ten thousand tests are collected nothing becomes garbage, and looking for some took 7 of 19 s.
gc.disable()

ENDING_S = 10.0
WAITING = ("integration", "chaos")
"""Folders of tests that mostly wait for processes; the others compute."""
LONGEST = (
    "integration/test_integration_rebalance.py",
    "integration/test_integration_kv_kinds.py",
    "integration/test_integration_ray.py",
    "unit/worker/test_worker_simulation.py",
    "integration/test_integration_preempted.py",
    "integration/test_integration_resume.py",
    "integration/test_integration_handoff.py",
    "integration/test_integration_serve.py",
    "unit/engine/test_engine_split_latents.py",
    "unit/worker/test_worker_windows.py",
    "integration/test_integration_constraint.py",
    "unit/engine/test_engine_triton_attention.py",
    "unit/engine/test_engine_gguf.py",
    "integration/test_integration_role_settings.py",
    "integration/test_integration_grammar_attack.py",
    "integration/test_integration_batches.py",
    "integration/test_integration_cancel.py",
    "unit/tools/test_tools_doctor_broken.py",
    "integration/test_integration_bad_input.py",
    "unit/engine/test_engine_families.py",
    "unit/worker/test_worker_sentinel.py",
    "integration/test_integration_batching.py",
    "integration/test_integration_doctor.py",
    "chaos/test_chaos_ranks.py",
    "unit/controller/test_controller_rebalance_policy.py",
    "unit/engine/test_engine_tracing.py",
    "unit/simulate/test_simulate_controller.py",
    "integration/test_integration_moves.py",
    "integration/test_integration_benchmark.py",
    "unit/engine/test_engine_tier_walks.py",
    "unit/test_bare_machine.py",
    "integration/test_integration_client.py",
    "integration/test_integration_fetch.py",
    "integration/test_integration_formats.py",
    "unit/engine/test_engine_graphs.py",
    "integration/test_integration_secured.py",
    "chaos/test_chaos_tiers.py",
    "unit/kv_transfer/test_kv_transfer_engine_peers.py",
    "unit/kv_transfer/test_kv_transport.py",
)
"""Files that take longer than the number of their tests would tell, longest first."""


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK] and process.pid != os.getpid()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _left_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    others = [p for p in psutil.process_iter() if _is_ours(p)]
    return list({p.pid: p for p in [*children, *others]}.values())


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:160]}"
    except psutil.NoSuchProcess:
        return ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the files for test processes that share them (`make test`): the longest first, so that no process works
    alone at the end, and those that wait spread among those that compute, so that the processors always have work."""
    if not hasattr(config, "workerinput"):
        return
    num_tests = Counter(item.path for item in items)
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    turns: dict[Path, float] = {}
    for waits in (True, False):
        files = [path for path in num_tests if (path.parent.name in WAITING) is waits]
        files.sort(key=lambda path: (ranks.get(path, len(ranks)), -num_tests[path], path))
        turns |= {path: (i + 0.5) / len(files) for i, path in enumerate(files)}
    items.sort(key=lambda item: (turns[item.path], item.path))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    if "ray" in sys.modules:
        raise pytest.UsageError(
            "a test module imports Ray at its top: a private Ray of other tests must come before that"
        )


def pytest_runtest_setup() -> None:
    """A test machine has few cores, and several processes of a test share them. Only where torch is loaded anyway."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What has just been told to end may take a moment; what is there after that was left behind."""
    close_nursery()
    _, alive = psutil.wait_procs(_left_processes(), timeout=ENDING_S)
    story = [text for p in alive if (text := _describe(p))]
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    if story:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        lines = ["processes were left behind by this test session:", *(f"  {line}" for line in story)]
        if reporter is not None:
            reporter.write_line("\n" + "\n".join(lines), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def redis_of_session() -> Iterator[RedisServer]:
    """One for all tests that leave it running; a test that kills one starts its own (`running_redis`)."""
    from benchmarks.redis_server import running_redis

    with running_redis() as server:
        yield server
