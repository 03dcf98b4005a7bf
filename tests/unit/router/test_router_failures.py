"""What clients see when workers are lost, fail, restart or are missing, and what the other worker is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, failed, pair, phase, tokens
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2
from router_harness import Router, begin, ids, kinds, refusal, rest, running_router, text_of, text_spec

from cluster import rpc
from cluster.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.pb import generation_pb2 as pb

pytestmark = pytest.mark.asyncio

Failed = worker_pb2.Failed
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


async def status(router: Router) -> admin_pb2.GetStatusResponse:
    answer: admin_pb2.GetStatusResponse = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
    return answer


async def test_a_prefill_worker_stands_in_for_the_last_decode_worker_until_one_is_back(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, events, key = await begin(router, prefill)
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b")))
        while text_of(events) != "ab":
            events.append(await stream.read())
        port = int(decode.address.rpartition(":")[2])
        await decode.stop()
        admit = await prefill.next_admit()
        assert admit.role == worker_pb2.ROLE_DECODE and not admit.expect_handoff
        assert [list(k.token_ids) for k in admit.known_tokens] == [ids("ab")]
        assert prefill.cancels == []
        prefill.emit(phase(admit.key, PREFILL), phase(admit.key, DECODE))
        prefill.emit(tokens(admit.key, 2, ids("c"), finish_reason=LENGTH))
        events += await rest(stream)
        new = asyncio.ensure_future(router.stream(text_spec(output=pb.OutputOptions(include_timing=True))))
        admit = await prefill.next_admit()
        assert admit.role == worker_pb2.ROLE_DECODE and not admit.expect_handoff
        prefill.emit(phase(admit.key, PREFILL), phase(admit.key, DECODE))
        prefill.emit(tokens(admit.key, 0, ids("d"), finish_reason=LENGTH))
        placement = (await new)[-1].completed.timing.placement
        assert placement == "local prefill on prefill-0: no decode worker is ready"
        await decode.start(port)
        await router.until_all_ready()
        router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        admit = await prefill.next_admit()
        assert admit.role == worker_pb2.ROLE_PREFILL and admit.decode_peer.incarnation == decode.incarnation
    assert text_of(events) == "abc" and kinds(events)[-1] == "completed"


async def test_a_lost_prefill_worker_does_not_touch_what_decodes_already(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, events, key = await begin(router, prefill)
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b")))
        while text_of(events) != "ab":
            events.append(await stream.read())
        await prefill.stop()
        await router.until_health(NOT_SERVING)
        decode.emit(tokens(key, 2, ids("c"), finish_reason=LENGTH))
        events += await rest(stream)
    assert text_of(events) == "abc" and kinds(events)[-1] == "completed"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Failed.REASON_INTERNAL, InternalError),
        (Failed.REASON_UNSPECIFIED, InternalError),
        (Failed.REASON_INVALID, InvalidRequest),
    ],
)
async def test_a_workers_failure_becomes_a_typed_error_and_the_other_drops_the_request(
    tmp_path: Path, reason: Any, kind: type[BatonError]
) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        call = asyncio.ensure_future(router.stream(text_spec()))
        key = (await decode.next_admit()).key
        decode.emit(failed(key, reason, "the detail"))
        error = await refusal(call)
        assert type(error) is kind and error.retry_after_s is None
        assert ("the detail" in error.message) is (kind is not InternalError)
        assert (await prefill.next_cancel()).key == key
        assert decode.cancels == []
        told = (await status(router)).router
    assert (told.num_failed, told.num_running) == (1, 0)


async def test_a_client_that_leaves_frees_both_workers(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, _, key = await begin(router, prefill)
        stream.cancel()
        assert (await prefill.next_cancel()).key == key
        assert (await decode.next_cancel()).key == key
        assert (await status(router)).router.num_cancelled == 1


async def test_a_client_that_leaves_a_unary_call_frees_both_workers(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        call = router.generation.Generate(pb.GenerateRequest(spec=text_spec()))
        key = (await prefill.next_admit()).key
        call.cancel()
        assert (await prefill.next_cancel()).key == key
        assert (await decode.next_cancel()).key == key


async def test_a_deadline_while_it_runs_frees_both_workers(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        call = asyncio.ensure_future(router.stream(text_spec(), timeout=0.3))
        key = (await prefill.next_admit()).key
        assert isinstance(await refusal(call), DeadlineExceeded)
        assert (await prefill.next_cancel()).key == key
        assert (await decode.next_cancel()).key == key


async def test_cancel_generation_ends_the_stream_with_its_last_tokens(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, events, key = await begin(router, prefill)
        answer = await router.generation.CancelGeneration(
            pb.CancelGenerationRequest(generation_ids=[key.request_id, "gen-unknown"])
        )
        assert list(answer.cancelled_ids) == [key.request_id] and list(answer.unknown_ids) == ["gen-unknown"]
        end = await stream.read()
        while not end.HasField("sequence_end"):
            end = await stream.read()
        assert end.sequence_end.finish_reason == pb.FINISH_REASON_CANCELLED
        assert isinstance(await refusal(rest(stream)), Cancelled)
        assert (await decode.next_cancel()).key == key
    assert text_of(events) == "a"


async def test_late_and_foreign_events_are_dropped(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, events, key = await begin(router, prefill)
        earlier = worker_pb2.RequestKey(request_id=key.request_id, attempt=0)
        unknown = worker_pb2.RequestKey(request_id="gen-unknown", attempt=1)
        decode.emit(phase(key, DECODE))
        for stranger in (earlier, unknown):
            decode.emit(tokens(stranger, 1, ids("x")), failed(stranger, Failed.REASON_INTERNAL))
        decode.emit(tokens(key, 1, ids("z"), sequence_index=7))
        decode.emit(tokens(key, 0, ids("ab")), tokens(key, 0, ids("a")), tokens(key, 2, ids("c"), finish_reason=LENGTH))
        events += await rest(stream)
    assert text_of(events) == "abc"


async def test_without_a_worker_a_request_waits_and_then_is_unavailable(tmp_path: Path) -> None:
    async with running_router(tmp_path, queue_timeout_s=0.05) as router:
        error = await refusal(router.stream(text_spec()))
        assert isinstance(error, Unavailable) and error.retry_after_s == 1.0
        assert (await status(router)).router.num_rejected == 1


async def test_a_request_that_waits_runs_as_soon_as_the_workers_are_ready(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("late")])
    await prefill.start()
    await decode.start()
    async with running_router(tmp_path) as router:
        stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        first = (await stream.read()).heartbeat
        assert (first.phase, first.queue_position) == (pb.Heartbeat.PHASE_QUEUED, 1)
        async with rpc.create_channel(router.control_address) as channel:
            control: Any = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
            workers = [
                admin_pb2.WorkerAddress(worker_id=w.worker_id, address=w.address, role=w.role)
                for w in (prefill, decode)
            ]
            await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers))
        assert text_of(await rest(stream)) == "late"
    await prefill.stop()
    await decode.stop()


async def test_a_full_queue_refuses_and_a_long_wait_is_exhausted(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode), max_running_requests=1, max_queued_requests=1) as router:
        running, _, _ = await begin(router, prefill)
        soon = pb.SchedulingOptions(queue_timeout=duration_pb2.Duration(nanos=300_000_000))
        waiting = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec(scheduling=soon)))
        assert (await waiting.read()).heartbeat.phase == pb.Heartbeat.PHASE_QUEUED
        refused = await refusal(router.stream(text_spec()))
        assert (
            isinstance(refused, Overloaded)
            and refused.retry_after_s is not None
            and 1.0 <= refused.retry_after_s <= 1.5
        )
        timed_out = await refusal(rest(waiting))
        assert isinstance(timed_out, Overloaded) and "0.3 s" in timed_out.message
        running.cancel()


async def test_a_queued_request_follows_when_one_ends(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode), max_running_requests=1) as router:
        first, _, key = await begin(router, prefill)
        second = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        assert (await second.read()).heartbeat.phase == pb.Heartbeat.PHASE_QUEUED
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("c"), finish_reason=LENGTH))
        assert text_of(await rest(second)) == "c"
        assert text_of(await rest(first)) == "b"


async def test_health_follows_the_workers_for_the_server_and_the_service(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        for service in ("", "baton.v1.GenerationService"):
            await asyncio.wait_for(router.until_health(SERVING, service), 20)
        await prefill.stop()
        for service in ("", "baton.v1.GenerationService"):
            await asyncio.wait_for(router.until_health(NOT_SERVING, service), 20)


async def test_status_names_each_worker_and_what_it_told(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, _, key = await begin(router, prefill)
        decode.emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(blocks_free=5, blocks_total=9)), phase(key, DECODE))
        beat = await stream.read()
        while not (beat.HasField("heartbeat") and beat.heartbeat.phase == DECODE):
            beat = await stream.read()
        told = await status(router)
        assert told.router_address == router.address
        assert [worker.worker_id for worker in told.workers] == ["decode-0", "prefill-0"]
        assert told.workers[0].stats.blocks_free == 5
        assert told.workers[0].info.incarnation == decode.incarnation
        assert all(worker.state == admin_pb2.WorkerStatus.STATE_READY for worker in told.workers)
        assert told.router.num_running == 1
        stream.cancel()


async def test_a_worker_that_is_no_longer_named_keeps_what_it_runs(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, events, key = await begin(router, prefill)
        router.server.dispatcher.fleet.set_workers([])
        assert (await status(router)).workers == []
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
        events += await rest(stream)
    assert text_of(events) == "ab"


async def test_a_worker_that_drains_gets_nothing_new_and_ends_what_it_runs(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream, events, key = await begin(router, prefill)
        workers = [
            admin_pb2.WorkerAddress(worker_id=w.worker_id, address=w.address, role=w.role, is_draining=True)
            for w in router.server.dispatcher.fleet
        ]
        async with rpc.create_channel(router.control_address) as channel:
            control: Any = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
            await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers))
            waiting = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec("later")))
            assert (await waiting.read()).heartbeat.phase == pb.Heartbeat.PHASE_QUEUED
            decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
            events += await rest(stream)
            assert len(decode.admits) == 1 and (await status(router)).router.num_queued == 1
            for worker in workers:
                worker.is_draining = False
            await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers))
        await decode.next_admit()
        waiting.cancel()
    assert text_of(events) == "ab"


async def test_the_controller_is_told_what_is_wrong_with_its_workers(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router, rpc.create_channel(router.control_address) as channel:
        control: Any = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        worker = admin_pb2.WorkerAddress(worker_id="w", address="127.0.0.1:1")
        error = await refusal(control.SetWorkers(admin_pb2.SetWorkersRequest(workers=[worker])))
    assert isinstance(error, InvalidRequest) and error.violations[0].field == "workers[0]"


async def test_shutdown_refuses_new_requests_and_lets_running_ones_end(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode), drain_timeout_s=20.0) as router:
        stream, events, key = await begin(router, prefill)
        healths = router.healths()
        assert await anext(healths) == SERVING
        stopping = asyncio.ensure_future(router.server.stop())
        assert await anext(healths) == NOT_SERVING
        await healths.aclose()
        # gRPC itself cancels a call that comes while the port is closing; our client repeats it, and so does this.
        while isinstance(error := await refusal(router.stream(text_spec())), Cancelled):
            pass
        assert isinstance(error, Unavailable)
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
        events += await rest(stream)
        await stopping
    assert text_of(events) == "ab" and kinds(events)[-1] == "completed"


async def test_a_drain_that_takes_too_long_fails_what_is_left(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode), drain_timeout_s=0.05) as router:
        stream, _, _ = await begin(router, prefill)
        stopping = asyncio.ensure_future(router.server.stop())
        error = await refusal(rest(stream))
        await stopping
    assert isinstance(error, Unavailable) and error.retry_after_s == 1.0
