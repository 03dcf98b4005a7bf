"""The model of steps that compute nothing: the next token is a hash of all tokens before it.

The same tokens lead to the same next one on every machine, however they were cut into steps, moved or computed again,
so an output shows whether a cluster lost, doubled or mixed anything up. The state after a prefix is one 64-bit number:
state * MULTIPLIER + token + 1, modulo 2**64. Pure: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.sequence import Request
from engine.step_input import IntArray

StateArray = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator; odd, so it has an inverse
_INVERSE = pow(MULTIPLIER, -1, 1 << 64)
_STRIDE = 0x9E3779B97F4A7C15
START = 0
"""The state before the first token."""


class TokenHash:
    """The state after some tokens; each one more costs the same."""

    __slots__ = ("state",)

    def __init__(self, tokens: Iterable[int] = (), state: int = START) -> None:
        self.state = state
        self.extend(tokens)

    def copy(self) -> Self:
        return type(self)(state=self.state)

    def extend(self, tokens: Iterable[int]) -> None:
        state = self.state
        for token in tokens:
            state = (state * MULTIPLIER + token + 1) & _MASK
        self.state = state

    def next_token(self, vocab_size: int, sequence_index: int = 0, excluded: Collection[int] = ()) -> int:
        """Returns the token that follows in sequence `sequence_index` of its request, in [0, vocab_size) and not
        among `excluded`: a request's stop tokens, say. The state stays as it is."""
        token = _mixed(self.state ^ (sequence_index * _STRIDE & _MASK)) % vocab_size
        for _ in range(len(excluded)):
            if token not in excluded:
                break
            token = (token + 1) % vocab_size
        return token


def obstacle(request: Request, *, takes_constraints: bool = False) -> str:
    """Why this model, or another without logits, cannot serve a request, or nothing."""
    params = request.params
    wanted = {
        "logprobs": params.top_logprobs is not None,
        "prompt logprobs": request.prompt_logprobs is not None,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "a constraint": params.constraint is not None and not takes_constraints,
    }
    names = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
    return f"this worker's steps are timed and compute no logits, so leave out {names}" if names else ""


def states_after(before: StateArray, tokens: IntArray, cu_seqlens: IntArray) -> StateArray:
    """Returns the state after each new token of some sequences: what `extend` gives one by one, [T].

    `before` [S]: the state before the first one of each; `cu_seqlens` [S + 1]: where they begin in `tokens` [T].
    """
    values = tokens.astype(np.uint64) + np.uint64(1)
    if len(before) == len(tokens):
        states: StateArray = before * np.uint64(MULTIPLIER) + values
        return states
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    powers, inverses = _powers(1 << int(lengths.max()).bit_length())
    places = np.arange(1, len(tokens) + 1) - np.repeat(starts, lengths)
    # state_k / M^k grows by (token_k + 1) / M^k with each token, all modulo 2**64, as uint64 wraps.
    scaled = values * inverses[places]
    sums = np.cumsum(scaled, dtype=np.uint64)
    shifts = before - sums[starts] + scaled[starts]
    states = (sums + np.repeat(shifts, lengths)) * powers[places]
    return states


@cache
def _powers(count: int) -> tuple[StateArray, StateArray]:
    """The powers of the multiplier and of its inverse, from 0 on."""
    factors = np.array([[MULTIPLIER], [_INVERSE]], dtype=np.uint64).repeat(count, axis=1)
    factors[:, 0] = 1
    powers, inverses = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers, inverses


def _mixed(state: int) -> int:
    """Spreads a state over all 64 bits (splitmix64)."""
    state = (state + _STRIDE) & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31
