"""Grammars of constrained output, as the router checks them and workers follow them: llguidance, with our limits.

A grammar is llguidance's text for what the whole output must be. The library's automata are lazy: making one takes
about a millisecond, and the limits keep any client's grammar from taking much more than a second of a thread.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LONGEST_GRAMMAR = 256 * 1024
"""Characters."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def new_vocabulary(definition: str, vocab_size: int) -> LLTokenizer:
    """Tokens of a tokenizer.json's content; the model's others stand for no text. Raises ValueError."""
    return LLTokenizer(definition, n_vocab=vocab_size)


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """At the start of an output. Raises ValueError, with the library's words, for a grammar that it does not take."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher
