"""What is there for good is kept from the collector of cycles, a few times only."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from cluster.pb import worker_pb2
from router import collector
from router.routing.prefix_index import Holders, PrefixIndex


@pytest.fixture
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_thawed")
def test_long_lived_objects_are_spared_again_when_more_workers_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOOK_S", 0.0)
    frozen = list[int]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(num_workers))
    num_workers = 0  # named now

    async def scenario() -> None:
        nonlocal num_workers
        task = asyncio.create_task(collector.spare_long_lived(lambda: num_workers))
        for count in (0, 4, 5, 4, 6, 100):
            num_workers = count
            for _ in range(5):
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(scenario())
    assert frozen == [0, 4, 6, 100]


def test_the_collector_does_not_look_at_what_is_known_of_caches() -> None:
    index = PrefixIndex(16, 1000, Holders())
    for number in range(1, 4):
        stored = [f"{number} {i:13}".encode() for i in range(100)]
        index.apply(worker_pb2.CacheEvents(sequence_number=number, snapshot=number == 1, stored=stored))
    tables = [index._hashes, index.holders._masks, *filter(None, index.holders._tables)]
    assert len(tables) > 2 and all(tables) and not any(map(gc.is_tracked, tables))
