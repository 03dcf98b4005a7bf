"""A collector that is slow, away or broken costs spans, which are counted: no request, and no end of a router."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_worker import pair
from kept_traces import Kept
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from otlp_receiver import WAIT_S, receiver
from router_harness import ids, running_router, text_spec
from waiting import until

from cluster.errors import InvalidRequest
from router.observe import otel, tracing
from router.observe.metrics import TRACE_SPANS
from router.observe.tracing import Origin

ORIGIN = Origin("chat", True, 0.0, 1e9)


def answer(_: object) -> list[list[int]]:
    return [ids("abc")]


@pytest.mark.parametrize("status", [None, 503, 400], ids=["silent", "unavailable", "refusing"])
async def test_a_bad_collector_costs_requests_and_the_end_nothing(
    status: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "BATCH_WAIT_S", 0.001)
    with receiver() as collector, caplog.at_level(logging.CRITICAL):
        collector.status = status
        async with running_router(tmp_path, pair(answer), trace_endpoint=collector.url) as router:
            for _ in range(5):
                await router.stream(text_spec())
            await asyncio.to_thread(collector.wait_for, lambda: collector.num_requests > 0)
            begun = time.monotonic()
            await router.stream(text_spec())
            assert time.monotonic() - begun < 5
            begun = time.monotonic()
        assert time.monotonic() - begun < 10
        collector.ended.set()


async def test_a_collector_that_is_away_costs_spans_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(otel, "EXPORT_TIMEOUT_S", 0.2)
    otel._SELDOM._last_at = -1e9
    async with running_router(tmp_path, pair(answer), trace_endpoint=f"http://127.0.0.1:{port}") as router:
        registry = router.server.metrics.registry
        for _ in range(3):
            await router.stream(text_spec())

        def failed() -> float:
            return registry.get_sample_value(TRACE_SPANS.name, {"outcome": "failed"}) or 0.0

        await asyncio.to_thread(until, lambda: failed() >= 15, "15 spans that failed", WAIT_S, 0.01)
    complaints = [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert len(complaints) == 1, "once a minute is enough"


class Slow(SpanExporter):
    """Takes no more until it may."""

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.thread = threading.current_thread()
        """The one that exports, once it has begun."""
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.may.wait(20)
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS


def refuse(kept: Kept) -> None:
    call = kept.traces.begin((), ORIGIN)
    assert call is not None
    call.refused(InvalidRequest("no"), 1.0)


def test_what_does_not_fit_behind_a_slow_collector_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MOST_WAITING", 8)
    monkeypatch.setattr(otel, "BATCH_WAIT_S", 0.001)
    slow = Slow()
    kept = Kept(slow)
    refuse(kept)
    assert slow.begun.wait(20)
    for _ in range(20):
        refuse(kept)
    assert kept.count("dropped") == 12
    slow.may.set()
    kept.traces.close()
    assert (slow.num_spans, kept.count("sent")) == (9, 9)


def test_the_end_waits_for_no_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.2)
    slow = Slow()
    kept = Kept(slow)
    refuse(kept)
    assert slow.begun.wait(20)
    begun = time.monotonic()
    kept.traces.close()
    assert time.monotonic() - begun < 3
    slow.may.set()
    slow.thread.join(20)
    assert not slow.thread.is_alive()


def test_the_end_of_a_full_queue_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MOST_WAITING", 2)
    slow = Slow()
    kept = Kept(slow)
    refuse(kept)
    assert slow.begun.wait(20)
    for _ in range(5):
        refuse(kept)
    threading.Timer(0.1, slow.may.set).start()
    kept.traces.close()
    slow.thread.join(20)
    assert not slow.thread.is_alive() and slow.num_spans == 3


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("it broke")


def test_an_exporter_that_raises_loses_its_batch_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(Broken())
    refuse(kept)
    until(lambda: kept.count("failed") == 1, "a failure that is counted", WAIT_S, 0.01)
    refuse(kept)
    until(lambda: kept.count("failed") == 2, "a failure that is counted", WAIT_S, 0.01)
    kept.traces.close()
    assert "could not be sent" in caplog.text


async def test_a_fault_in_making_a_trace_costs_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(tracing, "spans_of", break_)
    kept = Kept()
    async with running_router(tmp_path, pair(answer), traces=kept.traces) as router:
        events = await router.stream(text_spec())
    assert events[-1].HasField("completed") and not kept.spans()
    assert "the trace of gen-" in caplog.text
