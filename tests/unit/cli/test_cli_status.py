"""What `baton status` says of workers with different weights, and of those with KV below their pool."""

from __future__ import annotations

from scripted_router import ScriptedRouter, baton

from cli.status import describe, different_weights
from cluster.pb import admin_pb2, worker_pb2


def status_of(**revisions: str) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        workers=[
            admin_pb2.WorkerStatus(worker_id=worker_id, info=worker_pb2.WorkerInfo(weights_revision=revision))
            for worker_id, revision in revisions.items()
        ]
    )


def test_workers_with_different_weights_are_told_apart() -> None:
    described = describe(status_of(p0="a+float32", d0="b+float32", d1="a+float32", d2=""))
    assert different_weights(described) == (
        "workers have different weights, and share no request with the others: p0, d1: a+float32; d0: b+float32"
    )
    assert different_weights(describe(status_of(p0="a", d0="a", d1=""))) == ""


def test_what_lies_below_the_pools_is_shown_for_each_worker_and_tier(router: ScriptedRouter) -> None:
    tiers = [
        worker_pb2.KvTierStats(tier="host", blocks_kept=30, blocks_total=40, num_hit_tokens=320),
        worker_pb2.KvTierStats(tier="disk", blocks_kept=7, blocks_total=400, num_hit_tokens=64),
    ]
    stats = worker_pb2.WorkerStats(blocks_held=2, blocks_cached=5, blocks_total=8, num_hit_tokens=96, tiers=tiers)
    info = worker_pb2.WorkerInfo(pool_bytes=8_000_000, host_bytes=40_000_000, disk_bytes=410_000_000)
    router.status = admin_pb2.GetStatusResponse(
        workers=[admin_pb2.WorkerStatus(worker_id="p0", info=info, stats=stats)]
    )

    described = describe(router.status)["workers"][0]["kv_tiers"]
    lines = [line.split() for line in baton("status", "--address", router.address).stdout.splitlines()]

    assert [of["tier"] for of in described] == ["device", "host", "disk"]
    assert described[1] == {
        "tier": "host",
        "size_bytes": 40_000_000,
        "blocks_kept": 30,
        "blocks_total": 40,
        "hit_tokens": 320,
    }
    assert ["p0", "device", "8.0", "MB", "7", "8", "96"] in lines
    assert ["p0", "disk", "410.0", "MB", "7", "400", "64"] in lines


def test_without_tiers_there_is_no_table_of_them_and_a_worker_that_is_not_known_yet_has_none(
    router: ScriptedRouter,
) -> None:
    stats = worker_pb2.WorkerStats(blocks_free=8, blocks_total=8)
    workers = [admin_pb2.WorkerStatus(worker_id="p0", stats=stats), admin_pb2.WorkerStatus(worker_id="p1")]
    router.status = admin_pb2.GetStatusResponse(workers=workers)
    first, second = describe(router.status)["workers"]
    assert [of["tier"] for of in first["kv_tiers"]] == ["device"] and second["kv_tiers"] == []
    assert "hit tokens" not in baton("status", "--address", router.address).stdout
