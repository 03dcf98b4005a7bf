"""What the controller tells a router, and what the router says back: roles of now, version, needs, objectives."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeWorker, pair
from grpc_health.v1 import health_pb2
from router_harness import Router, ids, running_router, text_of, text_spec

from cluster import rpc
from cluster.errors import IncompatibleProtocol
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from router.routing import worker_client

pytestmark = pytest.mark.asyncio

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


@asynccontextmanager
async def control_of(router: Router) -> AsyncIterator[Any]:
    async with rpc.create_channel(router.control_address) as channel:
        yield admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]


def named(router: Router, **roles: worker_pb2.Role) -> list[admin_pb2.WorkerAddress]:
    """The workers it has, with other roles."""
    return [
        admin_pb2.WorkerAddress(worker_id=w.worker_id, address=w.address, role=roles.get(w.worker_id, w.role))
        for w in router.server.dispatcher.fleet
    ]


async def status(router: Router) -> admin_pb2.GetStatusResponse:
    answer: admin_pb2.GetStatusResponse = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
    return answer


async def test_a_flipped_worker_keeps_its_session_and_shows_its_role_of_now(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        sessions = list(router.server.dispatcher.fleet)
        flipped = admin_pb2.SetWorkersRequest(
            workers=named(router, **{prefill.worker_id: DECODE, decode.worker_id: PREFILL}), config_version=7
        )
        await control.SetWorkers(flipped)
        reply = await status(router)
        assert reply.config_version == 7
        roles = {w.worker_id: (w.role, w.info.role, w.state) for w in reply.workers}
        ready = admin_pb2.WorkerStatus.STATE_READY
        assert roles == {prefill.worker_id: (DECODE, PREFILL, ready), decode.worker_id: (PREFILL, DECODE, ready)}
        assert list(router.server.dispatcher.fleet) == sessions


async def test_a_worker_of_another_protocol_is_refused_by_name_and_the_others_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(worker_client, "LONGEST_BACKOFF_S", 0.2)
    prefill, decode = pair(lambda _: [ids("yes")])
    later = FakeWorker("decode-1", DECODE)
    prefill.protocol, decode.protocol, later.protocol = "", "1-2", "2-3"
    await later.start()
    why = "worker decode-1 speaks protocol 2 to 3; this router speaks 1: upgrade this router first"
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        workers = named(router)
        workers.append(admin_pb2.WorkerAddress(worker_id="decode-1", address=later.address, role=DECODE))
        began_at = time.monotonic()
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers))
        await later.until_sessions(4)
        assert time.monotonic() - began_at > 3 * 0.5 * 0.2, "it was asked again and again without a pause"
        seen = {worker.worker_id: worker for worker in (await status(router)).workers}
        assert seen["decode-1"].refusal == why and not seen["decode-1"].HasField("info")
        assert seen["decode-1"].state == admin_pb2.WorkerStatus.STATE_CONNECTING
        assert [seen[name].refusal for name in ("prefill-0", "decode-0")] == ["", ""]
        assert seen["decode-0"].info.protocol == "1-2"
        assert text_of(await router.stream(text_spec())) == "yes"
        later.protocol = "1-3"  # it was replaced
        await router.until_all_ready()
        assert not any(worker.refusal for worker in (await status(router)).workers)
    await later.stop()
    warnings = [record.getMessage() for record in caplog.records if "decode-1" in record.getMessage()]
    assert [line for line in warnings if why in line] == [f"no session with worker decode-1 at {later.address}: {why}"]


async def test_a_worker_that_refuses_the_session_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "LONGEST_BACKOFF_S", 0.001)
    why = "worker decode-0 speaks protocol 3; its caller speaks 1: upgrade its caller first"
    prefill, decode = pair()

    async def refuse(_: object, context: Any) -> AsyncIterator[worker_pb2.EventBatch]:
        decode.note_session()
        await rpc.abort(context, IncompatibleProtocol(why))
        yield worker_pb2.EventBatch()

    decode.Session = refuse  # type: ignore[method-assign, assignment]
    await prefill.start()
    await decode.start()
    async with running_router(tmp_path) as router, control_of(router) as control:
        named = admin_pb2.WorkerAddress
        workers = [named(worker_id=w.worker_id, address=w.address, role=w.role) for w in (prefill, decode)]
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers))
        await decode.until_sessions(2)  # it is asked again once the first answer is known
        assert [w.refusal for w in (await status(router)).workers if w.refusal] == [why]
    for worker in (prefill, decode):
        await worker.stop()


async def test_a_router_that_needs_no_prefill_any_more_serves_from_decode_workers_alone(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        both = named(router, **{prefill.worker_id: DECODE})
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=both))
        await router.until_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=both, needs_prefill=False))
        await router.until_serving()
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=both))
        assert router.server.dispatcher.fleet.can_serve, "a field that is not set changes what it was"


async def test_objectives_and_limits_hold_from_the_moment_they_are_told(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        context = router.server.dispatcher.context
        before = context.limits
        changed = json.dumps({"slo": {"ttft_ms": 250, "tpot_ms": 20}, "router": {"max_queued_requests": 7}})
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=named(router)))
        assert context.limits is before
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=named(router), run_time_settings=changed))
        assert (context.objectives.ttft_s, context.objectives.tpot_s) == (0.25, 0.02)
        assert context.limits == replace(before, max_queued_requests=7)


async def test_changed_settings_reach_every_worker_and_one_that_connects_later(tmp_path: Path) -> None:
    """A worker kept the `rebalance.slo.tpot_ms` of its start when that changed."""
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        changed = json.dumps({"slo": {"tpot_ms": 20}})
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=named(router), run_time_settings=changed))
        assert [await worker.next_update() for worker in (prefill, decode)] == [changed, changed]
        port = int(decode.address.rpartition(":")[2])
        await decode.stop()
        await decode.start(port)
        assert await decode.next_update() == changed


async def test_workers_get_what_their_role_has_of_its_own(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        common = {"engine": {"max_num_batched_tokens": 512}}
        own = {"engine": {"max_num_batched_tokens": 128}}
        sent = json.dumps({**common, "roles": {"decode": own}})
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=named(router), run_time_settings=sent))
        assert [json.loads(await worker.next_update()) for worker in (prefill, decode)] == [common, own]


async def test_settings_that_are_told_again_are_not_sent_again(tmp_path: Path) -> None:
    """The controller names everything every two seconds, so that the router knows that there is one."""
    prefill, decode = pair()
    first, second = (json.dumps({"slo": {"tpot_ms": ms}}) for ms in (20, 30))
    async with running_router(tmp_path, (prefill, decode)) as router, control_of(router) as control:
        assert not (await status(router)).router.HasField("controller_silent_s"), "it was started by hand"
        for text in (first, first, second):
            await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=named(router), run_time_settings=text))
        assert [await decode.next_update() for _ in range(2)] == [first, second]
        assert 0 <= (await status(router)).router.controller_silent_s < 5
