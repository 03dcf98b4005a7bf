"""The batch stores: what holds for a file of SQLite, and for one in memory, holds for Redis."""

from __future__ import annotations

import asyncio
import json
import stat
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.redis_server import RedisServer, running_redis
from cluster.state import StoreAway
from router.batches import redis_store
from router.batches.redis_store import RedisBatchStore
from router.batches.sqlite_store import SqliteStore
from router.batches.store import ORPHAN_S, BatchClaim, BatchStore, LineAnswer, StoredRecord, TenantLimits

LATER = 4e9
LONG_S, SHORT_S = 60.0, 0.05


def record(record_id: str, tenant: str = "acme", **fields: object) -> StoredRecord:
    kind = "file" if record_id.startswith("file") else "batch"
    return StoredRecord(
        **{"kind": kind, "record_id": record_id, "tenant": tenant, "data": b"{}", "ends_at": LATER} | fields
    )  # type: ignore[arg-type]


def maker(kind: str, request: pytest.FixtureRequest, folder: Path) -> Callable[[], BatchStore]:
    """Called in the test's own event loop. Those of one test, but for memory, are the same store."""
    if kind == "memory":
        return lambda: SqliteStore(None)
    if kind == "file":
        return lambda: SqliteStore(str(folder / "new" / "batches.db"))
    server: RedisServer = request.getfixturevalue("redis_of_session")
    prefix = f"{{{uuid.uuid4().hex}}}:"
    return lambda: RedisBatchStore(server.url, prefix)


@pytest.fixture(params=["memory", "file", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BatchStore]:
    return maker(request.param, request, tmp_path)


@pytest.fixture(params=["file", "redis"])
def make_shared(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BatchStore]:
    """Of those that outlive a process."""
    return maker(request.param, request, tmp_path)


async def test_a_record_is_found_by_its_tenant_only(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    mine = record("file-1", data=b'{"a":"\0\xc3\xa9"}', ends_at=1795358180.25)
    await store.add(mine)
    assert await store.find("file", "acme", "file-1") == mine
    assert await store.find("file", "other", "file-1") is None
    assert await store.find("batch", "acme", "file-1") is None
    assert not await store.remove("file", "other", "file-1")
    assert await store.remove("file", "acme", "file-1") and not await store.remove("file", "acme", "file-1")
    assert await store.find("file", "acme", "file-1") is None
    await store.close()


async def test_pages_follow_the_order_in_which_records_came(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    for number in range(5):
        await store.add(record(f"file-{number}"))
        await store.add(record(f"file-other-{number}", "other"))
    await store.add(record("file-1"))  # once more, in its place

    async def ids(after: str | None, limit: int, is_ascending: bool) -> list[str] | None:
        page = await store.page("file", "acme", after=after, limit=limit, is_ascending=is_ascending)
        return None if page is None else [each.record_id for each in page]

    assert await ids(None, 3, True) == ["file-0", "file-1", "file-2"]
    assert await ids("file-2", 3, True) == ["file-3", "file-4"]
    assert await ids(None, 2, False) == ["file-4", "file-3"]
    assert await ids("file-3", 9, False) == ["file-2", "file-1", "file-0"]
    assert await ids("file-0", 9, False) == [] and await ids("file-other-1", 9, True) is None
    await store.close()


async def test_a_record_is_replaced_by_who_knows_its_version_only(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    await store.add(record("batch_1"))
    assert await store.replace(record("batch_1", data=b"2"))
    assert not await store.replace(record("batch_1", data=b"late"))
    assert not await store.replace(record("batch_1", "other", version=2))
    found = await store.find("batch", "acme", "batch_1")
    assert found is not None and (found.data, found.version) == (b"2", 2)
    assert not await store.replace(record("batch_none"))
    await store.close()


async def test_pieces_are_read_as_they_were_written_and_go_with_their_file(
    make_store: Callable[[], BatchStore],
) -> None:
    store = make_store()
    for number, data in enumerate((b"a\n\0", b"", b"\xff" * 100)):
        await store.put_piece("file-1", number, data)
    await store.add(record("file-1"))
    assert [await store.piece("file-1", number) for number in range(4)] == [b"a\n\0", b"", b"\xff" * 100, None]
    await store.remove("file", "acme", "file-1")
    assert await store.piece("file-1", 0) is None
    await store.close()


async def test_a_batch_is_held_by_one_until_its_time_is_over(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    await store.add(record("batch_1"))
    await store.add(record("batch_2"))
    first, second = await store.claim("a", SHORT_S), await store.claim("b", LONG_S)
    assert first is not None and first[0] == BatchClaim("batch_1", "a", 1) and first[1].record_id == "batch_1"
    assert second is not None and second[0] == BatchClaim("batch_2", "b", 1)
    taken = None
    async with asyncio.timeout(20):
        while taken is None:
            taken = await store.claim("c", LONG_S)
    assert taken[0] == BatchClaim("batch_1", "c", 2)
    assert await store.claim("d", LONG_S) is None
    assert not await store.renew(first[0], LONG_S) and await store.renew(taken[0], LONG_S)
    await store.release(first[0])
    assert await store.claim("d", LONG_S) is None
    await store.release(taken[0])
    again = await store.claim("d", LONG_S)
    assert again is not None and again[0] == BatchClaim("batch_1", "d", 3)
    await store.close()


async def test_batches_of_tenants_that_have_enough_are_left_to_others(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    for number, tenant in enumerate(("a", "a", "b", "c")):
        await store.add(record(f"batch_{number}", tenant))
    found = await store.claim("x", LONG_S, but_of=["a", "c"])
    assert found is not None and found[1].record_id == "batch_2"
    assert await store.claim("x", LONG_S, but_of=["a", "b", "c"]) is None
    found = await store.claim("x", LONG_S, but=["batch_0"])
    assert found is not None and found[1].record_id == "batch_1"
    found = await store.claim("x", LONG_S)
    assert found is not None and found[1].record_id == "batch_0"
    await store.close()


async def test_who_lost_a_batch_writes_nothing_any_more(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    await store.add(record("batch_1"))
    held = await store.claim("a", LONG_S)
    assert held is not None
    assert await store.answer(held[0], LineAnswer(3, True, b"first"))
    await store.release(held[0])
    taken = await store.claim("b", LONG_S)
    assert taken is not None
    assert not await store.answer(held[0], LineAnswer(4, True, b"late"))
    assert not await store.replace(replace(held[1], data=b"late"), held[0])
    assert not await store.put_piece("file-late", 0, b"late", held[0])
    assert not await store.add(record("file-late"), held[0])
    assert await store.piece("file-late", 0) is None and await store.find("file", "acme", "file-late") is None
    await store.close_batch(held[0])
    assert await store.answered("batch_1") == {3}
    assert await store.replace(replace(taken[1], data=b"mine"), taken[0])
    assert await store.answer(taken[0], LineAnswer(4, False, b"mine"))
    assert await store.put_piece("file-mine", 0, b"x", taken[0]) and await store.add(record("file-mine"), taken[0])
    await store.close()


async def test_a_line_has_one_answer_the_first(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    await store.add(record("batch_1"))
    held = await store.claim("a", LONG_S)
    assert held is not None
    reply = [
        LineAnswer(7, True, b"1\0"),
        LineAnswer(2, False, b"x"),
        LineAnswer(11, True, b""),
        LineAnswer(7, False, b"again"),
    ]
    for each in reply:
        assert await store.answer(held[0], each)
    assert await store.counts("batch_1") == (2, 1) and await store.counts("batch_2") == (0, 0)
    assert await store.answered("batch_1") == {2, 7, 11}
    assert await store.answers("batch_1", [11, 7, 5]) == [reply[0], reply[2]]
    assert await store.answers("batch_1", []) == []
    await store.close_batch(held[0])
    assert await store.answered("batch_1") == frozenset() and await store.claim("b", LONG_S) is None
    assert await store.find("batch", "acme", "batch_1") is not None
    await store.close()


async def test_what_is_over_is_told_for_the_sweep(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    await store.add(record("file-1", ends_at=100.0))
    await store.add(record("file-2", ends_at=300.0))
    await store.add(record("batch_1", "other", ends_at=200.0))
    assert {each.record_id for each in await store.ended(250.0, 10)} == {"file-1", "batch_1"}
    assert len(await store.ended(250.0, 1)) == 1
    await store.remove("batch", "other", "batch_1")
    assert await store.replace(record("file-1", ends_at=400.0))
    assert not await store.ended(250.0, 10) and await store.claim("a", LONG_S) is None
    await store.close()


async def test_of_many_who_want_a_batch_one_gets_it(make_shared: Callable[[], BatchStore]) -> None:
    stores = [make_shared() for _ in range(6)]
    for number in range(4):
        await stores[0].add(record(f"batch_{number}"))
    found = await asyncio.gather(*(store.claim(str(n), LONG_S) for n, store in enumerate(stores)))
    claims = [each[0] for each in found if each is not None]
    assert sorted(claim.batch_id for claim in claims) == [f"batch_{number}" for number in range(4)]
    assert await stores[1].find("batch", "acme", "batch_0") is not None
    for store in stores:
        await store.close()


async def test_what_was_kept_is_there_after_a_restart(make_shared: Callable[[], BatchStore]) -> None:
    before = make_shared()
    await before.add(record("batch_1"))
    held = await before.claim("a", SHORT_S)
    assert held is not None and await before.answer(held[0], LineAnswer(1, True, b"x"))
    await before.close()
    after = make_shared()
    assert await after.answered("batch_1") == {1}
    async with asyncio.timeout(20):
        while (found := await after.claim("b", LONG_S)) is None:
            pass
    assert found[0].epoch == 2
    await after.close()


async def test_pieces_whose_writer_has_died_are_dropped(tmp_path: Path) -> None:
    now = [1000.0]
    store = SqliteStore(str(tmp_path / "b.db"), clock=lambda: now[0])
    await store.put_piece("file-lost", 0, b"x")
    await store.put_piece("file-1", 0, b"y")
    await store.add(record("file-1"))
    await store.ended(now[0] + ORPHAN_S - 1, 10)
    assert await store.piece("file-lost", 0) == b"x"
    await store.ended(now[0] + ORPHAN_S, 10)
    assert await store.piece("file-lost", 0) is None and await store.piece("file-1", 0) == b"y"
    await store.close()


async def test_redis_itself_drops_pieces_until_their_file_is_added(redis_of_session: RedisServer) -> None:
    prefix = f"{{{uuid.uuid4().hex}}}:"
    store = RedisBatchStore(redis_of_session.url, prefix)
    await store.put_piece("file-1", 0, b"x")
    assert 0 < await store._client.ttl(f"{prefix}pieces:file-1") <= ORPHAN_S
    await store.add(record("file-1"))
    assert await store._client.ttl(f"{prefix}pieces:file-1") == -1
    await store.close()


async def test_the_file_is_its_owners_only(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "a" / "b.db"))
    await store.add(record("file-1"))
    assert stat.S_IMODE((tmp_path / "a" / "b.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    await store.close()


async def test_a_file_that_cannot_be_used_is_away_until_it_can(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    path.write_bytes(b"this is no database at all, and longer than a header of one" * 50)
    store = SqliteStore(str(path))
    with pytest.raises(StoreAway, match="the file of batches cannot be used"):
        await store.add(record("file-1"))
    path.unlink()
    await store.add(record("file-1"))
    assert await store.find("file", "acme", "file-1") is not None
    await store.close()


async def test_a_redis_that_is_gone_is_away_and_one_that_came_back_empty_has_lost_the_claim() -> None:
    with running_redis() as server:
        store = RedisBatchStore(server.url)
        await store.add(record("batch_1"))
        held = await store.claim("a", LONG_S)
        assert held is not None
        server.kill()
        with pytest.raises(StoreAway):
            await store.renew(held[0], LONG_S)
        server.start()
        assert not await store.renew(held[0], LONG_S)
        assert not await store.answer(held[0], LineAnswer(1, True, b"x"))
        await store.close()


async def test_lines_that_were_begun_count_as_lost_under_later_claims_until_they_end(
    make_store: Callable[[], BatchStore],
) -> None:
    store = make_store()
    await store.add(record("batch_1"))

    async def claimed(ttl_s: float) -> BatchClaim:
        found = await store.claim("a", ttl_s)
        assert found is not None
        return found[0]

    first = await claimed(0.0)
    for number in (1, 2, 3, 4):
        assert await store.begin_line(first, number) and await store.begin_line(first, number)
    await store.end_lines(first, 2)
    assert await store.answer(first, LineAnswer(3, True, b"{}"))
    assert await store.lost_lines(first) == {}, "they run"
    second = await claimed(0.0)
    assert not await store.begin_line(first, 5)
    assert await store.lost_lines(second) == {1: 1, 4: 1}
    assert await store.begin_line(second, 1)
    third = await claimed(LONG_S)
    assert await store.lost_lines(third) == {1: 2, 4: 1}
    await store.end_lines(second)
    assert await store.lost_lines(third) == {1: 1, 4: 1}, "the second one lives"
    assert await store.begin_line(third, 1)
    await store.release(third)
    fourth = await claimed(LONG_S)
    assert await store.lost_lines(fourth) == {1: 1, 4: 1}, "the third one gave it back"
    await store.close_batch(fourth)
    assert await store.lost_lines(fourth) == {}
    await store.close()


LIMITS = TenantLimits(most_bytes=100, most_files=4, most_batches=5, most_open=3)


def upload(number: int, size: int, tenant: str = "acme", kind: str = "upload") -> StoredRecord:
    data = json.dumps({"size_bytes": size}).encode()
    return record(f"file-{tenant}-{number}", tenant, kind=kind, data=data)


async def test_of_uploads_that_come_at_once_as_many_are_taken_as_fit(make_shared: Callable[[], BatchStore]) -> None:
    stores = [make_shared() for _ in range(3)]
    taken = await asyncio.gather(*(stores[n % 3].reserve(upload(n, 40), LIMITS) for n in range(12)))
    assert sum(taken) == 2
    assert await stores[0].reserve(upload(1, 40, "other"), LIMITS), "another tenant has its own"
    assert await stores[1].reserve(upload(20, 20), LIMITS) and not await stores[1].reserve(upload(21, 1), LIMITS)
    for store in stores:
        await store.close()


async def test_what_a_tenant_keeps_is_counted_until_it_is_removed(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    assert await store.reserve(upload(1, 60), LIMITS)
    assert await store.find("file", "acme", "file-acme-1") is None, "its bytes are still being written"
    await store.add(upload(1, 60, kind="file"))
    assert await store.find("file", "acme", "file-acme-1") is not None
    assert [r.record_id for r in await store.page("upload", "acme", after=None, limit=9, is_ascending=True) or ()] == []
    assert not await store.reserve(upload(2, 41), LIMITS) and await store.reserve(upload(2, 40), LIMITS)
    assert await store.remove("upload", "acme", "file-acme-2")
    await store.add(upload(3, 1000, kind="file"))  # the result of a batch is never refused
    assert not await store.reserve(upload(4, 0), LIMITS)
    assert await store.remove("file", "acme", "file-acme-3") and await store.reserve(upload(4, 40), LIMITS)
    assert await store.reserve(upload(5, 0), LIMITS) and await store.reserve(upload(6, 0), LIMITS)
    assert not await store.reserve(upload(7, 0), LIMITS), "four files"
    await store.close()


async def test_a_tenant_has_so_many_open_batches_and_so_many_in_all(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    assert await store.reserve(upload(1, 100), LIMITS)
    assert [await store.reserve(record(f"batch_{n}"), LIMITS) for n in range(4)] == [True, True, True, False]
    assert await store.reserve(record("batch_other", "other"), LIMITS)
    for number in range(4, 6):
        held = await store.claim("a", LONG_S, but_of=["other"])
        assert held is not None
        await store.close_batch(held[0])
        assert await store.reserve(record(f"batch_{number}"), LIMITS)
        assert not await store.reserve(record("batch_more"), LIMITS)
    held = await store.claim("a", LONG_S, but_of=["other"])
    assert held is not None
    await store.close_batch(held[0])
    assert not await store.reserve(record("batch_more"), LIMITS), "five, of which two are open"
    assert await store.remove("batch", "acme", held[0].batch_id)
    assert await store.reserve(record("batch_more"), LIMITS)
    await store.close()


async def test_a_batch_behind_many_that_are_held_is_found(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    for number in range(250):
        await store.add(record(f"batch_{number}", "busy" if number < 240 else "acme"))
    for number in range(5):
        found = await store.claim("a", LONG_S, but_of=["busy"])
        assert found is not None and found[1].record_id == f"batch_{240 + number}"
    await store.close()


async def test_no_script_looks_at_every_batch() -> None:
    """Redis does nothing else while a script runs."""
    scripts = [value for name, value in vars(redis_store).items() if name.isupper() and "redis.call" in str(value)]
    assert len(scripts) >= 9
    assert not [script for script in scripts if "ZRANGE" in script or "for " in script or "KEYS *" in script]
