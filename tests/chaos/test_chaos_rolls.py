"""A router that is replaced again and again under streams that outlast its drain: each goes on at the next router, from
the journal, with every output exact. Long: `make chaos`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_fixture import token_spec
from serve_process import ROOT, Serve
from steady_load import SteadyOutputs

from cluster.pb import generation_pb2 as pb
from tools.client import AdminClient, BatonClient
from tools.generation_stream import Transcript

pytestmark = [pytest.mark.timeout(600), pytest.mark.battery]

NUM_STREAMS, NUM_ROLLS = 12, 6
WAIT_S = 120.0
DRAIN_S = 0.3
_draw = random.Random(9)
PROMPTS = [_draw.choices(range(4, 1000), k=_draw.randint(8, 80)) for _ in range(NUM_STREAMS)]


def spec(number: int) -> pb.GenerationSpec:
    """Short ones and long ones, one in four of two sequences."""
    return token_spec(PROMPTS[number], 64 + 32 * number, temperature=0.9, seed=number, n=1 + (number % 4 == 3))


class Streams(SteadyOutputs):
    """By a client that resumes."""

    def __init__(self, client: BatonClient) -> None:
        super().__init__(NUM_STREAMS)
        self._client = client

    def output(self, number: int) -> list[tuple[list[int], str]]:
        transcript = Transcript()
        with self._client.resuming_stream(spec(number), timeout_s=WAIT_S) as stream:
            for event in stream:
                transcript.add(event)
        assert transcript.is_complete
        return [(sequence.token_ids, sequence.text) for sequence in transcript.sequences]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Serve, Path]]:
    (tmp_path / "models").symlink_to(ROOT / "models")
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    assert "drain_timeout_s: 60.0" in text
    text = text.replace("drain_timeout_s: 60.0", f"drain_timeout_s: {DRAIN_S}")
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    serve = Serve("--config", str(file), "--port", "0")
    try:
        assert serve.address
        yield serve, file
    finally:
        serve.close()


def test_streams_outlast_routers_that_are_replaced_again_and_again(serving: tuple[Serve, Path]) -> None:
    serve, file = serving
    pids = []
    with BatonClient(serve.address) as client, AdminClient(serve.admin_address) as admin, Streams(client) as load:
        for number in range(NUM_ROLLS):
            load.wait_for_more(NUM_STREAMS)
            pids.append(client.status().router.pid)
            text = file.read_text(encoding="utf-8")
            queued = 1024 - number
            assert f"max_queued_requests: {queued}" in text
            wanted = text.replace(f"max_queued_requests: {queued}", f"max_queued_requests: {queued - 1}")
            told = [event.text for event in admin.follow(admin.apply(wanted, filename=str(file)))]
            assert told[-1].endswith("done: 1:1"), told
        load.wait_for_more(2 * NUM_STREAMS)
        pids.append(client.status().router.pid)
        num_done, problems = load.num_done, load.problems
    assert problems == []
    assert num_done >= NUM_STREAMS * (NUM_ROLLS + 2)
    assert len(set(pids)) == NUM_ROLLS + 1
