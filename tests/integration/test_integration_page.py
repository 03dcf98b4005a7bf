"""What the page and `baton top` tell of a real cluster, held against what clients were served and workers say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Stream, token_spec
from scripted_router import baton

from cli.top_view import Seen


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("page"), router={"http_port": 0}) as cluster:
        yield cluster


def shown(cluster: PlainCluster) -> dict[str, Any]:
    answer = httpx.get(f"http://{cluster.http_address}/api/cluster", timeout=20)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def seconds(cluster: PlainCluster, after: int = 0) -> list[dict[str, Any]]:
    return [second for second in shown(cluster)["activity"]["seconds"] if second["number"] > after]


def test_a_life_on_the_page_is_the_timing_that_the_client_was_told(cluster: PlainCluster) -> None:
    stream = Stream(cluster, token_spec([7, 8, 9] * 30, 40, include_timing=True, request_id="mine"))
    stream.result()
    timing = stream.timing()
    (life,) = [life for life in shown(cluster)["activity"]["requests"] if life["request_id"] == "mine"]
    phases = [phase["state"] for phase in life["phases"]]
    assert phases == ["queued", "prefilling", "transferring", "decoding", "finished"]
    began = {phase["state"]: phase["at_s"] for phase in life["phases"]}
    for duration, begin, end in (
        (timing.queue, began["queued"], began["prefilling"]),
        (timing.prefill, began["prefilling"], life["first_token_s"]),
        (timing.kv_transfer, began["transferring"], began["decoding"]),
        (timing.decode, began["decoding"], began["finished"]),
        (timing.time_to_first_token, 0.0, life["first_token_s"]),
    ):
        assert duration.ToNanoseconds() / 1e9 == pytest.approx(end - begin, abs=1e-5)
    assert (life["generation_id"], life["outcome"]) == (stream.generation_id, "finished")
    assert (life["num_prompt_tokens"], life["num_output_tokens"]) == (90, 40)
    assert (life["prefill_id"], life["decode_id"], life["placement"]) == (PREFILL, DECODE, timing.placement)
    assert life["arrival_time"] == pytest.approx(timing.arrival_time.ToNanoseconds() / 1e9, abs=1e-3)


def test_seconds_add_up_to_what_was_generated_and_running_requests_are_seen(cluster: PlainCluster) -> None:
    cluster.client.generate(token_spec([1, 2, 3], 5))
    cluster.wait_for(lambda status: sum(s["num_finished"] for s in seconds(cluster)) == status.router.num_finished)
    last = seconds(cluster)[-1]["number"]
    streams = [Stream(cluster, token_spec([number, 5, 6] * 20, 200)) for number in range(4, 8)]
    for stream in streams:
        stream.wait_for_tokens(3)
    during = shown(cluster)["status"]
    assert during["router"]["num_running"] > 0 and sum(w["num_requests"] for w in during["workers"]) > 0
    for stream in streams:
        assert sum(event.delta.token_count for event in stream.result()) == 200
    cluster.wait_for(lambda _: sum(second["num_finished"] for second in seconds(cluster, last)) >= 4)
    new = seconds(cluster, last)
    assert sum(second["num_output_tokens"] for second in new) == 800
    assert sum(second["num_prompt_tokens"] for second in new) == 240
    assert sum(second["ttft"]["count"] for second in new if second["ttft"]) == 4
    assert sum(second["num_failed"] + second["num_rejected"] + second["num_cancelled"] for second in new) == 0
    (pair,) = shown(cluster)["activity"]["pairs"]
    assert (pair["prefill_id"], pair["decode_id"], pair["num_now"]) == (PREFILL, DECODE, 0)
    assert pair["num_handed_over"] >= 4
    after = {worker["worker_id"]: worker for worker in shown(cluster)["status"]["workers"]}
    assert after[DECODE]["stats"]["blocks_total"] == cluster.stats(DECODE).blocks_total
    assert after[DECODE]["role"] == "decode"


def test_a_client_that_leaves_is_a_life_that_was_cancelled(cluster: PlainCluster) -> None:
    stream = Stream(cluster, token_spec([1, 2, 3], 1000, request_id="gone"))
    stream.wait_for_tokens(2)
    stream.cancel()
    stream.join()
    cluster.wait_for(lambda status: status.router.num_running == 0)
    (life,) = [life for life in shown(cluster)["activity"]["requests"] if life["request_id"] == "gone"]
    assert life["outcome"] == "cancelled" and life["phases"][-1] == {
        "state": "cancelled",
        "at_s": life["phases"][-1]["at_s"],
        "why": "the client left",
    }


def test_top_once_shows_the_same_cluster(cluster: PlainCluster) -> None:
    cluster.client.generate(token_spec([1, 2, 3], 5))
    done = baton("top", "--once", "--address", cluster.address)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith(f"{BUNDLED_MODEL.name} at {cluster.address}, up 00:00:") and lines[0].endswith(", 1:1")
    for role in ("prefill", "decode"):
        assert any(line.startswith(f"{role}-0 {role} ready ") for line in lines)
    assert any(line.startswith("finished ") and line.endswith(f" 3 0 5 {PREFILL} > {DECODE}") for line in lines)
    seen = Seen()
    seen.note(cluster.status(), cluster.client.activity())
    assert seen.requests[-1].num_output_tokens == 5
    assert not cluster.client.activity(seen.since()).requests
