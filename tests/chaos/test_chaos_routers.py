"""A router that is killed again and again under streams that may be resumed, without Redis: every output is exact."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL, WAIT_S, PlainCluster, token_spec

from cluster.errors import Unavailable
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient
from tools.generation_stream import Transcript

NUM_KILLS, NUM_STREAMS, NUM_TOKENS = 6, 12, 300
TOKENS_BETWEEN = 400
LOOK_EVERY_S = 0.05
pytestmark = [pytest.mark.battery, pytest.mark.timeout(400)]


def specs() -> list[pb.GenerationSpec]:
    return [
        token_spec([5, 6, 7], NUM_TOKENS),
        token_spec(range(4, 80), NUM_TOKENS, temperature=0.9, seed=1, top_logprobs=1),
        token_spec([9, 8, 7], NUM_TOKENS, temperature=0.9, seed=2, n=2),
        token_spec([40, 50, 60], NUM_TOKENS, temperature=0.7, seed=3, stop=["KING", "thou art"]),
    ]


class Readers:
    """Clients that resume, one request after the other until `stop`, and the tokens that all of them have been told."""

    def __init__(self, address: str) -> None:
        self.num_told = 0
        self._address = address
        self._is_over = threading.Event()
        self._told = threading.Condition()
        self._next = count()

    def read(self, client: BatonClient, spec: pb.GenerationSpec) -> list[dict[str, Any]]:
        """Asks again where no router took the request."""
        while True:
            transcript = Transcript()
            try:
                with client.resuming_stream(spec, timeout_s=4 * WAIT_S) as stream:
                    for event in stream:
                        self._add(transcript, event)
                assert transcript.is_complete
                return [vars(sequence) for sequence in transcript.sequences]
            except Unavailable:
                if transcript.started is not None:
                    raise
                self._is_over.wait(LOOK_EVERY_S)

    def _add(self, transcript: Transcript, event: pb.GenerateStreamResponse) -> None:
        transcript.add(event)
        with self._told:
            self.num_told += event.delta.token_count
            self._told.notify_all()

    def read_on(self) -> list[tuple[int, list[dict[str, Any]]]]:
        found = []
        with BatonClient(self._address) as client:
            while not self._is_over.is_set():
                number = next(self._next) % len(specs())
                found.append((number, self.read(client, specs()[number])))
        return found

    def wait_for_more(self, num_tokens: int) -> None:
        with self._told:
            wanted = self.num_told + num_tokens
            assert self._told.wait_for(lambda: self.num_told >= wanted, 2 * WAIT_S), "the streams do not go on"

    def stop(self) -> None:
        self._is_over.set()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PlainCluster]:
    router = {"state": str(tmp_path / "journal.db")}
    with PlainCluster(BUNDLED_MODEL, tmp_path, router=router, kv_cache_tokens=32768) as cluster:
        yield cluster


def test_streams_outlive_a_router_that_is_killed_again_and_again(cluster: PlainCluster) -> None:
    readers = Readers(cluster.address)
    undisturbed = [readers.read(cluster.client, spec) for spec in specs()]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        reading = [pool.submit(readers.read_on) for _ in range(NUM_STREAMS)]
        try:
            for _ in range(NUM_KILLS):
                readers.wait_for_more(TOKENS_BETWEEN)
                cluster.kill_router()
                cluster.start_router()
        finally:
            readers.stop()
        outputs = [each for future in reading for each in future.result()]
    assert len(outputs) >= NUM_STREAMS
    assert [number for number, output in outputs if output != undisturbed[number]] == []
