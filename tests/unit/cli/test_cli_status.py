"""What `baton status` says of workers with different weights."""

from __future__ import annotations

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
