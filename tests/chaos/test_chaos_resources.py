"""A machine that runs out of what processes need: shared memory, /dev/shm, disk, descriptors. Nobody ends, and all goes
on once there is some again.

The cluster lives in a mount namespace with a full /dev/shm and a small disk for all that it writes; the fleet's workers
have shorter timers.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import grpc
import openai
import psutil
import pytest
from chaos_fleet import ChaosWorker, Fleet
from chaos_reference import Direct, Reference
from chaos_states import LONG_TOKENS, OUTPUT_TOKENS, prompt_of
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Stream, token_spec
from openai_batches import begin, check, client_of, lines_of, num_answered, over, until
from small_disks import SmallDisks, missing
from workers import Process

from cluster.errors import BatonError
from cluster.pb import generation_pb2, generation_pb2_grpc, worker_pb2
from cluster.rpc import create_blocking_channel

SKIP = missing()
needs_disks = pytest.mark.skipif(bool(SKIP), reason=SKIP)
pytestmark = [pytest.mark.battery, pytest.mark.timeout(300)]

SHM = Path("/dev/shm")
SHM_BYTES, DISK_BYTES = 1 << 20, 8 << 20
NUM_STREAMS, NUM_TOKENS = 8, 300
NUM_LINES, LINE_TOKENS = 60, 32
NEW_PAIRS = (("prefill-1", "decode-0"), ("prefill-0", "decode-1"))
STRANGER_S = 3.0
"""A client that connects while no descriptor is left gives up after so long."""
WAIT_S = 60.0


@dataclass
class Cramped:
    cluster: PlainCluster
    disks: SmallDisks
    folder: Path
    """Where all of it is written."""

    def pids(self) -> dict[str, int]:
        return {name: process.popen.pid for name, process in self.cluster.processes.items()}

    def said(self) -> str:
        return self.cluster.processes["router"].stderr()


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cramped]:
    folder = tmp_path_factory.mktemp("small")
    with SmallDisks({SHM: SHM_BYTES, folder: DISK_BYTES}) as disks:
        disks.fill(SHM)
        with pytest.raises(OSError, match="No space left"):
            (disks.path(SHM) / "more").write_bytes(b"x")
        kept = {"state": str(folder / "journal.db"), "batch_store": str(folder / "batches.db"), "http_port": 0}
        start = partial(Process, namespace=disks.namespace)
        with PlainCluster(BUNDLED_MODEL, disks.path(folder), router=kept, start=start) as cluster:
            pids = {name: process.popen.pid for name, process in cluster.processes.items()}
            yield Cramped(cluster, disks, folder)
            assert {name: process.popen.pid for name, process in cluster.processes.items()} == pids


@pytest.fixture
def client(cramped: Cramped) -> Iterator[openai.OpenAI]:
    with client_of(cramped.cluster.http_address) as client:
        yield client


def begun(cluster: PlainCluster, seed: int, num_tokens: int, *, may_resume: bool = False) -> tuple[Stream, list[int]]:
    prompt = prompt_of(seed, 100)
    spec = token_spec(prompt, num_tokens, include_timing=True)
    if may_resume:
        spec.resume.SetInParent()
    return Stream(cluster, spec, name=str(seed)), prompt


def finish(stream: Stream, prompt: list[int], num_tokens: int, reference: Reference) -> None:
    stream.result()
    assert stream.token_ids() == reference(prompt, num_tokens)


@needs_disks
def test_memory_that_cannot_be_shared_sends_a_request_another_way_and_a_full_dev_shm_is_not_missed(
    cramped: Cramped, reference: Reference
) -> None:
    """At first the kernel refuses the slots of a pair, as where memory is short; /dev/shm is full all the time."""
    pid, limit = cramped.pids()[PREFILL], resource.RLIMIT_FSIZE
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (0, before[1]))
    try:
        stream, prompt = begun(cramped.cluster, 70_000, OUTPUT_TOKENS)
        finish(stream, prompt, OUTPUT_TOKENS, reference)
    finally:
        resource.prlimit(pid, limit, before)
    assert stream.timing().placement.startswith(("local prefill", "retried")), stream.timing()
    stream, prompt = begun(cramped.cluster, 71_000, OUTPUT_TOKENS)
    finish(stream, prompt, OUTPUT_TOKENS, reference)
    assert stream.timing().placement.startswith("disaggregated")
    infos = [worker.info for worker in cramped.cluster.status().workers]
    assert all(info.transport.startswith("shm") for info in infos), infos


@needs_disks
def test_streams_outlive_a_full_disk_and_say_that_no_other_router_could_go_on(
    cramped: Cramped, reference: Reference, client: openai.OpenAI
) -> None:
    cluster, disks, folder = cramped.cluster, cramped.disks, cramped.folder
    batch = begin(client, lines_of(NUM_LINES, LINE_TOKENS))
    until(client, batch.id, lambda batch: num_answered(batch) > 0)
    before, _ = begun(cluster, 72_000, NUM_TOKENS, may_resume=True)
    before.wait_for(lambda: any(event.resumable for event in before.events))
    disks.fill(folder)
    streams = [begun(cluster, 72_001 + number, NUM_TOKENS, may_resume=True) for number in range(NUM_STREAMS)]
    for stream, prompt in streams:
        finish(stream, prompt, NUM_TOKENS, reference)
    told = [event.resumable for stream, _ in streams for event in stream.events if event.HasField("resumable")]
    assert False in told
    with pytest.raises(openai.APIStatusError) as refused:
        client.with_options(max_retries=0).files.create(file=("more.jsonl", lines_of(1) * 40_000), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (503, "store_away")
    steps = len(cluster.steps(DECODE))
    disks.free(folder)
    check(client, over(client, batch.id), NUM_LINES, LINE_TOKENS)
    after, prompt = begun(cluster, 73_000, NUM_TOKENS, may_resume=True)
    finish(after, prompt, NUM_TOKENS, reference)
    assert [event.resumable for event in after.events if event.HasField("resumable")][-1]
    assert len(cluster.steps(DECODE)) > steps
    assert "steps are not written" in cluster.processes[DECODE].stderr()


@contextlib.contextmanager
def no_descriptors(*pids: int) -> Iterator[None]:
    """These processes can open nothing meanwhile."""
    with contextlib.ExitStack() as limits:
        for pid in pids:
            taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            lowest = next(number for number in count() if number not in taken)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
            limits.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, before)
        yield


@needs_disks
def test_a_router_without_descriptors_serves_whom_it_has_and_takes_others_later(
    cramped: Cramped, reference: Reference
) -> None:
    cluster, router = cramped.cluster, psutil.Process(cramped.pids()["router"])
    host, _, port = cluster.http_address.rpartition(":")
    num_said, used = len(cramped.said()), sum(router.cpu_times()[:2])
    late = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    small = generation_pb2.GenerateRequest(spec=token_spec([1, 2, 3], 2))
    followed = token_spec([1, 2, 3], 2, ignore_eos=False)
    followed.sampling.regex = "a+"
    with contextlib.closing(late), create_blocking_channel(cluster.address, is_alone=True) as channel:
        stranger = generation_pb2_grpc.GenerationServiceStub(channel)
        with no_descriptors(router.pid):
            late.request("GET", "/healthz")  # connects, and waits where nobody has accepted it yet
            with pytest.raises(grpc.RpcError):
                stranger.Generate(small, timeout=STRANGER_S)
            assert sum(router.cpu_times()[:2]) - used < STRANGER_S / 2, "it waits, and does not try all the time"
            assert len(cramped.said()) - num_said < 50_000
            stream, prompt = begun(cluster, 74_000, OUTPUT_TOKENS)
            finish(stream, prompt, OUTPUT_TOKENS, reference)
            with pytest.raises(BatonError) as refused:
                cluster.client.generate(followed, timeout_s=WAIT_S)
            assert "grammar" in str(refused.value), "it has no descriptor for the process of one"
        assert late.getresponse().status == 200
        assert stranger.Generate(small, timeout=WAIT_S, wait_for_ready=True).usage.completion_tokens == 2
        assert cluster.client.generate(followed, timeout_s=WAIT_S).usage.completion_tokens > 0


def test_workers_without_descriptors_keep_their_pairs_and_make_others_later(fleet: Fleet, reference: Reference) -> None:
    """prefill-1 and decode-1 have just been started, and have no pair with the others yet."""
    Direct("old", prompt_of(75_000, LONG_TOKENS), OUTPUT_TOKENS, fleet["prefill-0"], fleet["decode-0"]).check(reference)
    fleet.restart("prefill-1", "decode-1")
    fleet.await_ready()
    starved = [rank.popen for name in ("prefill-0", "decode-0") for rank in fleet[name].ranks]
    prompt = prompt_of(75_001, LONG_TOKENS)
    with no_descriptors(*(popen.pid for popen in starved)):
        Direct("pair", prompt, OUTPUT_TOKENS, fleet["prefill-0"], fleet["decode-0"]).check(reference)
        for prefill, decode in NEW_PAIRS:
            said = refusal(fleet[prefill], fleet[decode], prompt)
            assert said.reason in (worker_pb2.Failed.REASON_PEER_LOST, worker_pb2.Failed.REASON_TRANSFER_FAILED), said
        stream = fleet.submit(prompt, OUTPUT_TOKENS)
        stream.result()
        assert stream.token_ids() == reference(prompt, OUTPUT_TOKENS)
    assert [popen.poll() for popen in starved] == [None] * len(starved)
    for number, (prefill, decode) in enumerate(NEW_PAIRS):
        prompt = prompt_of(75_010 + number, LONG_TOKENS)
        Direct(f"new-{number}", prompt, OUTPUT_TOKENS, fleet[prefill], fleet[decode]).check(reference)
    fleet.settle()


def refusal(prefill: ChaosWorker, decode: ChaosWorker, prompt: list[int]) -> worker_pb2.Failed:
    """Why a hand-off could not be."""
    name = f"{prefill.settings.worker_id}-{decode.settings.worker_id}"
    direct = Direct(name, prompt, OUTPUT_TOKENS, prefill, decode)
    output = prefill.outputs[direct.key]
    prefill.wait_for(lambda: output.failed)
    decode.send(cancel=worker_pb2.Cancel(key=direct.key.to_proto()))
    assert output.failed is not None
    return output.failed
