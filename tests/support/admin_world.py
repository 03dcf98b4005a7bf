"""A controller without processes: a reconfigurer whose workers are only names.

A step is carried out when the test says so (or at once); updates of the routers are counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cluster.config.schema import ModelSection, RoleSection, RolesSection, ServingConfig
from controller.change_plan import Member, Step, apply_step
from controller.events import ClusterEvent, EventKind, EventLog
from controller.reconfigurer import Reconfigurer
from controller.worker_pool import StepFailed

FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"


def config_of(prefill: int = 1, decode: int = 3) -> ServingConfig:
    return ServingConfig(
        model=ModelSection(path="models/m"),
        roles=RolesSection(RoleSection(devices=prefill), RoleSection(devices=decode)),
    )


class FakeSteps:
    """Workers by name only. `gate`: steps wait for it. `broken`: the step with this text fails."""

    def __init__(self, config: ServingConfig) -> None:
        self.workers = [
            Member(f"{role}-{number}", role, config.role(role).tensor_parallel)  # type: ignore[arg-type]
            for role in ("prefill", "decode")
            for number in range(config.role(role).num_workers)  # type: ignore[arg-type]
        ]
        self.engine = config.engine
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = ""
        self.num_told = 0

    def members(self, wanted: ServingConfig | None = None) -> list[Member]:
        """Every worker has been started with the step that `engine` names."""
        is_stale = wanted is not None and wanted.engine.max_num_batched_tokens > self.engine.max_num_batched_tokens
        return [replace(worker, is_stale=is_stale) for worker in self.workers]

    async def update_routers(self) -> None:
        self.num_told += 1

    async def carry_out(self, step: Step, config: ServingConfig) -> None:
        await self.gate.wait()
        if str(step) == self.broken:
            raise StepFailed(f"{step.worker_id} did not")
        self.workers = apply_step(self.workers, step)


class ReconfigurerStage:
    """A reconfigurer over fake steps, and its events."""

    def __init__(self, config: ServingConfig | None = None, max_devices: int | None = None) -> None:
        config = config or config_of()
        self.told: list[ClusterEvent] = []
        self.events = EventLog(self.told.append)
        self.steps = FakeSteps(config)
        num_devices = None if max_devices is None else lambda: max_devices
        self.reconfigurer = Reconfigurer(config, cast(Any, self.steps), self.events, num_devices)

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.told]

    def split(self) -> tuple[int, int]:
        roles = [worker.role for worker in self.steps.workers]
        return roles.count("prefill"), roles.count("decode")
