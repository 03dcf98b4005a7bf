"""Detokenizers: deltas joined are the decode of the whole, whatever the text and wherever tokens are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import TOKENIZER, VOCAB_SIZE
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from router.api.chat_template import ChatTemplate
from router.api.tokenizer import Tokenizer
from router.stream.detokenizer import ByteDetokenizer, Detokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sentencepiece_like() -> Library:
    """A decoder like that of Llama 2 and Mistral: pieces with a mark for the space, bytes for the rest."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *("▁" + c for c in "abc"), *"abcé€"]
    library = Library(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<s>"])
    return library


def added_tokens() -> Library:
    library = Library.from_str(TOKENIZER.to_str())
    library.add_tokens([AddedToken("a b"), AddedToken("éé"), AddedToken("😀")])
    return library


def tokenizer_of(library: Library) -> Tokenizer:
    return Tokenizer(library.to_str().encode(), ChatTemplate({}, {}))


BYTE_LEVEL = tokenizer_of(added_tokens())
WINDOWED = tokenizer_of(sentencepiece_like())
PIECES = sentencepiece_like().get_vocab()


def cut(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The ids in pieces of these sizes, the rest one by one."""
    out, at = [], 0
    for size in cuts:
        out.append(token_ids[at : at + size])
        at += size
    return [piece for piece in [*out, *([t] for t in token_ids[at:])] if piece]


def joined(detokenizer: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.flush()


@given(st.lists(st.integers(0, VOCAB_SIZE), max_size=60), st.lists(st.integers(1, 5), max_size=10))
def test_byte_level_deltas_equal_the_whole_decode_of_any_tokens(token_ids: list[int], cuts: list[int]) -> None:
    deltas = joined(BYTE_LEVEL.new_detokenizer(()), cut(token_ids, cuts))
    assert deltas == BYTE_LEVEL.decode(token_ids)


@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=10))
def test_no_delta_of_valid_text_holds_half_a_character(text: str, cuts: list[int]) -> None:
    token_ids = list(BYTE_LEVEL.encode(text, add_special_tokens=False).token_ids)
    detokenizer = BYTE_LEVEL.new_detokenizer(())
    deltas = [detokenizer.push(piece) for piece in cut(token_ids, cuts)]
    assert "".join(deltas) == text and detokenizer.flush() == ""
    assert REPLACEMENT in text or not any(REPLACEMENT in delta for delta in deltas)


@given(st.text(alphabet="abcé€ 🎉ü\n", max_size=30), st.lists(st.integers(1, 5), max_size=10))
def test_windowed_deltas_equal_the_whole_decode_of_any_text(text: str, cuts: list[int]) -> None:
    token_ids = [
        token_id
        for character in text.replace(" ", "▁")
        for token_id in ([PIECES[character]] if character in PIECES else [2 + byte for byte in character.encode()])
    ]
    detokenizer = WINDOWED.new_detokenizer(())
    pieces = cut(token_ids, cuts)
    deltas = [detokenizer.push(piece) for piece in pieces]
    assert "".join(deltas) + detokenizer.flush() == WINDOWED.decode(token_ids)
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_a_windowed_word_keeps_its_space_after_the_prompt() -> None:
    assert joined(WINDOWED.new_detokenizer([PIECES["a"]]), [[PIECES["▁b"]]]) == " b"
    assert joined(WINDOWED.new_detokenizer([]), [[PIECES["▁b"]]]) == "b"


def test_a_window_stays_small_however_long_the_text() -> None:
    longest = 0

    def decode(token_ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(list(token_ids)))  # type: ignore[call-overload]
        return WINDOWED.decode(list(token_ids))  # type: ignore[call-overload]

    from router.stream.detokenizer import WindowDetokenizer

    detokenizer = WindowDetokenizer(decode, (), frozenset({1}))
    for token_id in [PIECES["a"], 1, 2 + 0xFF] * 100:
        detokenizer.push([token_id])
    assert longest < 25


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    detokenizer = ByteDetokenizer({0: b"\xe2\x82"}.__getitem__)
    assert detokenizer.push([0]) == ""
    assert detokenizer.flush() == REPLACEMENT


def test_byte_level_is_recognised_inside_a_sequence_of_one() -> None:
    definition = json.loads(TOKENIZER.to_str())
    definition["decoder"] = {"type": "Sequence", "decoders": [definition["decoder"]]}
    tokenizer = Tokenizer(json.dumps(definition).encode(), ChatTemplate({}, {}))
    assert isinstance(tokenizer.new_detokenizer(()), ByteDetokenizer)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WINDOWED])
def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    special = 0 if tokenizer is BYTE_LEVEL else PIECES["<s>"]
    assert joined(tokenizer.new_detokenizer(()), [[special], [special]]) == ""
