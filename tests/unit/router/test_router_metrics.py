"""What the router's page says: each request, attempt and placement once, and how long its client waited."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, STOP, phase, tokens
from router_harness import ids, running_router
from wired_router import ManualClock, WiredRouter, run

from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, worker_pb2
from router.observe import metrics as module
from router.observe.counters import OUTCOMES, RETRIES
from router.observe.metrics import METRICS, VllmNames
from router.routing.load_tracker import Placement, PlacementKind, RequestLoad
from router.routing.policies.interface import RoutingRequest
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.retry import RETRYABLE

ROOT = Path(__file__).resolve().parents[3]


def value(router: WiredRouter, name: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(f"baton_{name}", labels)


def by_label(router: WiredRouter, name: str, label: str) -> dict[str, float]:
    """Series above zero."""
    samples = [s for family in router.metrics.registry.collect() for s in family.samples]
    return {s.labels[label]: s.value for s in samples if s.name == f"baton_{name}" and s.value}


def test_every_series_is_there_from_the_start() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        for outcome in OUTCOMES:
            assert value(router, "requests_total", outcome=outcome) == 0
        for reason in RETRIES.labels[0][1]:
            assert value(router, "retries_total", reason=reason) == 0
        for kind in PlacementKind:
            assert value(router, "placements_total", kind=kind) == 0
        names = {family.name for family in router.metrics.registry.collect()}
        assert names == {metric.name.removesuffix("_total") for metric in METRICS}

    run(scenario)


def test_a_request_is_counted_where_it_was_placed_how_it_ended_and_how_long_it_took() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit()
        key = RequestKey(client.request_id, 1).to_proto()
        assert (value(router, "running_requests"), value(router, "queued_requests")) == (1, 0)
        await clock.advance(0.3)
        router.workers["p0"].emit(phase(key, PREFILL), tokens(key, 0, ids("a")))
        await clock.advance(0.2)
        router.workers["d0"].emit(phase(key, DECODE), tokens(key, 1, ids("bc")))
        await clock.advance(0.04)
        router.workers["d0"].emit(tokens(key, 3, ids("d"), finish_reason=LENGTH))
        assert by_label(router, "placements_total", "kind") == {"disaggregated": 1}
        assert by_label(router, "requests_total", "outcome") == {"finished": 1}
        assert value(router, "decision_seconds_count") == 1
        assert value(router, "time_to_first_token_seconds_count") == 1
        assert value(router, "time_to_first_token_seconds_sum") == pytest.approx(0.3)
        assert value(router, "inter_token_seconds_count") == 2
        assert value(router, "inter_token_seconds_sum") == pytest.approx(0.1 + 0.04), "two tokens came together"
        assert (value(router, "running_requests"), value(router, "queued_requests")) == (0, 0)
        assert value(router, "request_seconds_sum") == pytest.approx(0.54)
        num_prompt_tokens = len(client.live.request.prompt_token_ids)
        counted = [value(router, f"{kind}_tokens_total") for kind in ("prompt", "cached", "output")]
        assert counted == [num_prompt_tokens, 0, 4]
        phases = [value(router, f"{name}_seconds_sum") for name in ("queue", "prefill", "decode")]
        assert phases == [pytest.approx(0.3), pytest.approx(0.0), pytest.approx(0.24)]
        assert value(router, "time_per_output_token_seconds_sum") == pytest.approx(0.24 / 3)
        sizes = [value(router, f"request_{kind}_tokens_sum") for kind in ("prompt", "output")]
        assert sizes == [num_prompt_tokens, 4]
        assert by_label(router, "sequences_total", "finished_reason") == {"length": 1}

    run(scenario)


def test_what_requests_hold_of_the_kv_is_told_by_role_and_not_of_workers_that_are_gone() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        for name, held in (("d0", 10), ("d1", 30)):
            stats = worker_pb2.WorkerStats(blocks_held=held, blocks_cached=20, blocks_total=100)
            router.workers[name].emit(worker_pb2.Event(stats=stats))
        assert by_label(router, "kv_usage_ratio", "role") == {"decode": 0.2}
        router.workers["d1"].lose()
        assert by_label(router, "kv_usage_ratio", "role") == {"decode": 0.1}

    run(scenario)


def test_outputs_are_counted_by_why_they_ended_each_and_only_of_what_finished() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        left = router.submit()
        router.dispatcher.cancel(left.request_id, "the client left")
        client = router.submit(n=2)
        key = RequestKey(client.request_id, 1).to_proto()
        stopped = tokens(key, 0, ids("b"), sequence_index=1, finish_reason=STOP)
        router.workers["p0"].emit(phase(key, PREFILL), tokens(key, 0, ids("a"), finish_reason=LENGTH), stopped)
        assert by_label(router, "sequences_total", "finished_reason") == {"length": 1, "stop": 1}
        assert value(router, "request_output_tokens_count") == 1
        assert value(router, "time_per_output_token_seconds_count") == 0, "one token has no time per token"

    run(scenario)


def test_dashboards_made_for_vllm_find_the_same_numbers_under_its_names() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit()
        names = VllmNames(router.metrics.registry, "tiny").registry

        def value_of(name: str) -> float | None:
            return names.get_sample_value(f"vllm:{name}", {"model_name": "tiny"})

        assert (value_of("num_requests_running"), value_of("num_requests_waiting")) == (1, 0)
        key = RequestKey(client.request_id, 1).to_proto()
        router.workers["p0"].emit(phase(key, PREFILL), tokens(key, 0, ids("a"), finish_reason=LENGTH))
        assert value_of("generation_tokens_total") == value_of("time_to_first_token_seconds_count") == 1
        wanted = {name.removesuffix("_total") for metric in METRICS for name in metric.aliases}
        assert {family.name for family in names.collect()} == wanted
        success = {"model_name": "tiny", "finished_reason": "length"}
        assert names.get_sample_value("vllm:request_success_total", success) == 1
        assert value_of("prefix_cache_queries_total") == value_of("prompt_tokens_total") == 5

    run(scenario)


def test_sequences_of_one_request_are_timed_each_by_itself_and_late_tokens_not_at_all() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit(n=2)
        key = RequestKey(client.request_id, 1).to_proto()
        prefill, decode = router.workers["p0"], router.workers["d0"]
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")), tokens(key, 0, ids("b"), sequence_index=1))
        await clock.advance(0.5)
        decode.emit(tokens(key, 0, ids("a")), tokens(key, 1, ids("c"), sequence_index=1))
        assert value(router, "inter_token_seconds_count") == 1
        assert value(router, "inter_token_seconds_sum") == pytest.approx(0.5)

    run(scenario)


def test_a_lost_worker_is_a_retry_and_another_placement_of_the_same_request() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0"])
        client = router.submit()
        router.workers["p0"].lose()
        assert by_label(router, "retries_total", "reason") == {"worker_lost": 1}
        assert by_label(router, "placements_total", "kind") == {"disaggregated": 1, "retried": 1}
        router.dispatcher.counters.retried["NEVER_HEARD_OF"] += 1
        assert by_label(router, "retries_total", "reason") == {"worker_lost": 1, "other": 1}
        router.dispatcher.cancel(client.request_id, "by the test")
        assert by_label(router, "requests_total", "outcome") == {"cancelled": 1}

    run(scenario)


def test_the_reasons_of_retries_are_those_that_there_are() -> None:
    names = {worker_pb2.Failed.Reason.Name(r).removeprefix("REASON_").lower() for r in RETRYABLE}
    assert names | {"worker_lost", "stalled", "other"} == set(RETRIES.labels[0][1])


async def test_the_page_is_served_where_the_status_says(tmp_path: Path) -> None:
    async with running_router(tmp_path, metrics_port=0) as router:
        status = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
        with urllib.request.urlopen(f"http://{status.router.metrics_address}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        assert 'baton_requests_total{outcome="finished"} 0.0' in page


async def test_without_a_port_there_is_no_page(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        status = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert status.router.metrics_address == ""


def test_the_turns_of_a_session_are_placed_together_and_counted() -> None:
    """From the client's field to the policy and the page; by their ids, p0 and d0 would come first."""
    cost = worker_pb2.StepCost(fixed_s=0.01, prompt_token_s=0.1, sequence_s=0.001)

    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0", "d1"])
        for worker in router.workers.values():
            worker.emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=cost)))
        first = [router.submit(), router.submit(session_id="s")]
        for client in first:
            router.dispatcher.cancel(client.request_id, "by the test")
        second = router.submit(session_id="s"), router.submit()
        placed = [client.live.placement for client in (*first, *second)]
        assert [p and (p.prefill_id, p.decode_id) for p in placed] == [
            ("p0", "d0"),
            ("p1", "d1"),
            ("p1", "d1"),
            ("p0", "d0"),
        ]
        assert placed[2] is not None and placed[2].reason.endswith("where its session is")
        assert by_label(router, "placements_total", "kind")["session"] == 1

    run(scenario)


def test_the_page_in_docs_is_the_code() -> None:
    assert (ROOT / "docs" / "router-metrics.md").read_text() == module.reference()


def test_a_policy_sees_every_placement_hand_off_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []

    class Recorder(LeastLoaded):
        def on_placed(self, request: RoutingRequest, placement: Placement) -> None:
            seen.append(("placed", placement.decode_id))

        def on_handoff(self, placement: Placement, work: RequestLoad, exposed_s: float) -> None:
            seen.append(("handoff", exposed_s))

        def on_worker_lost(self, worker_id: str) -> None:
            seen.append(("lost", worker_id))

    monkeypatch.setattr("router.routing.dispatcher.policy_class", lambda name: Recorder)

    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        key = router.submit().live.key.to_proto()
        router.workers["p0"].emit(phase(key, PREFILL), tokens(key, 0, ids("a")))
        await clock.advance(0.25)
        router.workers["d0"].emit(phase(key, DECODE), tokens(key, 1, ids("b")))
        router.workers["d0"].lose()
        assert seen == [("placed", "d0"), ("handoff", 0.25), ("lost", "d0"), ("placed", "d1")]
        assert value(router, "decision_seconds_count") == 3, "a retry decides on the decode and on the prefill worker"

    run(scenario)
