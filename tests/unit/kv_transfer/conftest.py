"""A store, workers that are closed at the end, and a pair that is open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer_harness import HOST, Worker, make_layout, make_truth, open_both

from kv_transfer.transports.interface import serve_store


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = serve_store(HOST)
    yield address
    del store


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def pair(workers: list[Worker], store_address: str) -> tuple[Worker, Worker]:
    sender, receiver = Worker(make_layout()), Worker(make_layout())
    workers += [sender, receiver]
    sender.load(make_truth())
    open_both(sender, receiver, "e1", store_address)
    return sender, receiver
