"""Who reads a page of metrics, under which name, and how long one reader may take."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from prometheus_client import CollectorRegistry

from cluster import metrics_page
from cluster.auth import Metadata
from cluster.errors import PermissionDenied, Unauthenticated
from cluster.metrics_page import MetricsPage, serve_beside

WAIT_S = 20.0


@contextlib.contextmanager
def page_at(host: str = "127.0.0.1", **options: Any) -> Iterator[int]:
    """The port of a page."""
    page = MetricsPage(CollectorRegistry(), host, 0, **options)
    try:
        yield int(page.address.rpartition(":")[2])
    finally:
        page.close()


def status_of(port: int, host: str = "127.0.0.1", **headers: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse().status


def check_key(metadata: Metadata) -> None:
    found = dict(metadata)
    if not found:
        raise Unauthenticated("an API key is needed")
    if found != {"authorization": "Bearer good"}:
        raise PermissionDenied("another scope")


def test_a_site_that_points_its_name_here_reads_nothing() -> None:
    with page_at() as port:
        assert status_of(port) == status_of(port, Host=f"localhost:{port}") == 200
        assert status_of(port, Host=f"evil.example:{port}") == 403
        assert status_of(port, Origin="http://evil.example") == 403
    with page_at(allowed_hosts=("node-1.example",)) as port:
        assert status_of(port, Host=f"node-1.example:{port}") == 200


def test_beyond_loopback_and_without_tls_a_reader_needs_a_key_where_there_are_keys(tmp_path: Path) -> None:
    with page_at("0.0.0.0", insecure=True, check_key=check_key) as port:
        assert status_of(port) == 401
        assert status_of(port, Authorization="Bearer bad") == 403
        assert status_of(port, Authorization="Bearer good") == 200
        assert status_of(port, Authorization="Bearer good", Host="node-1:9100") == 200, "a key is proof enough"
    with page_at("127.0.0.1", check_key=check_key) as port:
        assert status_of(port) == 200
    page = serve_beside(CollectorRegistry(), "0.0.0.0", 0, insecure=False, tls=None, check_key=check_key)
    page.close()
    assert page.address.startswith("127.0.0.1:")
    ours = Authority(tmp_path)
    with page_at("0.0.0.0", tls=ours.server("localhost"), check_key=check_key) as port:
        secure = http.client.HTTPSConnection("localhost", port, timeout=WAIT_S, context=ours.client().context())
        with contextlib.closing(secure):
            secure.request("GET", "/metrics")
            assert secure.getresponse().status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: "], ids=["silent", "half a head"])
def test_a_reader_that_does_not_ask_in_time_is_closed(sent: bytes) -> None:
    with page_at(read_s=0.2) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as slow:
        slow.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(4096):
                pass


def test_a_reader_that_trickles_is_closed_too() -> None:
    with page_at(read_s=0.2) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as slow:
        slow.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            while True:
                slow.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(4096):
                        break


def test_a_crowd_of_readers_takes_no_more_threads_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_MOST_READERS", 3)
    with page_at() as port, contextlib.ExitStack() as stack:
        before = threading.active_count()
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) for _ in range(20)]
        for refused in crowd[3:]:
            with contextlib.suppress(ConnectionResetError):
                assert refused.recv(1) == b""
        assert threading.active_count() - before <= 2 * 3, "a thread and a timer for each place"
        for reader in crowd[:3]:
            reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert reader.recv(12) == b"HTTP/1.0 200"


def test_a_reader_for_whom_no_file_is_left_waits_and_costs_no_processor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with page_at() as port, socket.socket() as waiting:
        next_one = os.dup(0)
        os.close(next_one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
        try:
            waiting.settimeout(WAIT_S)
            waiting.connect(("127.0.0.1", port))
            waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            used = time.process_time()
            time.sleep(0.5)  # the processor's time is what is measured
            assert time.process_time() - used < 0.25
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert waiting.recv(64).startswith(b"HTTP/1.0 200 ")
