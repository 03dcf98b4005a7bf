"""What is handed out counts at once, and always balances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.step_cost import StepSize
from router.routing.load_tracker import NOTHING, Charge, LoadTracker, Placement, RequestLoad

WORK = RequestLoad(num_prompt_tokens=10, num_sequences=2, num_output_tokens=50)


def test_a_charge_is_on_both_workers_and_a_local_one_on_one() -> None:
    ledger = LoadTracker()
    Charge(ledger, Placement("p0", "d0", ""), WORK)
    assert ledger["p0"].prompts == StepSize.of_prompt(10) and ledger["p0"].num_prompts == 1
    assert ledger["d0"].sequences == StepSize(num_sequences=2, num_kv_tokens=20)
    assert ledger["d0"].num_tokens == 50 and not ledger["d0"].num_prompts
    Charge(ledger, Placement(None, "d1", ""), WORK)
    assert ledger["d1"].num_prompts == 1 and ledger["d1"].sequences.num_sequences == 2


def test_what_is_cached_is_not_computed() -> None:
    ledger = LoadTracker()
    Charge(ledger, Placement("p0", "d0", "", num_cached_tokens=8), WORK)
    assert ledger["p0"].prompts == StepSize(num_prompt_tokens=2, num_attended=9 + 10)


def test_a_finished_prefill_no_longer_weighs() -> None:
    ledger = LoadTracker()
    charge = Charge(ledger, Placement("p0", "d0", ""), WORK)
    charge.prefill_done()
    charge.prefill_done()
    assert ledger["p0"] == NOTHING
    assert ledger["d0"].sequences.num_sequences == 2


def test_a_sequence_decodes_once_its_prompt_is_computed() -> None:
    ledger = LoadTracker()
    charge = Charge(ledger, Placement("p0", "d0", ""), WORK)
    assert ledger["d0"].decoding.num_sequences == 0
    charge.prefill_done()
    assert ledger["d0"].decoding == ledger["d0"].sequences == StepSize(num_sequences=2, num_kv_tokens=20)
    charge.sequence_done()
    assert ledger["d0"].decoding == ledger["d0"].sequences == StepSize(num_sequences=1, num_kv_tokens=10)


@given(st.lists(st.sampled_from(["prefill", "sequence", "all"]), max_size=8), st.sampled_from(["p0", None]))
def test_whatever_is_given_back_in_whatever_order_nothing_is_left(parts: list[str], prefill_id: str | None) -> None:
    ledger = LoadTracker()
    charge = Charge(ledger, Placement(prefill_id, "d0", "", num_cached_tokens=3), WORK)
    give = {"prefill": charge.prefill_done, "sequence": charge.sequence_done, "all": charge.all_done}
    for part in parts:
        give[part]()
        for load in (ledger["p0"], ledger["d0"]):
            assert min(load.num_prompts, load.num_tokens) >= 0
            assert 0 <= load.decoding.num_sequences <= load.sequences.num_sequences
    charge.all_done()
    assert ledger["p0"] == ledger["d0"] == NOTHING
