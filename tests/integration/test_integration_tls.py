"""Real processes that speak TLS: the router's port, router to worker, worker to worker, rank to rank, metrics."""

from __future__ import annotations

import socket
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from cluster_fixture import BUNDLED_MODEL, PlainCluster, Stream, single_process, token_spec
from workers import Process, Worker, hand_off, merged, running, sampling

from cluster.errors import NotReachable
from cluster.settings import WorkerSettings
from cluster.tls import INTERNAL_NAME, InternalTls
from engine.sampling.params import SamplingParams
from tools.client import BatonClient

PROMPT = [(i * 37) % 1000 + 5 for i in range(101)]
NUM_TOKENS = 24


def settings_of(tls: InternalTls) -> dict[str, Any]:
    return {f"internal_tls_{name}": path for name, path in asdict(tls).items()}


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)
    return list(single_process([PROMPT], [params])[0][0].token_ids)


def test_a_cluster_under_tls_writes_what_a_single_process_writes(
    ours: Authority, tmp_path: Path, expected: list[int]
) -> None:
    public, client = ours.server(clients=ours), ours.client(showing=ours)
    router = {"tls_cert": public.cert, "tls_key": public.key, "tls_client_ca": public.client_ca}
    inside = settings_of(ours.internal())
    with PlainCluster(
        BUNDLED_MODEL, tmp_path, router={**router, **inside}, tls=client, metrics_port=0, **inside
    ) as cluster:
        stream = Stream(cluster, token_spec(PROMPT, NUM_TOKENS))
        stream.result()
        assert stream.token_ids() == expected
        cluster.wait_for(lambda status: any(worker.stats.kv_bytes_received for worker in status.workers))
        for stranger in (None, ours.client()):
            with BatonClient(cluster.address, tls=stranger) as refused, pytest.raises(NotReachable):
                refused.models()
        for worker in cluster.status().workers:
            assert "baton_kv_" in page(worker.info.metrics_address, ours)


def page(address: str, authority: Authority) -> str:
    """The metrics of a worker, as a Prometheus reads them that holds no certificate."""
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10).close()
    host, _, port = address.rpartition(":")
    context = authority.client().context()
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=INTERNAL_NAME) as secure,
    ):
        secure.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: secure.recv(65536), b"")).decode()


def test_ranks_talk_under_tls_and_hand_over_what_they_computed(ours: Authority, expected: list[int]) -> None:
    common: dict[str, Any] = {"model_path": str(BUNDLED_MODEL), "kv_cache_tokens": 2048, **settings_of(ours.internal())}
    prefill = Worker(worker_id="prefill-0", role="prefill", tp_size=2, **common)
    decode = Worker(worker_id="decode-0", role="decode", **common)
    with running(prefill, decode):
        key = hand_off("tls", PROMPT, prefill, decode, sampling(max_output_tokens=NUM_TOKENS))
        decode.wait_for(lambda: decode.outputs[key].finished)
        assert merged(key, prefill, decode).sequence() == expected
        prefill.wait_idle()


class LateWorker(Worker):
    """Before its own rank 1, another process tries to join as that."""

    def __init__(self, stranger: dict[str, Any], **settings: Any) -> None:
        self._stranger = stranger
        self.stranger_said = ""
        super().__init__(**settings)

    def start_rank(self, settings_json: str) -> Process:
        given = WorkerSettings.from_json(settings_json)
        if given.tp_rank == 1:
            process = Process("worker", given.with_values(**self._stranger).to_json())
            assert process.popen.wait(60) != 0
            self.stranger_said = process.stderr()
            process.stop()
        return super().start_rank(settings_json)


def test_a_rank_of_another_authority_does_not_join(ours: Authority, tmp_path: Path) -> None:
    """It ends and says why; the group goes on waiting for its own, which comes."""
    stranger = settings_of(Authority(tmp_path).internal())
    common: dict[str, Any] = {"model_path": str(BUNDLED_MODEL), "kv_cache_tokens": 2048, "tp_size": 2}
    worker = LateWorker(stranger, worker_id="decode-0", role="decode", **common, **settings_of(ours.internal()))
    with running(worker):
        assert "no TLS with a peer of the rank protocol" in worker.stranger_said
        assert len(worker.info.ranks) == 2
