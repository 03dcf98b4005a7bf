"""Weights and the size of steps change worker by worker under greedy streams, on and back: none fails, and every output
is that of one revision in a single process.

Long: `make chaos`.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from checkpoints import make_revision
from cluster_fixture import BUNDLED_MODEL, single_process, token_spec
from serve_process import ROOT, Serve
from steady_load import SteadyLoad

from cluster.pb import admin_pb2
from engine.sampling.params import SamplingParams
from tools.client import AdminClient, BatonClient

pytestmark = [pytest.mark.timeout(900), pytest.mark.battery]

NUM_STREAMS = 12
TOKENS = 128
WAIT_S = 120.0
NUM_CHANGES = 4
_draw = random.Random(19)
PROMPTS = [_draw.choices(range(4, 1000), k=_draw.randint(8, 200)) for _ in range(NUM_STREAMS)]


class Streams(SteadyLoad):
    """So many at any time; `outputs`: for each revision those of a single process."""

    def __init__(self, client: BatonClient, outputs: Sequence[Sequence[list[int]]]) -> None:
        super().__init__(NUM_STREAMS)
        self._client = client
        self._outputs = outputs
        self.num_of_revision = [0] * len(outputs)
        self.gaps_s: list[float] = []
        """Between two messages with tokens of one stream."""

    def ask(self, number: int) -> str:
        tokens, moments = self._run(number)
        self.gaps_s += [after - before for before, after in itertools.pairwise(moments)]
        for revision, outputs in enumerate(self._outputs):
            if outputs[number] == tokens:
                self.num_of_revision[revision] += 1
                return ""
        return f"{tokens} is the output of no revision"

    def _run(self, number: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        moments: list[float] = []
        spec = token_spec(PROMPTS[number], TOKENS)
        spec.output.stream_interval_tokens = 1
        with self._client.stream(spec, timeout_s=WAIT_S) as stream:
            for event in stream:
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(tokens), "a gap or a repeat"
                    tokens.extend(event.delta.token_ids)
                    moments.append(time.monotonic())
        return tokens, moments


@pytest.fixture(params=["1:1", "2:2"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Serve, Path]]:
    """A cluster of so many workers, and its file."""
    file = tmp_path / "cluster.yaml"
    (tmp_path / "models").symlink_to(ROOT / "models")
    text = (
        (ROOT / "cluster.yaml").read_text(encoding="utf-8").replace("kv_cache_tokens: 16384", "kv_cache_tokens: 8192")
    )
    file.write_text(text.replace("devices: 1", f"devices: {request.param[0]}"), encoding="utf-8")
    serve = Serve("--config", str(file), "--port", "0")
    try:
        yield serve, file
    finally:
        serve.close()


def test_weights_and_steps_change_under_streams(serving: tuple[Serve, Path], tmp_path: Path) -> None:
    serve, file = serving
    revised = make_revision(BUNDLED_MODEL, tmp_path / "tiny-shakespeare")
    params = [SamplingParams(temperature=0.0, max_output_tokens=TOKENS)] * NUM_STREAMS
    outputs = [
        [list(completion.token_ids) for (completion,) in single_process(PROMPTS, params, folder)]
        for folder in (BUNDLED_MODEL, revised)
    ]
    assert all(one != other for one, other in zip(*outputs, strict=True))
    old = file.read_text(encoding="utf-8")
    new = old.replace("path: models/tiny-shakespeare", f"path: {revised}")
    with BatonClient(serve.address) as client, AdminClient(serve.admin_address) as admin:
        with Streams(client, outputs) as streams:
            streams.wait_for_more(2 * NUM_STREAMS)
            assert streams.num_of_revision[1] == 0
            quiet, streams.gaps_s = streams.gaps_s, []
            for number in range(1, NUM_CHANGES + 1):
                since = admin.cluster().last_sequence
                text = (old, new)[number % 2].replace(
                    "max_num_batched_tokens: 2048", f"max_num_batched_tokens: {2048 + number}"
                )
                file.write_text(text, encoding="utf-8")
                change = next(e for e in admin.events(since) if e.kind in ENDS)
                assert change.kind == admin_pb2.ClusterEvent.KIND_CHANGED, change.text
                seen = list(streams.num_of_revision)
                streams.wait_for_more(2 * NUM_STREAMS)
                assert streams.num_of_revision[number % 2] > seen[number % 2]
            revisions = {w.info.weights_revision for w in client.status().workers}
        assert streams.problems == []
        assert len(revisions) == 1
    before, during = (p99_ms(gaps) for gaps in (quiet, streams.gaps_s))
    print(
        f"{NUM_CHANGES} changes, {streams.num_done} streams, of each revision {streams.num_of_revision}; gap between "
        f"tokens, p99: {before:.0f} ms before, {during:.0f} ms during; longest {1000 * max(streams.gaps_s):.0f} ms"
    )


ENDS = (
    admin_pb2.ClusterEvent.KIND_CHANGED,
    admin_pb2.ClusterEvent.KIND_FAILED,
    admin_pb2.ClusterEvent.KIND_REFUSED,
)


def p99_ms(gaps_s: Sequence[float]) -> float:
    return 1000 * statistics.quantiles(gaps_s, n=100)[98]
