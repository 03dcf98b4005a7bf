"""The store in a file of SQLite, which the routers of one machine share: logs that outlive the process that wrote them.

    a batch of writes -> one transaction of a few statements, each for the whole batch

The file (`cluster.sqlite_file`) is never synced: what was committed survives every process, but not a loss of power, so
a file of an earlier boot is emptied. It is bounded in records and bytes, and a log ends `ttl_s` after its last write.
Knows no time limit: the guard has that.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cluster.sqlite_file import SqliteFile, remove_file
from cluster.state import Claim, Log, MemoryStore, Outcome, Store, Write, judge

MOST_RECORDS = 16_384
"""Logs in the file; one more is refused (FULL)."""
MOST_BYTES = 512 * 1024 * 1024
"""Size of the file from which on no log is begun; SQLite refuses every write at twice that."""
CLEAN_EVERY_S = 5.0
"""Interval at which logs that have ended are removed."""
_PAGE_BYTES = 4096
_WAL_BYTES = 16 * 1024 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS machine (boot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS logs (
  key TEXT PRIMARY KEY, owner TEXT NOT NULL, epoch INTEGER NOT NULL, number INTEGER NOT NULL, ends_at REAL NOT NULL)
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
  key TEXT NOT NULL, epoch INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (key, epoch, number)) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS end_of_log AFTER DELETE ON logs BEGIN DELETE FROM entries WHERE key = OLD.key; END;
"""
# Each statement gets a whole batch as one JSON text: every step of a statement gives up Python's lock and waits for it.
_HELD = """
SELECT json_group_array(json_array(key, owner, epoch, number)) FROM logs
WHERE key IN (SELECT value FROM json_each(?)) AND ends_at > ?
"""
_EMPTY = "DELETE FROM entries WHERE key IN (SELECT value FROM json_each(?))"
_PUT = """
INSERT INTO logs (key, owner, epoch, number, ends_at)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
  json_extract(value, '$[3]'), json_extract(value, '$[4]') FROM json_each(?) WHERE true
ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, epoch = excluded.epoch, number = excluded.number,
  ends_at = excluded.ends_at
"""
_ADD = """
INSERT INTO entries (key, epoch, number, data)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
  substr(?2, json_extract(value, '$[3]'), json_extract(value, '$[4]')) FROM json_each(?1)
"""
"""All data in one blob; each entry has the position of its first byte, from 1 on, and their number."""
_FILL = "SELECT (SELECT count(*) FROM logs), (SELECT page_count FROM pragma_page_count), freelist_count "
_FILL += "FROM pragma_freelist_count"
_CLAIMED = "key = ? AND owner = ? AND epoch = ?"


class FileStore:
    """`~` in `path` is the home directory. Instants are on the machine's monotonic clock, which its processes share."""

    outlives_process = True

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_records: int = MOST_RECORDS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._clock = clock
        self._most_records = most_records
        self._most_bytes = most_bytes
        self._file = SqliteFile(path, self._prepare, name=f"the journal {path}", is_disposable=True)
        self._cleaned_at = -CLEAN_EVERY_S

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        return await self._file.run(lambda db: self._write(db, writes))

    async def read(self, key: str) -> Log | None:
        def work(db: sqlite3.Connection) -> Log | None:
            query = "SELECT owner, epoch, number FROM logs WHERE key = ? AND ends_at > ?"
            row = db.execute(query, (key, self._clock())).fetchone()
            if row is None:
                return None
            rows = db.execute("SELECT data FROM entries WHERE key = ? ORDER BY epoch, number", (key,)).fetchall()
            return Log(Claim(row[0], row[1]), row[2], tuple(bytes(data) for (data,) in rows))

        return await self._file.run(work)

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        now = self._clock()
        values = (wanted.owner, wanted.epoch, now + ttl_s, key, held.owner, held.epoch, now)
        query = f"UPDATE logs SET owner = ?, epoch = ?, number = 0, ends_at = ? WHERE {_CLAIMED} AND ends_at > ?"
        return await self._file.run(lambda db: db.execute(query, values).rowcount == 1)

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        values = [(key, claim.owner, claim.epoch) for key, claim in keys]
        await self._file.run(lambda db: db.executemany(f"DELETE FROM logs WHERE {_CLAIMED}", values))

    async def probe(self) -> None:
        await self._file.run(self._clean)

    async def reset(self) -> None:
        await self._file.reset()

    async def close(self) -> None:
        """A second one does nothing."""
        await self._file.close()

    def _write(self, db: sqlite3.Connection, writes: Sequence[Write]) -> list[Outcome]:
        now = self._clock()
        if now - self._cleaned_at >= CLEAN_EVERY_S:
            self._clean(db)
        (found,) = db.execute(_HELD, (_json({write.key for write in writes}), now)).fetchone()
        held = {key: Log(Claim(owner, epoch), number, ()) for key, owner, epoch, number in json.loads(found)}
        num_free = self._num_free(db) if any(write.key not in held for write in writes) else 0
        accepted: list[Write] = []
        outcomes = []
        for write in writes:
            outcome = judge(held.get(write.key), write)
            if outcome is Outcome.DONE and write.key not in held:
                num_free -= 1
                outcome = outcome if num_free >= 0 else Outcome.FULL
            if outcome is Outcome.DONE:
                held[write.key] = Log(write.claim, write.number, ())
                accepted.append(write)
            outcomes.append(outcome)
        self._store(db, accepted, now)
        return outcomes

    def _store(self, db: sqlite3.Connection, writes: Sequence[Write], now: float) -> None:
        """Stores writes that were accepted, in their order."""
        last_whole = {write.key: number for number, write in enumerate(writes) if write.is_whole}
        if last_whole:
            db.execute(_EMPTY, (_json(last_whole),))
        rows = {w.key: (w.key, w.claim.owner, w.claim.epoch, w.number, now + w.ttl_s) for w in writes}
        if rows:
            db.execute(_PUT, (_json(rows.values()),))
        entries, parts, at = [], [], 1
        for number, write in enumerate(writes):
            if write.data and number >= last_whole.get(write.key, 0):
                entries.append((write.key, write.claim.epoch, write.number, at, len(write.data)))
                parts.append(write.data)
                at += len(write.data)
        if entries:
            db.execute(_ADD, (_json(entries), b"".join(parts)))

    def _num_free(self, db: sqlite3.Connection) -> int:
        """Returns how many logs may still be begun."""
        fill: tuple[int, int, int] = db.execute(_FILL).fetchone()
        num_records, num_pages, num_unused = fill
        is_full = (num_pages - num_unused) * _PAGE_BYTES >= self._most_bytes
        return 0 if is_full else self._most_records - num_records

    def _clean(self, db: sqlite3.Connection) -> None:
        self._cleaned_at = self._clock()
        db.execute("DELETE FROM logs WHERE ends_at <= ?", (self._cleaned_at,))

    def _prepare(self, db: sqlite3.Connection) -> None:
        for pragma in (
            f"page_size = {_PAGE_BYTES}",
            "journal_mode = WAL",
            "synchronous = OFF",
            f"journal_size_limit = {_WAL_BYTES}",
            f"max_page_count = {2 * self._most_bytes // _PAGE_BYTES}",
        ):
            db.execute(f"PRAGMA {pragma}").close()
        db.executescript(_SCHEMA)
        _empty_after_boot(db)


def open_store(where: str | None) -> Store:
    """The store at a redis:// or rediss:// URL, or in a file, opened at the first call; None: in memory."""
    if where is None:
        return MemoryStore()
    if not where.startswith(("redis://", "rediss://")):
        return FileStore(where)
    from cluster.redis_store import RedisStore

    return RedisStore(where)


def remove(path: str | Path) -> None:
    """Removes a journal at its cluster's end. Whoever still has it open begins another one."""
    remove_file(Path(path).expanduser())


def _empty_after_boot(db: sqlite3.Connection) -> None:
    """Instants of an earlier boot mean nothing, and what it wrote may not be whole."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    db.execute("BEGIN IMMEDIATE")
    with db:
        if db.execute("SELECT boot FROM machine").fetchall() != [(boot,)]:
            for table in ("logs", "entries", "machine"):
                db.execute(f"DELETE FROM {table}")
            db.execute("INSERT INTO machine VALUES (?)", (boot,))


def _json(values: Iterable[object]) -> str:
    return json.dumps(list(values), separators=(",", ":"))
