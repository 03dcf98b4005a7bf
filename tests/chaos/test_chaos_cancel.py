"""Clients that leave while a hand-off is in each of its states: nothing stays held, and the next request is right."""

from __future__ import annotations

import pytest
from chaos_fleet import FAST, Fleet
from chaos_reference import Reference
from chaos_states import DECODE, OUTPUT_TOKENS, PREFILL, SHORT_TOKENS, State, prompt_of, reach

SUBSET = {State.GRANTED}
STATES = [pytest.param(s, id=s.value, marks=[] if s in SUBSET else [pytest.mark.battery]) for s in State]


def check_next(fleet: Fleet, reference: Reference, seed: int) -> None:
    prompt = prompt_of(seed, SHORT_TOKENS)
    stream = fleet.submit(prompt, OUTPUT_TOKENS)
    stream.result()
    assert stream.token_ids() == reference(prompt, OUTPUT_TOKENS)


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_leaves_leaves_nothing_behind(fleet: Fleet, reference: Reference, state: State) -> None:
    seed = 10_000 + list(State).index(state)
    before = fleet.client.status().router.num_cancelled
    held = reach(fleet, state, seed)
    held.stream.cancel()
    held.stream.join()
    held.release()
    fleet.settle()
    assert fleet.client.status().router.num_cancelled == before + 1
    check_next(fleet, reference, seed + 100)


@pytest.mark.battery
@pytest.mark.parametrize("state", [State.OFFERED, State.GRANTED])
def test_a_cancel_does_not_wait_for_a_peer_that_stands_still(fleet: Fleet, reference: Reference, state: State) -> None:
    """The prefill worker gets everything back while the decode worker is still stopped: the pair is retired."""
    seed = 11_000 + list(State).index(state)
    held = reach(fleet, state, seed)
    held.stream.cancel()
    held.stream.join()
    took_s = fleet.settle(but=[DECODE])
    assert took_s < 3 * max(float(FAST["dead_after_s"]), 2 * float(FAST["transfer_timeout_s"]))
    assert not fleet[PREFILL].held()
    held.release()
    fleet.settle()
    check_next(fleet, reference, seed + 100)
