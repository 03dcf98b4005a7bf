"""Least work: the ledger's choice, and that it always balances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policy import Charge, Ledger, Placement, Work

WORK = Work(num_prompt_tokens=10, num_sequences=2, num_output_tokens=50)


def test_equals_are_taken_by_id() -> None:
    placement = Ledger().choose(["p1", "p0"], ["d1", "d0"])
    assert (placement.prefill_id, placement.decode_id) == ("p0", "d0")
    assert placement.reason == "disaggregated: p0 -> d0, least work"


def test_own_decisions_count_at_once() -> None:
    ledger = Ledger()
    chosen = []
    for _ in range(4):
        placement = ledger.choose(["p0", "p1"], ["d0", "d1"])
        Charge(ledger, placement, WORK)
        chosen.append((placement.prefill_id, placement.decode_id))
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


def test_prefill_goes_by_tokens_and_decode_by_sequences_then_tokens() -> None:
    ledger = Ledger()
    Charge(ledger, Placement("p0", "d0", ""), Work(1000, 1, 2000))
    Charge(ledger, Placement("p1", "d1", ""), Work(10, 1, 20))
    Charge(ledger, Placement("p1", "d2", ""), Work(10, 3, 3))
    placement = ledger.choose(["p0", "p1"], ["d0", "d1", "d2"])
    assert (placement.prefill_id, placement.decode_id) == ("p1", "d1")


def test_a_finished_prefill_no_longer_weighs() -> None:
    ledger = Ledger()
    charge = Charge(ledger, Placement("p0", "d0", ""), WORK)
    charge.prefill_done()
    charge.prefill_done()
    assert ledger.outstanding("p0")[0] == 0 and ledger.outstanding("d0") == (0, 2, 50)
    assert ledger.choose(["p0", "p1"], ["d0"]).prefill_id == "p0"


@given(st.lists(st.sampled_from(["prefill", "sequence", "all"]), max_size=8))
def test_whatever_is_given_back_in_whatever_order_nothing_is_left(parts: list[str]) -> None:
    ledger = Ledger()
    charge = Charge(ledger, Placement("p0", "d0", ""), WORK)
    give = {"prefill": charge.prefill_done, "sequence": charge.sequence_done, "all": charge.all_done}
    for part in parts:
        give[part]()
        assert min(ledger.outstanding("p0") + ledger.outstanding("d0")) >= 0
    charge.all_done()
    assert ledger.outstanding("p0") == ledger.outstanding("d0") == (0, 0, 0)
