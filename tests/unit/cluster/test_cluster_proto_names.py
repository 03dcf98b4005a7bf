"""Messages as documents: what the router's page reads."""

from __future__ import annotations

import json

from cluster.pb import admin_pb2, worker_pb2
from cluster.text import role_name, to_document


def test_a_document_has_every_field_and_numbers_stay_numbers() -> None:
    stats = worker_pb2.WorkerStats(kv_bytes_sent=2**60, blocks_total=3)
    worker = admin_pb2.WorkerStatus(worker_id="d0", state=admin_pb2.WorkerStatus.STATE_READY, stats=stats)
    status = to_document(admin_pb2.GetStatusResponse(workers=[worker], config_version=2**40))
    assert json.loads(json.dumps(status)) == status
    assert set(status) == {field.name for field in admin_pb2.GetStatusResponse.DESCRIPTOR.fields}
    (described,) = status["workers"]
    assert (status["config_version"], described["stats"]["kv_bytes_sent"]) == (2**40, 2**60)
    assert (described["worker_id"], described["state"], described["role"]) == ("d0", "ready", "")
    assert described["stats"]["blocks_held"] == 0, "a number that is zero is there"


def test_what_is_unset_is_none() -> None:
    life = to_document(admin_pb2.RequestLife())
    assert (life["first_token_s"], life["phases"], life["num_moves"]) == (None, [], 0)
    assert to_document(admin_pb2.RequestLife(first_token_s=0.0))["first_token_s"] == 0.0
    assert to_document(admin_pb2.GetClusterResponse())["changing"] is None


def test_roles_have_short_names() -> None:
    names = [role_name(role) for role in (worker_pb2.ROLE_UNSPECIFIED, worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)]
    assert names == ["", "prefill", "decode"]
