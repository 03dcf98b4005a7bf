"""Objects in a store: what is read is what was written there under this key, for this KV, or an error; and the store
never has more than its room, whoever writes."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from cluster.errors import ConfigError, Corrupted
from kv_transfer import block_store
from kv_transfer.block_store import _OBJECT, FolderStore, StoredObject, StoreObjects, StoreSilent
from kv_transfer.layout import KvLayout
from kv_transfer.sealed import KvSecret, sealed

BYTES = 5000
OBJECT = 4096 + BYTES
KEYS = [(number % 2, bytes([number]) * 16) for number in range(12)]
LAYOUT = KvLayout(2, 2, 8, "float32", 1, 16, "model@revision")
PAIR = replace(LAYOUT, tp_size=2)


def block_of(key: tuple[int, bytes]) -> bytes:
    return (bytes([key[0]]) + key[1] * 400)[:BYTES]


def opened(
    folder: Path,
    layout: KvLayout = LAYOUT,
    form: str = "native",
    rank: int = 0,
    limit: int = 1 << 20,
    secret: KvSecret | None = None,
) -> StoreObjects:
    return StoreObjects(FolderStore(folder), layout, form, rank, BYTES, limit, secret)


def push(objects: StoreObjects, keys: Sequence[tuple[int, bytes]] = KEYS) -> None:
    objects.push(keys, map(block_of, keys))


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_blocks_come_back_in_another_process_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    push(opened(tmp_path / "kv"))
    again = opened(tmp_path / "kv")
    order = [KEYS[number] for number in (3, 11, 0, 7)]
    assert again.find([*order, (0, b"x" * 16)], 5.0) == [True] * 4 + [False]
    assert [bytes(block) for block in again.fetch(order)] == list(map(block_of, order))
    files = files_of(tmp_path)
    assert len(files) == len(KEYS) and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


OTHERS = {
    "model": {"layout": replace(LAYOUT, model="other@revision")},
    "revision": {"layout": replace(LAYOUT, model="model@another")},
    "type": {"layout": replace(LAYOUT, dtype="bfloat16")},
    "ranks": {"layout": PAIR},
    "tokens of a block": {"layout": replace(LAYOUT, block_size=32)},
    "rounding": {"form": "int8"},
    "secret": {"secret": KvSecret(b"s" * 32)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_kv_of_another_kind_is_never_found_nor_read_under_another_name(what: str, tmp_path: Path) -> None:
    mine, other = opened(tmp_path), opened(tmp_path, **OTHERS[what])
    push(mine)
    assert not any(other.find(KEYS, 5.0))
    with pytest.raises(FileNotFoundError):
        list(other.fetch(KEYS[:1]))
    place = tmp_path / other.name_of(KEYS[0])
    place.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mine.name_of(KEYS[0])).rename(place)
    with pytest.raises(Corrupted, match="damaged, or another block"):
        list(other.fetch(KEYS[:1]))


def test_a_block_is_there_when_every_rank_has_its_part_and_a_rank_reads_no_other_ones(tmp_path: Path) -> None:
    ranks = [opened(tmp_path, PAIR, rank=rank) for rank in (0, 1)]
    push(ranks[0])
    assert not any(ranks[0].find(KEYS, 5.0)), "rank 1 has written nothing yet"
    push(ranks[1])
    assert all(objects.find(KEYS, 5.0) == [True] * len(KEYS) for objects in ranks)
    for rank, gone in ((0, 3), (1, 7)):
        (tmp_path / ranks[rank].name_of(KEYS[gone])).unlink()
    for objects in ranks:
        assert [at for at, is_there in enumerate(objects.find(KEYS, 5.0)) if not is_there] == [3, 7]
    (tmp_path / ranks[0].name_of(KEYS[0])).rename(tmp_path / ranks[1].name_of(KEYS[0]))
    with pytest.raises(Corrupted, match="damaged, or another block"):
        list(ranks[1].fetch(KEYS[:1]))


def test_an_object_that_was_changed_cut_off_or_is_another_block_is_refused_and_deleted(tmp_path: Path) -> None:
    objects = opened(tmp_path)
    for number, key in enumerate(KEYS):
        push(objects, [key])
        path = tmp_path / objects.name_of(key)
        content = bytearray(path.read_bytes())
        match number % 4:
            case 0:
                content[4096 + number * 400] ^= 1 << number % 8
            case 1:
                content[number * 8] ^= 1 << number % 8
            case 2:
                del content[number * OBJECT // len(KEYS) :]
            case 3:
                push(objects, KEYS[:1])
                content = bytearray((tmp_path / objects.name_of(KEYS[0])).read_bytes())
        path.write_bytes(content)
        with pytest.raises(Corrupted):
            list(objects.fetch([key]))
        assert not path.exists()


def test_whoever_writes_deletes_what_was_used_least_recently_and_what_killed_writers_left(tmp_path: Path) -> None:
    limit = 24 * OBJECT
    stores = [opened(tmp_path, limit=limit) for _ in range(2)]
    (tmp_path / "mine.txt").write_text("not Baton's")
    foreign = tmp_path / "a" / "b" / "mine.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not Baton's")
    push(stores[0], KEYS[:1])
    part = (tmp_path / stores[0].name_of(KEYS[0])).with_suffix(".r0.node-1-1.part")
    part.write_bytes(b"half")
    for number, path in enumerate(files_of(tmp_path)):
        os.utime(path, (1.0 + number, 1.0 + number))
    for number in range(60):
        new = [(0, bytes([number, rank]) * 8) for rank in (0, 1)]
        for objects, key in zip(stores, new, strict=True):
            push(objects, [key])
        used = sum(path.stat().st_size for path in files_of(tmp_path))
        assert used <= limit + OBJECT, "each may be behind by what the other one wrote"
    assert not part.exists() and foreign.exists() and (tmp_path / "mine.txt").exists()
    assert all(objects.find([key], 5.0) == [True] for objects, key in zip(stores, new, strict=True))
    assert stores[0].find(KEYS[:1], 5.0) == [False]


def test_many_writers_that_delete_at_once_do_not_fail(tmp_path: Path) -> None:
    limit, failed = 12 * OBJECT, list[Exception]()

    def write(rank: int) -> None:
        objects = opened(tmp_path, rank=0, limit=limit)
        try:
            for number in range(40):
                push(objects, [(0, bytes([number, rank]) * 8), (0, bytes([number]) * 16)])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    objects = opened(tmp_path, limit=limit)
    objects.look()
    assert objects.used_bytes == sum(path.stat().st_size for path in files_of(tmp_path)) <= limit
    assert not list(tmp_path.rglob("*.part"))


def test_encrypted_blocks_come_back_with_their_secret_alone_and_show_nothing(tmp_path: Path) -> None:
    mine, same, other = (opened(tmp_path, secret=KvSecret(bytes([number]) * 32)) for number in (1, 1, 2))
    plain = opened(tmp_path)
    push(mine)
    assert [bytes(block) for block in same.fetch(KEYS)] == list(map(block_of, KEYS))
    assert not any(other.find(KEYS, 5.0)) and not any(plain.find(KEYS, 5.0))
    contents = {path: path.read_bytes() for path in files_of(tmp_path)}
    assert not any(
        block_of(key)[at : at + 16] in of[4096:] for of in contents.values() for key in KEYS for at in (0, 1, 99)
    )
    push(other)
    again = set(files_of(tmp_path)) - contents.keys()
    assert len({path.read_bytes()[4096:] for path in again} | {of[4096:] for of in contents.values()}) == 2 * len(KEYS)
    for key, at in (
        (KEYS[0], _OBJECT.size + 8),
        (KEYS[1], _OBJECT.size + 8 + 12),
        (KEYS[2], 4096),
    ):  # nonce, tag, block
        path = tmp_path / mine.name_of(key)
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(Corrupted, match="damaged, or another block"):
            list(same.fetch([key]))
        assert not path.exists()


def test_an_encrypted_block_under_the_name_of_another_one_is_refused(tmp_path: Path) -> None:
    """As by somebody who may write files, and forges the header, whose checksum is no secret."""
    objects = opened(tmp_path, secret=KvSecret(b"s" * 32))
    push(objects, KEYS[:1])
    push(objects, [KEYS[2]])
    first, other = (tmp_path / objects.name_of(KEYS[number]) for number in (0, 2))
    head, block = bytearray(other.read_bytes()[:4096]), first.read_bytes()[4096:]
    fields = list(_OBJECT.unpack_from(head))
    fields[-1] = xxhash.xxh3_64_intdigest(block)
    box = first.read_bytes()[_OBJECT.size + 8 : _OBJECT.size + 8 + 28]
    other.write_bytes(sealed(_OBJECT.pack(*fields), box) + block)
    with pytest.raises(Corrupted):
        list(objects.fetch([KEYS[2]]))


def test_a_secret_is_a_file_of_32_bytes_that_only_its_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "kv.key"
    for content, mode, why in (
        (None, 0, "cannot be read: No such file"),
        (b"k" * 32, 0o640, "has mode 0640: others than its owner may read it"),
        (b"k" * 31, 0o600, r"must hold 32 to 4096 bytes, such as 32 of /dev/urandom \(got 31\)"),
    ):
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        with pytest.raises(ConfigError, match=f"kv_key_file: .*{why}"):
            KvSecret.read(path)
    path.write_bytes(b"k" * 32)
    push(opened(tmp_path / "kv", secret=KvSecret.read(path)))
    assert all(opened(tmp_path / "kv", secret=KvSecret(b"k" * 32)).find(KEYS, 5.0))


def test_what_is_there_is_not_written_again_and_counts_as_used(tmp_path: Path) -> None:
    mine, other = opened(tmp_path), opened(tmp_path)
    push(mine, KEYS[:6])
    written = {path: path.stat().st_ino for path in files_of(tmp_path)}
    for path in written:
        os.utime(path, (1.0, 1.0))
    push(other)
    assert {path: path.stat().st_ino for path in written} == written
    assert all(path.stat().st_mtime > 1.0 for path in written)
    assert other.used_bytes == len(KEYS) * OBJECT and len(files_of(tmp_path)) == len(KEYS)
    cut = tmp_path / mine.name_of(KEYS[0])
    os.truncate(cut, OBJECT - 1)
    push(other, KEYS[:1])
    assert list(map(bytes, mine.fetch(KEYS[:1]))) == [block_of(KEYS[0])]


def test_a_push_that_failed_has_no_write_under_way(tmp_path: Path) -> None:
    is_over, begun = threading.Event(), threading.Event()
    seen: list[bool] = []

    class FullStore(FolderStore):
        def put(self, name: str, content: bytes) -> bool:
            if objects.name_of(KEYS[0]) == name:
                assert begun.wait(30.0)
                raise OSError("no space left")
            begun.set()
            seen.append(is_over.wait(0.2))
            return super().put(name, content)

    objects = StoreObjects(FullStore(tmp_path), LAYOUT, "native", 0, BYTES, 1 << 20)
    with pytest.raises(OSError, match="no space left"):
        push(objects)
    is_over.set()
    assert seen and not any(seen)


def test_a_flush_deletes_what_this_rank_has_of_this_kv_alone(tmp_path: Path) -> None:
    mine, of_other_rank = (opened(tmp_path, PAIR, rank=rank) for rank in (0, 1))
    others = [of_other_rank, *(opened(tmp_path, **other) for what, other in OTHERS.items() if what != "ranks")]
    for objects in (mine, *others):
        push(objects, KEYS[:2])
    assert mine.flush() == 2
    assert not any(mine.find(KEYS, 5.0))
    assert all(len(list(other.fetch(KEYS[:2]))) == 2 for other in others)


def test_a_folder_that_vanished_is_an_error_and_is_not_made_again(tmp_path: Path) -> None:
    objects = opened(tmp_path / "kv")
    push(objects)
    (tmp_path / "kv").rename(tmp_path / "gone")
    calls = (lambda: push(objects), lambda: objects.find(KEYS, 5.0), lambda: list(objects.fetch(KEYS)), objects.flush)
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()
    assert not (tmp_path / "kv").exists()
    (tmp_path / "gone").rename(tmp_path / "kv")
    assert len(list(objects.fetch(KEYS))) == len(KEYS)


class StuckStore(FolderStore):
    """Reads and lists wait until it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.goes_on = threading.Event()

    def get(self, name: str) -> bytes:
        assert self.goes_on.wait(30.0)
        return super().get(name)

    def objects(self) -> Iterator[StoredObject]:
        assert self.goes_on.wait(30.0)
        return super().objects()


def test_a_store_that_is_stuck_is_waited_for_once_and_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StuckStore(tmp_path)
    objects = StoreObjects(store, LAYOUT, "native", 0, BYTES, 1 << 20)
    push(opened(tmp_path))
    monkeypatch.setattr(block_store, "MOVE_TIMEOUT_S", 0.05)
    with pytest.raises(StoreSilent, match="did not answer in time"):
        list(objects.fetch(KEYS))
    begun = time.monotonic()
    for call in (lambda: list(objects.fetch(KEYS)), lambda: push(objects), lambda: objects.find(KEYS, 5.0)):
        with pytest.raises(StoreSilent, match="left alone"):
            call()
    assert time.monotonic() - begun < 1.0
    store.goes_on.set()
    monkeypatch.setattr(block_store, "MOVE_TIMEOUT_S", 5.0)
    objects._away_until = 0.0
    assert [bytes(block) for block in objects.fetch(KEYS)] == list(map(block_of, KEYS))


def test_a_push_waits_for_a_long_listing_for_half_its_time_and_the_store_is_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StuckStore(tmp_path)
    objects = StoreObjects(store, LAYOUT, "native", 0, BYTES, 1 << 20)
    monkeypatch.setattr(block_store, "MOVE_TIMEOUT_S", 0.1)
    for _ in range(2):
        with pytest.raises(StoreSilent, match=r"is being listed, which takes (more than 0\.05 s|long)"):
            push(objects)
    monkeypatch.setattr(block_store, "MOVE_TIMEOUT_S", 5.0)
    push(opened(tmp_path))
    assert objects.find(KEYS, 5.0) == [True] * len(KEYS), "a store that is listed is not left alone"
    store.goes_on.set()
    with objects._looking:  # the listing has ended
        pass
    push(objects)
    assert objects.used_bytes == len(KEYS) * OBJECT
