"""What a sequence hides from others: blocks under a salt of its own."""

from __future__ import annotations

import pytest

from cluster.lifecycle import RequestKey
from engine.sampling.params import SamplingParams
from engine.sequence import Request


@pytest.mark.parametrize("request_id", ["r1", "", "\u00ff", "attempts of r1"])
def test_no_client_can_set_the_salt_of_anothers_attempts(request_id: str) -> None:
    request = Request(RequestKey(request_id, 1), (1, 2), SamplingParams(max_output_tokens=1))
    assert request.private_salt.endswith(request_id.encode())
    with pytest.raises(UnicodeDecodeError):  # a client's salt is the UTF-8 of a string
        request.private_salt.decode()
