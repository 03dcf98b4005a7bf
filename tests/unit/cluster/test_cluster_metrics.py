"""The page of a registry: where it may be served, how it ends, and that labels stay bounded."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import urllib.request
from pathlib import Path

import pytest
from certificates import Authority
from prometheus_client import CollectorRegistry

from cluster.errors import ConfigError
from cluster.metrics import LabelledCounter, Metric, TokenHistogram, histogram, render_reference
from cluster.metrics_page import MetricsPage
from cluster.tls import ServerTls

METRIC = Metric("baton_moves_total", "counter", "What moved.", (("way", ("up", "other")), ("size", ("big", "small"))))


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    LabelledCounter(METRIC, registry).add(2, "up", "big")
    return registry


def read(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


def port_of(page: MetricsPage) -> int:
    return int(page.address.rpartition(":")[2])


def test_a_page_has_every_series_from_the_start_and_nothing_else(registry: CollectorRegistry) -> None:
    page = MetricsPage(registry, "127.0.0.1", 0)
    try:
        assert read(port_of(page)) == [
            "# HELP baton_moves_total What moved.",
            "# TYPE baton_moves_total counter",
            'baton_moves_total{size="big",way="up"} 2.0',
            'baton_moves_total{size="small",way="up"} 0.0',
            'baton_moves_total{size="big",way="other"} 0.0',
            'baton_moves_total{size="small",way="other"} 0.0',
        ]
    finally:
        page.close()


def test_a_label_that_was_not_declared_counts_as_other() -> None:
    registry = CollectorRegistry()
    counter = LabelledCounter(METRIC, registry)
    counter.add(3, "sideways", "small")
    counter.add(-1, "up", "small")
    values = {tuple(s.labels.values()): s.value for f in registry.collect() for s in f.samples if s.value}
    assert values == {("other", "small"): 3}


def test_the_reference_names_each_metric_with_its_labels() -> None:
    lines = render_reference("# Metrics\n", [METRIC, Metric("baton_x", "gauge", "X.")]).splitlines()
    assert lines[-2:] == [
        "| `baton_moves_total` | counter | `way`: up, other; `size`: big, small | What moved. |",
        "| `baton_x` | gauge | – | X. |",
    ]


def test_a_port_in_use_is_refused_with_the_remedy(registry: CollectorRegistry) -> None:
    page = MetricsPage(registry, "127.0.0.1", 0)
    try:
        wanted = rf"cannot serve metrics on {page.address}: it is in use .* another port \(0: any free one\)"
        with pytest.raises(ConfigError, match=wanted):
            MetricsPage(registry, "127.0.0.1", port_of(page))
    finally:
        page.close()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("192.0.2.1", 0), ("no.such.host.invalid", 0)])
def test_an_address_that_cannot_be_had_is_refused(registry: CollectorRegistry, host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot serve metrics on {host}:{port}"):
        MetricsPage(registry, host, port, insecure=True)


def test_another_address_than_loopback_needs_insecure(registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigError, match=r"refusing to serve metrics on '0.0.0.0' without TLS"):
        MetricsPage(registry, "0.0.0.0", 0)
    page = MetricsPage(registry, "0.0.0.0", 0, insecure=True)
    try:
        assert read(port_of(page))
    finally:
        page.close()


def test_a_closed_page_leaves_neither_thread_nor_port(registry: CollectorRegistry) -> None:
    before = set(threading.enumerate())
    page = MetricsPage(registry, "127.0.0.1", 0)
    assert set(threading.enumerate()) > before
    page.close()
    page.close()
    assert set(threading.enumerate()) == before
    with socket.create_server(("127.0.0.1", port_of(page))):
        pass


def test_a_page_with_tls_is_read_by_who_believes_its_authority_and_is_not_held_up(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    ours = Authority(tmp_path)
    page = MetricsPage(registry, "0.0.0.0", 0, tls=ours.server("localhost"))
    try:
        port = port_of(page)
        with socket.create_connection(("127.0.0.1", port)):  # says nothing, and nobody waits for it
            secure = http.client.HTTPSConnection("localhost", port, timeout=20, context=ours.client().context())
            with contextlib.closing(secure):
                secure.request("GET", "/metrics")
                assert b"baton_moves_total" in secure.getresponse().read()
        strange = http.client.HTTPSConnection(
            "localhost", port, timeout=20, context=Authority(tmp_path).client().context()
        )
        with contextlib.closing(strange), pytest.raises(ssl.SSLCertVerificationError):
            strange.request("GET", "/metrics")
        with pytest.raises(OSError):
            read(port)
    finally:
        page.close()


def test_a_page_with_files_that_cannot_be_used_is_refused(registry: CollectorRegistry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        MetricsPage(registry, "127.0.0.1", 0, tls=ServerTls(str(tmp_path / "cert"), str(tmp_path / "key")))


def test_a_histogram_of_tokens_reads_like_any_other() -> None:
    metric, registry = (
        Metric("baton_wait_seconds", "histogram", "How long.", buckets=(0.1, 0.5, 1.0)),
        CollectorRegistry(),
    )
    usual, quick = histogram(metric, registry), TokenHistogram(metric)
    for value in (0.0, 0.1, 0.11, 0.5, 0.9, 1.0, 7.0, 7.0):
        usual.observe(value)
        quick.observe(value)
    (expected,) = registry.collect()
    samples = [sample for sample in expected.samples if not sample.name.endswith("_created")]
    family = quick.family()
    assert (family.name, family.documentation, family.type) == (expected.name, expected.documentation, expected.type)
    assert family.samples == samples
