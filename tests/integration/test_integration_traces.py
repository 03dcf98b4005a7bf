"""Traces of real workers at a collector: one request, a replay after a kill -9, and a collector that hangs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL, HAND_OVER, PATIENT, PlainCluster, token_spec
from otlp_receiver import Received, Receiver, receiver
from router_harness import Router
from workers import Worker, running

from cluster import rpc
from cluster.pb import generation_pb2 as pb
from cluster.settings import RouterSettings
from router.program import RouterServer

PROMPT = [(i * 37) % 1000 + 5 for i in range(300)]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    common: dict[str, Any] = {"model_path": str(BUNDLED_MODEL), "dtype": "float32", "threads": 1}
    with running(
        Worker(worker_id="prefill-0", role="prefill", **common),
        Worker(worker_id="decode-0", role="decode", **common),
        Worker(worker_id="decode-1", role="decode", **common),
    ) as started:
        yield started


@asynccontextmanager
async def serving(workers: Sequence[Worker], collector: Receiver) -> AsyncIterator[Router]:
    names = tuple(f"{w.settings.role}:{w.settings.worker_id}={w.address}" for w in workers)
    given: dict[str, Any] = HAND_OVER | PATIENT | {"trace_endpoint": collector.url, "workers": names}
    server = RouterServer(RouterSettings.from_values(model_path=str(BUNDLED_MODEL), port=0, **given), lambda line: None)
    addresses = await server.start()
    try:
        async with rpc.create_channel(addresses[0]) as channel:
            router = Router(server, *addresses, channel)
            await router.until_all_ready()
            yield router
    finally:
        await server.stop()


def timed(spec: pb.GenerationSpec) -> pb.GenerationSpec:
    spec.output.include_timing = True
    spec.cache.bypass_prefix_cache = True
    return spec


def seconds(span: Received) -> float:
    return (span.end_ns - span.begin_ns) / 1e9


async def test_the_spans_of_a_request_are_its_timing(workers: list[Worker]) -> None:
    with receiver() as collector:
        async with serving(workers, collector) as router:
            call = {"metadata": (("traceparent", PARENT),)}
            events = await router.stream(timed(token_spec(PROMPT, 40)), **call)
        (root,) = collector.roots(1)
    (attempt,) = collector.children(root)
    phases = {span.name: span for span in collector.children(attempt)}
    assert list(phases) == ["queue", "prefill", "hand-off", "decode"]
    assert (root.trace_id, root.parent_id) == (PARENT.split("-")[1], PARENT.split("-")[2])
    ordered = list(phases.values())
    assert ordered[0].begin_ns == attempt.begin_ns == root.begin_ns
    assert ordered[-1].end_ns == attempt.end_ns == root.end_ns
    assert [a.end_ns for a in ordered[:-1]] == [b.begin_ns for b in ordered[1:]]
    timing = events[-1].completed.timing
    for span, told in (("queue", timing.queue), ("hand-off", timing.kv_transfer), ("decode", timing.decode)):
        assert seconds(phases[span]) == pytest.approx(told.ToNanoseconds() / 1e9, abs=2e-6)
    ttft = timing.time_to_first_token.ToNanoseconds() / 1e9
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(ttft, abs=2e-6)
    assert root.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert root.attributes["gen_ai.usage.output_tokens"] == 40
    assert attempt.attributes["baton.placement.reason"] == timing.placement
    assert abs(root.begin_ns / 1e9 - time.time()) < 120


async def kill_decoder(router: Router, workers: Sequence[Worker]) -> str:
    """The id of the worker that decoded the one request there is."""
    (live,) = router.server.dispatcher.running
    decode_id = live.attempt.placement.decode_id
    process = next(w for w in workers if w.settings.worker_id == decode_id).ranks[0].popen
    process.send_signal(signal.SIGKILL)
    assert await asyncio.to_thread(process.wait, 20) == -signal.SIGKILL
    return decode_id


async def test_a_replay_after_a_kill_is_two_attempts_of_one_trace(workers: list[Worker]) -> None:
    """Of the decode worker that runs it, in the middle of its output. Comes last: it is not started again."""
    with receiver() as collector:
        async with serving(workers, collector) as router:
            request = pb.GenerateStreamRequest(spec=timed(token_spec(PROMPT, 500)))
            call = router.generation.GenerateStream(request)
            num_tokens, victim = 0, ""
            while not (event := await call.read()).HasField("completed"):
                num_tokens += event.delta.token_count
                if not victim and num_tokens > 20:
                    victim = await kill_decoder(router, workers)
        (root,) = collector.roots(1)
    assert num_tokens == 500
    first, second = collector.children(root)
    assert first.attributes["baton.decode_worker"] == victim
    assert first.is_error and first.attributes["error.type"] == "WORKER_LOST"
    assert not second.is_error and not root.is_error
    assert second.attributes["baton.decode_worker"] != victim
    assert second.attributes["baton.placement.kind"] == "retried"
    assert first.begin_ns == root.begin_ns and first.end_ns == second.begin_ns and second.end_ns == root.end_ns
    assert [span.name for span in collector.children(first)] == ["queue", "prefill", "hand-off", "decode"]
    assert [span.name for span in collector.children(second)][-1] == "decode"
    assert root.attributes["baton.attempts"] == 2
    assert {span.trace_id for span in collector.spans} == {root.trace_id}


def test_a_router_ends_in_time_beside_a_collector_that_hangs(tmp_path: Path) -> None:
    with receiver() as collector:
        collector.status = None
        with PlainCluster(BUNDLED_MODEL, tmp_path, router={"trace_endpoint": collector.url}) as cluster:
            for _ in range(3):
                cluster.client.generate(token_spec(PROMPT, 4))
            collector.wait_for(lambda: collector.num_requests)
            cluster.wait_idle()
            process = cluster.processes["router"]
            begun = time.monotonic()
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(20) == 0
            assert time.monotonic() - begun < 10
            del cluster.processes["router"]
            process.stop()
            cluster.wait_idle = lambda: None  # type: ignore[method-assign]  # there is no router to ask any more
