"""What the chaos tests share: a fleet that outlives a test, the reference, and the times they measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chaos_fleet import FAST, Fleet, Measured
from chaos_reference import Reference
from chaos_states import POOL_TOKENS, WORKERS

_TIMES = pytest.StashKey[dict[str, float]]()


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> Measured:
    return Measured(pytestconfig.stash.setdefault(_TIMES, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    times = config.stash.get(_TIMES, {})
    if times:
        terminalreporter.write_line("longest: " + ", ".join(f"{what} {1000 * s:.0f} ms" for what, s in times.items()))


@pytest.fixture(scope="session")
def _long_lived(measured: Measured) -> Iterator[Fleet]:
    workers: dict[str, dict[str, Any]] = {
        "prefill-0": {"tp_size": 2, "kv_cache_tokens": POOL_TOKENS},
        "prefill-1": {},
        "decode-0": {"tp_size": 2, "kv_cache_tokens": POOL_TOKENS},
        "decode-1": {},
    }
    with Fleet(workers, {**WORKERS, **FAST}, measured) as fleet:
        yield fleet


@pytest.fixture
def fleet(_long_lived: Fleet) -> Iterator[Fleet]:
    """prefill-0 and decode-0 of two ranks each, -1 of one, and a router; whole again after each test."""
    yield _long_lived
    _long_lived.repair()
