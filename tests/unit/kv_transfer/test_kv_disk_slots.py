"""Slots in a file: what is read is what was written there under this key, for these weights, or Corrupted."""

from __future__ import annotations

import mmap
import os
import random
import resource
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.errors import Corrupted
from kv_transfer.disk_slots import _SLOT, PAGE, DiskFolder, DiskSlots
from kv_transfer.layout import KvLayout
from kv_transfer.sealed import KvSecret

BYTES = 5000
NAMESPACE = b"n" * 32
KEYS = [(number % 2, bytes([number]) * 16) for number in range(12)]
SECRETS = [bytes([number]) * 32 for number in (1, 2)]
LAYOUT = KvLayout(2, 2, 8, "float32", 1, 16, "model@revision")


def block_of(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def opened(path: Path, num_slots: int = 12, namespace: bytes = NAMESPACE, size: int = BYTES) -> DiskSlots:
    return DiskSlots(path, namespace, num_slots, size)


def filled(path: Path) -> DiskSlots:
    slots = opened(path)
    slots.write(range(12), KEYS, [block_of(number) for number in range(12)])
    return slots


def read(slots: DiskSlots, numbers: list[int]) -> list[torch.Tensor]:
    found = {place: block.clone() for place, block in slots.read(numbers, [KEYS[number] for number in numbers])}
    return [found[place] for place in range(len(numbers))]


def test_blocks_come_back_in_any_order_also_after_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "1.rank0"
    slots = filled(path)
    order = [3, 4, 5, 11, 0, 7]
    for number, block in zip(order, read(slots, order), strict=True):
        assert torch.equal(block, block_of(number))
    slots.close()
    again = opened(path)
    assert dict(again.keys()) == dict(enumerate(KEYS))
    assert torch.equal(read(again, [6])[0], block_of(6))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_slot_is_read_under_its_own_key_alone(tmp_path: Path) -> None:
    slots = filled(tmp_path / "file")
    for key in ((1, KEYS[2][1]), KEYS[3], (0, b"x" * 16)):
        with pytest.raises(Corrupted, match="slot 2 of file does not hold"):
            list(slots.read([2], [key]))


@pytest.mark.parametrize(
    "other", [{"namespace": b"m" * 32}, {"size": BYTES + 1}], ids=["other weights", "another size"]
)
def test_a_file_of_other_kv_is_begun_anew(tmp_path: Path, other: dict[str, object]) -> None:
    filled(tmp_path / "file").close()
    slots = opened(tmp_path / "file", **other)  # type: ignore[arg-type]
    assert not list(slots.keys()) and (tmp_path / "file").stat().st_size == PAGE


def test_nothing_from_before_a_flush_is_found_or_read(tmp_path: Path) -> None:
    slots = filled(tmp_path / "file")
    slots.flush()
    with pytest.raises(Corrupted):
        read(slots, [1])
    slots.write([4], [KEYS[4]], [block_of(4)])
    slots.close()
    assert dict(opened(tmp_path / "file").keys()) == {4: KEYS[4]}


def test_a_smaller_tier_gives_the_rest_of_the_file_back(tmp_path: Path) -> None:
    filled(tmp_path / "file").close()
    slots = opened(tmp_path / "file", num_slots=3)
    assert dict(slots.keys()) == dict(enumerate(KEYS[:3]))
    assert (tmp_path / "file").stat().st_size == PAGE + 3 * (PAGE + 2 * PAGE)


def test_of_a_file_that_was_cut_off_what_is_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    filled(path).close()
    with path.open("r+b") as file:
        file.truncate(PAGE + 2 * 3 * PAGE + PAGE + 100)
    slots = opened(path)
    assert torch.equal(read(slots, [1])[0], block_of(1))
    with pytest.raises(Corrupted):
        read(slots, [2])
    with pytest.raises(Corrupted):
        read(slots, [9])


def test_no_flipped_bit_is_ever_read_as_a_block(tmp_path: Path) -> None:
    """A bit that changes no byte of a header or block is in the padding, and changes nothing."""
    path = tmp_path / "file"
    slots = filled(path)
    rng, num_found = random.Random(1), 0
    for _ in range(300):
        number, at = rng.randrange(12), rng.randrange(3 * PAGE)
        place = PAGE + number * 3 * PAGE + at
        with path.open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        try:
            assert torch.equal(read(slots, [number])[0], block_of(number))
        except Corrupted:
            num_found += 1
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
    assert num_found > 100 and all(torch.equal(read(slots, [n])[0], block_of(n)) for n in range(12))


def test_encrypted_slots_come_back_with_their_secret_alone_and_show_nothing(tmp_path: Path) -> None:
    numbers = range(12)
    mine, other, plain = (DiskFolder(tmp_path, LAYOUT, 1, "", secret) for secret in (*map(KvSecret, SECRETS), None))
    slots = mine.open(1, 0, 12, BYTES)
    slots.write(numbers, KEYS, [block_of(number) for number in numbers])
    slots.close()
    (path,) = (path for path in tmp_path.glob("*/1.rank0"))
    content = path.read_bytes()
    assert not any(block_of(number).numpy().tobytes()[at : at + 16] in content for number in numbers for at in (0, 99))
    assert not list(other.open(1, 0, 12, BYTES).keys()) and not list(plain.open(1, 0, 12, BYTES).keys())
    again = DiskFolder(tmp_path, LAYOUT, 1, "", KvSecret(SECRETS[0])).open(1, 0, 12, BYTES)
    assert dict(again.keys()) == dict(enumerate(KEYS))
    for number, block in zip((3, 4, 11, 0), read(again, [3, 4, 11, 0]), strict=True):
        assert torch.equal(block, block_of(number))
    at = again._at(5) + _SLOT.size + 8  # a checksum does not cover the nonce
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([content[at] ^ 1]), at)
    with pytest.raises(Corrupted, match="encrypted block is damaged"):
        read(again, [5])
    assert torch.equal(read(again, [6])[0], block_of(6))


def test_two_workers_never_have_the_same_files(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path, LAYOUT)
    second = DiskFolder(tmp_path, LAYOUT)
    other = DiskFolder(tmp_path, replace(LAYOUT, model="model@another"))
    assert (first.number, second.number, other.number) == (1, 2, 1)
    slots = first.open(1, 0, 4, BYTES)
    slots.write([0], [KEYS[0]], [block_of(0)])
    assert not list(DiskFolder(tmp_path, LAYOUT, 1).open(1, 1, 4, BYTES).keys()), "ranks have files of their own"
    assert not list(other.open(1, 0, 4, BYTES).keys())
    first.close()
    again = DiskFolder(tmp_path, LAYOUT)
    assert again.number == 1 and dict(again.open(1, 0, 4, BYTES).keys()) == {0: KEYS[0]}
    for folder in (again, second, other):
        folder.close()


def test_files_that_a_worker_has_left_for_good_go_to_a_newcomer_of_its_role(tmp_path: Path) -> None:
    old, other = (DiskFolder(tmp_path, LAYOUT, role=role) for role in ("prefill", "decode"))
    for folder in (old, other):
        folder.open(folder.number, 0, 4, BYTES).write([0, 1], KEYS[:2], [block_of(0), block_of(1)])
    new = DiskFolder(tmp_path, LAYOUT, role="prefill")
    assert new.number == 3 and new.is_new and new.left_behind() is None, "who lives keeps its files"
    other.leave()
    assert new.left_behind() is None, "they are of another role"
    old.close()
    assert new.left_behind() is None, "who was killed comes back for them"
    killed = DiskFolder(tmp_path, LAYOUT, role="prefill")
    assert killed.number == 1 and not killed.is_new
    killed.leave()
    left = new.left_behind()
    assert left is not None and left.number == 1 and new.left_behind() is None, "they are claimed"
    new.open(new.number, 0, 4, BYTES)
    new.remove()
    assert {path.name for path in tmp_path.glob("*/*.rank*")} == {"1.rank0", "2.rank0"}
    assert DiskFolder(tmp_path, LAYOUT, role="decode").number == 2, "a worker begins with files of its role"
    left.leave()


def test_a_full_disk_is_an_error_and_what_was_written_stays(tmp_path: Path) -> None:
    slots = filled(tmp_path / "file")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE + 12 * 3 * PAGE, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            opened(tmp_path / "other", num_slots=99).write(range(50, 51), KEYS[:1], [block_of(0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(read(slots, [11])[0], block_of(11))


def test_buffers_begin_where_huge_pages_do_and_are_not_for_a_process_that_is_forked(tmp_path: Path) -> None:
    """A fork would have both share the pages, and the system splits huge ones that are shared and written."""
    slots = opened(tmp_path / "file")
    first, *others = (np.frombuffer(buffer, np.uint8).ctypes.data for buffer in slots._buffers)
    assert first % (2 << 20) == 0 and not any(other % PAGE for other in others)
    is_here, flags = False, list[list[str]]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            begin, end = (int(part, 16) for part in name.split("-"))
            is_here = any(begin <= at < end for at in (first, *others))
        elif name == "VmFlags:" and is_here:
            flags.append(values)
    assert flags and all("dc" in values for values in flags)


def test_a_system_without_huge_pages_has_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # no such advice is known
    assert torch.equal(read(filled(tmp_path / "file"), [6, 3])[1], block_of(3))
