"""Changes of a running cluster: versions, one change at a time, what is refused, and what stays when a step fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from admin_world import ReconfigurerStage, config_of

from cluster.config.schema import ServingConfig
from cluster.errors import FailedPrecondition
from controller.change_plan import Step, Stop
from controller.events import EventKind
from controller.reconfigurer import AnotherChange, StaleVersion
from controller.worker_pool import StepFailed


async def test_a_change_is_carried_out_and_gets_the_next_version() -> None:
    stage = ReconfigurerStage()
    answer = stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "a test")
    assert (answer.is_change, answer.version, stage.reconfigurer.version) == (True, 2, 2)
    assert [str(step) for step in answer.plan.steps] == ["flip decode-1 to prefill", "flip decode-2 to prefill"]
    await stage.reconfigurer.settled()
    assert stage.split() == (3, 1)
    assert stage.reconfigurer.changing is None
    step = [EventKind.STEP, EventKind.STEP_DONE]
    assert stage.kinds() == [EventKind.PLANNED, *step, *step, EventKind.CHANGED]
    assert stage.told[-1].text == "a test: done: 1:3 to 3:1"
    assert stage.told[0].sequence == answer.after_sequence + 1


async def test_a_dry_run_plans_and_changes_nothing() -> None:
    stage = ReconfigurerStage()
    answer = stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "a test", dry_run=True)
    assert (answer.is_change, answer.version, len(answer.plan.steps)) == (False, 1, 2)
    assert (stage.split(), stage.told, stage.reconfigurer.changing) == ((1, 3), [], None)


async def test_where_baton_chooses_the_split_a_file_that_names_another_does_not() -> None:
    def auto(config: ServingConfig, margin: float = 0.1) -> ServingConfig:
        rebalance = replace(config.rebalance, mode="auto", auto=replace(config.rebalance.auto, margin=margin))
        return replace(config, rebalance=rebalance)

    stage = ReconfigurerStage()
    fixed, reconfigurer = stage.reconfigurer.config, stage.reconfigurer
    assert reconfigurer.split_kept(auto(fixed)) == auto(fixed), "the mode is new: the file's split counts"
    reconfigurer.propose(auto(fixed), "the file")
    await reconfigurer.settled()
    reconfigurer.propose(reconfigurer.with_split(2, 2), "mode auto")
    await reconfigurer.settled()
    kept = reconfigurer.split_kept(auto(fixed, margin=0.5))
    assert (kept.roles.prefill.devices, kept.rebalance.auto.margin) == (2, 0.5)
    assert reconfigurer.split_kept(fixed) == fixed
    one_more = replace(fixed.roles, decode=replace(fixed.roles.decode, devices=4))
    assert reconfigurer.split_kept(auto(replace(fixed, roles=one_more))).roles == one_more


@pytest.mark.parametrize(("present", "named", "change"), [(3, 2, {"tensor_parallel": 2}), (2, 3, {"min_workers": 3})])
async def test_a_split_that_a_role_does_not_fit_any_more_gives_way_to_the_files(
    present: int, named: int, change: dict[str, int]
) -> None:
    first = config_of(4 - present, present)
    stage = ReconfigurerStage(replace(first, rebalance=replace(first.rebalance, mode="auto")))
    roles = config_of(4 - named, named).roles
    wanted = replace(stage.reconfigurer.config, roles=replace(roles, decode=replace(roles.decode, **change)))
    assert stage.reconfigurer.split_kept(wanted) == wanted


async def test_what_runs_already_is_no_change() -> None:
    stage = ReconfigurerStage()
    answer = stage.reconfigurer.propose(config_of(), "a test")
    assert (answer.is_change, stage.reconfigurer.version, stage.told) == (False, 1, [])


async def test_a_change_that_builds_on_an_old_version_is_refused_with_the_current_one() -> None:
    stage = ReconfigurerStage()
    stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "first", expected_version=1)
    await stage.reconfigurer.settled()
    with pytest.raises(StaleVersion, match="version 1 is not current: 2 is"):
        stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "second", expected_version=1)
    assert (stage.split(), stage.kinds()[-1]) == ((2, 2), EventKind.REFUSED)


async def test_one_change_at_a_time_and_the_other_is_named() -> None:
    stage = ReconfigurerStage()
    stage.steps.gate.clear()
    first = stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "the first")
    with pytest.raises(AnotherChange, match=r"another change is being carried out \(the first: .*flip decode-2"):
        stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "the second")
    again = stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "the file says so too")
    assert (again.plan, again.after_sequence) == (first.plan, first.after_sequence)
    stage.steps.gate.set()
    await stage.reconfigurer.settled()
    assert stage.split() == (2, 2)


async def test_steps_become_smaller_as_workers_run_and_larger_than_they_have_memory_for_with_others() -> None:
    stage = ReconfigurerStage(config_of(1, 1))
    engine = stage.reconfigurer.config.engine

    def with_steps_of(tokens: int) -> ServingConfig:
        return replace(stage.reconfigurer.config, engine=replace(engine, max_num_batched_tokens=tokens))

    assert stage.reconfigurer.propose(with_steps_of(512), "a test").plan.steps == ()
    await stage.reconfigurer.settled()
    assert stage.reconfigurer.propose(with_steps_of(2048), "back").plan.steps == ()
    await stage.reconfigurer.settled()
    answer = stage.reconfigurer.propose(with_steps_of(4096), "a test", dry_run=True)
    assert [str(step) for step in answer.plan.steps] == [
        "start prefill-1 on 1 device",
        "drain and stop prefill-0",
        "start decode-1 on 1 device",
        "drain and stop decode-0",
    ]


async def test_requests_do_not_wait_for_the_only_prefill_worker_while_it_is_replaced() -> None:
    stage = ReconfigurerStage(config_of(1, 1), max_devices=2)
    stage.steps.gate.clear()
    engine = replace(stage.reconfigurer.config.engine, max_num_batched_tokens=4096)
    assert stage.reconfigurer.needs_prefill
    stage.reconfigurer.propose(replace(stage.reconfigurer.config, engine=engine), "a test")
    assert not stage.reconfigurer.needs_prefill
    stage.steps.gate.set()
    await stage.reconfigurer.settled()
    assert stage.reconfigurer.needs_prefill


async def test_a_new_worker_that_does_not_come_up_stops_the_change_and_the_old_configuration_stays() -> None:
    stage = ReconfigurerStage(config_of(1, 2))
    before = stage.reconfigurer.config
    stage.steps.broken = "start decode-2 on 1 device"
    engine = replace(before.engine, max_num_batched_tokens=4096)
    stage.reconfigurer.propose(replace(before, engine=engine), "a test")
    await stage.reconfigurer.settled()
    assert stage.reconfigurer.config == before
    assert stage.split() == (1, 2)
    assert stage.told[-1].text == "a test: decode-2 did not; 2 of 6 steps are done, and they stay"


def with_blocks_of(config: ServingConfig, tokens: int) -> ServingConfig:
    return replace(config, engine=replace(config.engine, block_size=tokens))


async def half_replaced() -> ReconfigurerStage:
    """A change of the block size failed when prefill-1 had taken the place of prefill-0."""
    stage = ReconfigurerStage(config_of(1, 2))
    stage.steps.broken = "start decode-2 on 1 device"
    stage.reconfigurer.propose(with_blocks_of(stage.reconfigurer.config, 32), "a test")
    await stage.reconfigurer.settled()
    assert [worker.worker_id for worker in stage.steps.workers] == ["decode-0", "decode-1", "prefill-1"]
    stage.steps.broken = ""
    return stage


async def test_a_change_of_the_split_leaves_workers_that_a_failed_change_has_replaced() -> None:
    stage = await half_replaced()
    answer = stage.reconfigurer.propose(stage.reconfigurer.with_split(1, 3), "more")
    assert [str(step) for step in answer.plan.steps] == ["start decode-2 on 1 device"]
    await stage.reconfigurer.settled()
    answer = stage.reconfigurer.propose(stage.reconfigurer.without("decode-1"), "less", leaving=["decode-1"])
    assert [str(step) for step in answer.plan.steps] == ["drain and stop decode-1"]


async def test_after_a_failed_change_the_old_settings_and_the_new_ones_can_both_be_asked_for() -> None:
    stage = await half_replaced()
    before = stage.reconfigurer.config
    back = stage.reconfigurer.propose(before, "back", dry_run=True).plan.steps
    assert [str(step) for step in back] == ["start prefill-0 on 1 device", "drain and stop prefill-1"]
    onwards = stage.reconfigurer.propose(with_blocks_of(before, 32), "again", dry_run=True).plan.steps
    assert {step.worker_id for step in onwards} == {"decode-0", "decode-1", "decode-2", "decode-3"}


async def test_a_worker_started_for_one_that_then_could_not_be_stopped_is_stopped() -> None:
    stage = ReconfigurerStage(config_of(1, 2))
    before = stage.reconfigurer.config
    stage.steps.broken = "drain and stop decode-0"
    stage.reconfigurer.propose(with_blocks_of(before, 32), "a test")
    await stage.reconfigurer.settled()
    assert stage.split() == (1, 2)
    assert stage.reconfigurer.config == before
    assert stage.told[-1].text == (
        "a test: decode-0 did not; decode-2, which was started for it, was stopped; "
        "2 of 6 steps are done, and they stay"
    )


async def test_a_worker_that_cannot_be_stopped_either_stays_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ReconfigurerStage(config_of(1, 2))
    carry_out = stage.steps.carry_out

    async def stop_nothing(step: Step, config: ServingConfig) -> None:
        if isinstance(step, Stop):
            raise StepFailed(f"{step.worker_id} stays")
        await carry_out(step, config)

    monkeypatch.setattr(stage.steps, "carry_out", stop_nothing)
    stage.reconfigurer.propose(with_blocks_of(stage.reconfigurer.config, 32), "a test")
    await stage.reconfigurer.settled()
    assert (stage.split(), stage.reconfigurer.config.roles.prefill.devices) == ((2, 2), 2)
    assert stage.told[-1].text == (
        "a test: prefill-0 stays; prefill-1, which was started for it, stays: prefill-1 stays; "
        "1 of 6 steps are done, and they stay"
    )


async def test_devices_of_a_change_that_failed_do_not_count_as_asked_for() -> None:
    stage = ReconfigurerStage(config_of(1, 2))
    stage.steps.broken = "start decode-3 on 1 device"
    stage.reconfigurer.propose(stage.reconfigurer.with_split(1, 4), "a test")
    await stage.reconfigurer.settled()
    assert (stage.split(), stage.reconfigurer.num_named) == ((1, 3), 4)


async def test_a_key_that_only_a_restart_changes_is_refused_by_name() -> None:
    stage = ReconfigurerStage()
    model = replace(stage.reconfigurer.config.model, max_model_len=512)
    with pytest.raises(FailedPrecondition, match=r"model\.max_model_len cannot change while the cluster runs: restart"):
        stage.reconfigurer.propose(replace(stage.reconfigurer.with_split(3, 1), model=model), "a test")
    assert (stage.split(), stage.reconfigurer.version) == ((1, 3), 1)


async def test_what_requests_should_keep_changes_without_moving_a_worker() -> None:
    stage = ReconfigurerStage()
    slo = replace(stage.reconfigurer.config.rebalance.slo, ttft_ms=100.0)
    wanted = replace(stage.reconfigurer.config, rebalance=replace(stage.reconfigurer.config.rebalance, slo=slo))
    answer = stage.reconfigurer.propose(wanted, "a test")
    await stage.reconfigurer.settled()
    assert (answer.plan.changes, answer.plan.steps) == (("rebalance.slo.ttft_ms: 100.0",), ())
    assert stage.steps.num_told == 1, "the router was not told"
    assert stage.told[-1].text == "a test: done: 1:3"


async def test_a_step_that_fails_leaves_what_was_done_and_the_door_open_for_another_try() -> None:
    stage = ReconfigurerStage()
    stage.steps.broken = "flip decode-2 to prefill"
    stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "a test")
    await stage.reconfigurer.settled()
    assert (stage.split(), stage.kinds()[-1]) == ((2, 2), EventKind.FAILED)
    assert stage.told[-1].text == "a test: decode-2 did not; 1 of 2 steps are done, and they stay"
    assert (stage.reconfigurer.version, stage.reconfigurer.config) == (3, config_of(2, 2))
    stage.steps.broken = ""
    assert stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "once more").is_change
    await stage.reconfigurer.settled()
    assert stage.split() == (3, 1)


async def test_a_fault_of_the_hands_does_not_keep_the_door_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ReconfigurerStage()

    async def fall(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(stage.steps, "carry_out", fall)
    stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "a test")
    await stage.reconfigurer.settled()
    assert (stage.kinds()[-1], stage.reconfigurer.changing) == (EventKind.FAILED, None)


@pytest.mark.parametrize("broken", ["", "flip decode-2 to prefill"], ids=["done", "failed"])
async def test_routers_that_cannot_be_told_do_not_keep_the_door_shut(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = ReconfigurerStage()
    stage.steps.broken = broken

    async def fall() -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(stage.steps, "update_routers", fall)
    stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "a test")
    await stage.reconfigurer.settled()
    assert (stage.kinds()[-1], stage.reconfigurer.changing) == (EventKind.FAILED, None)
    assert ("the routers did not get the update: KeyError" in stage.told[-1].text) == (not broken)
    assert stage.reconfigurer.config == (config_of(1, 3) if broken else config_of(2, 2))


async def test_a_drained_worker_takes_its_devices_out_of_its_role() -> None:
    stage = ReconfigurerStage()
    stage.reconfigurer.propose(stage.reconfigurer.without("decode-1"), "drain decode-1", leaving=["decode-1"])
    await stage.reconfigurer.settled()
    assert [worker.worker_id for worker in stage.steps.workers] == ["prefill-0", "decode-0", "decode-2"]
    assert stage.reconfigurer.config.roles.decode.devices == 2


@pytest.mark.parametrize(("worker", "role"), [("decode-0", "decode"), ("prefill-0", "prefill")])
async def test_the_last_worker_of_a_role_is_not_drained(worker: str, role: str) -> None:
    stage = ReconfigurerStage(config_of(1, 1))
    with pytest.raises(FailedPrecondition, match=f"0 {role} workers cannot be"):
        stage.reconfigurer.propose(stage.reconfigurer.without(worker), f"drain {worker}", leaving=[worker])
    assert stage.split() == (1, 1)


async def test_an_unknown_worker_is_refused_with_those_there_are() -> None:
    stage = ReconfigurerStage(config_of(1, 1))
    with pytest.raises(FailedPrecondition, match="there is no worker decode-7; there are decode-0, prefill-0"):
        stage.reconfigurer.propose(stage.reconfigurer.without("decode-7"), "drain decode-7", leaving=["decode-7"])


async def test_what_cannot_be_written_down_is_not_done() -> None:
    stage = ReconfigurerStage()

    def save(wanted: ServingConfig, changed: dict[str, Any]) -> None:
        assert changed == {"roles.prefill.devices": 2, "roles.decode.devices": 2}
        raise FailedPrecondition("the file is not writable")

    with pytest.raises(FailedPrecondition, match="not writable"):
        stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "a test", save=save)
    assert (stage.split(), stage.reconfigurer.version, stage.kinds()) == ((1, 3), 1, [EventKind.REFUSED])


async def test_requests_wait_for_prefill_only_where_it_is_there_before_and_after() -> None:
    roles = config_of().roles
    none = replace(config_of(0, 4), roles=replace(roles, prefill=replace(roles.prefill, devices=0, min_workers=0)))
    stage = ReconfigurerStage(none)
    stage.steps.gate.clear()
    stage.reconfigurer.propose(config_of(1, 3), "a test")
    assert not stage.reconfigurer.needs_prefill
    stage.steps.gate.set()
    await stage.reconfigurer.settled()
    assert stage.reconfigurer.needs_prefill


async def test_closing_stops_between_two_steps() -> None:
    stage = ReconfigurerStage()
    stage.steps.gate.clear()
    stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "a test")
    await asyncio.sleep(0)
    await stage.reconfigurer.close()
    assert stage.split() == (1, 3)


async def test_a_listener_hears_what_came_before_and_what_comes_next() -> None:
    stage = ReconfigurerStage()
    stage.events.add(EventKind.WORKER_READY, "zero")
    answer = stage.reconfigurer.propose(stage.reconfigurer.with_split(2, 2), "a test")
    heard = []
    async for event in stage.events.after(answer.after_sequence):
        heard.append(event.kind)
        if event.kind is EventKind.CHANGED:
            break
    assert heard == [EventKind.PLANNED, EventKind.STEP, EventKind.STEP_DONE, EventKind.CHANGED]
