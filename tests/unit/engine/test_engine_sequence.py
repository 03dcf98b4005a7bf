"""What a sequence hides from others, blocks under a salt of its own; and what it is while a token of it is unread."""

from __future__ import annotations

import pytest

from cluster.lifecycle import RequestKey
from engine.sampling.params import SamplingParams
from engine.sequence import Request, Sequence
from engine.step_input import table_of


@pytest.mark.parametrize("request_id", ["r1", "", "\u00ff", "attempts of r1"])
def test_no_client_can_set_the_salt_of_anothers_attempts(request_id: str) -> None:
    request = Request(RequestKey(request_id, 1), (1, 2), SamplingParams(max_output_tokens=1))
    assert request.private_salt.endswith(request_id.encode())
    with pytest.raises(UnicodeDecodeError):  # a client's salt is the UTF-8 of a string
        request.private_salt.decode()


def test_a_token_that_is_not_read_is_fed_by_the_row_it_is_sampled_from() -> None:
    request = Request(RequestKey("r", 1), (5, 6, 7), SamplingParams(max_output_tokens=3))
    sequence = Sequence(request, 0, 0, output_token_ids=[8], block_table=table_of([2]), num_computed_tokens=3)
    sequence.count_ahead(1, row=4)
    assert (sequence.num_tokens, sequence.num_remaining) == (5, 1)
    ahead = sequence.slice(1)
    assert (ahead.token_ids, ahead.start, ahead.wants_logits) == ((-5,), 4, True)
    assert [(row.position, row.num_unread) for row in sequence.sample_rows()] == [(2, 1)], "what comes behind it"


def test_a_token_that_is_the_last_in_any_case_is_not_fed() -> None:
    request = Request(RequestKey("r", 1), (5, 6, 7), SamplingParams(max_output_tokens=2))
    sequence = Sequence(request, 0, 0, output_token_ids=[8], block_table=table_of([2]), num_computed_tokens=3)
    sequence.count_ahead(1, row=0)
    assert sequence.num_remaining == 0


def test_tokens_in_the_middle_of_a_prompt_lead_to_none() -> None:
    request = Request(RequestKey("r", 1), (5, 6, 7), SamplingParams(max_output_tokens=2))
    sequence = Sequence(request, 0, 0, block_table=table_of([2]))
    sequence.count_ahead(2, row=None)
    assert (sequence.num_tokens, sequence.num_remaining) == (3, 1)
    assert sequence.slice(1).token_ids == (7,)
