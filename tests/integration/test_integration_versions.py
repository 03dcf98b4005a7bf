"""A running cluster with processes of later versions of the protocol: each works, or is refused by name, and every
stream on the others is exact. The versions of real workers and routers are changed before their `main`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Stream, single_process, token_spec
from scripted_router import baton
from workers import Process

from cluster.errors import IncompatibleProtocol
from cluster.pb import admin_pb2, admin_pb2_grpc, rank_pb2, worker_pb2
from cluster.protocol import spoken
from cluster.rpc import create_blocking_channel
from cluster.settings import WorkerSettings
from engine.sampling.params import SamplingParams
from tools.client import BatonClient
from worker.rank_socket import accept, connect, hello, read_frame, write_frame

NEXT, AFTER_NEXT = "next_version", "version_after_next"
READY = admin_pb2.WorkerStatus.STATE_READY
NUM_TOKENS, WAIT_S = 60, 60.0
PROMPTS = [[50 + 31 * number + i for i in range(20)] for number in range(6)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("versions")) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)
    return [list(completions[0].token_ids) for completions in single_process(PROMPTS, [params] * len(PROMPTS))]


@contextmanager
def worker_of(cluster: PlainCluster, program: str, worker_id: str) -> Iterator[Process]:
    """Another worker that the router is told of, and forgets before it ends."""
    role = worker_id.partition("-")[0]
    settings = WorkerSettings.from_json(cluster.settings_of(PREFILL if role == "prefill" else DECODE, role))
    process = Process(program, settings.with_values(worker_id=worker_id, step_log=None).to_json())
    try:
        process.expect("prepared")
        address = str(process.expect("ready")["address"])
        name_workers(cluster.addresses | {worker_id: address}, cluster.control_address)
        yield process
        name_workers(cluster.addresses, cluster.control_address)
    finally:
        process.stop()


def name_workers(addresses: dict[str, str], control_address: str) -> None:
    """Tells a router which workers there are."""
    numbers = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
    workers = [
        admin_pb2.WorkerAddress(worker_id=worker_id, address=address, role=numbers[worker_id.partition("-")[0]])
        for worker_id, address in addresses.items()
    ]
    with create_blocking_channel(control_address) as channel:
        stub = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers), timeout=WAIT_S)


@contextmanager
def router_of(cluster: PlainCluster, program: str) -> Iterator[tuple[Process, BatonClient, str]]:
    """Another router for the cluster's workers, a client of it and its control port."""
    process = Process(program, cluster._router.to_json())
    try:
        card = process.expect("ready")
        with BatonClient(str(card["address"])) as client:
            yield process, client, str(card["control_address"])
    finally:
        process.stop()


def streams_of(cluster: PlainCluster, client: BatonClient | None = None) -> list[Stream]:
    return [Stream(cluster, token_spec(prompt, NUM_TOKENS, include_timing=True), client=client) for prompt in PROMPTS]


def assert_exact(streams: list[Stream], reference: list[list[int]]) -> None:
    for stream, expected in zip(streams, reference, strict=True):
        stream.result()
        assert stream.token_ids() == expected


def test_a_worker_of_the_next_version_that_speaks_this_one_works_beside_the_others(
    cluster: PlainCluster, reference: list[list[int]]
) -> None:
    with worker_of(cluster, NEXT, "decode-1"):
        status = cluster.wait_for(lambda status: all(worker.state == READY for worker in status.workers))
        assert {w.worker_id: w.info.protocol for w in status.workers}["decode-1"] == "1-2"
        streams = streams_of(cluster)
        assert_exact(streams, reference)
        assert cluster.stats("decode-1").num_decode_tokens > 0, "it got nothing to do"
        cluster.wait_for(lambda status: not any(worker.num_requests for worker in status.workers))


def test_a_worker_of_another_protocol_is_refused_by_name_and_the_others_serve(
    cluster: PlainCluster, reference: list[list[int]]
) -> None:
    why = "worker decode-2 speaks protocol 2; its caller speaks 1: upgrade its caller first"
    streams = streams_of(cluster)
    for stream in streams:
        stream.wait_for_tokens(3)
    with worker_of(cluster, AFTER_NEXT, "decode-2") as worker:
        status = cluster.wait_for(lambda status: any(worker.refusal for worker in status.workers))
        assert {w.worker_id: w.refusal for w in status.workers if w.refusal} == {"decode-2": why}
        shown = baton("status", "--address", cluster.address)
        assert f"decode-2 is not used: {why}" in shown.stdout.replace("\n", " ")
        assert_exact(streams, reference)
        assert_exact(streams_of(cluster), reference)
        assert worker.stderr().count("Session was refused") == 1
    assert cluster.processes["router"].stderr().count(why) == 1
    assert all(worker.state == READY for worker in cluster.status().workers)


def test_a_router_of_the_next_version_serves_with_these_workers(
    cluster: PlainCluster, reference: list[list[int]]
) -> None:
    with router_of(cluster, NEXT) as (_, client, _):
        until_serving(client)
        here, there = streams_of(cluster), streams_of(cluster, client)
        assert_exact(here, reference)
        assert_exact(there, reference)
        assert client.status().protocol == "1-2"


def test_a_router_of_another_protocol_is_refused_by_every_worker_and_the_others_serve(
    cluster: PlainCluster, reference: list[list[int]]
) -> None:
    streams = streams_of(cluster)
    with router_of(cluster, AFTER_NEXT) as (router, client, _):
        with pytest.raises(IncompatibleProtocol) as refused:
            client.status()
        where = f"the router at {client.address}"
        assert refused.value.message == f"{where} speaks protocol 2; this program speaks 1: upgrade this program first"
        with create_blocking_channel(client.address) as channel:
            stub = admin_pb2_grpc.StatusServiceStub(channel)  # type: ignore[no-untyped-call]
            refusals: dict[str, str] = {}
            while len(refusals) < 2:
                status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
                refusals = {worker.worker_id: worker.refusal for worker in status.workers if worker.refusal}
        assert refusals == {
            name: f"worker {name} speaks protocol 1; its caller speaks 2: upgrade worker {name} first"
            for name in (PREFILL, DECODE)
        }
        assert client.health() == "NOT_SERVING"
        assert_exact(streams, reference)
        assert_exact(streams_of(cluster), reference)
        assert all(router.stderr().count(why) == 1 for why in refusals.values())


def test_a_router_that_speaks_with_two_workers_which_do_not_speak_with_each_other_hands_nothing_over(
    cluster: PlainCluster, reference: list[list[int]]
) -> None:
    """The decode worker then computes the prompts itself."""
    with ExitStack() as stack:
        _, client, control_address = stack.enter_context(router_of(cluster, NEXT))
        settings = WorkerSettings.from_json(cluster.settings_of(PREFILL, "prefill"))
        later = Process(AFTER_NEXT, settings.with_values(worker_id="prefill-9", step_log=None).to_json())
        stack.callback(later.stop)
        later.expect("prepared")
        address = str(later.expect("ready")["address"])
        name_workers({"prefill-9": address, DECODE: cluster.addresses[DECODE]}, control_address)
        while [worker.state for worker in client.status().workers] != [READY, READY]:
            pass
        streams = streams_of(cluster, client)
        assert_exact(streams, reference)
        for stream in streams:
            assert "local prefill on decode-0 after" in stream.timing().placement, stream.timing()
        why = "worker prefill-9 speaks protocol 2; worker decode-0 speaks 1: upgrade worker decode-0 first"
        # gRPC may end a call on which somebody still writes with "Internal error from Core" instead of the refusal.
        while why not in later.stderr() or why not in cluster.processes[DECODE].stderr():
            assert_exact(streams_of(cluster, client), reference)


def until_serving(client: BatonClient) -> None:
    while client.health() != "SERVING":
        pass


def test_ranks_of_two_protocols_refuse_each_other_by_name_before_they_load(cluster: PlainCluster) -> None:
    settings = WorkerSettings.from_json(cluster.settings_of(DECODE, "decode", tp_size=2))
    leader = Process("worker", settings.with_values(worker_id="decode-5", step_log=None).to_json())
    address = str(leader.expect("prepared")["rank_address"])
    rank = connect(address, WAIT_S)
    write_frame(rank, rank_pb2.RankReply(hello=rank_pb2.RankHello(tp_rank=1, protocol="2-3")))
    assert read_frame(rank, rank_pb2.RankCommand).start.protocol == "1-1"
    rank.close()
    assert leader.popen.wait(WAIT_S) == 1
    why = "rank 1 of worker decode-5 speaks protocol 2 to 3; its rank 0 speaks 1: upgrade its rank 0 first"
    assert why in leader.stderr()
    leader.stop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        at = "{}:{}".format(*listener.getsockname())
        follower = Process("worker", settings.with_values(worker_id="decode-5", tp_rank=1, leader=at).to_json())
        rank_0 = accept(listener)
        assert hello(rank_0).protocol == "1-1"
        write_frame(rank_0, rank_pb2.RankCommand(start=rank_pb2.Start(protocol="2-3")))
        assert follower.popen.wait(WAIT_S) == 1
        rank_0.close()
    why = "rank 0 of worker decode-5 speaks protocol 2 to 3; its rank 1 speaks 1: upgrade its rank 1 first"
    assert why in follower.stderr()
    follower.stop()


def test_an_older_rank_that_would_keep_whole_latents_is_refused_by_name(tmp_path: Path) -> None:
    values = {"worker_id": "d", "role": "decode", "model_path": str(make_checkpoint("deepseek-v3", tmp_path))}
    settings = WorkerSettings.from_values(**values, device="cpu", tp_size=2, split_latents=True)
    leader = Process("worker", settings.to_json())
    rank = connect(str(leader.expect("prepared")["rank_address"]), WAIT_S)
    write_frame(rank, rank_pb2.RankReply(hello=rank_pb2.RankHello(tp_rank=1, protocol=spoken())))
    assert leader.popen.wait(WAIT_S) == 1
    rank.close()
    assert "rank 1 of worker d does not split latents as rank 0 does" in leader.stderr()
    leader.stop()
