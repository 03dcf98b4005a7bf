"""`baton targets`: what Prometheus is told of the pages that a router knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_router import baton

from cli.targets import _write, group, groups_of
from cluster.errors import BatonError
from cluster.pb import admin_pb2, worker_pb2


def status() -> admin_pb2.GetStatusResponse:
    page, none = (worker_pb2.WorkerInfo(metrics_address=address) for address in ("192.0.2.2:9000", ""))
    return admin_pb2.GetStatusResponse(
        router=admin_pb2.RouterStatus(metrics_address="127.0.0.1:9001"),
        workers=[
            admin_pb2.WorkerStatus(worker_id="decode-0", info=page),
            admin_pb2.WorkerStatus(worker_id="decode-1", info=none),
        ],
    )


def test_each_process_that_has_a_page_is_a_target() -> None:
    assert groups_of(status(), "router-1") == [
        {"targets": ["127.0.0.1:9001"], "labels": {"process": "router-1"}},
        {"targets": ["192.0.2.2:9000"], "labels": {"process": "decode-0"}},
    ]


def test_the_file_is_replaced_whole_and_readable_by_prometheus(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    for address in ("192.0.2.2:9000", "192.0.2.3:9000"):
        _write(group(address, "router"), file)
        assert json.loads(file.read_text()) == [{"targets": [address], "labels": {"process": "router"}}]
    assert file.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(BatonError, match="cannot be written: No such file or directory"):
        _write([], tmp_path / "nowhere" / "targets.json")


def test_following_needs_a_file() -> None:
    done = baton("targets", "--follow")
    assert done.exit_code == 2 and "name it with --file" in " ".join(done.stderr.split())
