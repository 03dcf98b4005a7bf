"""Settings that change while real processes run: from the controller's call to the steps of a worker."""

from __future__ import annotations

import json
from pathlib import Path

from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Stream, token_spec

from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.rpc import create_blocking_channel

PROMPT = list(range(100, 300))


def largest_step(cluster: PlainCluster, skipped: int) -> int:
    """Tokens of the prefill worker's largest step after the first `skipped`."""
    return max(step.num_tokens for step in cluster.steps(PREFILL)[skipped:])


def test_a_worker_takes_over_a_changed_setting_also_from_a_router_that_was_restarted(tmp_path: Path) -> None:
    with PlainCluster(BUNDLED_MODEL, tmp_path, enable_prefix_cache=False) as cluster:
        workers = [
            admin_pb2.WorkerAddress(worker_id=w.worker_id, address=w.address, role=w.role)
            for w in cluster.status().workers
        ]
        assert {w.worker_id for w in workers} == {PREFILL, DECODE}

        def change(tokens: int) -> None:
            settings = json.dumps({"engine": {"max_num_batched_tokens": tokens}})
            with create_blocking_channel(cluster.control_address) as channel:
                control = admin_pb2_grpc.ControlServiceStub(channel)
                control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers, run_time_settings=settings), timeout=10)

        def generate() -> int:
            done = len(cluster.steps(PREFILL))
            Stream(cluster, token_spec(PROMPT, 2)).result()
            cluster.wait_idle()
            return largest_step(cluster, done)

        assert generate() == len(PROMPT)
        change(64)
        assert generate() == 64
        cluster.kill_router()
        cluster.start_router()
        change(128)
        assert generate() == 128
