"""Ranks that are killed, or stopped and set going again, while a hand-off is in each of its states.

The request goes through a real router, from a worker of two ranks to another. Whatever happens to it, its client gets
what one process alone would have generated, each token once; a bystander on the other workers too.
"""

from __future__ import annotations

import pytest
from chaos_fleet import FAST, Fleet
from chaos_reference import Direct, Reference
from chaos_states import DECODE, OUTPUT_TOKENS, PREFILL, SHORT_TOKENS, HandOff, State, prompt_of, reach

from cluster.pb import generation_pb2

DEAD_S = float(FAST["dead_after_s"])
BYSTANDER_TOKENS = 100
SUBSET = {
    (State.GRANTED, PREFILL, 1),
    (State.OFFERED, DECODE, 0),
}
"""What runs with every other test; the rest is the battery's."""


def cases() -> list[object]:
    """Every state, worker and rank, named for the report."""
    return [
        pytest.param(
            *case,
            id=f"{case[0].value}-{case[1].partition('-')[0]}-rank{case[2]}",
            marks=[] if case in SUBSET else [pytest.mark.battery],
        )
        for case in ((state, worker, rank) for state in State for worker in (PREFILL, DECODE) for rank in (0, 1))
    ]


def bystander(fleet: Fleet, seed: int) -> Direct:
    """A request between the other two workers, which decodes while something happens to the first two."""
    direct = Direct(f"bystander-{seed}", prompt_of(1, 40), BYSTANDER_TOKENS, fleet["prefill-1"], fleet["decode-1"])
    direct.wait_for_phase(generation_pb2.Heartbeat.PHASE_DECODE)
    return direct


def check_end(held: HandOff, victim: str, reference: Reference) -> None:
    """The whole output, placed again unless it needed the victim no more."""
    held.stream.join()
    held.check(reference)
    placement = held.stream.timing().placement
    if held.state is State.DECODING and victim == PREFILL:
        assert placement.startswith("disaggregated")
    elif held.state is not State.COMMITTING or victim == DECODE:  # all is on its way: the prefill worker may go
        assert placement.startswith(("retried", "local prefill")), placement


@pytest.mark.parametrize(("state", "victim", "rank"), cases())
def test_a_killed_rank_costs_nobody_a_request(
    fleet: Fleet, reference: Reference, state: State, victim: str, rank: int
) -> None:
    seed = 100 * list(State).index(state) + 10 * (victim == DECODE) + rank
    other = bystander(fleet, seed)
    held = reach(fleet, state, seed)
    fleet[victim].kill(rank)
    held.release()
    fleet[victim].await_end()
    check_end(held, victim, reference)
    other.check(reference)
    fleet.settle(but=[victim])
    fleet.restart(victim)
    fleet.await_ready()


@pytest.mark.parametrize(("state", "victim", "rank"), cases())
def test_a_stopped_rank_costs_nobody_a_request_and_harms_nothing_when_it_goes_on(
    fleet: Fleet, reference: Reference, state: State, victim: str, rank: int
) -> None:
    """It is given up for its silence, and its requests go elsewhere, while it still stands."""
    seed = 5000 + 100 * list(State).index(state) + 10 * (victim == DECODE) + rank
    other = bystander(fleet, seed)
    held = reach(fleet, state, seed)
    target = fleet[victim], rank
    if target not in held.holders:
        fleet[victim].stop(rank)
    held.release(but=target)
    assert held.stream.ends_within(10 * DEAD_S)
    fleet[victim].cont(rank)
    check_end(held, victim, reference)
    other.check(reference)
    fleet.settle()
    again = Direct(f"again-{seed}", prompt_of(seed + 500, SHORT_TOKENS), OUTPUT_TOKENS, fleet[PREFILL], fleet[DECODE])
    again.check(reference)


@pytest.mark.battery
def test_a_decode_leader_that_stands_still_for_a_moment_costs_nothing(fleet: Fleet, reference: Reference) -> None:
    held = reach(fleet, State.DECODING, 9000)
    fleet[DECODE].stop()
    assert not held.stream.ends_within(DEAD_S / 2)
    fleet[DECODE].cont()
    held.check(reference)
    fleet.settle()
