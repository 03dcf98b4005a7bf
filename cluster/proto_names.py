"""Roles and states of workers, as people and documents call them."""

from __future__ import annotations

from cluster.pb import admin_pb2, worker_pb2


def role_name(role: worker_pb2.Role) -> str:
    """`prefill` or `decode`; empty: it is not known."""
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower() if role else ""


def state_name(worker: admin_pb2.WorkerStatus) -> str:
    """Such as `ready`."""
    return admin_pb2.WorkerStatus.State.Name(worker.state).removeprefix("STATE_").lower()
