"""Thousands of connections that say nothing or half of something, and bodies that are deep or wide, at a real cluster:
its processes stay, a good stream beside them stays exact, and afterwards everybody is served."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, token_spec
from flood import GoodStream

from cluster.address import parse_address
from cluster.program import raise_file_limit

NO_LIMIT = pytest.mark.timeout(900)
COUNTS = [pytest.param(400, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.battery)]
OF_ADDRESS = 1000
"""Connections that one address makes."""
STALLED_S = 4.0
WAIT_S = 120.0
OPENINGS = (
    b"",
    b"G",
    b"GET / HTTP/1.1\r\nHost: ",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01",
)


@contextlib.contextmanager
def crowd(address: str, count: int) -> Iterator[Counter[str]]:
    """So many connections at once, of an address for each thousand: how many were opened, and how many of those were
    closed at once or answered."""
    host, port = parse_address(address)
    seen = Counter[str]()
    with contextlib.ExitStack() as stack:
        poll = stack.enter_context(selectors.DefaultSelector())
        for number in range(count):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.bind((f"127.0.{1 + number // OF_ADDRESS}.1", 0))
            client.connect_ex((host, port))
            poll.register(client, selectors.EVENT_WRITE, OPENINGS[number % len(OPENINGS)])
        until, num_left = time.monotonic() + WAIT_S, count
        while num_left and time.monotonic() < until:
            for key, _ in poll.select(1.0):
                poll.unregister(key.fileobj)
                num_left -= 1
                try:
                    key.fileobj.send(key.data)  # type: ignore[union-attr]  # they are sockets
                    seen["opened"] += 1
                except OSError:
                    seen["refused"] += 1
        yield seen


def until_served(http: httpx.Client) -> None:
    """Until a new connection is answered: the others have had their time."""
    until = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if http.get("/healthz", headers={"connection": "close"}).status_code == 200:
                return
        assert time.monotonic() < until, "nobody is served any more"


@contextlib.contextmanager
def attacked(folder: Path, **router: object) -> Iterator[tuple[PlainCluster, httpx.Client]]:
    """A cluster with a good stream beside what happens to it, which the same processes then outlive."""
    settings = {"http_port": 0, "stalled_client_timeout_s": STALLED_S} | router
    with PlainCluster(BUNDLED_MODEL, folder, router=settings) as cluster:
        pids = {name: process.popen.pid for name, process in cluster.processes.items()}
        with (
            GoodStream(cluster.address, token_spec([5, 6, 7, 8], 24)) as good,
            httpx.Client(base_url=f"http://{cluster.http_address}", timeout=60) as http,
        ):
            before = good.num_exact
            yield cluster, http
            until_served(http)
        assert not good.wrong
        assert good.num_exact > before
        status = cluster.status()
        assert status.router.pid == pids["router"] and status.router.num_failed == 0
        assert {process.popen.poll() for process in cluster.processes.values()} == {None}
        assert {rank.pid for w in status.workers for rank in w.info.ranks} == set(pids.values()) - {pids["router"]}


@NO_LIMIT
@pytest.mark.parametrize("count", COUNTS)
def test_a_crowd_of_silent_connections_takes_nothing_down(tmp_path: Path, count: int) -> None:
    """Half of them at the HTTP port, then as many at gRPC's; in the long run more than may be open."""
    if raise_file_limit() < count + 2000:
        pytest.skip(f"this process may not open {count} connections; raise the hard limit of open files (ulimit -Hn)")
    with attacked(tmp_path) as (cluster, http):
        with crowd(cluster.http_address, count) as seen:
            assert seen.total() == count
            until_served(http)
        with crowd(cluster.address, count) as seen:
            assert seen.total() == count
            assert http.get("/healthz").status_code == 200


BODIES = {
    "wide": (b'{"model": "", "prompt": [', b"{},", b"{}]}"),
    "wide within": (b'{"model": "", "messages": [{"role": "user", "content": [', b"[],", b"[]]}]}"),
    "many fields": (b'{"model": "", "prompt": "a", ', b'"%d": 1,', b'"x": 1}'),
    "many biases": (b'{"model": "", "prompt": "a", "logit_bias": {', b'"%d": 1,', b'"x": 1}}'),
    "deep": (b'{"model": "", "prompt": ', b"[", b""),
    "deep objects": (b'{"model": "", "messages": ', b'{"a":', b""),
    "a text without an end": (b'{"model": "", "prompt": "', b'\\"[', b""),
}
BODY_BYTES = 1_000_000


def filled(begin: bytes, entry: bytes, end: bytes) -> bytes:
    count = BODY_BYTES // len(entry)
    entries = [entry % number for number in range(count)] if b"%d" in entry else [entry] * count
    return begin + b"".join(entries) + end


@NO_LIMIT
@pytest.mark.parametrize("count", [pytest.param(1, id="short"), pytest.param(30, id="long", marks=pytest.mark.battery)])
def test_deep_and_wide_bodies_are_refused_and_stop_nobody(tmp_path: Path, count: int) -> None:
    bodies = [filled(*parts) for parts in BODIES.values()]
    with attacked(tmp_path) as (_, http):
        for _ in range(count):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                for body in bodies:
                    answer = http.post(path, content=body)
                    assert answer.status_code == 400 and len(answer.content) < 2000, (
                        path,
                        body[:60],
                        answer.text[:200],
                    )
