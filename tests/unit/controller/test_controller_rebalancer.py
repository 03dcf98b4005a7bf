"""The loop of `mode: auto`: what it asks the reconfigurer for, and when it keeps still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config.roles import ModelOverrides
from cluster.config.schema import AutoSection, ModelSection, RebalanceSection, ServingConfig
from cluster.demand import Demand
from cluster.errors import FailedPrecondition
from cluster.pb import admin_pb2
from cluster.step_cost import RoleCosts, StepCost
from controller.rebalance_policy import Reason
from controller.rebalancer import MeasuredLoad, Rebalancer, Split
from controller.reconfigurer import AnotherChange, StaleVersion

pytestmark = pytest.mark.asyncio

COST = StepCost(fixed_s=0.005, prompt_token_s=0.0005, attended_s=0.0, sequence_s=0.001, kv_token_s=0.0)
COSTS = RoleCosts(COST, replace(COST, prompt_token_s=0.0015))
"""A decode worker computes prompts in small pieces."""
LONG_PROMPTS = Demand(
    num_arrived=200,
    num_placed=200,
    num_prompt_tokens=200 * 800,
    num_sequences=200,
    num_output_tokens=200 * 20,
    num_kv_tokens=200 * 800,
)
AUTO = ServingConfig(
    ModelSection("m"),
    rebalance=RebalanceSection(mode="auto", auto=AutoSection(confirm_s=2, cooldown_s=5, dwell_s=20)),
)


class World:
    """Four workers and a reconfigurer that does what it is asked at once."""

    def __init__(self, demand: Demand | None = LONG_PROMPTS) -> None:
        self.demand = demand
        self.split: Split | None = Split(1, 3, version=7)
        self.asked: list[tuple[int, int, int]] = []
        self.error: FailedPrecondition | None = None
        self.costs = COSTS
        self.has_room = False
        self.num_kept_places = 0
        self.rebalancer = Rebalancer(self.measure, lambda: self.split, self.move, self.ask, self.give_back)
        self.now = 0.0

    async def measure(self) -> MeasuredLoad | None:
        return None if self.demand is None else MeasuredLoad(10.0, self.demand, self.costs, 0)

    def ask(self) -> bool:
        self.num_kept_places = 1
        return self.has_room

    def give_back(self) -> None:
        self.num_kept_places = 0

    def move(self, num_prefill: int, num_decode: int, version: int, why: str) -> None:
        assert why.startswith(("moves: ", "grows: "))
        self.asked.append((num_prefill, num_decode, version))
        if self.error is not None:
            raise self.error
        self.split = Split(num_prefill, num_decode, version + 1)

    async def run(self, seconds: int, config: ServingConfig = AUTO) -> None:
        for _ in range(seconds):
            self.now += 1
            await self.rebalancer.look(self.now, config)


async def test_moves_to_where_most_is_served_and_stays_there() -> None:
    world = World()
    await world.run(30)
    assert world.asked == [(3, 1, 7)]
    assert world.rebalancer.decision is not None and world.rebalancer.decision.why.startswith("stays: 3:1 serves")
    counted = world.rebalancer.num_decisions
    assert counted[Reason.MOVES] == world.rebalancer.num_moves == 1 and counted[Reason.CONFIRM] == 2
    assert counted[Reason.BEST] == 27 and counted.total() == 30


async def test_another_mode_moves_nothing() -> None:
    world = World()
    await world.run(30, replace(AUTO, rebalance=replace(AUTO.rebalance, mode="fixed")))
    assert not world.asked and world.rebalancer.decision is None


async def test_while_a_change_is_carried_out_or_no_router_answers_nothing_moves() -> None:
    world = World()
    world.split = None
    await world.run(30)
    world = World(demand=None)
    await world.run(30)
    assert not world.asked


@pytest.mark.parametrize("refusal", [StaleVersion, AnotherChange])
async def test_what_the_door_refuses_for_another_change_is_asked_for_again(refusal: type[FailedPrecondition]) -> None:
    world = World()
    world.error = refusal("version 7 is not current")
    await world.run(3)
    assert world.asked == [(3, 1, 7)]
    world.error, world.split = None, Split(1, 3, version=9)
    await world.run(1)
    assert world.asked == [(3, 1, 7), (3, 1, 9)]


async def test_what_the_door_refuses_for_itself_is_not_asked_for_again_before_the_cooldown() -> None:
    world = World()
    world.error = FailedPrecondition("more devices than there are")
    await world.run(3)
    assert world.asked == [(3, 1, 7)]
    await world.run(4)
    assert world.asked == [(3, 1, 7)]
    await world.run(1)
    assert world.asked == [(3, 1, 7), (3, 1, 7)]


async def test_roles_of_different_sizes_stay_and_it_is_said_why() -> None:
    world = World()
    decode = replace(AUTO.roles.decode, tensor_parallel=2, devices=2)
    await world.run(30, replace(AUTO, roles=replace(AUTO.roles, decode=decode)))
    assert not world.asked
    assert world.rebalancer.decision is not None and not world.rebalancer.decision.moves
    assert world.rebalancer.decision.why.startswith("stays: the roles differ in tensor_parallel (1 and 2)")


async def test_roles_of_different_settings_stay_and_it_is_said_in_what_they_differ() -> None:
    world = World()
    decode = replace(AUTO.roles.decode, model=ModelOverrides(quantization="int8"))
    await world.run(30, replace(AUTO, roles=replace(AUTO.roles, decode=decode)))
    assert not world.asked
    assert world.rebalancer.decision is not None
    why = "stays: the roles differ in model.quantization (none and int8), so that no worker can change"
    assert world.rebalancer.decision.why == why


async def test_after_an_operators_change_there_is_peace_as_after_its_own() -> None:
    world = World()
    await world.run(1)
    world.split = Split(3, 1, version=8)
    await world.run(1)
    world.split = Split(2, 2, version=9)
    await world.run(4)
    assert not world.asked
    await world.run(30)
    assert world.asked == [(3, 1, 9)]


async def test_each_role_keeps_its_least_workers() -> None:
    world = World()
    await world.run(30, replace(AUTO, roles=replace(AUTO.roles, decode=replace(AUTO.roles.decode, min_workers=2))))
    assert world.asked == [(2, 2, 7)]


async def test_the_reports_of_several_routers_are_one_sight() -> None:
    one = admin_pb2.GetDemandResponse(window_s=5, demand=Demand(num_arrived=2).to_proto(), kv_tokens=50)
    two = admin_pb2.GetDemandResponse(
        window_s=15,
        demand=Demand(num_arrived=3).to_proto(),
        prefill_cost=COST.to_proto(),
        decode_cost=COST.to_proto(),
        kv_tokens=40,
    )
    assert MeasuredLoad.of([one, two]) == MeasuredLoad(15, Demand(num_arrived=9), RoleCosts(COST, COST), 40)
    assert MeasuredLoad.of([]) is None


async def test_what_a_load_does_not_show_is_known_from_one_that_did() -> None:
    world = World()
    await world.run(1)
    blind = replace(COST, prompt_token_s=0.0)
    world.costs = RoleCosts(blind, replace(blind, sequence_s=0.0))
    await world.run(10)
    assert world.asked == [(3, 1, 7)]


GROWING = replace(
    AUTO, rebalance=replace(AUTO.rebalance, auto=replace(AUTO.rebalance.auto, max_devices=5, release_after_s=50))
)


async def test_one_more_worker_is_asked_for_once_there_is_room() -> None:
    world = World()
    await world.run(30, GROWING)
    assert world.asked == [(3, 1, 7)] and world.num_kept_places == 1
    assert world.rebalancer.decision is not None and world.rebalancer.decision.reason is Reason.ROOM
    assert world.rebalancer.decision.why.startswith("stays until there is room for one more worker; grows: 4:1 serves")
    world.has_room = True
    await world.run(1, GROWING)
    assert world.asked == [(3, 1, 7), (4, 1, 8)]


async def test_a_place_that_is_not_needed_any_more_is_given_back() -> None:
    world = World()
    await world.run(30, GROWING)
    world.demand = replace(LONG_PROMPTS, num_arrived=20)
    await world.run(1, GROWING)
    assert world.num_kept_places == 0
    world.demand = LONG_PROMPTS
    await world.run(10, GROWING)
    assert world.num_kept_places == 1
    await world.run(1, replace(GROWING, rebalance=replace(GROWING.rebalance, mode="fixed")))
    assert world.num_kept_places == 0
