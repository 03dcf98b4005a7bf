"""`worker.program` where Ray's GPUs are only numbers: what is to run on CUDA runs on the CPU."""

from __future__ import annotations

from dataclasses import replace

from cluster.program import Program, Report
from cluster.settings import WorkerSettings
from worker import program


def create(settings_json: str, report: Report) -> Program:
    settings = WorkerSettings.from_json(settings_json)
    return program.create(replace(settings, engine=replace(settings.engine, device="cpu")).to_json(), report)
