"""The stop matcher against a plain search of the whole text, wherever the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stream.detokenizer import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    out, at = [], 0
    for size in cuts:
        out.append(text[at : at + size])
        at += size
    return [*out, text[at:]]


def run(pieces: list[str], stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    out = ""
    for piece in pieces:
        fed = matcher.feed(piece)
        out += fed.text
        if fed.stop is not None:
            return out, fed.stop
    return out + matcher.flush(), None


def expected(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(0, 4), max_size=15), st.booleans())
def test_any_cut_of_the_text_finds_what_a_search_of_the_whole_finds(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    found = run(pieces_of(text, cuts), stops, include_stop=include_stop)
    assert found == expected(text, stops, include_stop=include_stop)


@given(LETTERS, STOPS, st.lists(st.integers(0, 4), max_size=15))
def test_nothing_is_sent_that_a_stop_string_may_still_take_back(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    seen = sent = ""
    for piece in pieces_of(text, cuts):
        fed = matcher.feed(piece)
        seen, sent = seen + piece, sent + fed.text
        if fed.stop is not None:
            return
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_a_match_before_the_minimum_does_not_count_but_its_tail_may_begin_one() -> None:
    matcher = StopMatcher(["aa"], include_stop=False)
    assert matcher.feed("aa", can_stop=False).text == "a"
    fed = matcher.feed("a")
    assert (fed.text, fed.stop) == ("", "aa")


def test_of_two_that_end_together_the_longer_is_taken_away() -> None:
    assert run(["xab"], ["b", "ab"], include_stop=False) == ("x", "ab")
