"""A worker or a router of a version of the protocol that no longer speaks this one."""

from __future__ import annotations

from next_version.program import create_of_this_build

from cluster import protocol
from cluster.program import Program, Report


def create(settings_json: str, report: Report) -> Program:
    protocol.VERSION += 1
    protocol.OLDEST = protocol.VERSION
    return create_of_this_build(settings_json, report)
