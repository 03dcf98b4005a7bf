"""The router as a program: an event loop on a thread of its own, behind `cluster.program.Program`.

create (reads the model folder) -> prepare -> start -> wait; stop from any thread drains and ends it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from concurrent.futures import Future

from cluster.program import Report
from cluster.settings import RouterSettings
from router.server import RouterServer


def create(settings_json: str, report: Report) -> RouterProgram:
    """Raises TypeError for a setting that does not exist."""
    return RouterProgram(RouterSettings.from_json(settings_json), report)


class RouterProgram:
    """One router. A failed start has ended it; `wait` then returns at once."""

    def __init__(self, settings: RouterSettings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._card: Future[str] = Future()
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_stopping = threading.Event()

    def prepare(self) -> str:
        return "{}"

    def start(self) -> str:
        """Blocks until clients can connect; raises CheckpointError or ConfigError."""
        threading.Thread(target=self._run, name="router", daemon=True).start()
        return self._card.result()

    def wait(self) -> None:
        self._ended.result()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._loop is not None and self._stop is not None and not self._ended.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended since
                self._loop.call_soon_threadsafe(self._stop.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._card.done():
                self._card.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = RouterServer(self._settings, self._report)
        try:
            address, control_address = await server.start()
            card = {"address": address, "control_address": control_address, "pid": os.getpid()}
            card["http_address"] = server.http_address
            self._card.set_result(json.dumps(card))
            if not self._is_stopping.is_set():
                await self._stop.wait()
        finally:
            await server.stop()
