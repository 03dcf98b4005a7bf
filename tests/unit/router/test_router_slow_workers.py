"""A worker that is far slower than predicted gets nothing new for a while, and comes back when it has recovered."""

from __future__ import annotations

from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, phase
from hypothesis import given
from hypothesis import strategies as st
from wired_router import Client, ManualClock, WiredRouter, logged, run

from cluster.pb import worker_pb2
from router.routing.slow_workers import (
    FIRST_PAUSE_S,
    LEAST_SAMPLES,
    LONGEST_PAUSE_S,
    NUM_WINDOWS,
    WINDOW_S,
    SlowDetector,
)
from router.routing.worker_client import Speed

P, D = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


class Scene:
    """Workers whose work takes so many times what is predicted, window by window."""

    def __init__(self, *worker_ids: str) -> None:
        self.detector = SlowDetector()
        self.roles = {i: P if i[0] == "p" else D for i in worker_ids}
        self.detector.tick(WINDOW_S, self.roles)

    @property
    def out(self) -> list[str]:
        return [i for i in self.roles if self.detector.speed_of(i) is not Speed.USUAL]

    def window(self, **ratios: float) -> None:
        for worker_id, ratio in ratios.items():
            for _ in range(LEAST_SAMPLES):
                self.detector.add(worker_id, 0.1 * ratio, 0.1, 0.05)
        ejected = self.detector.tick(WINDOW_S, self.roles)
        assert all(self.detector.speed_of(i) is Speed.SLOW for i in ejected)

    def windows(self, num: int, **ratios: float) -> None:
        for _ in range(num):
            self.window(**ratios)


def test_a_worker_that_is_slow_for_a_while_is_ejected_and_one_that_was_for_a_moment_is_not() -> None:
    scene = Scene("d0", "d1", "p0")
    for _ in range(5):
        scene.windows(NUM_WINDOWS - 1, d0=8.0, d1=1.0)
        scene.window(d0=1.2, d1=1.0)
    assert not scene.out
    scene.windows(NUM_WINDOWS, d0=8.0, d1=1.0)
    assert scene.out == ["d0"]


def test_no_worker_is_ejected_where_all_are_slow_together_nor_the_last_one() -> None:
    scene = Scene("d0", "d1", "p0")
    scene.windows(20, d0=9.0, d1=8.0, p0=50.0)
    assert not scene.out
    scene.windows(NUM_WINDOWS, d0=30.0, d1=8.0)
    assert scene.out == ["d0"]
    scene.windows(20, d1=30.0)
    assert "d1" not in scene.out


def test_a_few_milliseconds_are_not_worth_an_ejection() -> None:
    scene = Scene("d0", "d1")
    for _ in range(20):
        for _ in range(LEAST_SAMPLES):
            scene.detector.add("d0", 0.01, 0.001, 0.05)
        scene.window(d1=1.0)
    assert not scene.out


def test_too_little_work_says_nothing() -> None:
    scene = Scene("d0", "d1")
    for _ in range(LEAST_SAMPLES * NUM_WINDOWS - 1):
        scene.detector.add("d0", 1.0, 0.01, 0.05)
        scene.window()
    assert not scene.out
    scene.detector.add("d0", 1.0, 0.01, 0.05)
    scene.window()
    assert scene.out == ["d0"]


def test_it_comes_back_by_a_probe_and_after_a_longer_pause_each_time_that_it_has_not_recovered() -> None:
    scene = Scene("d0", "d1")
    scene.windows(NUM_WINDOWS, d0=8.0)
    pause_s = FIRST_PAUSE_S
    for _ in range(8):
        scene.windows(int(pause_s / WINDOW_S) - 1)
        assert scene.detector.speed_of("d0") is Speed.SLOW
        scene.window()
        assert scene.detector.speed_of("d0") is Speed.PROBED
        scene.windows(3)
        assert scene.detector.speed_of("d0") is Speed.PROBED, "nothing has shown that it is well"
        scene.window(d0=8.0)
        assert scene.detector.speed_of("d0") is Speed.SLOW
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
    scene.windows(int(LONGEST_PAUSE_S / WINDOW_S))
    scene.window(d0=1.1)
    assert not scene.out


@given(
    st.lists(st.dictionaries(st.sampled_from(["p0", "p1", "d0", "d1", "d2", "d3"]), st.floats(0.1, 100.0)), max_size=80)
)
def test_whatever_happens_most_of_a_role_stay(story: list[dict[str, float]]) -> None:
    scene = Scene("p0", "p1", "d0", "d1", "d2", "d3")
    for ratios in story:
        scene.window(**ratios)
        assert sum(i[0] == "p" for i in scene.out) <= 1 and sum(i[0] == "d" for i in scene.out) <= 1


# In a router


COST = worker_pb2.StepCost(fixed_s=0.05, prompt_token_s=0.001, sequence_s=0.0001)


def with_costs(clock: ManualClock, worker_ids: list[str]) -> WiredRouter:
    router = WiredRouter(clock, worker_ids, policy="round_robin")
    for worker in router.workers.values():
        worker.emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=COST)))
    return router


async def pass_window(router: WiredRouter, clock: ManualClock) -> None:
    """Everybody beats."""
    for worker in router.workers.values():
        if worker.is_ready:
            worker.emit()
    await clock.advance(WINDOW_S)


def only_token(router: WiredRouter, client: Client) -> str:
    """The output is its first token; returns who sent it."""
    key, prefill_id = client.live.key.to_proto(), client.live.attempt.placement.prefill_id
    assert prefill_id is not None
    router.workers[prefill_id].emit(phase(key, PREFILL), logged(key, 0, "a", finish_reason=LENGTH))
    client.take()
    return prefill_id


async def slow_prompts(router: WiredRouter, clock: ManualClock) -> None:
    """Both prefill workers compute prompts, p0 each in a second, until p0 is ejected."""
    for _ in range(LEAST_SAMPLES * NUM_WINDOWS):
        assert router.workers["p0"].speed is Speed.USUAL
        clients = {
            client.live.attempt.placement.prefill_id: client
            for client in (router.submit(max_output_tokens=1), router.submit(max_output_tokens=1))
        }
        only_token(router, clients["p1"])
        await pass_window(router, clock)
        only_token(router, clients["p0"])
    await pass_window(router, clock)
    assert router.workers["p0"].speed is Speed.SLOW


def test_a_prefill_worker_whose_prompts_take_long_gets_no_more_until_it_is_probed() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = with_costs(clock, ["p0", "p1", "d0"])
        await slow_prompts(router, clock)
        assert router.dispatcher.counters.ejected == {"prefill": 1}
        others = [router.submit(max_output_tokens=1) for _ in range(4)]
        assert {only_token(router, client) for client in others} == {"p1"}
        for _ in range(int(FIRST_PAUSE_S / WINDOW_S)):
            await pass_window(router, clock)
        assert router.workers["p0"].speed is Speed.PROBED
        for _ in range(LEAST_SAMPLES):
            together = [router.submit(max_output_tokens=1) for _ in range(4)]
            assert sorted(only_token(router, client) for client in together) == ["p0", "p1", "p1", "p1"]
        await pass_window(router, clock)
        assert router.workers["p0"].speed is Speed.USUAL
        together = [router.submit(max_output_tokens=1) for _ in range(4)]
        assert sorted(only_token(router, client) for client in together) == ["p0", "p0", "p1", "p1"]
        router.check_idle()

    run(scenario)


def test_the_only_worker_that_is_ready_gets_requests_however_slow_it_is() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = with_costs(clock, ["p0", "p1", "d0"])
        await slow_prompts(router, clock)
        router.workers["p1"].lose()
        assert only_token(router, router.submit(max_output_tokens=1)) == "p0"
        router.check_idle()

    run(scenario)


def test_the_only_worker_that_does_not_drain_is_not_slow() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = with_costs(clock, ["p0", "p1", "d0"])
        router.workers["p1"].is_draining = True
        for _ in range(2 * LEAST_SAMPLES * NUM_WINDOWS):
            client = router.submit(max_output_tokens=1)
            await pass_window(router, clock)
            assert only_token(router, client) == "p0"
            assert router.workers["p0"].speed is Speed.USUAL
        router.check_idle()

    run(scenario)


def test_a_worker_that_is_started_again_is_trusted() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = with_costs(clock, ["p0", "p1", "d0"])
        await slow_prompts(router, clock)
        p0 = router.workers["p0"]
        p0.lose()
        await pass_window(router, clock)
        p0.open()
        for _ in range(2):
            assert p0.speed is Speed.USUAL
            await pass_window(router, clock)
        router.check_idle()

    run(scenario)


def test_requests_leave_a_decode_worker_whose_tokens_take_long() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = with_costs(clock, ["p0", "d0", "d1"])
        clients = [router.submit(max_output_tokens=100) for _ in range(2 * LEAST_SAMPLES)]
        for client in clients:
            key = client.live.key.to_proto()
            router.workers["p0"].emit(phase(key, PREFILL), logged(key, 0, "a"), phase(key, TRANSFER))
            tell(router, client, phase(key, DECODE), logged(key, 1, "b"))
        for worker in router.workers.values():
            worker.take()
        for _ in range(NUM_WINDOWS + 1):  # one that is over before they decode
            assert router.workers["d0"].speed is Speed.USUAL
            for client in clients:
                num_new = 2 if client.live.attempt.placement.decode_id == "d0" else 19
                tell(router, client, logged(client.live.key.to_proto(), client.live.num_tokens, num_new * "c"))
            await pass_window(router, clock)
        assert router.workers["d0"].speed is Speed.SLOW and router.workers["d1"].speed is Speed.USUAL
        moved = router.workers["d1"].take_admits()
        assert len(moved) == LEAST_SAMPLES and all(admit.expect_handoff for admit in moved)
        assert {client.live.attempt.placement.decode_id for client in clients} == {"d1"}
        for client in clients:
            router.dispatcher.cancel(client.request_id, "by the test")
        router.check_idle()

    run(scenario)


def tell(router: WiredRouter, client: Client, *events: worker_pb2.Event) -> None:
    router.workers[client.live.attempt.placement.decode_id].emit(*events)
    client.take()
