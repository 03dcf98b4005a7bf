"""Ray as a host of programs: a thin actor that runs one in its own process, and the handles to such processes.

The actor names its program by module (`worker.program`, `router.program`) and imports it in its own process, so that
nothing here, nor in the controller's process, loads what a program needs. Everything between an actor and its owner is
a string or a Failure. No request passes through an actor: once a program serves, its actor only waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.errors import BatonError, CheckpointError, ConfigError
from cluster.program import Program, import_behind
from controller.supervisor import StartFailed

Strategy = PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy

_PR_SET_PDEATHSIG = 1
_LEAVE_S = 1.0
"""How long a process that Ray ends may take, before it is killed."""
_KILL_S = 5.0
_THREADS = 8
"""Calls an actor answers at one time: `wait` and `lines` block for its whole life."""


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it (Ray's raylet) is gone, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True)
class ProgramFailure:
    """How a program failed."""

    message: str
    is_mistake: bool = False
    """True when the configuration or the checkpoint is to blame."""


@dataclass(frozen=True)
class NodePlacement:
    """The node and process of an actor."""

    host: str
    """Address at which the node's other processes and nodes reach this one."""
    pid: int


class Process:
    """The actor: hosts one program for its whole life; calls run on threads of their own."""

    def __init__(self, module: str, name: str, log_dir: str | None) -> None:
        die_with_parent()
        self._module = module
        self._program: Program | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        send_logs_to(self._lines.put, name, log_dir)

    def locate(self) -> NodePlacement:
        return NodePlacement(host=ray.util.get_node_ip_address(), pid=os.getpid())

    def prepare(self, settings_json: str) -> str | ProgramFailure:
        """Creates and prepares the program; what it returns is described in `cluster.program`."""
        return self._guard(lambda: self._create(settings_json).prepare())

    def start(self) -> str | ProgramFailure:
        return self._guard(lambda: self._known().start())

    def wait(self) -> ProgramFailure | None:
        """Returns when the program has ended: None when it was asked to."""

        def until_ended() -> str:
            self._known().wait()
            return ""

        outcome = self._guard(until_ended)
        return outcome if isinstance(outcome, ProgramFailure) else None

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()

    def lines(self) -> list[str]:
        """Waits for a line of progress or a warning; returns all there are."""
        lines = [self._lines.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return lines

    def _create(self, settings_json: str) -> Program:
        program: Program = import_behind(self._module).create(settings_json, self._lines.put)
        self._program = program
        return program

    def _known(self) -> Program:
        if self._program is None:
            raise RuntimeError("prepare comes before start and wait")
        return self._program

    @staticmethod
    def _guard(step: Callable[[], str]) -> str | ProgramFailure:
        """Errors cross to the owner as plain text; the stack trace stays in this process's log."""
        try:
            return step()
        except BatonError as error:
            return ProgramFailure(error.message, is_mistake=isinstance(error, (ConfigError, CheckpointError)))
        except Exception as error:
            logging.getLogger(__name__).exception("the program failed")
            return ProgramFailure(f"{type(error).__name__}: {error}")


class _LineHandler(logging.Handler):
    """Hands each record's message on as a line."""

    def __init__(self, put: Callable[[str], None]) -> None:
        super().__init__(level=logging.WARNING)
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        self._put(f"{record.levelname.lower()}: {self.format(record)}")


def send_logs_to(put: Callable[[str], None], name: str, log_dir: str | None) -> None:
    """Sends this process's warnings to the operator as lines; with a folder, everything from INFO on also goes to a
    file."""
    root = logging.getLogger()
    root.addHandler(_LineHandler(put))
    root.setLevel(logging.INFO)
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(Path(log_dir) / f"{name}.log", encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        root.addHandler(to_file)


class HostedProcess:
    """The owner's end of one Process actor."""

    def __init__(
        self,
        module: str,
        name: str,
        report: Callable[[str], None],
        *,
        bundle: Mapping[str, float],
        strategy: Strategy,
        log_dir: str | None,
    ) -> None:
        self.name = name
        actor_class = ray.remote(Process).options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            max_concurrency=_THREADS,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        self._actor: Any = actor_class.remote(module, name, log_dir)
        self._exit: ExitOfLocalProcess | None = None
        self._report = report
        self._relay = asyncio.create_task(self._relay_lines())
        self._ended: asyncio.Task[str] | None = None

    async def locate(self) -> NodePlacement:
        """Returns where Ray placed it; waits until there is room."""
        place: NodePlacement = await self._ask(self._actor.locate.remote())
        if place.host == ray.util.get_node_ip_address() and sys.platform == "linux":
            self._exit = ExitOfLocalProcess(place.pid)
        return place

    async def prepare(self, settings_json: str) -> str:
        return await self._outcome(self._actor.prepare.remote(settings_json))

    async def start(self) -> str:
        """Returns the program's card; from then on `ended` watches it."""
        card = await self._outcome(self._actor.start.remote())
        self._ended = asyncio.create_task(self._watch())
        return card

    async def ended(self) -> str:
        """Waits for the end of the program or of its process; returns why."""
        assert self._ended is not None, "only a started program ends"
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Asks the program to end and gives it `grace_s`; its process ends either way."""
        if self._ended is not None and not self._ended.done():
            # Not awaited: a process that is frozen never answers.
            self._actor.stop.remote()
            await asyncio.wait([self._ended], timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process at once, also one that no longer answers; returns when it is gone (on this node)."""
        self._relay.cancel()
        ray.kill(self._actor, no_restart=True)
        if self._ended is not None:
            await asyncio.wait([self._ended], timeout=_KILL_S)
        if self._exit is not None:
            await self._exit.force()

    async def _watch(self) -> str:
        try:
            failure: ProgramFailure | None = await self._actor.wait.remote()
        except RayError:
            return f"{self.name} died"
        return f"{self.name} failed: {failure.message}" if failure else f"{self.name} ended"

    async def _relay_lines(self) -> None:
        with contextlib.suppress(RayError):
            while True:
                for line in await self._actor.lines.remote():
                    self._report(line)

    async def _outcome(self, reference: Awaitable[str | ProgramFailure]) -> str:
        outcome: str | ProgramFailure = await self._ask(reference)
        if isinstance(outcome, ProgramFailure):
            raise StartFailed(outcome.message, is_mistake=outcome.is_mistake)
        return outcome

    async def _ask(self, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except RayError as error:
            last_line = str(error).strip().splitlines()[-1].strip()
            raise StartFailed(f"{self.name} died while it started: {last_line}") from error


class ExitOfLocalProcess:
    """A process of this machine, held by a descriptor, so that a number used again never hits a stranger. Linux."""

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = -1

    async def force(self) -> None:
        """Waits a moment for an end that is under way, then kills; returns when the process is gone."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, gone.set)
        waiting = asyncio.create_task(gone.wait())
        try:
            done, _ = await asyncio.wait([waiting], timeout=_LEAVE_S)
            if not done:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                await asyncio.wait([waiting], timeout=_KILL_S)
        finally:
            waiting.cancel()
            loop.remove_reader(descriptor)
            os.close(descriptor)
