"""What is handed out counts at once, and always balances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.step_cost import StepSize
from router.routing.load_tracker import NOTHING, Charge, LoadTracker, Placement, RequestLoad

WORK = RequestLoad(num_prompt_tokens=10, num_sequences=2, num_output_tokens=50)


def test_a_charge_is_on_both_workers_and_a_local_one_on_one() -> None:
    loads = LoadTracker()
    Charge(loads, Placement("p0", "d0", ""), WORK)
    assert loads["p0"].prompts == StepSize.of_prompt(10) and loads["p0"].num_prompts == 1
    assert loads["d0"].sequences == StepSize(num_sequences=2, num_kv_tokens=20)
    assert loads["d0"].num_tokens == 50 and not loads["d0"].num_prompts
    Charge(loads, Placement(None, "d1", ""), WORK)
    assert loads["d1"].num_prompts == 1 and loads["d1"].sequences.num_sequences == 2


def test_what_is_cached_is_not_computed() -> None:
    loads = LoadTracker()
    Charge(loads, Placement("p0", "d0", "", num_cached_tokens=8), WORK)
    assert loads["p0"].prompts == StepSize(num_prompt_tokens=2, num_attended=9 + 10)


def test_a_finished_prefill_no_longer_weighs() -> None:
    loads = LoadTracker()
    charge = Charge(loads, Placement("p0", "d0", ""), WORK)
    charge.prefill_done()
    charge.prefill_done()
    assert loads["p0"] == NOTHING
    assert loads["d0"].sequences.num_sequences == 2


def test_prompts_that_are_computed_again_are_counted_until_they_are() -> None:
    loads = LoadTracker()
    again = [Charge(loads, Placement(f"p{i}", "d0", ""), WORK, is_retry=True) for i in range(2)]
    Charge(loads, Placement("p0", "d0", ""), WORK)
    assert (loads.num_retries, loads["p0"].num_retries, loads["p1"].num_retries) == (2, 1, 1)
    again[0].prefill_done()
    again[0].all_done()
    assert (loads.num_retries, loads["p0"].num_retries, loads["p0"].num_prompts) == (1, 0, 1)


def test_a_sequence_decodes_once_its_prompt_is_computed() -> None:
    loads = LoadTracker()
    charge = Charge(loads, Placement("p0", "d0", ""), WORK)
    assert loads["d0"].decoding.num_sequences == 0
    charge.prefill_done()
    assert loads["d0"].decoding == loads["d0"].sequences == StepSize(num_sequences=2, num_kv_tokens=20)
    charge.sequence_done()
    assert loads["d0"].decoding == loads["d0"].sequences == StepSize(num_sequences=1, num_kv_tokens=10)


@given(st.lists(st.sampled_from(["prefill", "sequence", "all"]), max_size=8), st.sampled_from(["p0", None]))
def test_whatever_is_given_back_in_whatever_order_nothing_is_left(parts: list[str], prefill_id: str | None) -> None:
    loads = LoadTracker()
    charge = Charge(loads, Placement(prefill_id, "d0", "", num_cached_tokens=3), WORK)
    give = {"prefill": charge.prefill_done, "sequence": charge.sequence_done, "all": charge.all_done}
    for part in parts:
        give[part]()
        for load in (loads["p0"], loads["d0"]):
            assert min(load.num_prompts, load.num_tokens) >= 0
            assert 0 <= load.decoding.num_sequences <= load.sequences.num_sequences
    charge.all_done()
    assert loads["p0"] == loads["d0"] == NOTHING
