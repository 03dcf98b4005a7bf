"""Who is taken for stalled, when nobody is, and where the requests of one that is go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, phase
from hypothesis import given
from hypothesis import strategies as st
from router_harness import ids
from wired_router import ManualClock, WiredRouter, admit_of, cancelled, known, logged, reach, run

from cluster.pb import worker_pb2
from cluster.step_cost import StepCost
from router.routing.stalls import TICK_S, Findings, StallDetector, Watched
from router.routing.worker_client import WorkerClient

LIMIT_S = 1.0
STEP_S = 0.02


class Scene:
    """Workers that beat and tell tokens as the test says, tick by tick."""

    def __init__(self, **step_s: float | None) -> None:
        self.detector = StallDetector(LIMIT_S)
        self.step_s = step_s
        self.suspects: dict[str, str] = {}

    def pass_time(
        self, seconds: float, *, owing: Iterable[str] = (), telling: Iterable[str] = (), silent: Iterable[str] = ()
    ) -> None:
        """Everybody beats but the `silent`; of those that owe tokens, the `telling` tell some."""
        watched = [Watched(i, i in owing, step) for i, step in self.step_s.items()]
        for _ in range(round(seconds / TICK_S)):
            for worker_id in self.step_s:
                if worker_id not in silent:
                    is_telling = worker_id in telling
                    self.detector.on_message(worker_id, has_progress=is_telling, has_tokens=is_telling)
            self.take(self.detector.tick(TICK_S, watched))

    def take(self, findings: Findings) -> None:
        assert not findings.trusted - set(self.suspects) and not set(findings.suspected) & set(self.suspects)
        for worker_id in findings.trusted:
            del self.suspects[worker_id]
        self.suspects |= findings.suspected


def test_a_process_that_says_nothing_is_a_suspect_sooner_than_it_is_lost() -> None:
    scene = Scene(d0=STEP_S, d1=STEP_S)
    scene.pass_time(2)
    scene.pass_time(LIMIT_S - 2 * TICK_S, silent=["d0"])
    assert not scene.suspects
    scene.pass_time(2 * TICK_S, silent=["d0"])
    assert scene.suspects == {"d0": "it has sent nothing for 1.0 s"}
    scene.pass_time(TICK_S)
    assert not scene.suspects, "a sign of life is enough"


def test_an_engine_that_stands_still_is_found_by_its_tokens_though_its_loop_beats() -> None:
    scene = Scene(d0=STEP_S, d1=STEP_S)
    scene.pass_time(2, owing=["d0", "d1"], telling=["d0", "d1"])
    scene.pass_time(LIMIT_S + TICK_S, owing=["d0", "d1"], telling=["d1"])
    assert scene.suspects == {"d0": "it has sent no token for 1.0 s, and its step takes 20 ms"}
    scene.pass_time(5, owing=["d1"], telling=["d1"])
    assert list(scene.suspects) == ["d0"], "to beat is not to tell"
    scene.pass_time(TICK_S, telling=["d0"])
    assert not scene.suspects


def test_a_worker_of_long_steps_may_be_silent_for_longer() -> None:
    scene = Scene(d0=0.5, d1=0.5)
    scene.pass_time(8, owing=["d0", "d1"], telling=["d0", "d1"])
    scene.pass_time(4.5, owing=["d0", "d1"], telling=["d1"])
    assert not scene.suspects
    scene.pass_time(0.5, owing=["d0", "d1"], telling=["d1"])
    assert list(scene.suspects) == ["d0"]


def test_who_owes_nothing_may_be_silent_and_so_may_who_knows_nothing_of_its_steps() -> None:
    scene = Scene(d0=STEP_S, d1=None, d2=STEP_S)
    scene.pass_time(20, owing=["d1", "d2"], telling=["d2"])
    assert not scene.suspects


@pytest.mark.parametrize("silent", [["d0", "d1", "p0"], []])
def test_when_everybody_is_slow_together_nobody_is_ejected(silent: list[str]) -> None:
    """On a machine that is overloaded; whoever comes first out of it does not speak against the others."""
    scene = Scene(d0=STEP_S, d1=STEP_S, p0=STEP_S)
    owing = ["d0", "d1"]
    scene.pass_time(3, owing=owing, telling=owing)
    scene.pass_time(5, owing=owing, silent=silent)
    assert not scene.suspects
    scene.pass_time(3 * TICK_S, owing=owing, telling=["d1"], silent=[i for i in silent if i != "d1"])
    assert not scene.suspects


def test_one_worker_alone_is_never_a_suspect() -> None:
    scene = Scene(d0=STEP_S)
    scene.pass_time(3, owing=["d0"], telling=["d0"])
    scene.pass_time(30, owing=["d0"], silent=["d0"])
    assert not scene.suspects


def test_the_absence_of_the_router_is_not_the_workers() -> None:
    scene = Scene(d0=STEP_S, d1=STEP_S)
    scene.pass_time(3, owing=["d0", "d1"], telling=["d0", "d1"])
    scene.take(scene.detector.tick(60.0, [Watched("d0", True, STEP_S), Watched("d1", True, STEP_S)]))
    assert not scene.suspects


signs = st.sampled_from(["nothing", "beat", "told", "tokens"])


@given(st.lists(st.tuples(st.tuples(signs, signs, signs), st.tuples(st.booleans(), st.booleans(), st.booleans()))))
def test_somebody_is_always_trusted_and_who_tells_tokens_is(
    story: list[tuple[tuple[str, ...], tuple[bool, ...]]],
) -> None:
    scene = Scene(d0=STEP_S, d1=STEP_S, p0=STEP_S)
    for told, owes in story:
        for worker_id, sign in zip(scene.step_s, told, strict=True):
            if sign != "nothing":
                scene.detector.on_message(worker_id, has_progress=sign != "beat", has_tokens=sign == "tokens")
        watched = [Watched(i, o, step) for (i, step), o in zip(scene.step_s.items(), owes, strict=True)]
        for _ in range(3):
            scene.take(scene.detector.tick(TICK_S, watched))
        assert len(scene.suspects) < len(scene.step_s)
        telling = {i for i, sign in zip(scene.step_s, told, strict=True) if sign == "tokens"}
        assert not telling & set(scene.suspects)


# In a router


async def be_silent(router: WiredRouter, clock: ManualClock, silent: Iterable[str], seconds: float) -> None:
    """The others beat."""
    for _ in range(round(seconds / TICK_S)):
        for worker_id, worker in router.workers.items():
            if worker_id not in silent and worker.is_ready:
                worker.emit()
        await clock.advance(TICK_S)


def test_the_silence_of_each_worker_is_counted_a_few_at_a_time_also_of_one_that_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(clock: ManualClock) -> None:
        ids = ["p0", *(f"d{i}" for i in range(7))]
        router = WiredRouter(clock, ids)
        reach(router, "dispatched")
        router.name(ids[:1] + ids[2:])
        counted.clear()
        for _ in range(8):
            await clock.advance(TICK_S)
        assert counted == dict.fromkeys(ids, 8 * TICK_S)

    counted = Counter[str]()
    monkeypatch.setattr("router.routing.fleet.MOST_AT_ONCE", 3)
    monkeypatch.setattr(WorkerClient, "tick", lambda self, elapsed_s: counted.update({self.worker_id: elapsed_s}))
    run(scenario)


def test_what_decodes_on_a_worker_that_stands_still_goes_on_elsewhere() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        await be_silent(router, clock, [], 2)
        client, key = reach(router, "transferring")
        p0, d0, d1 = (router.workers[i] for i in ("p0", "d0", "d1"))
        d0.emit(phase(key, DECODE), logged(key, 1, "b"))
        await be_silent(router, clock, ["d0"], 1.5)
        assert d0.is_ready and d0.is_suspect
        prompt, reserve = admit_of(p0), admit_of(d1)
        assert known(prompt) == known(reserve) == {0: ids("ab")}
        assert d0.take() and cancelled(d0, key) == [None], "it drops the request as soon as it hears again"
        assert router.dispatcher.counters.retried == {"STALLED": 1}
        other = router.submit()
        assert admit_of(d1) and not d0.take_admits()
        d0.emit(logged(key, 2, "late"))
        p0.emit(logged(prompt.key, 2, "c"))
        d1.emit(phase(prompt.key, DECODE), logged(prompt.key, 3, "d", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abcd"]
        await be_silent(router, clock, [], 2 * TICK_S)
        assert not d0.is_suspect, "it has told something"
        router.dispatcher.cancel(other.request_id, "over")
        router.check_idle()

    run(scenario)


def test_an_engine_that_hangs_while_its_loop_beats_loses_its_requests() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client, key = reach(router, "transferring")
        d0, d1 = router.workers["d0"], router.workers["d1"]
        cost = StepCost(0.01, 0.0001, 0, 0.001, 0).to_proto()
        for worker in router.workers.values():
            worker.emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=cost)))
        d0.emit(phase(key, DECODE), logged(key, 1, "b"))
        await be_silent(router, clock, [], 2)
        assert d0.is_suspect and known(admit_of(d1)) == {0: ids("ab")}
        await be_silent(router, clock, [], 2)
        assert d0.is_suspect and not d1.is_suspect
        d0.emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=cost, num_steps=1)))
        await be_silent(router, clock, [], TICK_S)
        assert not d0.is_suspect
        router.dispatcher.cancel(client.request_id, "over")
        router.check_idle()

    run(scenario)


def test_whoever_nobody_else_can_take_over_waits_for_its_worker() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        await be_silent(router, clock, [], 2)
        client, key = reach(router, "transferring")
        d0 = router.workers["d0"]
        d0.emit(phase(key, DECODE), logged(key, 1, "b"))
        router.name(["p0", "d0"], draining=["p0"])
        await be_silent(router, clock, ["d0"], 2.5)
        assert d0.is_suspect and client.live.key.attempt == 1
        d0.emit(logged(key, 2, "c", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abc"]
        router.check_idle()

    run(scenario)


def test_a_prompt_goes_from_a_prefill_worker_that_stands_still_to_another() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0"])
        await be_silent(router, clock, [], 2)
        client, key = reach(router, "prefilling")
        await be_silent(router, clock, ["p0"], 1.5)
        p1, d0 = router.workers["p1"], router.workers["d0"]
        again = admit_of(p1).key
        d0.take()
        assert cancelled(d0, key) == [None]
        p1.emit(phase(again, PREFILL), logged(again, 0, "a", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["a"] and client.completed is not None
        assert client.completed.timing.placement == "retried after STALLED on p0: p1 -> d0"
        router.check_idle()

    run(scenario)
