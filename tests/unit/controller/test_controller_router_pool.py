"""Routers that are started, replaced and stopped one at a time; they are only names here."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest
from admin_world import ReconfigurerStage, RouterStage, config_of

from cluster.address import hold_port, listen_error
from cluster.config.schema import PlacementSection, ServingConfig
from cluster.errors import FailedPrecondition
from controller.adoption import SavedRouter
from controller.events import EventKind
from controller.router_pool import ReplaceRouter, RouterStep, SharedPorts, StartRouter, StopRouter
from controller.worker_pool import STOP_S, StepFailed


def with_router(config: ServingConfig, **values: Any) -> ServingConfig:
    return replace(config, router=replace(config.router, **values))


CONFIG = config_of()
TWO = with_router(CONFIG, replicas=2)


async def stage_of(config: ServingConfig) -> RouterStage:
    stage = RouterStage(config)
    await stage.come_up()
    return stage


async def carry_out(stage: RouterStage, wanted: ServingConfig, *steps: RouterStep) -> None:
    assert stage.pool.plan(wanted) == steps
    for step in steps:
        await stage.pool.carry_out(step, wanted)
    assert stage.pool.plan(wanted) == ()


async def test_routers_of_the_wanted_settings_are_left_alone() -> None:
    stage = await stage_of(TWO)
    assert stage.pool.plan(TWO) == ()
    slo = replace(TWO.rebalance.slo, ttft_ms=1.0)
    assert stage.pool.plan(replace(TWO, rebalance=replace(TWO.rebalance, slo=slo))) == (), "they take that over"
    assert stage.pool.plan(replace(TWO, engine=replace(TWO.engine, block_size=32))) == (), "workers go by it"


async def test_each_router_is_replaced_and_the_new_one_serves_before_the_old_one_leaves() -> None:
    stage = await stage_of(TWO)
    first, second = stage.running
    wanted = with_router(TWO, policy="least_loaded")
    assert stage.pool.plan(wanted) == (ReplaceRouter("router"), ReplaceRouter("router-1"))
    stage.gate.clear()
    replacing = asyncio.create_task(stage.pool.carry_out(ReplaceRouter("router"), wanted))
    while not stage.stopping:
        await asyncio.sleep(0)
    assert stage.stopping == [("router", wanted.rebalance.drain_timeout_s + STOP_S)]
    assert stage.names() == ["router", "router-1", "router"], "both are there while the old one drains"
    assert stage.running[2].settings.router == replace(first.settings.router, policy="least_loaded")
    assert len(stage.pool) == 2 and not replacing.done()
    assert stage.pool.supervisors[0] is stage.links[2].router, "the new one counts"
    stage.gate.set()
    await replacing
    assert stage.names() == ["router-1", "router"] and second in stage.running
    await stage.pool.carry_out(ReplaceRouter("router-1"), wanted)
    assert stage.pool.plan(wanted) == ()
    assert stage.launches[2:] == [("router", True), ("router-1", True)]
    assert {router.num_starts for router in stage.pool.supervisors} == {2}, "starts are counted on"


async def test_a_router_that_was_replaced_is_started_again_as_the_only_one_at_its_ports() -> None:
    stage = await stage_of(CONFIG)
    await carry_out(stage, with_router(CONFIG, policy="random"), ReplaceRouter("router"))
    starter = stage.pool._routers[0].starter
    assert not starter.is_successor


async def test_a_successor_takes_the_free_port_that_the_router_has() -> None:
    free = with_router(CONFIG, port=0, http_port=0)
    stage = await stage_of(free)
    await carry_out(stage, with_router(free, policy="random"), ReplaceRouter("router"))
    assert stage.running[0].settings.router.port == 7000


async def test_routers_that_the_next_controller_starts_again_have_the_free_ports_that_clients_know() -> None:
    free = with_router(CONFIG, port=0, http_port=0)
    stage = await stage_of(free)
    after = RouterStage(free, saved=(*stage.pool.saved, SavedRouter(7, 8)))
    assert after.pool.saved == (SavedRouter(7000, 7001),), "before any of them runs"
    await after.come_up()
    assert after.running[0].settings.router.port == 7000
    fixed = RouterStage(with_router(CONFIG, port=6000, http_port=None), saved=stage.pool.saved)
    await fixed.come_up()
    section = fixed.running[0].settings.router
    assert (section.port, section.http_port) == (6000, None), "what the configuration says goes first"


async def test_another_port_is_taken_by_a_new_router() -> None:
    stage = await stage_of(CONFIG)
    await carry_out(stage, with_router(CONFIG, port=6000), ReplaceRouter("router"))
    assert stage.running[0].settings.router.port == 6000
    assert stage.running[0].settings.state == "/nowhere/journal.db", "streams of the old one are found there"


async def test_a_router_that_does_not_come_up_changes_nothing() -> None:
    stage = await stage_of(CONFIG)
    old = stage.running[0]
    stage.broken = {"router"}
    wanted = with_router(CONFIG, policy="random")
    with pytest.raises(StepFailed, match=r"^router did not start: no such policy$"):
        await stage.pool.carry_out(ReplaceRouter("router"), wanted)
    assert stage.running == [old] and not stage.stopping
    assert stage.pool.plan(CONFIG) == () and stage.pool.plan(wanted) == (ReplaceRouter("router"),)
    assert stage.pool.links.are_all_up


async def test_routers_become_more_and_fewer() -> None:
    stage = await stage_of(CONFIG)
    three = with_router(CONFIG, replicas=3)
    await carry_out(stage, three, StartRouter("router-1"), StartRouter("router-2"))
    assert {router.settings.router.port for router in stage.running} == {50051}
    await carry_out(stage, CONFIG, StopRouter("router-2"), StopRouter("router-1"))
    assert stage.names() == ["router"]
    both = with_router(TWO, policy="random")
    assert stage.pool.plan(both) == (StartRouter("router-1"), ReplaceRouter("router"))


async def test_routers_of_one_machine_share_ports_that_nobody_else_gets() -> None:
    two = with_router(TWO, port=0, http_port=0)
    stage = RouterStage(two, ports=SharedPorts())
    await stage.come_up()
    first, second = (router.settings for router in stage.running)
    assert first.router == second.router and first.shares_ports and second.shares_ports
    ports = {first.router.port, first.router.http_port}
    assert len(ports) == 2 and 0 not in ports
    assert all(listen_error("127.0.0.1", port) is not None for port in ports), "also while no router listens"
    three = with_router(two, replicas=3, policy="random")
    for step in stage.pool.plan(three):
        await stage.pool.carry_out(step, three)
    assert [router.settings.router.port for router in stage.running] == [first.router.port] * 3
    await stage.pool.stop(0.0)
    assert all(listen_error("127.0.0.1", port) is None for port in ports)


async def test_a_port_that_the_routers_have_left_is_free() -> None:
    one = with_router(CONFIG, port=0, http_port=None)
    stage = RouterStage(one, ports=SharedPorts())
    await stage.come_up()
    port = stage.running[0].settings.router.port
    with hold_port("127.0.0.1", 0) as other:
        elsewhere = other.getsockname()[1]
    await carry_out(stage, with_router(one, port=elsewhere), ReplaceRouter("router"))
    assert listen_error("127.0.0.1", port) is None and listen_error("127.0.0.1", elsewhere) is not None
    await stage.pool.stop(0.0)


async def test_a_port_of_another_program_is_left_to_the_router_to_refuse() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stage = RouterStage(with_router(TWO, port=taken.getsockname()[1], http_port=None), ports=SharedPorts())
        await stage.come_up()
        assert not any(router.settings.shares_ports for router in stage.running)
    await stage.pool.stop(0.0)


async def test_routers_on_nodes_of_their_own_do_not_become_more() -> None:
    spread = replace(TWO, placement=PlacementSection(routers="spread"))
    stage = await stage_of(spread)
    with pytest.raises(FailedPrecondition, match=r"router\.replicas cannot become 3 while the cluster runs"):
        stage.pool.plan(with_router(spread, replicas=3))
    assert stage.pool.plan(with_router(spread, replicas=1)) == (StopRouter("router-1"),)


async def test_the_end_of_the_cluster_ends_routers_that_come_and_leave_too() -> None:
    stage = await stage_of(CONFIG)
    stage.gate.clear()
    replacing = asyncio.create_task(stage.pool.carry_out(ReplaceRouter("router"), with_router(CONFIG, policy="random")))
    while not stage.stopping:
        await asyncio.sleep(0)
    replacing.cancel()
    await asyncio.wait([replacing])
    stage.gate.set()
    await stage.pool.stop(0.0)
    assert {name for name, _ in stage.stopping} == {"router"} and len(stage.stopping) >= 2


async def test_a_change_replaces_workers_first_and_routers_then() -> None:
    stage = ReconfigurerStage(config_of(1, 1))
    await stage.routers.come_up()
    config = stage.reconfigurer.config
    wanted = with_router(replace(config, engine=replace(config.engine, block_size=32)), policy="random")
    answer = stage.reconfigurer.propose(wanted, "a test")
    assert [str(step) for step in answer.plan.steps[-2:]] == [
        "drain and stop decode-0",
        "start router with the new settings beside the old one, and drain and stop that",
    ]
    await stage.reconfigurer.settled()
    assert stage.told[-1].kind is EventKind.CHANGED
    assert stage.routers.running[0].settings.router.policy == "random"


async def test_a_router_that_is_started_again_later_begins_with_the_folder_of_the_model_as_it_is_then() -> None:
    stage = ReconfigurerStage(with_router(config_of(1, 1), replicas=2))
    await stage.routers.come_up()
    before = stage.reconfigurer.config
    stage.routers.broken = {"router-1"}
    stage.reconfigurer.propose(with_router(before, policy="random"), "a test")
    await stage.reconfigurer.settled()
    moved = replace(before, model=replace(before.model, path="models/other"))
    stage.routers.pool.renew(moved)
    half_done, other = [router.starter.settings for router in stage.routers.pool._routers]
    assert (half_done.router.policy, half_done.model.path) == ("random", "models/m"), "it has other settings"
    assert (other.model.path, other.router) == ("models/other", stage.routers.running[0].settings.router)


async def test_a_change_that_fails_at_a_router_says_how_many_there_are() -> None:
    stage = ReconfigurerStage(config_of(1, 1))
    await stage.routers.come_up()
    before = stage.reconfigurer.config
    stage.routers.broken = {"router-2"}
    stage.reconfigurer.propose(with_router(before, replicas=4), "a test")
    await stage.reconfigurer.settled()
    assert stage.told[-1].text == (
        "a test: router-2 did not start: no such policy; 1 of 3 steps are done, and they stay"
    )
    assert stage.reconfigurer.config == with_router(before, replicas=2)


async def test_a_change_of_the_split_leaves_routers_that_a_failed_change_has_replaced() -> None:
    stage = ReconfigurerStage(with_router(config_of(1, 1), replicas=2))
    await stage.routers.come_up()
    before = stage.reconfigurer.config
    stage.routers.broken = {"router-1"}
    stage.reconfigurer.propose(with_router(before, policy="random"), "a test")
    await stage.reconfigurer.settled()
    assert stage.reconfigurer.config == before
    split = stage.reconfigurer.propose(stage.reconfigurer.with_split(1, 2), "more", dry_run=True)
    assert [str(step) for step in split.plan.steps] == ["start decode-1 on 1 device"]
    back = stage.reconfigurer.propose(before, "back", dry_run=True)
    assert back.plan.steps == (ReplaceRouter("router"),)
