"""Ray as a host of programs: a thin actor that runs one in its own process, and the handles to such processes.

The actor names its program by module (`worker.program`, `router.program`) and imports it in its own process, so that
nothing here, nor in the controller's process, loads what a program needs. Everything between an actor and its
controller is a string or a small record. No request passes through an actor: once a program serves, its actor only
waits for its end. Actors are detached: they outlive the controller that made them, and tell the next one who they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.errors import BatonError, CheckpointError, ConfigError, IncompatibleProtocol
from cluster.program import MOST_LOG_BYTES, Program, import_behind
from cluster.protocol import check_protocol, spoken
from controller.adoption import FoundProcess, NodePlacement, ProcessIdentity
from controller.events import ProgressBatch, ProgressEvent, ProgressKind, ProgressLog
from controller.ray_namespace import RayNamespace
from controller.supervisor import StartFailed

Strategy = PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy

_PR_SET_PDEATHSIG = 1
_LEAVE_S = 1.0
"""Seconds that a process which Ray ends may take, before it is killed."""
_KILL_S = 5.0
_DEATHS = 3
_OWNER_S = 0.5
"""An owner is given up when Ray says so as often in a row, at that interval."""


def gpu_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Options of an actor that has a GPU: it sees the node's other GPUs, too, since what a worker maps or copies of
    another one's memory lies there. Ray would hide them, and says which one is the actor's own (`gpu_number`)."""
    if not bundle.get("GPU"):
        return {}
    return {"runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}}


def gpu_number(assigned: Sequence[int | str], visible: str | None) -> int | None:
    """The number, as CUDA counts, of the one GPU that Ray has assigned; None where it is not one.

    Ray names GPUs as `visible`, CUDA_VISIBLE_DEVICES, does where it is set, and CUDA counts those that stand there.
    """
    if len(assigned) != 1:
        return None
    name = str(assigned[0])
    names = [each.strip() for each in visible.split(",")] if visible else []
    return names.index(name) if name in names else int(name) if name.isdigit() and not names else None


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it (Ray's raylet) is gone, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True)
class ProgramFailure:
    """The failure of a program."""

    message: str
    is_mistake: bool = False
    """True when the configuration or the checkpoint is to blame."""


class Process:
    """The actor: hosts one program for its whole life, in threads; any number of calls is answered at one time.

    `owner`: the controller's handle, where the process is to end when Ray gives that up; None: it stays until told."""

    def __init__(self, module: str, identity: ProcessIdentity, log_dir: str | None, owner: Any = None) -> None:
        die_with_parent()
        self._module = module
        self._identity = identity
        self._program: Program | None = None
        self._settings = ""
        self._card = ""
        self._log = ProgressLog()
        self._loop = asyncio.get_running_loop()
        self._tasks = set() if owner is None else {self._loop.create_task(_end_with(owner), name="end with the owner")}
        send_logs_to(self._report, identity.name, log_dir)

    async def locate(self) -> NodePlacement:
        gpu = gpu_number(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return NodePlacement(ray.util.get_node_ip_address(), os.getpid(), spoken(), gpu)

    async def describe(self) -> FoundProcess:
        """Identifies this process to a controller that did not make it."""
        return FoundProcess(
            self._identity,
            await self.locate(),
            self._settings,
            self._card,
            self._log.last_sequence,
            ray.util.get_current_placement_group(),
        )

    async def prepare(self, settings_json: str) -> str | ProgramFailure:
        """Creates and prepares the program; what it returns is described in `cluster.program`."""
        self._settings = settings_json
        return await self._guard(lambda: self._create(settings_json).prepare())

    async def start(self) -> str | ProgramFailure:
        """Returns the program's card; `news` says later how it ended."""
        outcome = await self._guard(lambda: self._known().start())
        if isinstance(outcome, str):
            self._card = outcome
            self._tasks.add(self._loop.create_task(self._wait(), name="wait for the program"))
        return outcome

    async def stop(self) -> None:
        if self._program is not None:
            self._program.stop()

    async def news(self, after: int) -> ProgressBatch:
        """Waits for lines of progress or warnings after that number; one of the kind `failed` says that the program
        has ended, and why."""
        return await self._log.after(after)

    async def _wait(self) -> None:
        def until_ended() -> str:
            self._known().wait()
            return ""

        outcome = await self._guard(until_ended)
        self._card = ""
        how = f"failed: {outcome.message}" if isinstance(outcome, ProgramFailure) else "ended"
        self._add("failed", f"{self._identity.name} {how}")

    def _report(self, line: str) -> None:
        """From any thread, for as long as the loop runs."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._add, "progress", line)

    def _add(self, kind: ProgressKind, text: str) -> None:
        self._log.add(ProgressEvent(kind, self._identity.name, text))

    def _create(self, settings_json: str) -> Program:
        program: Program = import_behind(self._module).create(settings_json, self._report)
        self._program = program
        return program

    def _known(self) -> Program:
        if self._program is None:
            raise RuntimeError("prepare comes before start and wait")
        return self._program

    @staticmethod
    async def _guard(step: Callable[[], str]) -> str | ProgramFailure:
        """Runs it in a thread. Errors cross to the controller as plain text; the stack trace stays in this process's
        log."""
        try:
            return await asyncio.to_thread(step)
        except BatonError as error:
            return ProgramFailure(error.message, is_mistake=isinstance(error, (ConfigError, CheckpointError)))
        except Exception as error:
            logging.getLogger(__name__).exception("the program failed")
            return ProgramFailure(f"{type(error).__name__}: {error}")


async def _end_with(owner: Any) -> None:
    """Ends this process when Ray has given up the owner: not while it is started again."""
    num_deaths = 0
    while num_deaths < _DEATHS:
        try:
            await owner.hold.remote()
        except ActorDiedError:
            num_deaths += 1  # said of a call that was under way, too, while the actor is about to be started again
        except RayError:
            num_deaths = 0
        await asyncio.sleep(_OWNER_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _LineHandler(logging.Handler):
    """Hands each record's message on as a line."""

    def __init__(self, put: Callable[[str], None]) -> None:
        super().__init__(level=logging.WARNING)
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        self._put(f"{record.levelname.lower()}: {self.format(record)}")


def send_logs_to(put: Callable[[str], None], name: str, log_dir: str | None) -> None:
    """Sends this process's warnings to the operator as lines; with a folder, everything from INFO on also goes to a
    file, which becomes NAME.1 when it is full, in the place of the one before."""
    root = logging.getLogger()
    root.addHandler(_LineHandler(put))
    root.setLevel(logging.INFO)
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        path = Path(log_dir) / f"{name}.log"
        to_file = RotatingFileHandler(path, maxBytes=MOST_LOG_BYTES, backupCount=1, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        root.addHandler(to_file)


@dataclass(frozen=True)
class Hosting:
    """The way in which the processes of one cluster are hosted. `config_version` returns the version of the
    configuration now; `owner`: see `Process`; `token`: what they show one another."""

    namespace: RayNamespace
    log_dir: str | None
    config_version: Callable[[], int]
    owner: Any = None
    token: str = ""

    def start(
        self,
        module: str,
        identity: ProcessIdentity,
        report: Callable[[str], None],
        *,
        bundle: Mapping[str, float],
        strategy: Strategy,
    ) -> HostedProcess:
        actor_class = ray.remote(Process).options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=strategy,
            **gpu_options(bundle),
            **self.namespace.actor_options(identity),
        )
        return HostedProcess(actor_class.remote(module, identity, self.log_dir, self.owner), identity.name, report)

    @staticmethod
    def adopt(found: FoundProcess, report: Callable[[str], None]) -> HostedProcess:
        return HostedProcess(found.actor, found.identity.name, report, found)


class HostedProcess:
    """The controller's end of one Process actor. `found`: one that serves already."""

    def __init__(self, actor: Any, name: str, report: Callable[[str], None], found: FoundProcess | None = None) -> None:
        self.name = name
        self._actor = actor
        self._exit: ExitOfLocalProcess | None = None
        self._report = report
        self._is_started = found is not None
        self._ended = asyncio.create_task(self._follow(0 if found is None else found.num_lines))
        if found is not None:
            self._hold(found.placement)

    async def locate(self) -> NodePlacement:
        """Returns where Ray placed it; waits until there is room. Raises StartFailed for one that this controller does
        not understand, before it is given settings."""
        place: NodePlacement = await self._ask(self._actor.locate.remote())
        self._hold(place)
        try:
            check_protocol(self.name, place.protocol, "this controller")
        except IncompatibleProtocol as error:
            raise StartFailed(error.message, is_mistake=True) from error
        return place

    async def prepare(self, settings_json: str) -> str:
        return await self._outcome(self._actor.prepare.remote(settings_json))

    async def start(self) -> str:
        """Returns the program's card; from then on `ended` watches it."""
        card = await self._outcome(self._actor.start.remote())
        self._is_started = True
        return card

    async def ended(self) -> str:
        """Waits for the end of the program or of its process; returns why."""
        assert self._is_started, "only a started program ends"
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Asks the program to end and gives it `grace_s`; its process ends either way."""
        if self._is_started and not self._ended.done():
            # Not awaited: a process that is frozen never answers.
            self._actor.stop.remote()
            await asyncio.wait([self._ended], timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process at once, also one that no longer answers; returns when it is gone (on this node)."""
        ray.kill(self._actor, no_restart=True)
        if self._is_started:
            await asyncio.wait([self._ended], timeout=_KILL_S)
        self._ended.cancel()
        if self._exit is not None:
            await self._exit.force()

    def _hold(self, place: NodePlacement) -> None:
        if place.host == ray.util.get_node_ip_address() and sys.platform == "linux":
            self._exit = ExitOfLocalProcess(place.pid)

    async def _follow(self, after: int) -> str:
        """Reports its lines until it ends; returns why it did."""
        try:
            while True:
                batch: ProgressBatch = await self._actor.news.remote(after)
                for event in batch.events:
                    if event.kind == "failed":
                        return event.text
                    self._report(event.text)
                after = batch.last
        except RayError:
            return f"{self.name} died"

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
