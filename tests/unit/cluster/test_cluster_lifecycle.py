"""The table of a request's life and its one door."""

from __future__ import annotations

import itertools

import pytest

from cluster.errors import InternalError
from cluster.lifecycle import TRANSITIONS, IllegalTransition, Lifecycle, RequestState

S = RequestState
TERMINAL = {S.FINISHED, S.CANCELLED, S.FAILED, S.REJECTED}
PATHS = {
    S.QUEUED: (),
    S.PREFILLING: (S.PREFILLING,),
    S.TRANSFERRING: (S.PREFILLING, S.TRANSFERRING),
    S.DECODING: (S.PREFILLING, S.TRANSFERRING, S.DECODING),
    S.FINISHED: (S.PREFILLING, S.DECODING, S.FINISHED),
    S.CANCELLED: (S.CANCELLED,),
    S.FAILED: (S.FAILED,),
    S.REJECTED: (S.REJECTED,),
}
LEGAL = {
    (S.QUEUED, S.PREFILLING),
    (S.QUEUED, S.REJECTED),
    (S.PREFILLING, S.TRANSFERRING),
    (S.PREFILLING, S.DECODING),
    (S.PREFILLING, S.QUEUED),
    (S.TRANSFERRING, S.DECODING),
    (S.TRANSFERRING, S.QUEUED),
    (S.DECODING, S.FINISHED),
    (S.DECODING, S.TRANSFERRING),
    (S.DECODING, S.QUEUED),
    *itertools.product((S.QUEUED, S.PREFILLING, S.TRANSFERRING, S.DECODING), (S.CANCELLED, S.FAILED)),
}


def in_state(state: RequestState) -> Lifecycle:
    life = Lifecycle(0.0)
    for number, step in enumerate(PATHS[state], start=1):
        life.advance(step, float(number))
    assert life.state is state
    return life


def test_a_request_begins_queued_at_its_arrival() -> None:
    life = Lifecycle(12.5, "arrived")
    assert life.state is S.QUEUED
    assert life.instant(S.QUEUED) == 12.5
    assert not life.is_terminal


@pytest.mark.parametrize(("state", "to"), list(itertools.product(S, S)), ids=lambda state: state.value)
def test_a_move_is_legal_exactly_when_the_design_says_so(state: RequestState, to: RequestState) -> None:
    life = in_state(state)
    before = life.history
    if (state, to) in LEGAL:
        life.advance(to, 99.0)
        assert life.state is to
    else:
        with pytest.raises(IllegalTransition):
            life.advance(to, 99.0)
        assert life.history == before


def test_exactly_the_states_without_a_move_are_terminal() -> None:
    assert {state for state in S if in_state(state).is_terminal} == TERMINAL
    assert set(TRANSITIONS) == set(S)


def test_a_state_entered_twice_keeps_both_instants() -> None:
    life = Lifecycle(0.0)
    life.advance(S.PREFILLING, 1.0)
    life.advance(S.QUEUED, 2.0, "worker lost")
    life.advance(S.PREFILLING, 3.0)
    assert life.instant(S.PREFILLING) == 1.0
    assert life.instant(S.PREFILLING, last=True) == 3.0
    assert life.instant(S.QUEUED, last=True) == 2.0
    assert life.instant(S.DECODING) is None


def test_an_illegal_move_tells_the_story_of_the_request() -> None:
    life = Lifecycle(10.0)
    life.advance(S.PREFILLING, 10.25, "picked prefill-0")
    with pytest.raises(IllegalTransition) as caught:
        life.advance(S.FINISHED, 11.0, "stop token")
    message = str(caught.value)
    assert "cannot go from prefilling to finished (stop token)" in message
    assert "allowed: cancelled, decoding, failed, queued, transferring" in message
    assert "queued +0.000s, prefilling +0.250s (picked prefill-0)" in message
    assert isinstance(caught.value, InternalError)


def test_a_finished_request_says_that_nothing_may_follow() -> None:
    with pytest.raises(IllegalTransition, match="nothing: it is terminal"):
        in_state(S.FINISHED).advance(S.FAILED, 9.0)
