"""What the router counts of its clients' requests over the last seconds."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker import pair
from router_harness import running_router, text_spec

from cluster import rpc
from cluster.demand import Demand
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from router.routing.demand import (
    ENOUGH_REQUESTS,
    FIRST_GUESS_TOKENS,
    LEAST_WINDOW_S,
    WINDOW_S,
    DemandWindow,
)
from router.routing.policies.interface import Objectives


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = DemandWindow(10.0)
    for second in range(20):
        window.add_arrival(float(second))
    assert window.sums(19.5) == (10.0, Demand(num_arrived=10))
    assert window.sums(100.0) == (10.0, Demand())


def test_only_what_has_come_since_the_load_turned_counts() -> None:
    window = DemandWindow()
    for tenth in range(300):
        window.add_arrival(tenth / 10)
        window.add_placement(tenth / 10, 100 if tenth < 240 else 7, 0, 1, 10)
    seconds, told = window.sums(29.9)
    assert 3 <= seconds < 6 and told.num_placed == told.num_arrived == pytest.approx(10 * seconds, abs=11)
    assert told.num_prompt_tokens == 7 * told.num_placed


@pytest.mark.parametrize("num_before", [0, 2 * ENOUGH_REQUESTS])
def test_a_load_has_turned_once_enough_requests_say_so(num_before: int) -> None:
    """Also where little came before."""
    for missing, expected in ((0, LEAST_WINDOW_S), (1, 20.0)):
        window = DemandWindow()
        window.add_arrival(0.0)
        for at, num, num_tokens in ((0.5, num_before, 80), (20.0 - LEAST_WINDOW_S, ENOUGH_REQUESTS - missing, 5)):
            for _ in range(num):
                window.add_arrival(at)
                window.add_placement(at, num_tokens, 0, 1, 10)
        assert window.sums(20.0)[0] == expected


def test_a_load_that_stays_as_it_is_counts_as_far_back_as_it_is_known() -> None:
    draw, window, lengths = random.Random(1), DemandWindow(), []
    at = 0.0
    while at < 200:
        at += draw.expovariate(4.0)
        window.add_arrival(at)
        window.add_placement(at, 1 + round(draw.expovariate(1 / 1000)), 0, 1, 100)
        lengths.append(window.sums(at)[0])
    settled = lengths[400:]
    assert sum(seconds > 30 for seconds in settled) > 0.9 * len(settled)


def test_a_router_that_has_just_begun_tells_the_rate_since_then() -> None:
    window = DemandWindow()
    for tenth in range(20):
        window.add_arrival(100 + tenth / 10)
    assert window.sums(102.0) == (2.0, Demand(num_arrived=20))


def test_prompts_count_without_what_is_cached() -> None:
    window = DemandWindow()
    window.add_placement(0.0, 10, 6, 2, 5)
    window.add_placement(0.5, 5, 5, 1, 5)
    _, told = window.sums(1.0)
    assert (told.num_placed, told.num_prompt_tokens, told.num_cached_tokens, told.num_sequences) == (2, 4, 11, 3)
    assert told.num_attended == 4 * 6 + 10


def test_outputs_are_expected_to_take_what_others_like_them_took() -> None:
    window = DemandWindow()
    window.add_placement(0.0, 10, 0, 2, 1000)
    assert window.sums(1.0)[1].num_output_tokens == 2 * FIRST_GUESS_TOKENS, "nothing has ended yet"
    window.lengths.add(300, 1000)
    window.add_placement(70.0, 10, 0, 2, 1000)
    told = window.sums(71.0)[1]
    assert (told.num_output_tokens, told.num_kv_tokens) == (2 * 300, 2 * (10 + 150))


def test_the_sums_of_two_routers_add_up_and_travel() -> None:
    one, two = Demand(num_arrived=3, num_kv_tokens=2.5), Demand(num_arrived=4, num_sequences=1)
    assert Demand.from_proto((one + two).to_proto()) == Demand(num_arrived=7, num_sequences=1, num_kv_tokens=2.5)


@pytest.mark.asyncio
async def test_a_router_tells_what_was_asked_of_it_and_what_its_workers_cost(tmp_path: Path) -> None:
    prefill, decode = pair(lambda admit: [[1, 2, 3]])
    cost = worker_pb2.StepCost(fixed_s=0.5, prompt_token_s=0.25)
    async with running_router(tmp_path, (prefill, decode)) as router:
        decode.emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=cost)))
        await router.stream(text_spec("hello"))
        async with rpc.create_channel(router.control_address) as channel:
            control: Any = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
            told = await control.GetDemand(admin_pb2.GetDemandRequest())
    assert 0 < told.window_s <= WINDOW_S and told.decode_cost == told.prefill_cost == cost
    assert (told.demand.num_arrived, told.demand.num_placed, told.demand.num_prompt_tokens) == (1, 1, 5)
    assert (told.demand.num_sequences, told.demand.num_output_tokens) == (1, 128)
    assert (told.demand.num_ended, told.demand.num_kept) == (1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("objective", ["ttft", "tpot"])
async def test_a_request_that_was_late_is_not_counted_as_kept(tmp_path: Path, objective: str) -> None:
    async with running_router(tmp_path, pair(lambda admit: [[1, 2, 3]])) as router:
        late = Objectives(ttft_s=0.0) if objective == "ttft" else Objectives(tpot_s=-1.0)
        router.server.dispatcher.context.objectives = late
        await router.stream(text_spec("hello"))
        _, told = router.server.dispatcher.demand()
    assert (told.num_ended, told.num_kept) == (1, 0)


@pytest.mark.asyncio
async def test_what_is_refused_for_want_of_room_has_ended_too_late(tmp_path: Path) -> None:
    workers = pair(lambda admit: [[1, 2, 3]])
    workers[1].script = None
    async with running_router(tmp_path, workers, max_running_requests=1, max_queued_requests=1) as router:
        dispatcher = router.server.dispatcher
        running = [asyncio.ensure_future(router.stream(text_spec())) for _ in range(3)]
        done, waiting = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        [refused] = done
        assert isinstance(error := refused.exception(), grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        _, told = dispatcher.demand()
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert (told.num_arrived, told.num_ended, told.num_kept) == (3, 1, 0)
