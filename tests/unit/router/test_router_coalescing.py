"""Streams share a budget of messages: many send several tokens at a time, and none waits at its start or end."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, FakeWorker, phase, tokens
from router_harness import ids, running_router, text_spec

from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.stream import client_stream
from router.stream.client_stream import LEAST_SPACING_S, MESSAGES_PER_CORE, MOST_SPACING_S, MessageRate

FOREVER_S = 3600.0


def test_the_more_streams_the_longer_each_waits() -> None:
    rate, found = MessageRate(1000), []
    with ExitStack() as streams:
        for count in range(1, 301):
            streams.enter_context(rate.stream())
            found.append(rate.spacing_s)
            assert rate.spacing_s in (0.0, min(count / 1000, MOST_SPACING_S))
    assert found[0] == found[1] == 0.0, "a wait of 2 ms or less costs what it saves"
    assert found[2] == pytest.approx(0.003) and found[2] > LEAST_SPACING_S
    assert found == sorted(found) and found[-1] == MOST_SPACING_S
    assert rate.spacing_s == 0.0, "they are all over"


def test_the_budget_is_by_cores_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with ExitStack() as streams:
        own, given = MessageRate(), MessageRate(500)
        for _ in range(20):
            streams.enter_context(own.stream())
            streams.enter_context(given.stream())
        assert own.spacing_s == pytest.approx(20 / (4 * MESSAGES_PER_CORE))
        assert given.spacing_s == pytest.approx(20 / 500)


async def counts_of(folder: Path, *, stream_interval_tokens: int | None, at_once: bool) -> list[int]:
    """Tokens of each message of a stream of five; `at_once`: the last four come without waiting for the client."""
    prefill, decode = FakeWorker("p", worker_pb2.ROLE_PREFILL), FakeWorker("d", worker_pb2.ROLE_DECODE)
    async with running_router(folder, (prefill, decode), stream_messages_per_s=1e-9) as router:
        output = pb.OutputOptions(token_ids=True, stream_interval_tokens=stream_interval_tokens)
        stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec(output=output)))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")))
        counts, number = [], 1
        async for event in stream:
            if not event.HasField("delta"):
                continue
            counts.append(event.delta.token_count)
            assert event.delta.first_token_index == sum(counts[:-1])
            for _ in range(4 if at_once and number == 1 else 1):
                if number <= 4:
                    finish = {"finish_reason": LENGTH} if number == 4 else {}
                    decode.emit(phase(key, DECODE), tokens(key, number, ids("b"), **finish))
                number += 1
    return counts


async def test_tokens_that_come_during_a_pause_are_sent_together_and_the_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_stream, "MOST_SPACING_S", FOREVER_S)
    async with asyncio.timeout(20):
        assert await counts_of(tmp_path, stream_interval_tokens=None, at_once=True) == [1, 4]


async def test_a_client_that_names_an_interval_gets_its_messages_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_stream, "MOST_SPACING_S", FOREVER_S)
    async with asyncio.timeout(20):
        assert await counts_of(tmp_path, stream_interval_tokens=1, at_once=False) == [1] * 5


async def test_a_client_that_leaves_during_a_pause_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "MOST_SPACING_S", FOREVER_S)
    prefill, decode = FakeWorker("p", worker_pb2.ROLE_PREFILL), FakeWorker("d", worker_pb2.ROLE_DECODE)
    async with (
        asyncio.timeout(20),
        running_router(tmp_path, (prefill, decode), stream_messages_per_s=1e-9) as router,
    ):
        stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")))
        async for event in stream:
            if event.HasField("delta"):
                break
        stream.cancel()
        assert (await decode.next_cancel()).key == key
