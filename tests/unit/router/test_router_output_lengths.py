"""How long outputs are expected to get."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.demand import FIRST_GUESS_TOKENS, OutputLengths


def test_before_any_has_ended_there_is_a_guess_and_never_more_than_a_client_allows() -> None:
    lengths = OutputLengths()
    assert (lengths.expected(1000), lengths.expected(8)) == (FIRST_GUESS_TOKENS, 8)


def test_clients_that_ask_for_as_much_get_as_much_and_others_say_nothing_of_them() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.add(100, 4096)  # these ask for the whole context, and stop early
        lengths.add(100, 100)
    assert round(lengths.expected(4096)) == round(lengths.expected(100)) == 100
    assert lengths.expected(2000) == FIRST_GUESS_TOKENS, "nobody has asked for that yet"


def test_what_ended_long_ago_counts_less_and_less() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.add(10, 1000)
    for _ in range(100):
        lengths.add(900, 1000)
    assert 890 < lengths.expected(1000) <= 900


def test_outputs_that_still_run_are_no_shorter_than_those_that_ended_first() -> None:
    lengths, alone = OutputLengths(), OutputLengths()
    running = dict.fromkeys(range(10), 0)
    ends_at = {0: 10, 1: 20, 2: 40, **dict.fromkeys(range(3, 10), 100)}
    for _ in range(40):
        for number in list(running):
            running[number] += 1
            lengths.add_tokens(1, 1000)
            if running[number] == ends_at[number]:
                lengths.add(running[number], 1000)
                alone.add(running.pop(number), 1000)
    assert alone.expected(1000) < 25 and 60 < lengths.expected(1000) < 100
    for _ in range(1000):
        lengths.add_tokens(79, 1000)
        lengths.add(79, 1000)
    assert round(lengths.expected(1000)) == 79, "while one ends, as many tokens come as one has"


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000))), st.integers(1, 5000))
def test_it_is_a_length_that_can_be(ended: list[tuple[int, int]], most: int) -> None:
    lengths = OutputLengths()
    for num_tokens, allowed in ended:
        lengths.add(min(num_tokens, allowed), allowed)
    assert 1 <= lengths.expected(most) <= most
