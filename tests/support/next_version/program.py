"""A worker or a router of the next version of the protocol, which still speaks this one."""

from __future__ import annotations

import json

from cluster import protocol
from cluster.program import Program, Report


def create(settings_json: str, report: Report) -> Program:
    protocol.VERSION += 1
    return create_of_this_build(settings_json, report)


def create_of_this_build(settings_json: str, report: Report) -> Program:
    """A worker where the settings are a worker's, else a router."""
    from router import program as router
    from worker import program as worker

    is_worker = "worker_id" in json.loads(settings_json)
    return worker.create(settings_json, report) if is_worker else router.create(settings_json, report)
