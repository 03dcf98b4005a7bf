"""What a router keeps of the last minutes: percentiles, seconds, lives of requests, hand-offs of pairs, rates."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, phase, tokens
from router_harness import ids
from wired_router import ManualClock, WiredRouter, run

from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, worker_pb2
from router.observe.activity import KEPT_REQUESTS, KEPT_SECONDS, WINDOW_SECONDS, Activity, Sketch, WorkerRates
from router.observe.counters import OUTCOMES

NOTHING_ENDED = dict.fromkeys(OUTCOMES, 0)


def response_of(activity: Activity, **since: object) -> admin_pb2.GetActivityResponse:
    return activity.response(admin_pb2.GetActivityRequest(**since), Counter())  # type: ignore[arg-type]


def tick(activity: Activity, now: float, **ended: int) -> None:
    activity.tick(now, 1e9 + now, NOTHING_ENDED | ended, num_queued=3, num_running=4)


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 0.03, 1.0, 500.0])
def test_percentiles_of_a_sketch_are_within_four_percent(scale: float) -> None:
    draw = random.Random(3)
    values = sorted(scale * draw.lognormvariate(0, 1.5) for _ in range(4000))
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    assert len(sketch) == 4000
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = max(values[max(0, round(share * len(values)) - 1)], 1e-6)
        assert sketch.quantile(share) == pytest.approx(exact, rel=0.05)


def test_sketches_add_up_and_an_empty_or_a_zero_one_has_answers() -> None:
    one, other, both = Sketch(), Sketch(), Sketch()
    assert one.quantile(0.5) == 0.0 and one.to_proto() == admin_pb2.Quantiles()
    for number in range(1, 200):
        (one if number % 3 else other).add(number / 1000)
        both.add(number / 1000)
    one.merge(other)
    assert one.to_proto() == both.to_proto() and one.to_proto().count == 199
    zero = Sketch()
    zero.add(0.0)
    zero.add(-1.0)
    assert 0 < zero.quantile(1.0) < 1e-5


def test_a_second_holds_what_came_in_it_and_a_minute_is_their_sum() -> None:
    activity = Activity()
    tick(activity, 100.0, finished=5)
    activity.on_first_token(0.2, 30)
    activity.on_tokens(1, None)
    activity.on_tokens(3, 0.06)
    tick(activity, 101.0, finished=6, rejected=2)
    tick(activity, 103.5, finished=6, rejected=2, failed=1)
    first, held_up = response_of(activity).seconds
    assert (first.number, first.time, first.duration_s) == (1, 1e9 + 101, 1.0)
    assert (first.num_finished, first.num_rejected, first.num_failed) == (1, 2, 0), "not what ended before it"
    assert (first.num_prompt_tokens, first.num_output_tokens) == (30, 4)
    assert (first.ttft.count, first.itl.count) == (1, 1)
    assert first.ttft.p50 == pytest.approx(0.2, rel=0.05) and first.itl.p99 == pytest.approx(0.02, rel=0.05)
    assert (held_up.number, held_up.duration_s, held_up.num_failed, held_up.ttft.count) == (2, 2.5, 1, 0)
    window = response_of(activity).window
    assert (window.duration_s, window.num_finished, window.num_rejected, window.num_failed) == (3.5, 1, 2, 1)
    assert (window.num_output_tokens, window.ttft, window.num_running) == (4, first.ttft, 4)


def test_what_is_kept_is_bounded_and_told_once_to_who_comes_again() -> None:
    activity = Activity()
    for now in range(KEPT_SECONDS + 50):
        activity.on_tokens(1, None)
        tick(activity, float(now))
    whole = response_of(activity)
    assert [s.number for s in whole.seconds] == list(range(50, KEPT_SECONDS + 50))
    assert whole.window.duration_s == whole.window.num_output_tokens == WINDOW_SECONDS
    last = whole.seconds[-1].number
    assert not response_of(activity, life=activity.life, after_second=last).seconds
    tick(activity, 1e4)
    assert [s.number for s in response_of(activity, life=activity.life, after_second=last).seconds] == [last + 1]
    assert len(response_of(activity, life="another router's", after_second=last).seconds) == KEPT_SECONDS


def test_the_life_of_a_request_is_told_with_its_phases_tokens_and_workers() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        activity = router.activity
        tick(activity, clock())
        client = router.submit()
        key = RequestKey(client.request_id, 1).to_proto()
        prefill, decode = router.workers["p0"], router.workers["d0"]
        assert router.dispatcher.handing_over() == {("p0", "d0"): 1}
        await clock.advance(0.1)
        prefill.emit(phase(key, PREFILL, 2))
        await clock.advance(0.3)
        prefill.emit(phase(key, TRANSFER), tokens(key, 0, ids("a")))
        await clock.advance(0.05)
        decode.emit(phase(key, DECODE))
        assert not router.dispatcher.handing_over(), "the prefill worker is done with it"
        assert not response_of(activity).requests
        await clock.advance(0.5)
        decode.emit(tokens(key, 1, ids("bc"), finish_reason=LENGTH))
        tick(activity, clock())
        (life,) = response_of(activity).requests
        assert [p.state for p in life.phases] == ["queued", "prefilling", "transferring", "decoding", "finished"]
        assert [p.at_s for p in life.phases] == pytest.approx([0, 0.1, 0.4, 0.45, 0.95])
        assert (life.outcome, life.first_token_s, life.generation_id) == ("finished", pytest.approx(0.4), "gen-1")
        assert (life.num_prompt_tokens, life.num_cached_tokens, life.num_output_tokens) == (5, 2, 3)
        assert (life.prefill_id, life.decode_id, life.num_moves, life.arrival_time) == ("p0", "d0", 0, 1e9)
        (pair,) = response_of(activity).pairs
        assert (pair.prefill_id, pair.decode_id, pair.num_handed_over, pair.num_prompt_tokens) == ("p0", "d0", 1, 5)
        assert pair.kv_transfer.p50 == pytest.approx(0.05, rel=0.05)
        second = response_of(activity).seconds[0]
        assert (second.num_prompt_tokens, second.num_output_tokens) == (5, 3)

    run(scenario)


def test_requests_that_do_not_end_well_are_told_too_and_the_oldest_make_way() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"], max_running_requests=1)
        activity = router.activity
        running, waiting = router.submit(), router.submit(queue_timeout_s=1)
        router.dispatcher.cancel(running.request_id, "by the test")
        lost = router.submit(queue_timeout_s=1)
        await clock.advance(2)
        assert waiting.live.placement is not None, "it took the place of the one that was cancelled"
        outcomes = {life.generation_id: life for life in response_of(activity).requests}
        assert outcomes[running.request_id].outcome == "cancelled"
        assert outcomes[running.request_id].phases[-1].why == "by the test"
        rejected = outcomes[lost.request_id]
        assert (rejected.outcome, rejected.decode_id, rejected.placement) == ("rejected", "", "not placed")
        assert not rejected.HasField("first_token_s")
        router.dispatcher.cancel(waiting.request_id, "by the test")
        for _ in range(KEPT_REQUESTS):
            router.dispatcher.cancel(router.submit().request_id, "by the test")
        numbers = [life.number for life in response_of(activity).requests]
        assert numbers == list(range(4, KEPT_REQUESTS + 4))

    run(scenario)


def test_rates_of_a_worker_begin_again_with_it_and_end_with_it() -> None:
    def sample(rates: WorkerRates, now: float, incarnation: str, tokens: int) -> None:
        info = worker_pb2.WorkerInfo(worker_id="d0", incarnation=incarnation)
        rates.add(now, [(info, worker_pb2.WorkerStats(num_decode_tokens=tokens, kv_bytes_received=10 * tokens))])

    rates = WorkerRates()
    sample(rates, 10.0, "a", 1000)
    assert rates.rates()[0].decode_tokens_per_s == 0
    for number in range(1, 20):
        sample(rates, 10.0 + number, "a", 1000 + 50 * number)
    (rate,) = rates.rates()
    assert (rate.decode_tokens_per_s, rate.kv_received_bytes_per_s) == pytest.approx((50, 500))
    sample(rates, 31.0, "b", 7)
    sample(rates, 32.0, "b", 9)
    assert rates.rates()[0].decode_tokens_per_s == pytest.approx(2), "counters of another life are no difference"
    rates.add(33.0, [])
    assert rates.rates() == []
