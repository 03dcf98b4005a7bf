"""Requests that wait for the store to say what it has of their prompts: none waits longer than it may."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from engine.kv.stored_blocks import StoredBlocks
from engine.sampling.params import SamplingParams
from engine.sequence import Request
from kv_transfer.block_store import FolderStore, StoreObjects
from kv_transfer.layout import KvLayout
from worker import store_lookups
from worker.grammar_queue import WaitingAdmit
from worker.store_lookups import StoreLookups

BYTES = 100
LAYOUT = KvLayout(2, 2, 8, "float32", 1, 16, "model@revision")
PROMPT = tuple(range(20))


class World:
    """One worker above a store whose calls wait while `goes_on` is not set."""

    def __init__(self, folder: Path) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        world = self

        class Store(FolderStore):
            def objects(self) -> Any:
                assert world.goes_on.wait(30.0)
                return super().objects()

            def has(self, name: str) -> bool:
                assert world.goes_on.wait(30.0)
                return super().has(name)

        self.folder = folder
        self.objects = StoreObjects(Store(folder), LAYOUT, "native", 0, BYTES, 1 << 20)
        self.blocks = StoredBlocks(32, 2, num_slots=32)
        self.posted: SimpleQueue[Any] = SimpleQueue()
        self.admitted: list[WaitingAdmit] = []

    def start(self) -> StoreLookups:
        return StoreLookups(self.objects, self.blocks, lambda *call: self.posted.put(call), self.admitted.append)

    def ask(self, lookups: StoreLookups, number: int) -> None:
        request = Request(RequestKey(f"r{number}", 1), (number, *PROMPT), SamplingParams())
        assert lookups.takes(WaitingAdmit(object(), worker_pb2.Admit()), request)  # type: ignore[arg-type]

    def answer(self) -> None:
        """Makes the next call that was posted to the engine thread."""
        call, *arguments = self.posted.get(timeout=20.0)
        call(*arguments)


def test_what_is_there_is_learnt_before_the_request_is_admitted(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    keys = [(0, digest) for digest in prefix_hashes((1, *PROMPT), 2, b"")]
    world.objects.push(keys[:4], [bytes(BYTES)] * 4)
    lookups = world.start()
    world.ask(lookups, 1)
    world.answer()
    assert [key in world.blocks.store for key in keys[:5]] == [True] * 4 + [False]
    assert len(world.admitted) == 1 and not len(lookups) and lookups.counts.found == 1


def test_many_prompts_at_once_wait_for_a_silent_store_no_longer_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lookups, "LOOK_UP_S", 0.2)
    world = World(tmp_path / "kv")
    world.goes_on.clear()  # also the first look at all objects
    lookups, begun = world.start(), time.monotonic()
    for number in range(50):
        world.ask(lookups, number)
    for _ in range(50):
        world.answer()
    assert time.monotonic() - begun < 5.0, "each waited for those before it"
    assert len(world.admitted) == 50 and lookups.counts.failed == 50
    world.goes_on.set()


def test_a_store_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    lookups = world.start()
    world.folder.rename(tmp_path / "away")
    world.ask(lookups, 1)
    world.answer()
    assert lookups.counts.failed == 1
    (tmp_path / "away").rename(world.folder)
    world.ask(lookups, 2)
    world.answer()
    assert lookups.counts.nothing == 1 and len(world.admitted) == 2


def test_an_error_that_nobody_expects_ends_no_other_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "kv")
    lookups, find = world.start(), world.objects.find
    errors = iter([ValueError("a fault")])

    def find_or_fail(*arguments: Any) -> Any:
        for error in errors:
            raise error
        return find(*arguments)

    monkeypatch.setattr(world.objects, "find", find_or_fail)
    for number in range(2):
        world.ask(lookups, number)
        world.answer()
    assert len(world.admitted) == 2 and (lookups.counts.failed, lookups.counts.nothing) == (1, 1)
