"""Objects behind a URL: as in a folder, and whatever a file system raises is an OSError."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cluster.errors import ConfigError, Corrupted
from kv_transfer import bucket_store
from kv_transfer.block_store import FolderStore, StoredObject, StoreObjects
from kv_transfer.bucket_store import BucketStore, store_at
from kv_transfer.layout import KvLayout

BYTES = 5000
OBJECT = 4096 + BYTES
KEYS = [(0, bytes([number]) * 16) for number in range(6)]
LAYOUT = KvLayout(2, 2, 8, "float32", 1, 16, "model@revision")
URL = "memory://kv/of/cluster"


@pytest.fixture
def storage() -> Iterator[dict[str, Any]]:
    """The objects by path."""
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


def opened(limit: int = 1 << 20) -> StoreObjects:
    return StoreObjects(BucketStore(URL), LAYOUT, "native", 0, BYTES, limit)


def block_of(key: tuple[int, bytes]) -> bytes:
    return (key[1] * 400)[:BYTES]


def test_blocks_come_back_in_another_process(storage: dict[str, Any]) -> None:
    opened().push(KEYS, map(block_of, KEYS))
    assert len(storage) == len(KEYS) and all(path.startswith("/kv/of/cluster/") for path in storage)
    again, order = opened(), [KEYS[3], KEYS[0]]
    assert again.find([*order, (0, b"x" * 16)], 5.0) == [True, True, False]
    assert [bytes(block) for block in again.fetch(order)] == list(map(block_of, order))
    assert again.flush() == len(KEYS) and not storage


def test_a_changed_object_is_refused_and_deleted(storage: dict[str, Any]) -> None:
    objects = opened()
    objects.push(KEYS[:1], map(block_of, KEYS[:1]))
    (file,) = storage.values()
    file.seek(OBJECT - 1)
    file.write(b"\xff")
    file.commit()
    with pytest.raises(Corrupted):
        list(objects.fetch(KEYS[:1]))
    assert not storage


def test_what_was_written_least_recently_is_deleted_first(storage: dict[str, Any]) -> None:
    opened().push(KEYS[:4], map(block_of, KEYS[:4]))
    oldest, *_ = storage
    storage[oldest].modified = datetime.now(UTC) - timedelta(hours=2)
    opened(limit=4 * OBJECT).push(KEYS[4:5], map(block_of, KEYS[4:5]))
    assert oldest not in storage and len(storage) <= 4


def test_what_is_there_is_written_again_once_it_is_old(
    storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written = BucketStore(URL), list[float]()

    def changed_at(there: dict[str, Any]) -> float:
        return written[-1]

    monkeypatch.setattr(bucket_store, "_changed_at", changed_at)
    written.append(time.time())
    assert store.put("a/b/c", b"12") and not store.put("a/b/c", b"12") and store.put("a/b/c", b"123")
    written.append(time.time() - bucket_store.RENEW_S - 1)
    assert store.put("a/b/c", b"123")


def test_objects_are_listed_with_size_and_time_and_deleting_none_is_no_error(storage: dict[str, Any]) -> None:
    store, begun, name = BucketStore(URL + "/"), time.time(), f"{'ab' * 32}/cd/{'ef' * 16}.g0.r0"
    assert not [*store.objects()]
    store.put(name, b"12")
    (found,) = store.objects()
    assert found == StoredObject(name, 2, found.used_at) and begun - 1 <= found.used_at <= time.time() + 1
    store.delete(name, "another")
    store.delete(name)
    assert not store.has(name) and not [*store.objects()]
    with pytest.raises(FileNotFoundError):
        store.get(name)


def test_folders_that_others_have_in_the_bucket_are_not_looked_into(
    storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looked_into, ls = BucketStore(URL), list[str](), MemoryFileSystem.ls
    names = [f"{number:064x}/{number % 256:02x}/{number:032x}.g0.r0" for number in range(300)]
    for name in (*names, "theirs/deep/object", f"{1:064x}/theirs/object", "object"):
        store.put(name, b"1")

    def watched(self: MemoryFileSystem, path: str, **options: Any) -> list[dict[str, Any]]:
        looked_into.append(path)
        found: list[dict[str, Any]] = ls(self, path, **options)
        return found

    monkeypatch.setattr(MemoryFileSystem, "ls", watched)
    assert [each.name for each in store.objects()] == names
    assert len(looked_into) == 1 + 2 * 300 and not any("theirs" in path for path in looked_into)


@pytest.mark.parametrize("call", ["put", "get", "has", "objects", "delete", "try_out"])
def test_what_a_client_of_storage_raises_is_an_oserror(
    call: str, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndpointConnectionError(Exception):
        """As botocore's, which is no OSError."""

    def away(*args: object, **keywords: object) -> None:
        raise EndpointConnectionError("could not connect")

    store = BucketStore(URL)
    for name in ("info", "pipe_file", "cat_file", "ls", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, away)
    arguments = {"put": ("a", b"1"), "objects": (), "try_out": ()}.get(call, ("a",))
    with pytest.raises(OSError, match="EndpointConnectionError: could not connect"):
        list(getattr(store, call)(*arguments) or ())


@pytest.mark.parametrize("told", [0.5, "1970-01-01T00:00:00.500Z", datetime.fromtimestamp(0.5, UTC)])
@pytest.mark.parametrize("name", ["LastModified", "mtime", "updated", "created"])
def test_the_time_of_the_last_write_is_told_in_several_ways(name: str, told: object) -> None:
    assert bucket_store._changed_at({"size": 1, name: told}) == 0.5


def test_a_protocol_that_nobody_knows_and_a_package_that_is_missing_are_told_apart() -> None:
    with pytest.raises(ValueError, match="nope"):
        BucketStore("nope://bucket")
    with pytest.raises(ImportError, match="dropbox"):
        BucketStore("dropbox://folder")


def test_a_store_is_a_folder_or_a_url_that_can_be_written(
    storage: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store_at(str(tmp_path / "kv")), FolderStore)
    assert isinstance(store_at(URL), BucketStore) and not storage, "what was tried out is left"
    with pytest.raises(ConfigError, match=r"kv_store_path: .*/a/b cannot be used: No such file .*such as a mount"):
        store_at(str(tmp_path / "a" / "b"))
    with pytest.raises(ConfigError, match=r"kv_store_path: nope://kv cannot be used: Protocol not known"):
        store_at("nope://kv")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"kv_store_path: s3://b/kv cannot be used: Install s3fs"):
        store_at("s3://b/kv")

    def refuse(*args: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(ConfigError, match=r"kv_store_path: memory://kv/of/cluster cannot be used: Access Denied"):
        store_at(URL)


class SilentFiles(AsyncFileSystem):  # type: ignore[misc]
    """Storage whose server takes what it is asked, and never answers."""

    protocol = "silent"

    async def _never(self, *args: object, **options: object) -> None:
        await asyncio.Event().wait()

    _pipe_file = _cat_file = _info = _ls = _rm_file = _never


@pytest.mark.parametrize("call", ["put", "get", "has", "objects", "delete", "try_out"])
def test_storage_that_never_answers_is_given_up_in_time(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("silent", SilentFiles, clobber=True)
    for bound in ("MOVE_TIMEOUT_S", "START_TIMEOUT_S", "LOOK_TIMEOUT_S"):
        monkeypatch.setattr(bucket_store, bound, 0.1)
    store, begun = BucketStore("silent://kv"), time.monotonic()
    arguments = {"put": ("a", b"1"), "objects": (), "try_out": ()}.get(call, ("a",))
    with pytest.raises(TimeoutError, match="no answer in time"):
        list(getattr(store, call)(*arguments) or ())
    assert time.monotonic() - begun < 5.0
