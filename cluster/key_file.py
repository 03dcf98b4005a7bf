"""The keys file while a process runs: a changed file takes effect within about a second, a broken one changes nothing.

    load at the start (a mistake is a ConfigError) -> follow: stat, and read again what differs

Only `stat` runs on the event loop; a changed file is read and checked on the executor.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import Executor
from pathlib import Path

from cluster.api_keys import ApiKey, load_keys
from cluster.auth import KeyRing
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5

Stamp = tuple[int, int, int, int]
"""What differs between two states of a file: its inode, its length, when its text was changed, and when anything of it
was, its owner and mode among them."""


class KeyFile:
    """The keys of one file, kept in `ring`."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be read or is wrong."""
        self._path = Path(path)
        self._stamp = self._look()
        """Of what is in `ring`: a file that could not be taken up is read again."""
        self._problem = ""
        """What was said last of a file that is not taken up; it is said once."""
        self.ring = KeyRing(load_keys(path))

    async def follow(self, executor: Executor | None = None) -> None:
        """Until it is cancelled. `executor` None: the event loop's own."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.refresh(executor)
            except Exception as error:  # whatever it is, the file is looked at again
                self._say(f"{type(error).__name__}: {error}")

    async def refresh(self, executor: Executor | None) -> bool:
        """Takes the file up if it has changed; True when it did."""
        stamp = self._look()
        if stamp == self._stamp:
            self._problem = ""
            return False
        try:
            keys: tuple[ApiKey, ...] = await asyncio.get_running_loop().run_in_executor(executor, load_keys, self._path)
        except ConfigError as error:
            self._say(error.message)
            return False
        self._stamp, self._problem = stamp, ""
        self.ring.replace(keys)
        log.info("%d API keys from now on", len(keys))
        return True

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.error("the API keys stay as they were: %s", problem)

    def _look(self) -> Stamp | None:
        """None: it is not there."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
