"""The numbers of hand-offs: right for a scripted one, forgotten at every end, bounded in their labels, served."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster.kv_groups import all_layers
from cluster.lifecycle import RequestKey
from cluster.metrics_page import MetricsPage
from decode_worker.receiver import Receiver
from engine.kv.kv_tier import MoveKind
from engine.kv.tiered_blocks import TierCounts
from kv_transfer.actions import Chunk, Range
from prefill_worker.sender import Sender
from worker import metrics as module
from worker.handoff_connection import ConnectionState
from worker.handoff_metrics import MAX_HANDOFFS, HandoffMetrics
from worker.metrics import LANDING_SLOTS, METRICS, PAIR_STATES, SEND_SLOTS, HeldCollector, HeldResources, TierUse, ask
from worker.store_lookups import LookUpCounts

ROOT = Path(__file__).resolve().parents[3]
HELD = HeldResources(
    pairs={"opening": 1, "open": 2},
    send_slots={"free": 3, "gathering": 1, "quarantined": 4},
    landing_slots={"free": 6, "posted": 2},
    blocks={"free": 10, "held": 5, "cached": 1},
    num_preemptions=7,
    resumed_tokens={"device": 0, "host": 33, "disk": 0, "computed": 1},
    hit_tokens={"device": 640, "host": 32, "disk": 0},
    tier=TierUse(
        {("host", "free"): 3, ("host", "moving"): 1, ("host", "kept"): 9, ("disk", "kept"): 2},
        TierCounts(saved=20, loaded=8, unsaved=2),
        {MoveKind.SAVE: 4096, MoveKind.LOAD: 2048},
        seconds={MoveKind.LOAD: 0.5},
    ),
    lookups=LookUpCounts(found=3, nothing=5, failed=1, seconds=0.25),
)


@dataclass
class RankSlots:
    """What rank 0's transport knows."""

    num_landed_slots: int = 1
    quarantined_bytes: int = 4096


SLOTS = RankSlots()


def key_of(number: int) -> RequestKey:
    return RequestKey(f"request-{number}", 1)


def chunk_of(key: RequestKey, index: int = 0, epoch: str = "e") -> Chunk:
    return Chunk(key, epoch, index, 0, Range(0, 16, 0, 2))


@pytest.fixture
def metrics() -> HandoffMetrics:
    return HandoffMetrics()


def watch(metrics: HandoffMetrics, held: HeldResources | None) -> None:
    metrics.registry.register(HeldCollector(metrics, lambda: held, SLOTS))  # type: ignore[arg-type]


@pytest.fixture
def serve() -> Iterator[Callable[..., MetricsPage]]:
    pages: list[MetricsPage] = []

    def start(registry: CollectorRegistry, port: int = 0) -> MetricsPage:
        pages.append(MetricsPage(registry, "127.0.0.1", port))
        return pages[-1]

    yield start
    for page in pages:
        page.close()


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def value(metrics: HandoffMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def series(metrics: HandoffMetrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(s.name, tuple(s.labels.items())) for family in metrics.registry.collect() for s in family.samples}


def hand_off(metrics: HandoffMetrics, key: RequestKey, start: float, num_chunks: int = 2) -> None:
    """A chunk every 0.01 s, granted after 0.004 s; first tokens at 0.1 s, commit at 0.12, committed at 0.15."""
    metrics.opened(key, "e")
    for index in range(num_chunks):
        at = start + 0.01 * index
        metrics.gather_issued(chunk_of(key, index), at)
        metrics.offered(key, index, at + 0.001)
        metrics.granted(key, index, at + 0.005)
    metrics.first_tokens(key, start + 0.1)
    metrics.commit_sent(key, start + 0.12)
    metrics.committed(key, start + 0.15)


# Values


def test_a_hand_off_is_measured_from_its_first_gather_to_the_confirmation(metrics: HandoffMetrics) -> None:
    hand_off(metrics, key_of(1), start=100.0, num_chunks=3)
    sums = {
        "baton_kv_transfer_seconds": (1, 0.15),
        "baton_kv_transfer_exposed_seconds": (1, 0.05),
        "baton_kv_grant_seconds": (3, 0.012),
        "baton_kv_commit_seconds": (1, 0.03),
    }
    for name, (count, total) in sums.items():
        assert value(metrics, f"{name}_count") == count, name
        assert value(metrics, f"{name}_sum") == pytest.approx(total), name
    assert value(metrics, "baton_kv_transfer_seconds_bucket", le="0.1") == 0
    assert value(metrics, "baton_kv_transfer_seconds_bucket", le="0.25") == 1
    assert metrics.num_outgoing == 0


def test_the_buckets_reach_from_a_tenth_of_a_millisecond_to_half_a_minute(metrics: HandoffMetrics) -> None:
    bounds = [dict(labels)["le"] for name, labels in series(metrics) if name == "baton_kv_transfer_seconds_bucket"]
    assert sorted(map(float, bounds))[0] == 0.0001
    assert sorted(map(float, bounds))[-2:] == [30.0, float("inf")]


def test_a_hand_off_of_which_nothing_had_to_move_counts_as_exposed_but_not_as_a_transfer(
    metrics: HandoffMetrics,
) -> None:
    metrics.opened(key_of(1), "e")
    metrics.first_tokens(key_of(1), 1.0)
    metrics.commit_sent(key_of(1), 1.0)
    metrics.committed(key_of(1), 1.25)
    assert value(metrics, "baton_kv_transfer_seconds_count") == 0
    assert value(metrics, "baton_kv_transfer_exposed_seconds_sum") == 0.25


def test_a_clock_that_goes_back_counts_as_no_time(metrics: HandoffMetrics) -> None:
    metrics.opened(key_of(1), "e")
    metrics.first_tokens(key_of(1), 5.0)
    metrics.committed(key_of(1), 4.0)
    assert value(metrics, "baton_kv_transfer_exposed_seconds_sum") == 0.0
    assert value(metrics, "baton_kv_transfer_exposed_seconds_count") == 1


def test_bytes_are_counted_by_direction_and_transport(metrics: HandoffMetrics) -> None:
    metrics.moved("sent", "shm", 1000)
    metrics.moved("sent", "shm", 24)
    metrics.moved("received", "gloo", 7)
    metrics.moved("sent", "gloo", 0)  # a gather that failed
    metrics.moved("received", "", 5)  # the link was gone by then
    name = "baton_kv_transfer_bytes_total"
    assert value(metrics, name, direction="sent", transport="shm") == 1024
    assert value(metrics, name, direction="received", transport="gloo") == 7
    assert value(metrics, name, direction="sent", transport="gloo") == 0
    assert value(metrics, name, direction="received", transport="other") == 5


# Ends


def failures(metrics: HandoffMetrics) -> dict[str, float]:
    found = metrics.registry.collect()
    samples = [s for family in found for s in family.samples if s.name == "baton_kv_transfer_failures_total"]
    return {s.labels["reason"]: s.value for s in samples if s.value}


def test_a_retired_link_fails_what_is_on_it_and_nothing_else(metrics: HandoffMetrics) -> None:
    metrics.opened(key_of(1), "e")
    metrics.opened(key_of(2), "e")
    metrics.opened(key_of(3), "another")
    metrics.called(key_of(4), "e")
    metrics.ended(key_of(2))  # cancelled before
    metrics.retired("e", "REASON_PEER_LOST")
    assert failures(metrics) == {"peer_lost": 2}
    assert (metrics.num_outgoing, metrics.num_incoming) == (1, 0)
    assert value(metrics, "baton_kv_pairs_retired_total", reason="peer_lost") == 1


def test_an_idle_link_is_retired_without_a_failure(metrics: HandoffMetrics) -> None:
    metrics.retired("e", "REASON_UNSPECIFIED")
    assert value(metrics, "baton_kv_pairs_retired_total", reason="idle") == 1
    assert failures(metrics) == {}


def test_only_the_first_end_of_a_hand_off_counts(metrics: HandoffMetrics) -> None:
    metrics.called(key_of(1), "e")
    metrics.failed(key_of(1), "REASON_CORRUPT")
    metrics.ended(key_of(1))
    metrics.retired("e", "REASON_TRANSFER_FAILED")
    metrics.opened(key_of(2), "f")
    metrics.failed(key_of(2), "aborted")
    metrics.retired("f", "timeout")
    metrics.committed(key_of(2), 9.0)
    assert failures(metrics) == {"corrupt": 1, "aborted": 1}
    assert value(metrics, "baton_kv_transfer_exposed_seconds_count") == 0


ENDS: tuple[Callable[[HandoffMetrics, RequestKey], None], ...] = (
    lambda metrics, key: metrics.ended(key),
    lambda metrics, key: metrics.failed(key, "aborted"),
    lambda metrics, key: metrics.retired("e", "REASON_PEER_LOST"),
)


def test_ten_thousand_aborted_hand_offs_leave_nothing_behind(metrics: HandoffMetrics) -> None:
    before = series(metrics)
    for number in range(10_000):
        key = key_of(number)
        metrics.opened(key, "e")
        metrics.called(key_of(-number - 1), "e")
        if number % 2:
            metrics.gather_issued(chunk_of(key), 1.0)
            metrics.offered(key, 0, 1.0)
        if number % 4 == 3:
            metrics.first_tokens(key, 1.0)
            metrics.commit_sent(key, 1.0)
        for ended in (key, key_of(-number - 1)):
            ENDS[number % len(ENDS)](metrics, ended)
        assert (metrics.num_outgoing, metrics.num_incoming) == (0, 0), number
    assert series(metrics) == before


def test_hand_offs_whose_end_is_never_told_are_forgotten_oldest_first(metrics: HandoffMetrics) -> None:
    for number in range(10_000):
        metrics.opened(key_of(number), "e")
        metrics.called(key_of(number), "e")
    assert (metrics.num_outgoing, metrics.num_incoming) == (MAX_HANDOFFS, MAX_HANDOFFS)
    metrics.first_tokens(key_of(9_999), 1.0)
    metrics.first_tokens(key_of(0), 1.0)
    metrics.committed(key_of(9_999), 2.0)
    metrics.committed(key_of(0), 2.0)
    assert value(metrics, "baton_kv_transfer_exposed_seconds_count") == 1


KEYS = st.integers(0, 2).map(key_of)
TIMES = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e9, max_value=1e9)
EPOCHS, REASONS = st.sampled_from(["e", "f"]), st.sampled_from(["REASON_CAPACITY", "aborted", "", "what?"])
TRANSPORTS = st.sampled_from(["", "shm", "?"])
CALLS = st.one_of(
    st.tuples(st.sampled_from(["opened", "called"]), KEYS, EPOCHS),
    st.tuples(st.sampled_from(["first_tokens", "commit_sent", "committed"]), KEYS, TIMES),
    st.tuples(st.sampled_from(["offered", "granted"]), KEYS, st.integers(0, 3), TIMES),
    st.tuples(st.just("gather_issued"), KEYS.map(chunk_of), TIMES),
    st.tuples(st.just("ended"), KEYS),
    st.tuples(st.just("failed"), KEYS, REASONS),
    st.tuples(st.just("retired"), EPOCHS, REASONS),
    st.tuples(st.just("moved"), st.sampled_from(["sent", "received"]), TRANSPORTS, st.integers(-5, 5)),
)


@settings(max_examples=200)
@given(st.lists(CALLS, max_size=30))
def test_events_in_any_order_neither_raise_nor_make_a_new_series(calls: list[tuple[object, ...]]) -> None:
    metrics = HandoffMetrics()
    before = series(metrics)
    for name, *arguments in calls:
        getattr(metrics, str(name))(*arguments)
    assert series(metrics) == before
    for number in range(3):
        metrics.ended(key_of(number))
    assert (metrics.num_outgoing, metrics.num_incoming) == (0, 0)


def test_a_hand_off_costs_the_engine_thread_microseconds(metrics: HandoffMetrics) -> None:
    num_handoffs, num_chunks = 1000, 8
    begin = time.thread_time()
    for number in range(num_handoffs):
        hand_off(metrics, key_of(number), start=1.0, num_chunks=num_chunks)
    each = (time.thread_time() - begin) / num_handoffs
    assert each < 0.001, f"{each * 1e6:.0f} us for a hand-off of {num_chunks} chunks"


# The page


def test_every_metric_is_on_the_page_with_its_meaning(
    metrics: HandoffMetrics, serve: Callable[..., MetricsPage]
) -> None:
    watch(metrics, HELD)
    hand_off(metrics, key_of(1), start=1.0)
    lines = read(serve(metrics.registry).address).splitlines()
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.doc}" in lines
        assert f"# TYPE {metric.name} {metric.kind}" in lines
    names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert names == {m.name for m in METRICS if m.kind != "histogram"} | {
        f"{m.name}_{suffix}" for m in METRICS if m.kind == "histogram" for suffix in ("bucket", "sum", "count")
    }


@pytest.mark.parametrize(
    "name",
    [
        "baton_kv_transfer_seconds",
        "baton_kv_transfer_bytes_total",
        "baton_kv_transfer_exposed_seconds",
        "baton_kv_transfer_failures_total",
        "baton_kv_pairs",
        "baton_kv_slots",
        "baton_kv_grant_seconds",
        "baton_kv_commit_seconds",
    ],
)
def test_a_metric_that_dashboards_use_keeps_its_name(name: str) -> None:
    assert name in {metric.name for metric in METRICS}


def test_the_page_is_what_prometheus_parses_and_shows_what_is_held(
    metrics: HandoffMetrics, serve: Callable[..., MetricsPage]
) -> None:
    watch(metrics, HELD)
    metrics.opened(key_of(1), "e")
    metrics.called(key_of(2), "f")
    metrics.called(key_of(3), "f")
    families = text_string_to_metric_families(read(serve(metrics.registry).address))
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert (found["baton_kv_handoffs", "send"], found["baton_kv_handoffs", "receive"]) == (1, 2)
    assert [found["baton_kv_pairs", state] for state in PAIR_STATES] == [1, 2, 0, 0]
    assert [found["baton_kv_slots", "send", state] for state in SEND_SLOTS] == [3, 1, 0, 0, 4]
    assert [found["baton_kv_slots", "receive", state] for state in LANDING_SLOTS] == [6, 1, 1, 0]
    assert found["baton_kv_quarantined_bytes",] == 4096
    assert [found["baton_kv_blocks", state] for state in ("free", "held", "cached")] == [10, 5, 1]
    assert found["baton_preemptions_total",] == 7
    assert found["baton_resumed_tokens_total", "host"] == 33
    assert found["baton_kv_tier_blocks", "kept", "host"] == 9
    assert found["baton_kv_tier_events_total", "loaded"] == 8
    assert [found["baton_kv_store_lookups_total", result] for result in ("found", "nothing", "failed")] == [3, 5, 1]
    assert (found["baton_kv_tier_bytes_total", "load"], found["baton_kv_tier_seconds_total", "load"]) == (2048, 0.5)


def test_the_page_is_served_without_what_is_held_while_the_engine_thread_does_not_answer(
    metrics: HandoffMetrics, serve: Callable[..., MetricsPage]
) -> None:
    watch(metrics, None)
    text = read(serve(metrics.registry).address)
    assert "baton_kv_handoffs{" in text
    assert "baton_kv_pairs{" not in text


def test_the_states_that_are_shown_are_those_that_there_are() -> None:
    assert {state.value for state in ConnectionState} == {*PAIR_STATES, "closed"}
    assert set(Sender(all_layers(2)).count_stages()) | {"quarantined"} == set(SEND_SLOTS)
    assert set(Receiver(all_layers(2)).count_stages()) | {"landed", "quarantined"} == set(LANDING_SLOTS)


# Asking the engine thread


def test_a_question_is_answered_on_the_thread_that_it_is_posted_to() -> None:
    answered_on: list[threading.Thread] = []

    def question() -> int:
        answered_on.append(threading.current_thread())
        return 7

    def post(run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="engine").start()

    assert ask(post, question) == 7
    assert [thread.name for thread in answered_on] == ["engine"]


def test_a_question_that_fails_ends_nothing_but_itself(caplog: pytest.LogCaptureFixture) -> None:
    def question() -> int:
        raise KeyError("gone")

    assert ask(lambda run: run(), question) is None
    assert "a question of the metrics page failed" in caplog.text


def test_a_question_that_nobody_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.05)
    posted: list[Callable[[], None]] = []
    assert ask(posted.append, lambda: 1) is None
    posted[0]()  # an answer that comes late disturbs nobody
    assert len(posted) == 1


def test_the_reference_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == module.reference()
