"""Filling in the middle: a text between two that a client has, by a model that was trained for it.

Such a model's tokenizer has marks for the two; `FORMATS` has their names and their order as the models' own
documentation has them. Knows no tokenizer and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    *("<fim_pad>", "<file_sep>", "▁<EOT>"),
)
"""Tokens by which models end what they fill in, beside those that end any of their texts."""


@dataclass(frozen=True)
class Infill:
    """A prompt: what is missing between two texts."""

    prefix: str
    suffix: str


@dataclass(frozen=True)
class InfillFormat:
    """The names of the tokens that stand before each of the two texts, and before the model's own."""

    prefix: str
    suffix: str
    middle: str
    """Empty: the model goes on with the prefix."""
    is_suffix_first: bool = False


FORMATS = (
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code, Stable Code
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True),  # Seed-Coder
    InfillFormat("[PREFIX]", "[SUFFIX]", "", is_suffix_first=True),  # Codestral
)


@dataclass(frozen=True)
class InfillTokens:
    """A format by the ids of one tokenizer."""

    prefix: int
    suffix: int
    middle: int | None
    is_suffix_first: bool
    end_ids: tuple[int, ...]
    """Tokens that end what is filled in: a mark of the format does so as well."""

    def arrange(self, prefix: Sequence[int], suffix: Sequence[int]) -> tuple[int, ...]:
        """The prompt of two encoded texts."""
        parts = (self.prefix, *prefix), (self.suffix, *suffix)
        first, second = reversed(parts) if self.is_suffix_first else parts
        return (*first, *second, *(() if self.middle is None else (self.middle,)))


def infill_of(token_id: Callable[[str], int | None]) -> InfillTokens | None:
    """The format of a tokenizer. `token_id`: the id of a token by its text, if there is one. None: it has no format's
    marks."""
    for each in FORMATS:
        ids = [token_id(name) for name in (each.prefix, each.suffix, each.middle) if name]
        found = [number for number in ids if number is not None]
        if len(found) == len(ids):
            ends = (number for name in _ENDS if (number := token_id(name)) is not None)
            middle = found[2] if each.middle else None
            return InfillTokens(found[0], found[1], middle, each.is_suffix_first, tuple(dict.fromkeys((*found, *ends))))
    return None
