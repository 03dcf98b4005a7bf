"""KV in a bucket that workers share, in S3's own protocol: prompts are found again after everything was restarted, and
every output is what it is without it, also when the server dies, falls silent or loses the bucket.
`pip install s3fs 'moto[server]'` runs these tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest
from chaos_fleet import await_true
from cluster_fixture import PREFILL, single_process
from test_integration_host_tier import BLOCK_BYTES, GREEDY, NUM_PROMPTS, ask_all, prompt_of, tier_of
from test_integration_store import COMMON
from workers import Process, Worker, running

from cluster.program import ExitCode
from cluster.settings import WorkerSettings
from kv_transfer.bucket_store import BucketStore

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

URL = "s3://cluster/kv"
BLOCKS_OF_ONE = 24


class Way:
    """A port whose connections go on to another one, unless it is `silent`: then nothing comes through."""

    def __init__(self, port: int) -> None:
        self.is_silent = False
        self._server, self._port = socket.create_server(("127.0.0.1", 0)), port
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._server.accept()[0]
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as far:
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            back.start()
            self._pass_on(near, far)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_silent:
                    target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Bucket:
    """S3's stand-in, a process, and the way to it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.way, self.client = Way(self._port), boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self._port}")
        self.start()
        self.client.create_bucket(Bucket="cluster")

    def start(self) -> None:
        """Starts a server that has nothing."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await_true(self._answers, lambda: "S3's stand-in did not start")

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def names(self) -> list[str]:
        return [each.name for each in BucketStore(URL).objects()]

    def kill(self) -> None:
        self.server.kill()
        self.server.wait()

    def close(self) -> None:
        self.kill()
        self.way.close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    there = Bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{there.way.port}")
    yield there
    there.close()


def settings_of(**more: object) -> dict[str, object]:
    store = {"kv_store_path": URL, "kv_store_bytes": 64 << 20, "kv_host_bytes": 200 * BLOCK_BYTES}
    return {**COMMON, **store, "metrics_port": 0, "role": "prefill", **more}


def expected_of(prompts: list[list[int]]) -> list[object]:
    return [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_prompts_are_found_in_a_bucket_after_everything_was_restarted(tp_size: int, bucket: Bucket) -> None:
    prompts = [prompt_of(number) for number in range(NUM_PROMPTS)]
    expected = expected_of(prompts)
    settings = settings_of(tp_size=tp_size)
    first, decode = Worker(worker_id=PREFILL, **settings), Worker(worker_id="decode-0", role="decode", **COMMON)
    with running(first, decode):
        ask_all("first", prompts, expected, first, decode)
    assert len(bucket.names()) >= NUM_PROMPTS * 10 * tp_size, "a worker that is stopped writes what it has"
    again, decode = Worker(worker_id=PREFILL, **settings), Worker(worker_id="decode-0", role="decode", **COMMON)
    with running(again, decode):
        keys = ask_all("after", prompts, expected, again, decode)
        tier = tier_of(again.info.metrics_address)
        assert tier["fetched"] >= BLOCKS_OF_ONE and tier["failed"] == 0, tier
        assert max(again.outputs[key].num_cached_tokens for key in keys) == 384


@pytest.mark.timeout(300)
def test_a_server_that_falls_silent_delays_one_prompt_and_is_used_again_once_it_answers(bucket: Bucket) -> None:
    prompts = [prompt_of(number) for number in range(4)]
    expected = expected_of(prompts)
    settings = settings_of(kv_store_policy="all", kv_cache_tokens=512)
    decode = Worker(worker_id="decode-0", role="decode", **COMMON)
    first = Worker(worker_id=PREFILL, **settings)
    with running(decode):
        with running(first):
            ask_all("first", prompts, expected, first, decode)
            await_true(lambda: len(bucket.names()) >= 4 * BLOCKS_OF_ONE, first.ranks[0].stderr)
        another, turns = Worker(worker_id="prefill-1", **settings), count()
        with running(another):

            def ask(turn: str, number: int) -> int:
                [key] = ask_all(f"{turn} {next(turns)}", [prompts[number]], [expected[number]], another, decode)
                return another.outputs[key].num_cached_tokens or 0

            assert ask("found", 0) == 384
            bucket.way.is_silent = True
            begun = time.monotonic()
            assert ask("silent", 1) == 0 and ask("left alone", 2) == 0
            assert time.monotonic() - begun < 10.0
            bucket.way.is_silent = False
            await_true(lambda: ask("again", 3) == 384, another.ranks[0].stderr, 60.0)
            bucket.way.is_silent = True
            begun = time.monotonic()
        assert time.monotonic() - begun < 15.0, "a worker ends while its store is silent"


@pytest.mark.timeout(300)
def test_a_server_that_dies_and_comes_back_without_the_bucket_or_with_it_makes_no_output_wrong(bucket: Bucket) -> None:
    prompts = [prompt_of(number) for number in range(5)]
    expected = expected_of(prompts)
    settings = settings_of(kv_store_policy="all", kv_cache_tokens=512, kv_host_bytes=30 * BLOCK_BYTES)
    decode = Worker(worker_id="decode-0", role="decode", **COMMON)
    prefill, turns = Worker(worker_id=PREFILL, **settings), count()
    with running(prefill, decode):

        def ask_for_all() -> None:
            ask_all(f"turn {next(turns)}", prompts, expected, prefill, decode)

        ask_for_all()
        await_true(lambda: len(bucket.names()) >= 4 * BLOCKS_OF_ONE, prefill.ranks[0].stderr)
        killer = threading.Timer(0.05, bucket.kill)
        killer.start()
        ask_for_all()
        killer.join()
        ask_for_all()
        bucket.start()
        ask_for_all()
        bucket.client.create_bucket(Bucket="cluster")

        def is_written() -> bool:
            ask_for_all()
            return len(bucket.names()) >= BLOCKS_OF_ONE

        await_true(is_written, prefill.ranks[0].stderr, 60.0)
        errors = prefill.ranks[0].stderr()
    assert "KV store" in errors and "Traceback" not in errors, errors


@pytest.mark.parametrize("what", ["no bucket", "refused", "silent"])
def test_a_worker_that_cannot_use_its_bucket_ends_at_the_start_with_the_key_and_the_reason(
    what: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = {"no bucket": "The specified bucket does not exist", "refused": "Could not connect", "silent": "no answer"}
    if what == "refused":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    bucket.way.is_silent = what == "silent"
    url = "s3://another/kv" if what == "no bucket" else URL
    settings = settings_of(kv_store_path=url, worker_id=PREFILL, threads=1, device="cpu", dtype="float32")
    process = Process("worker", WorkerSettings.from_values(**settings).to_json())
    assert process.popen.wait(60) == ExitCode.BAD_CONFIG
    assert f"kv_store_path: {url} cannot be used: " in process.stderr() and reason[what] in process.stderr()
    process.stop()
