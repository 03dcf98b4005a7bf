"""A worker that some requests end: it raises SIGSEGV in each step in which it decodes one whose prompt begins with
POISON, or prefills one that it is to decode."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from cluster.crash_record import CrashRecord
from cluster.pb import worker_pb2
from cluster.program import Program, Report
from engine.sequence import Request
from worker import program

POISON = 7


def create(settings_json: str, report: Report) -> Program:
    poisoned: set[str] = set()
    from_proto, step_begins = Request.from_proto, CrashRecord.step_begins

    def admitted(admit: worker_pb2.Admit, **fields: object) -> Request:
        if admit.role == worker_pb2.ROLE_DECODE and admit.prompt_token_ids[0] == POISON:
            poisoned.add(admit.key.request_id)
        return from_proto(admit, **fields)  # type: ignore[arg-type]

    def begins(record: CrashRecord, request_ids: Iterable[str]) -> None:
        running = list(request_ids)
        step_begins(record, running)
        if not poisoned.isdisjoint(running):
            ctypes.string_at(0)

    Request.from_proto = admitted  # type: ignore[method-assign, assignment]
    CrashRecord.step_begins = begins  # type: ignore[method-assign]
    return program.create(settings_json, report)
