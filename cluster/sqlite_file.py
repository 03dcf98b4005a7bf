"""A file of SQLite that processes of one machine share, on a thread of its own: each piece of work is one transaction.

The file is written ahead (WAL): what was committed survives the process, and readers do not wait for a writer. It is
opened at the first call, and again after a failure or when somebody has removed it. Only its owner can read it, as it
holds prompts. It keeps the version of the protocol to which its tables belong, and processes that do not speak that
leave it alone. Knows no table.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from cluster import protocol
from cluster.errors import IncompatibleProtocol
from cluster.protocol import check_protocol
from cluster.state import StoreAway

log = logging.getLogger(__name__)

T = TypeVar("T")

_BUSY_S = 5.0
"""Another process may hold the file for so long."""
_AGAIN_S = 0.005


class SqliteFile:
    """`~` in the path is the home directory of the process."""

    def __init__(
        self,
        path: str | None,
        prepare: Callable[[sqlite3.Connection], None],
        *,
        name: str,
        is_disposable: bool = False,
    ) -> None:
        """`path` None: in memory. `prepare` is given each new connection, for its settings and tables. `name` stands in
        errors. `is_disposable`: a file that cannot be read is removed, and begun anew."""
        self._path = None if path is None else Path(path).expanduser()
        self._prepare = prepare
        self._name = name
        self._is_disposable = is_disposable
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """In one transaction. One that was begun ends, also where nobody waits for it any more. Raises StoreAway."""
        return await self._submit(lambda: self._in_transaction(work))

    async def reset(self) -> None:
        """Closes the connection; the next call opens another one."""
        await self._submit(self._disconnect)

    async def close(self) -> None:
        """A second one does nothing."""
        with suppress(StoreAway):
            await self.reset()
        self._thread.shutdown(wait=False)

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        try:
            return asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError as error:  # the thread has ended
            raise StoreAway("the store is closed") from error

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            db = self._connected()
            db.execute("BEGIN IMMEDIATE")
            with db:
                return work(db)
        except (sqlite3.Error, OSError) as error:
            if self._path is not None:
                self._disconnect()
                # It is no database, or not whole: not merely locked or full.
                if self._is_disposable and type(error) is sqlite3.DatabaseError:
                    log.warning("%s cannot be read and is begun anew: %s", self._name, error)
                    remove_file(self._path)
            raise StoreAway(f"{self._name} cannot be used: {type(error).__name__}: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        """The connection to the file that is there now."""
        if self._path is None:
            self._connection = self._connection or self._connect(":memory:")
            return self._connection
        if self._connection is not None:
            with suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == self._inode:
                    return self._connection
            self._disconnect()
        self._connection = self._opened(self._path)
        self._inode = os.stat(self._path).st_ino
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _opened(self, file: Path) -> sqlite3.Connection:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Never opened but by SQLite once it is there: to close it would release the locks that this process has on it.
        with suppress(FileExistsError):
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        os.chmod(file, 0o600)
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                return self._connect(file)
            except sqlite3.OperationalError as error:
                # Of two that change a new file to WAL at one moment, one may be refused at once, whatever the timeout.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                    raise
                time.sleep(_AGAIN_S)

    def _connect(self, file: Path | str) -> sqlite3.Connection:
        db = sqlite3.connect(file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version:
                check_protocol(self._name, f"{version}-{version}", "this process")
            self._prepare(db)
            if not version:
                db.execute(f"PRAGMA user_version = {protocol.OLDEST}").close()
        except IncompatibleProtocol as error:
            db.close()
            raise StoreAway(f"{error.message}; the file is left as it is") from error
        except sqlite3.Error:
            db.close()
            raise
        return db


def remove_file(file: Path) -> None:
    """Removes a file of SQLite with those that stand beside it."""
    for suffix in ("", "-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
