"""The wall clock of a cluster is set back and forth by hours while it serves; monotonic clocks go on.

The processes are forked by a nursery that has a library in it (`tests/support/wall_clock.c`, compiled here), which adds
to the wall clock what stands in a file.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest
from chaos_fleet import await_true
from chaos_reference import ExactLoad, Reference
from chaos_states import prompt_of
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, token_spec
from nursery import Nursery
from openai_batches import begin, check, client_of, lines_of, num_answered, over, until
from workers import Process

from tools.client import BatonClient
from tools.generation_stream import Transcript

COMPILER = shutil.which("cc")
pytestmark = [
    pytest.mark.battery,
    pytest.mark.timeout(300),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, cc"),
]

HOUR_S = 3600
STEPS_S = (5 * HOUR_S, 0, -5 * HOUR_S, 5 * HOUR_S, -5 * HOUR_S, 0)
"""How far the clock is off, one after the other."""
SEEN_S = 60
"""Two clocks that are this close are the same."""
BETWEEN = 24
"""Streams that end at each."""
NUM_LINES, LINE_TOKENS = 400, 16
NUM_TOKENS = 400
WAIT_S = 60.0
WAITS = "a wait by the wall clock"


class Faked:
    """A cluster whose clock can be set."""

    def __init__(self, folder: Path, nursery: Nursery, file: Path) -> None:
        router = {"state": str(folder / "journal.db"), "batch_store": str(folder / "batches.db"), "http_port": 0}
        self.cluster = PlainCluster(BUNDLED_MODEL, folder, router=router, start=partial(Process, nursery=nursery))
        self._file = file

    def set(self, offset_s: int) -> None:
        """Returns when each process has done something by it."""
        with open(self._file, "r+b") as file:  # never truncated: the processes have it mapped
            file.write(struct.pack("=q", offset_s))
        await_true(lambda: all(abs(off_s - offset_s) < SEEN_S for off_s in self.offsets_s()), self.story)

    def story(self) -> str:
        said = {
            name: (process.popen.poll(), process.stderr()[-2000:]) for name, process in self.cluster.processes.items()
        }
        return f"{self.offsets_s()} {said}"

    def offsets_s(self) -> list[float]:
        """Those of the router and of both workers, as what they have just done was dated."""
        spec = token_spec([1, 2, 3], 2, include_timing=True)
        spec.cache.bypass_prefix_cache = True
        done = self.cluster.client.generate(spec, timeout_s=WAIT_S)
        dated = [
            done.timing.arrival_time.ToSeconds(),
            *(self.cluster.steps(name)[-1].time for name in (PREFILL, DECODE)),
        ]
        return [at - time.time() for at in dated]


@pytest.fixture(scope="module")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nursery, Path]]:
    folder = tmp_path_factory.mktemp("clock")
    library, file = folder / "wall_clock.so", folder / "offset"
    source = Path(__file__).parents[1] / "support" / "wall_clock.c"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
    file.write_bytes(struct.pack("=q", 0))
    nursery = Nursery({"LD_PRELOAD": str(library), "BATON_TEST_WALL_CLOCK": str(file)})
    yield nursery, file
    nursery.close()


@pytest.fixture(scope="module")
def faked(tmp_path_factory: pytest.TempPathFactory, _nursery: tuple[Nursery, Path]) -> Iterator[Faked]:
    faked = Faked(tmp_path_factory.mktemp("cluster"), *_nursery)
    with faked.cluster:
        yield faked


@pytest.fixture
def client(faked: Faked) -> Iterator[openai.OpenAI]:
    with client_of(faked.cluster.http_address) as client:
        yield client


def test_streams_and_batches_go_on_while_the_clock_is_set_back_and_forth(
    faked: Faked, reference: Reference, client: openai.OpenAI
) -> None:
    cluster = faked.cluster
    prompts = [prompt_of(80_000 + number, 30 + 20 * number) for number in range(12)]
    batch = begin(client, lines_of(NUM_LINES, LINE_TOKENS))
    with ExactLoad(cluster.client, reference, prompts, num_tokens=24, num_streams=6, timeout_s=WAIT_S) as load:
        for offset_s in STEPS_S:
            faked.set(offset_s)
            load.wait_for_more(BETWEEN)
    assert load.problems == []
    print(f"{load.num_done} streams, the clock set {len(STEPS_S)} times: {load.story()}")
    check(client, over(client, batch.id), NUM_LINES, LINE_TOKENS)
    said = {name: process.stderr() for name, process in cluster.processes.items()}
    assert not [text for text in said.values() if "lost" in text or "silent" in text or WAITS in text], said


def test_after_the_clock_was_set_back_another_router_goes_on_at_once(faked: Faked) -> None:
    """With the streams of the one that died, and its batches."""
    cluster, spec = faked.cluster, token_spec(prompt_of(81_000, 50), NUM_TOKENS)
    has_begun = threading.Event()
    with BatonClient(cluster.address) as alone, client_of(cluster.http_address) as client:
        expected = read(alone, spec, threading.Event())
        faked.set(5 * HOUR_S)
        batch = begin(client, lines_of(NUM_LINES, LINE_TOKENS))
        until(client, batch.id, lambda batch: num_answered(batch) > 0)
        faked.set(0)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read, alone, spec, has_begun)
            assert has_begun.wait(WAIT_S)
            assert until(client, batch.id, lambda batch: True).status == "in_progress"
            cluster.kill_router()
            cluster.start_router()
            assert reading.result() == expected
    with client_of(cluster.http_address) as client:
        check(client, over(client, batch.id), NUM_LINES, LINE_TOKENS)


def read(client: BatonClient, spec: object, has_begun: threading.Event) -> list[int]:
    """What a client that resumes has got in the end."""
    transcript = Transcript()
    with client.resuming_stream(spec, timeout_s=WAIT_S) as stream:  # type: ignore[arg-type]
        for event in stream:
            transcript.add(event)
            if event.delta.token_count:
                has_begun.set()
    assert transcript.is_complete
    return list(transcript.sequences[0].token_ids)
