"""The batch store in a file of SQLite, which several routers of one machine may share; or in memory."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence

from cluster.sqlite_file import SqliteFile
from router.batches.store import ORPHAN_S, BatchClaim, Kind, LineAnswer, StoredRecord, TenantLimits

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, record_id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  data BLOB NOT NULL, ends_at REAL NOT NULL, version INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_tenant ON records (kind, tenant, seq);
CREATE INDEX IF NOT EXISTS by_end ON records (ends_at);
CREATE TABLE IF NOT EXISTS pieces (
  file_id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, written_at REAL NOT NULL,
  PRIMARY KEY (file_id, number));
CREATE TABLE IF NOT EXISTS open_batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, batch_id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL DEFAULT '',
  epoch INTEGER NOT NULL DEFAULT 0, held_until REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS answers (
  batch_id TEXT NOT NULL, number INTEGER NOT NULL, is_good INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (batch_id, number));
CREATE TABLE IF NOT EXISTS begun_lines (
  batch_id TEXT NOT NULL, number INTEGER NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY (batch_id, number, epoch));
CREATE TABLE IF NOT EXISTS responses_of (tenant TEXT PRIMARY KEY, num INTEGER NOT NULL, bytes INTEGER NOT NULL);
"""
_SIZE = "json_extract(CAST({}.data AS TEXT), '$.size_bytes')"
_NEW, _OLD = _SIZE.format("NEW"), _SIZE.format("OLD")
_SCHEMA += f"""
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON records WHEN NEW.kind = 'response' BEGIN
  INSERT INTO responses_of VALUES (NEW.tenant, 1, {_NEW})
  ON CONFLICT (tenant) DO UPDATE SET num = num + 1, bytes = bytes + excluded.bytes; END;
CREATE TRIGGER IF NOT EXISTS response_changed AFTER UPDATE OF data ON records WHEN NEW.kind = 'response' BEGIN
  UPDATE responses_of SET bytes = bytes + {_NEW} - {_OLD} WHERE tenant = NEW.tenant; END;
CREATE TRIGGER IF NOT EXISTS response_removed AFTER DELETE ON records WHEN OLD.kind = 'response' BEGIN
  UPDATE responses_of SET num = num - 1, bytes = bytes - {_OLD} WHERE tenant = OLD.tenant; END;
"""
_HOLD = "json_extract(CAST(data AS TEXT), '$.held_until')"
_IS_HELD = f"kind = 'response' AND {_HOLD} > 0"
_SCHEMA += f"CREATE INDEX IF NOT EXISTS by_hold ON records ({_HOLD}) WHERE {_IS_HELD};"
_LONGEST_CLAIM_S = 60.0
"""A claim that would end later is of an earlier boot of the machine, whose monotonic clock was another one."""
_RECORD = "kind, record_id, tenant, data, ends_at, version"
_HELD = "EXISTS (SELECT 1 FROM open_batches WHERE batch_id = ? AND owner = ? AND epoch = ?)"


class SqliteStore:
    """`path` None: in memory. `~` in it is the home directory of the process.

    Claims last by the machine's monotonic clock, which its processes share, and which nobody sets; `clock` is the wall
    clock of what outlives a boot.
    """

    def __init__(
        self,
        path: str | None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._file = SqliteFile(path, _prepare, name="the file of batches")

    async def add(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            if not _is_held(db, claim):
                return False
            _add(db, record)
            return True

        return await self._file.run(work)

    async def reserve(self, record: StoredRecord, limits: TenantLimits) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            if not _has_room(db, record, limits):
                return False
            _add(db, record)
            return True

        return await self._file.run(work)

    async def find(self, kind: Kind, tenant: str, record_id: str) -> StoredRecord | None:
        query = f"SELECT {_RECORD} FROM records WHERE kind = ? AND tenant = ? AND record_id = ?"
        rows = await self._file.run(lambda db: db.execute(query, (kind, tenant, record_id)).fetchall())
        return StoredRecord(*rows[0]) if rows else None

    async def page(
        self, kind: Kind, tenant: str, *, after: str | None, limit: int, is_ascending: bool
    ) -> list[StoredRecord] | None:
        order, beyond = ("ASC", ">") if is_ascending else ("DESC", "<")

        def work(db: sqlite3.Connection) -> list[StoredRecord] | None:
            where, values = "kind = ? AND tenant = ?", [kind, tenant]
            if after is not None:
                found = db.execute(f"SELECT seq FROM records WHERE {where} AND record_id = ?", (*values, after))
                row = found.fetchone()
                if row is None:
                    return None
                where, values = f"{where} AND seq {beyond} ?", [*values, row[0]]
            query = f"SELECT {_RECORD} FROM records WHERE {where} ORDER BY seq {order} LIMIT ?"
            return [StoredRecord(*row) for row in db.execute(query, (*values, limit))]

        return await self._file.run(work)

    async def replace(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        where = "record_id = ? AND tenant = ? AND version = ?"
        values: list[object] = [record.data, record.ends_at, record.record_id, record.tenant, record.version]
        if claim is not None:
            where, values = f"{where} AND {_HELD}", [*values, claim.batch_id, claim.owner, claim.epoch]
        query = f"UPDATE records SET data = ?, ends_at = ?, version = version + 1 WHERE {where}"
        return await self._file.run(lambda db: db.execute(query, values).rowcount == 1)

    async def remove(self, kind: Kind, tenant: str, record_id: str) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            where = "DELETE FROM records WHERE kind = ? AND tenant = ? AND record_id = ?"
            is_gone = db.execute(where, (kind, tenant, record_id)).rowcount == 1
            if is_gone:
                db.execute("DELETE FROM pieces WHERE file_id = ?", (record_id,))
            return is_gone

        return await self._file.run(work)

    async def ended(self, now: float, limit: int) -> Sequence[StoredRecord]:
        query = f"SELECT {_RECORD} FROM records WHERE ends_at <= ? LIMIT ?"
        orphans = "DELETE FROM pieces WHERE written_at <= ? AND file_id NOT IN (SELECT record_id FROM records)"

        def work(db: sqlite3.Connection) -> list[StoredRecord]:
            db.execute(orphans, (now - ORPHAN_S,))
            return [StoredRecord(*row) for row in db.execute(query, (now, limit))]

        return await self._file.run(work)

    async def left(self, now: float, limit: int) -> Sequence[StoredRecord]:
        query = f"SELECT {_RECORD} FROM records INDEXED BY by_hold WHERE {_IS_HELD} AND {_HOLD} <= ? LIMIT ?"
        rows = await self._file.run(lambda db: db.execute(query, (now, limit)).fetchall())
        return [StoredRecord(*row) for row in rows]

    async def put_piece(self, file_id: str, number: int, data: bytes, claim: BatchClaim | None = None) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            if not _is_held(db, claim):
                return False
            db.execute("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?, ?)", (file_id, number, data, self._clock()))
            return True

        return await self._file.run(work)

    async def piece(self, file_id: str, number: int) -> bytes | None:
        query = "SELECT data FROM pieces WHERE file_id = ? AND number = ?"
        row = await self._file.run(lambda db: db.execute(query, (file_id, number)).fetchone())
        return None if row is None else bytes(row[0])

    async def claim(
        self, owner: str, ttl_s: float, *, but_of: Sequence[str] = (), but: Sequence[str] = ()
    ) -> tuple[BatchClaim, StoredRecord] | None:
        tenants, ids = ", ".join("?" * len(but_of)), ", ".join("?" * len(but))

        def work(db: sqlite3.Connection) -> tuple[BatchClaim, StoredRecord] | None:
            now = self._monotonic()  # inside the transaction: no claim that is there was made later
            query = (
                f"SELECT epoch, {_RECORD} FROM open_batches JOIN records ON record_id = batch_id "
                f"WHERE (held_until <= ? OR held_until > ?) AND tenant NOT IN ({tenants}) AND batch_id NOT IN ({ids}) "
                "ORDER BY open_batches.seq LIMIT 1"
            )
            row = db.execute(query, (now, now + _LONGEST_CLAIM_S, *but_of, *but)).fetchone()
            if row is None:
                return None
            record = StoredRecord(*row[1:])
            claim = BatchClaim(record.record_id, owner, row[0] + 1)
            held = "UPDATE open_batches SET owner = ?, epoch = ?, held_until = ? WHERE batch_id = ?"
            db.execute(held, (owner, claim.epoch, now + ttl_s, claim.batch_id))
            return claim, record

        return await self._file.run(work)

    async def renew(self, claim: BatchClaim, ttl_s: float) -> bool:
        return await self._hold_until(claim, self._monotonic() + ttl_s)

    async def release(self, claim: BatchClaim) -> None:
        await self.end_lines(claim)
        await self._hold_until(claim, 0.0)

    async def begin_line(self, claim: BatchClaim, number: int) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            if not _is_held(db, claim):
                return False
            values = (claim.batch_id, number, claim.epoch)
            db.execute("INSERT OR IGNORE INTO begun_lines VALUES (?, ?, ?)", values)
            return True

        return await self._file.run(work)

    async def end_lines(self, claim: BatchClaim, number: int | None = None) -> None:
        query = "DELETE FROM begun_lines WHERE batch_id = ? AND epoch = ? AND number = COALESCE(?, number)"
        await self._file.run(lambda db: db.execute(query, (claim.batch_id, claim.epoch, number)))

    async def lost_lines(self, claim: BatchClaim) -> Mapping[int, int]:
        query = "SELECT number, COUNT(*) FROM begun_lines WHERE batch_id = ? AND epoch < ? GROUP BY number"
        return dict(await self._file.run(lambda db: db.execute(query, (claim.batch_id, claim.epoch)).fetchall()))

    async def close_batch(self, claim: BatchClaim) -> None:
        def work(db: sqlite3.Connection) -> None:
            query = "DELETE FROM open_batches WHERE batch_id = ? AND owner = ? AND epoch = ?"
            if db.execute(query, (claim.batch_id, claim.owner, claim.epoch)).rowcount:
                db.execute("DELETE FROM answers WHERE batch_id = ?", (claim.batch_id,))
                db.execute("DELETE FROM begun_lines WHERE batch_id = ?", (claim.batch_id,))

        await self._file.run(work)

    async def answer(self, claim: BatchClaim, answer: LineAnswer) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            if not _is_held(db, claim):
                return False
            values = (claim.batch_id, answer.number, answer.is_good, answer.data)
            db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", values)
            db.execute("DELETE FROM begun_lines WHERE batch_id = ? AND number = ?", (claim.batch_id, answer.number))
            return True

        return await self._file.run(work)

    async def counts(self, batch_id: str) -> tuple[int, int]:
        query = "SELECT COALESCE(SUM(is_good), 0), COUNT(*) FROM answers WHERE batch_id = ?"
        good, both = await self._file.run(lambda db: db.execute(query, (batch_id,)).fetchone())
        return good, both - good

    async def answered(self, batch_id: str) -> frozenset[int]:
        query = "SELECT number FROM answers WHERE batch_id = ?"
        return frozenset(row[0] for row in await self._file.run(lambda db: db.execute(query, (batch_id,)).fetchall()))

    async def answers(self, batch_id: str, numbers: Sequence[int]) -> list[LineAnswer]:
        if not numbers:
            return []
        query = (
            "SELECT number, is_good, data FROM answers WHERE batch_id = ? AND number BETWEEN ? AND ? ORDER BY number"
        )
        wanted, bounds = frozenset(numbers), (batch_id, min(numbers), max(numbers))
        rows = await self._file.run(lambda db: db.execute(query, bounds).fetchall())
        return [LineAnswer(number, bool(is_good), bytes(data)) for number, is_good, data in rows if number in wanted]

    async def close(self) -> None:
        """A second one does nothing."""
        await self._file.close()

    async def _hold_until(self, claim: BatchClaim, until: float) -> bool:
        query = "UPDATE open_batches SET held_until = ? WHERE batch_id = ? AND owner = ? AND epoch = ?"
        values = (until, claim.batch_id, claim.owner, claim.epoch)
        return await self._file.run(lambda db: db.execute(query, values).rowcount == 1)


def _is_held(db: sqlite3.Connection, claim: BatchClaim | None) -> bool:
    """True without a claim: none is needed."""
    if claim is None:
        return True
    return bool(db.execute(f"SELECT {_HELD}", (claim.batch_id, claim.owner, claim.epoch)).fetchone()[0])


def _add(db: sqlite3.Connection, record: StoredRecord) -> None:
    values = (record.kind, record.record_id, record.tenant, record.data, record.ends_at, record.version)
    db.execute(
        f"INSERT INTO records ({_RECORD}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (record_id) DO UPDATE SET "
        "kind = excluded.kind, data = excluded.data, ends_at = excluded.ends_at, version = excluded.version",
        values,
    )
    if record.kind == "batch":
        db.execute("INSERT OR IGNORE INTO open_batches (batch_id) VALUES (?)", (record.record_id,))


def _has_room(db: sqlite3.Connection, record: StoredRecord, limits: TenantLimits) -> bool:
    if record.kind == "batch":
        of_tenant = "FROM records LEFT JOIN open_batches ON record_id = batch_id WHERE kind = 'batch' AND tenant = ?"
        num, num_open = db.execute(f"SELECT COUNT(*), COUNT(batch_id) {of_tenant}", (record.tenant,)).fetchone()
        return bool(num < limits.most_batches and num_open < limits.most_open)
    size = "COALESCE(SUM(json_extract(CAST(data AS TEXT), '$.size_bytes')), 0)"
    query = f"SELECT COUNT(*), {size} FROM records WHERE kind IN ('file', 'upload') AND tenant = ?"
    if record.kind == "response":  # which are many, and come with every call: they are not counted anew
        query = "SELECT COALESCE(SUM(num), 0), COALESCE(SUM(bytes), 0) FROM responses_of WHERE tenant = ?"
    num, num_bytes = db.execute(query, (record.tenant,)).fetchone()
    return bool(num < limits.most_files and num_bytes + record.size_bytes <= limits.most_bytes)


def _prepare(db: sqlite3.Connection) -> None:
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL"):
        db.execute(f"PRAGMA {pragma}").close()
    db.executescript(_SCHEMA)
