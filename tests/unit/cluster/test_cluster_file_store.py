"""The store in a file: what several processes write to it, what a killed one leaves, and that it is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster import file_store, protocol
from cluster.file_store import FileStore, remove
from cluster.state import Claim, Log, MemoryStore, Outcome, Store, StoreAway, Write

A, B = Claim("a", 1), Claim("b", 2)
TTL_S = 60.0
WRITER = """
import asyncio, sys
from cluster.file_store import FileStore
from cluster.state import Claim, Write

async def main():
    store, claim = FileStore(sys.argv[1]), Claim(sys.argv[2], 1)
    number = 0
    while True:
        number += 1
        data = number.to_bytes(4) * 16
        keys = [f"{sys.argv[2]}-{i}" for i in range(8)]
        outcomes = await store.write([Write(key, claim, number, data, number == 1, 60.0) for key in keys])
        assert {outcome.name for outcome in outcomes} == {"DONE"}, outcomes
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "private" / "journal.db"


def write(key: str, number: int, data: bytes = b"x", *, claim: Claim = A, is_whole: bool = False) -> Write:
    return Write(key, claim, number, data, is_whole, TTL_S)


async def test_nobody_else_can_read_it_and_its_end_leaves_nothing(path: Path) -> None:
    store = FileStore(str(path))
    await store.write([write("k", 1, is_whole=True)])
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(("journal.db", "journal.db-wal", "journal.db-shm"), 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await store.close()
    await store.close()
    with pytest.raises(StoreAway):
        await store.read("k")
    remove(path)
    assert list(path.parent.iterdir()) == []
    remove(path)


async def test_what_a_killed_process_had_written_is_there_to_the_last_write(path: Path) -> None:
    """Two of them write at once, each is killed wherever it is, and every batch is there whole or not at all."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    told = []
    for writer in writers:
        assert writer.stdout is not None
        lines = iter(writer.stdout)
        while int(next(lines)) < 100:
            pass
        writer.send_signal(signal.SIGKILL)
        told.append(max([100, *map(int, (line for line in lines if line.endswith("\n")))]))
        assert writer.wait(20) == -signal.SIGKILL
        writer.stdout.close()
    store = FileStore(str(path))
    for name, last in zip(("one", "two"), told, strict=True):
        found = [await store.read(f"{name}-{i}") for i in range(8)]
        assert len({log.number for log in found if log is not None}) == 1, "a batch was stored in part"
        for log in found:
            assert log is not None and log.claim == Claim(name, 1) and log.number >= last
            assert list(log.entries) == [n.to_bytes(4) * 16 for n in range(1, log.number + 1)]
        assert await store.take(f"{name}-0", Claim(name, 1), Claim("next", 2), TTL_S), "its lock was left behind"
    await store.close()


def version_of(path: Path, version: int | None = None) -> int:
    """The version of the protocol that a file is marked with, which is changed if another is given."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        if version is not None:
            db.execute(f"PRAGMA user_version = {version}").close()
        return int(db.execute("PRAGMA user_version").fetchone()[0])


async def test_a_file_of_another_protocol_is_refused_by_name_and_left_as_it_is(path: Path) -> None:
    store = FileStore(str(path))
    await store.write([write("k", 1, is_whole=True)])
    await store.close()
    assert version_of(path) == protocol.OLDEST
    version_of(path, protocol.VERSION + 1)
    before = path.read_bytes()
    store = FileStore(str(path))
    for _ in range(2):
        with pytest.raises(
            StoreAway, match=r"journal.db speaks protocol 2; this process speaks 1: .*; the file is left"
        ):
            await store.read("k")
    await store.close()
    assert path.read_bytes() == before
    version_of(path, 0)  # from before files were marked
    store = FileStore(str(path))
    assert await store.read("k") == Log(A, 1, (b"x",))
    await store.close()
    assert version_of(path) == protocol.OLDEST


async def test_two_stores_may_begin_a_file_at_the_same_moment(tmp_path: Path) -> None:
    """One of them was told now and then that the database is locked."""
    for number in range(40):
        one, two = (FileStore(str(tmp_path / str(number) / "journal.db")) for _ in range(2))
        first, second = [write("k", 1, is_whole=True)], [write("other", 1, is_whole=True)]
        assert await asyncio.gather(one.write(first), two.write(second)) == [[Outcome.DONE]] * 2
        await one.close()
        await two.close()


async def test_two_stores_of_one_file_see_one_another(path: Path) -> None:
    one, two = FileStore(str(path)), FileStore(str(path))
    await asyncio.gather(one.write([write("k", 1, is_whole=True)]), two.write([write("other", 1, is_whole=True)]))
    assert await two.read("k") == Log(A, 1, (b"x",))
    assert await two.take("k", A, B, TTL_S)
    assert await one.write([write("k", 2)]) == [Outcome.FENCED]
    assert await two.write([write("k", 1, b"y", claim=B)]) == [Outcome.DONE]
    assert await one.read("k") == Log(B, 1, (b"x", b"y"))
    await one.close()
    await two.close()


KEYS, NUMBERS = st.sampled_from(["k", "l"]), st.integers(1, 4)
CLAIMS = st.builds(Claim, st.sampled_from(["a", "b"]), st.integers(1, 3))
DATA_PARTS = st.sampled_from([b"", b"1", b"\0\xff", b"22"])
BATCH = st.lists(st.builds(Write, KEYS, CLAIMS, NUMBERS, DATA_PARTS, st.booleans(), st.just(TTL_S)), max_size=5)
TAKE = st.tuples(st.just("take"), KEYS, CLAIMS, CLAIMS).filter(lambda take: take[2].epoch < take[3].epoch)
STEPS = st.lists(
    st.one_of(BATCH, TAKE, st.tuples(st.just("delete"), KEYS, CLAIMS)),
    max_size=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_file_and_memory_say_the_same_of_every_batch(path: Path, steps: Sequence[object]) -> None:
    async def play(store: Store) -> list[object]:
        told: list[object] = []
        for step in steps:
            match step:
                case list():
                    told += await store.write(step)
                case ("take", key, held, wanted):
                    told.append(await store.take(key, held, wanted, TTL_S))
                case ("delete", key, claim):
                    await store.delete([(key, claim)])
            told += [await store.read(key) for key in ("k", "l")]
        await store.close()
        return told

    remove(path)
    assert asyncio.run(play(FileStore(str(path)))) == asyncio.run(play(MemoryStore()))


async def test_one_log_more_than_there_is_room_for_is_refused_until_another_has_ended(path: Path) -> None:
    now = 1000.0
    store = FileStore(str(path), lambda: now, most_records=2)
    outcomes = await store.write([write(key, 1, is_whole=True) for key in "abc"])
    assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.FULL]
    now += 30.0
    assert await store.write([write("a", 2), write("c", 2, is_whole=True)]) == [Outcome.DONE, Outcome.FULL]
    now += 31.0
    assert await store.read("b") is None, "it is older than its time"
    assert await store.write([write("c", 3, is_whole=True)]) == [Outcome.DONE]
    assert await store.read("a") is not None
    await store.delete([("a", A)])
    assert await store.write([write("d", 1, is_whole=True)]) == [Outcome.DONE]
    await store.close()


async def test_its_bytes_are_bounded_and_what_has_ended_makes_room(path: Path) -> None:
    most, now = 256 * 1024, 1000.0
    store = FileStore(str(path), lambda: now, most_bytes=most)
    big, number = bytes(20_000), 0
    while (await store.write([write(str(number), 1, big, is_whole=True)])) == [Outcome.DONE]:
        number += 1
    assert 8 <= number <= 14 and path.stat().st_size <= 2 * most
    with pytest.raises(StoreAway, match="full"):
        for count in range(2, 100):
            await store.write([write("0", count, big)])
    assert path.stat().st_size <= 2 * most
    now += TTL_S
    await store.probe()
    for again in range(100):
        assert await store.write([write(str(again % 4), 1 + again, big, is_whole=True)]) == [Outcome.DONE]
    assert path.stat().st_size <= 2 * most
    await store.close()


async def test_a_file_that_is_removed_or_spoilt_is_begun_anew(path: Path) -> None:
    store = FileStore(str(path))
    await store.write([write("k", 1, is_whole=True)])
    remove(path)
    assert await store.write([write("k", 2)]) == [Outcome.MISSING], "it went on with a file that nobody else can open"
    assert await store.write([write("k", 3, is_whole=True)]) == [Outcome.DONE]
    await store.reset()
    assert await store.read("k") == Log(A, 3, (b"x",)), "a closed connection is opened again"
    await store.close()
    path.write_bytes(os.urandom(8192))
    store = FileStore(str(path))
    with pytest.raises(StoreAway, match=r"journal\.db"):
        await store.probe()
    await store.probe()
    assert await store.write([write("k", 1, is_whole=True)]) == [Outcome.DONE]
    await store.close()


async def test_a_folder_that_cannot_be_had_is_a_store_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = FileStore(str(tmp_path / "file" / "journal.db"))
    with pytest.raises(StoreAway):
        await store.write([write("k", 1, is_whole=True)])
    await store.close()


async def test_what_an_earlier_boot_wrote_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("first\n")
    monkeypatch.setattr(file_store, "_BOOT_ID", boot)
    store = FileStore(str(path))
    await store.write([write("k", 1, is_whole=True)])
    await store.reset()
    assert await store.read("k") is not None
    boot.write_text("second\n")
    await store.reset()
    assert await store.read("k") is None
    await store.close()
