"""The controller as its AdminService sees it, without processes: a reconfigurer over a real file and named workers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from admin_world import FILE, ReconfigurerStage

from cluster.config.schema import ServingConfig
from cluster.pb import admin_pb2
from controller.config_file import ConfigFile
from controller.plan import WorkerPlan
from controller.reconfigurer import SaveConfig
from controller.supervisor import Supervisor
from controller.worker_pool import WorkerPool


class StaticLauncher:
    """A worker that runs already, at one of `addresses`; without one it does not come up."""

    def __init__(self, plan: WorkerPlan, addresses: Mapping[str, str]) -> None:
        self.plan = plan
        self.placing_limit_s: float | None = None
        self.card: Mapping[str, Any] = {}
        self._addresses = addresses

    async def launch(self) -> StaticLauncher:
        if self.plan.worker_id not in self._addresses:
            await asyncio.Event().wait()
        self.card = {"address": self._addresses[self.plan.worker_id]}
        return self

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, grace_s: float) -> None:
        pass

    async def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeBackend:
    """Stands in for the controller, over a copy of the shipped file that says 1:3."""

    def __init__(self, folder: Path) -> None:
        (folder / "models").symlink_to(FILE.parent / "models")
        shutil.copy(FILE, folder / "cluster.yaml")
        self.file = ConfigFile(folder / "cluster.yaml")
        self.edit("decode:\n        devices: 1", "decode:\n        devices: 3")
        self.stage = ReconfigurerStage(self.file.load())
        self.reconfigurer, self.events = self.stage.reconfigurer, self.stage.events
        self.worker_addresses: dict[str, str] = {}
        """Of the workers in `pool`."""
        self.pool = WorkerPool(lambda plan: StaticLauncher(plan, self.worker_addresses), lambda _: None)
        self.routers = [Supervisor("router", self._no_launch, lambda _: None)]
        self.auto = None
        self.config_path = str(self.file.path)
        self.metrics_address = "127.0.0.1:9000"
        self.address = ""

    @property
    def save(self) -> SaveConfig | None:
        return self.file.save

    def parse(self, text: str, filename: str) -> ServingConfig:
        return self.file.parse(text, filename)

    async def router_status(self) -> admin_pb2.GetStatusResponse | None:
        return None

    def edit(self, old: str, new: str) -> None:
        text = self.file.path.read_text(encoding="utf-8")
        assert old in text
        self.file.path.write_text(text.replace(old, new, 1), encoding="utf-8")

    async def _no_launch(self) -> Any:
        raise AssertionError("no router is started here")
