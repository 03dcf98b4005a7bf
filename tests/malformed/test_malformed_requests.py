"""Requests that nobody means, thrown at a running router: typed errors, no fault of ours, and a good stream unharmed.

`make malformed` runs the long part, 10,000 of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, token_spec
from fake_worker import FakeWorker, decode_script, prefill_script, prompt_logprobs
from flood import Flood, GoodStream, is_field
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from raw_bytes import Recording, attack
from router_harness import ids, running_router, text_spec

from benchmarks.nonsense import make_call
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from tools.client import BatonClient

LONG = pytest.param(10_000, id="long", marks=pytest.mark.battery)
COUNTS = [pytest.param(400, id="short"), LONG]
WRITTEN = "a good stream beside the flood"
NO_LIMIT = pytest.mark.timeout(1500)


def outputs(admit: worker_pb2.Admit) -> list[list[int]]:
    """What the fake workers write: as many sequences as were asked for, none longer than asked for."""
    return [ids(WRITTEN)[: admit.sampling.stopping.max_output_tokens]] * admit.sampling.params.n


def prefill(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
    if admit.HasField("prompt_logprobs"):
        worker.emit(prompt_logprobs(admit.key, 0, admit.prompt_token_ids, -1.0))
    prefill_script(outputs)(worker, admit)


@contextlib.contextmanager
def router_in_a_thread(folder: Path) -> Iterator[str]:
    """The address of a router over fake workers, on a loop of its own."""
    address: list[str] = []
    is_up, is_over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        workers = (
            FakeWorker("prefill-0", worker_pb2.ROLE_PREFILL, prefill),
            FakeWorker("decode-0", worker_pb2.ROLE_DECODE, decode_script(outputs)),
        )
        async with running_router(folder, workers, policy="least_loaded") as router:
            address.append(router.address)
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="router")
    thread.start()
    try:
        assert is_up.wait(60)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(60)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def throw(address: str, count: int) -> Flood:
    """So many requests as hypothesis draws; returns what came of them."""
    flood = Flood(address)

    @settings(
        max_examples=count,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**64 - 1))
    def one(seed: int) -> None:
        flood.send(make_call(Random(seed)))

    try:
        one()
    finally:
        flood.close()
    return flood


@NO_LIMIT
@pytest.mark.parametrize("count", COUNTS)
def test_nonsense_gets_typed_errors_and_a_good_stream_beside_it_stays_exact(tmp_path: Path, count: int) -> None:
    with router_in_a_thread(tmp_path) as address:
        with GoodStream(address, text_spec(output=pb.OutputOptions(token_ids=True))) as good:
            flood = throw(address, count)
        assert good.expected[0] == WRITTEN
        assert not good.wrong
        assert good.num_exact > 0
    assert sum(flood.codes.values()) >= count
    assert flood.codes["INVALID_ARGUMENT"] > count / 4, flood.codes
    seen = {"OK", "UNIMPLEMENTED", "NOT_FOUND"}
    if count > 1000:  # some hundreds may hold none that is only too long
        seen.add("OUT_OF_RANGE")
    assert seen <= set(flood.codes), flood.codes


@NO_LIMIT
@pytest.mark.parametrize("count", COUNTS)
def test_random_and_damaged_bytes_on_the_wire_do_no_harm(tmp_path: Path, count: int) -> None:
    """Below gRPC: connections that speak no HTTP/2, or one that goes wrong somewhere."""
    with router_in_a_thread(tmp_path) as address:
        recording = Recording.of(address)
        with GoodStream(address, text_spec()) as good:
            for number in range(count):
                attack(address, recording, Random(number))
        assert not good.wrong
        assert good.num_exact > 0
        with BatonClient(address) as client:
            assert client.models()


@NO_LIMIT
@pytest.mark.parametrize("count", [pytest.param(120, id="short"), LONG])
def test_a_real_cluster_survives_nonsense_and_writes_what_it_wrote_before(tmp_path: Path, count: int) -> None:
    """It holds nothing in the end, as the cluster's own last check finds."""
    with PlainCluster(BUNDLED_MODEL, tmp_path, metrics_port=0) as cluster:
        pids = {name: process.popen.pid for name, process in cluster.processes.items()}
        with GoodStream(cluster.address, token_spec([5, 6, 7, 8], 24)) as good:
            flood = throw(cluster.address, count)
        assert not good.wrong
        assert good.num_exact > 0
        assert len(good.expected[1]) == 24
        assert sum(flood.codes.values()) >= count
        status = cluster.status()
        assert status.router.pid == pids["router"]
        assert {rank.pid for worker in status.workers for rank in worker.info.ranks} == set(pids.values()) - {
            pids["router"]
        }


def test_the_judge_knows_fields_from_what_is_none() -> None:
    kind = pb.GenerateRequest.DESCRIPTOR
    for path in ("request", "spec", "spec.prompt", "spec.stopping.stop[3]", "spec.sampling.logit_bias[7]"):
        assert is_field(kind, path), path
    for path in ("", "specs", "spec.text.x", "spec.sampling.top", "model"):
        assert not is_field(kind, path), path
