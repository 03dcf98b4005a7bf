"""Restart decisions, and a supervisor that acts on them with groups made here; no Ray, no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from controller.supervisor import GiveUp, Restart, RestartPolicy, StartFailed, Supervisor, SupervisorState


def test_a_mistake_at_the_first_start_is_not_tried_again() -> None:
    assert RestartPolicy().ended(0.0, "bad file", is_mistake=True) == GiveUp("bad file", is_mistake=True)


def test_any_other_failure_of_the_first_start_is_tried_a_few_times() -> None:
    policy = RestartPolicy(max_first_tries=3)
    verdicts = [policy.ended(0.0, "boom") for _ in range(3)]
    assert verdicts[:2] == [Restart(0.2), Restart(0.4)]
    assert verdicts[2] == GiveUp("boom (tried 3 times)", is_mistake=False)


def test_what_has_served_is_brought_back_for_ever_at_growing_intervals_up_to_a_cap() -> None:
    policy = RestartPolicy(first_delay_s=1.0, max_delay_s=10.0, steady_s=60.0)
    policy.started(0.0)
    delays = []
    for number in range(60):
        verdict = policy.ended(float(number), "boom", is_mistake=number % 2 == 1)
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay_s)
    assert delays[:5] == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert set(delays[4:]) == {10.0}


def test_a_long_steady_life_forgives_earlier_failures() -> None:
    policy = RestartPolicy(first_delay_s=1.0, steady_s=60.0)
    policy.started(0.0)
    assert [policy.ended(1.0, ""), policy.ended(2.0, "")] == [Restart(1.0), Restart(2.0)]
    policy.started(10.0)
    assert policy.ended(69.9, "") == Restart(4.0)
    policy.started(100.0)
    assert policy.ended(160.0, "") == Restart(1.0)


class Group:
    """A running group whose end a test decides."""

    def __init__(self, number: int) -> None:
        self.card: Mapping[str, Any] = {"number": number}
        self.story: list[str] = []
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, why: str) -> None:
        self._death.set_result(why)

    async def ended(self) -> str:
        return await self._death

    async def stop(self, grace_s: float) -> None:
        self.story.append("stopped")

    async def kill(self) -> None:
        self.story.append("killed")


class Stage:
    """A supervisor, the groups it launched, and its changes of state as they come."""

    def __init__(self, failures: list[Exception | None] | None = None) -> None:
        self.groups: list[Group] = []
        self._failures = failures or []
        self._states: asyncio.Queue[SupervisorState] = asyncio.Queue()
        self.supervisor = Supervisor(
            "decode-0",
            self._launch,
            lambda supervisor: self._states.put_nowait(supervisor.state),
            RestartPolicy(first_delay_s=0.0, max_first_tries=2),
        )

    async def _launch(self) -> Group:
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        self.groups.append(Group(len(self.groups)))
        return self.groups[-1]

    async def states(self, *wanted: SupervisorState) -> None:
        got = [await self._states.get() for _ in wanted]
        assert got == list(wanted)


async def test_a_group_that_dies_is_killed_whole_and_started_afresh() -> None:
    stage = Stage()
    stage.supervisor.run()
    await stage.states(SupervisorState.STARTING, SupervisorState.READY)
    assert stage.supervisor.card == {"number": 0}
    stage.groups[0].die("decode-0 rank 1 died")
    await stage.states(SupervisorState.BACKING_OFF, SupervisorState.STARTING, SupervisorState.READY)
    assert stage.groups[0].story == ["killed"]
    assert stage.supervisor.card == {"number": 1}
    assert stage.supervisor.why == "decode-0 rank 1 died"
    assert stage.supervisor.num_starts == 2
    await stage.supervisor.stop(1.0)


async def test_a_start_that_fails_by_mistake_ends_in_failed_with_the_reason() -> None:
    stage = Stage([StartFailed("no tensor lm_head", is_mistake=True)])
    stage.supervisor.run()
    await stage.states(SupervisorState.STARTING, SupervisorState.FAILED)
    assert (stage.supervisor.why, stage.supervisor.is_mistake) == ("no tensor lm_head", True)
    await stage.supervisor.stop(1.0)


@pytest.mark.parametrize("failure", [StartFailed("died"), KeyError("address")], ids=["process", "launcher"])
async def test_a_start_that_fails_otherwise_is_tried_again(failure: Exception) -> None:
    stage = Stage([failure])
    stage.supervisor.run()
    await stage.states(
        SupervisorState.STARTING, SupervisorState.BACKING_OFF, SupervisorState.STARTING, SupervisorState.READY
    )
    await stage.supervisor.stop(1.0)


async def test_a_group_that_drains_has_its_card_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    seen: list[tuple[SupervisorState, Mapping[str, Any]]] = []

    async def drain(grace_s: float) -> None:
        seen.append((stage.supervisor.state, stage.supervisor.card))

    stage.supervisor.run()
    await stage.states(SupervisorState.STARTING, SupervisorState.READY)
    monkeypatch.setattr(stage.groups[0], "stop", drain)
    await stage.supervisor.stop(1.0)
    assert seen == [(SupervisorState.READY, {"number": 0})]
    assert (stage.supervisor.state, stage.supervisor.card) == (SupervisorState.STOPPED, {})


async def test_stop_ends_a_running_group_and_starts_nothing_again() -> None:
    stage = Stage()
    stage.supervisor.run()
    await stage.states(SupervisorState.STARTING, SupervisorState.READY)
    await stage.supervisor.stop(1.0)
    await stage.states(SupervisorState.STOPPED)
    assert stage.groups[0].story == ["stopped"]
    assert len(stage.groups) == 1


async def test_an_adopted_group_is_ready_at_once_and_brought_back_when_it_dies() -> None:
    stage = Stage([StartFailed("no tensor", is_mistake=True)])
    adopted = Group(7)
    stage.supervisor.run(adopted, num_starts=3)
    await stage.states(SupervisorState.READY)
    assert (stage.supervisor.card, stage.supervisor.num_starts) == ({"number": 7}, 3)
    stage.supervisor.run()  # as all others are then
    adopted.die("decode-0 died")
    await stage.states(SupervisorState.BACKING_OFF, SupervisorState.STARTING, SupervisorState.BACKING_OFF)
    await stage.states(SupervisorState.STARTING, SupervisorState.READY)
    assert adopted.story == ["killed"]
    assert (stage.supervisor.card, stage.supervisor.num_starts) == ({"number": 0}, 5)
    await stage.supervisor.stop(1.0)
    assert len(stage.groups) == 1


def test_what_has_served_under_another_controller_is_brought_back_for_ever() -> None:
    policy = RestartPolicy(has_served=True)
    assert {type(policy.ended(0.0, "boom", is_mistake=True)) for _ in range(5)} == {Restart}


@pytest.mark.parametrize("moment", ["before it ran", "while it launches", "after it failed"])
async def test_stop_is_safe_at_any_moment(moment: str) -> None:
    launching, cancelled = asyncio.Event(), asyncio.Event()

    async def launch() -> Group:
        if moment == "after it failed":
            raise StartFailed("mistake", is_mistake=True)
        launching.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError("unreachable")

    failed = asyncio.Event()

    def on_change(supervisor: Supervisor) -> None:
        if supervisor.state is SupervisorState.FAILED:
            failed.set()

    supervisor = Supervisor("decode-0", launch, on_change)
    if moment != "before it ran":
        supervisor.run()
        await (failed if moment == "after it failed" else launching).wait()
    await supervisor.stop(1.0)
    assert supervisor.state is SupervisorState.STOPPED
    assert cancelled.is_set() == (moment == "while it launches")
