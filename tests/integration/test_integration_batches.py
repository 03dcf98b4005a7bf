"""Batches on a real cluster with OpenAI's own client; routers that are killed in the middle; two that share a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster
from openai_batches import begin, check, client_of, expected, lines_of, num_answered, over, results, until
from serve_process import Serve

from benchmarks.redis_server import RedisServer, free_port, running_redis
from router.http_server import open_batch_store
from tools.client import AdminClient


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, redis_of_session: RedisServer) -> Iterator[PlainCluster]:
    """Two routers at one Redis."""
    given = {"http_port": 0, "batch_store": redis_of_session.url}
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("cluster"), router=given) as cluster:
        cluster.other_http_address = cluster.add_router("router-1", port=0)["http_address"]  # type: ignore[attr-defined]
        yield cluster


@pytest.fixture
def clients(cluster: PlainCluster) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    other: str = cluster.other_http_address  # type: ignore[attr-defined]
    with client_of(cluster.http_address) as one, client_of(other) as two:
        yield one, two


def num_finished(*addresses: str) -> int:
    total = 0
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
            found = re.search(rb'baton_requests_total{outcome="finished"} ([0-9.]+)', page.read())
        assert found is not None
        total += round(float(found[1]))
    return total


def test_a_batch_from_its_upload_to_its_answers(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    client, elsewhere = clients
    data = lines_of(20) + b'\n{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": 1}}'
    begun = begin(client, data)
    batch = over(elsewhere, begun.id)
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in results(elsewhere, batch.output_file_id)]
    assert texts == expected(client) * 4
    error = results(client, batch.error_file_id)[0]
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert batch.id in [each.id for each in elsewhere.batches.list()]


def test_two_routers_run_no_line_twice(cluster: PlainCluster, clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    addresses = (cluster.http_address, str(cluster.other_http_address))  # type: ignore[attr-defined]
    before = num_finished(*addresses)
    begun = [begin(clients[number % 2], lines_of(40)) for number in range(4)]
    batches = [over(clients[0], batch.id) for batch in begun]
    assert num_finished(*addresses) == before + 4 * 40
    for batch in batches:
        check(clients[1], batch, 40)


def test_a_batch_is_cancelled_at_another_router(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    client, elsewhere = clients
    begun = begin(client, lines_of(100, max_tokens=200))
    until(client, begun.id, lambda batch: batch.status == "in_progress")
    elsewhere.batches.cancel(begun.id)
    batch = over(client, begun.id)
    assert batch.status == "cancelled"
    told = [results(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id) if file_id]
    assert sorted(int(line["custom_id"].removeprefix("line-")) for part in told for line in part) == list(range(100))


@contextlib.contextmanager
def somewhere(kind: str, folder: Path) -> Iterator[str]:
    """A store of its own."""
    if kind == "sqlite":
        yield str(folder / "batches.db")
        return
    with running_redis() as server:
        yield server.url


async def num_kept(where: str, batch_id: str) -> int:
    """Answers that the store has, while no router lives."""
    store = open_batch_store(where)
    good, bad = await store.counts(batch_id)
    await store.close()
    return good + bad


CASES = [
    pytest.param("sqlite", 200, id="sqlite-200"),
    pytest.param("sqlite", 1000, id="sqlite-1000", marks=pytest.mark.battery),
    pytest.param("redis", 1000, id="redis-1000", marks=pytest.mark.battery),
]


@pytest.mark.parametrize(("kind", "count"), CASES)
def test_each_line_is_answered_once_though_its_router_is_killed_in_the_middle(
    kind: str, count: int, tmp_path: Path
) -> None:
    with (
        somewhere(kind, tmp_path) as where,
        PlainCluster(BUNDLED_MODEL, tmp_path, router={"http_port": 0, "batch_store": where}) as cluster,
        client_of(cluster.http_address) as client,
    ):
        begun = begin(client, lines_of(count))
        before = num_answered(until(client, begun.id, lambda batch: num_answered(batch) >= count // 3))
        cluster.kill_router()
        kept = asyncio.run(num_kept(where, begun.id))
        assert before <= kept < count, "the router was not killed in the middle"
        cluster.start_router()
        batch = over(client, begun.id)
        run_after = num_finished(cluster.http_address)
        check(client, batch, count)
        print(
            f"{kind}: {count} lines, {kept} had an answer when the router was killed, the next one ran {run_after}; "
            "each was answered once"
        )
        assert kept + run_after == count, "a line that had an answer was run again"


@pytest.mark.battery
@pytest.mark.timeout(240)
def test_baton_serve_keeps_batches_over_a_router_that_is_killed_and_over_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configuration that is shipped: in the home directory."""
    kernels = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", kernels)  # else workers compile theirs anew
    monkeypatch.setenv("HOME", str(tmp_path))
    ports = [str(free_port()) for _ in range(3)]
    flags = [text for pair in zip(("--port", "--admin-port", "--http-port"), ports, strict=True) for text in pair]
    serve = Serve(*flags)
    try:
        with client_of(f"127.0.0.1:{ports[2]}") as client, AdminClient(serve.admin_address) as admin:
            assert serve.address
            begun = begin(client, lines_of(400))
            until(client, begun.id, lambda batch: num_answered(batch) >= 100)
            pids = [process.pids[0] for process in admin.cluster().processes if process.name == "router"]
            os.kill(pids[0], signal.SIGKILL)
            check(client, over(client.with_options(max_retries=20), begun.id), 400)
            left = begin(client, lines_of(400, max_tokens=16))
            until(client, left.id, lambda batch: num_answered(batch) >= 10)
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait() == 0
        file = tmp_path / ".local" / "state" / "baton" / f"batches-{ports[2]}.db"
        assert file.exists()
        serve.close()
        serve = Serve(*flags)
        assert serve.address
        with client_of(f"127.0.0.1:{ports[2]}") as client:
            batch = over(client, left.id)
            assert (batch.status, num_answered(batch)) == ("completed", 400)
            assert [each.id for each in client.batches.list()] == [left.id, begun.id]
    finally:
        serve.close()
