"""The tokens of one batch and their logprobs, on the device until they are read. Knows nothing of how they were chosen.

Legend: R rows, L rows whose logprobs are wanted, K most alternatives that any of them wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.copies import Fetched
from engine.sampling.params import SampledToken


class Logprobs(NamedTuple):
    """Logprobs of L rows of a batch, on the device."""

    own: Tensor  # [L] of the chosen tokens
    ranks: Tensor  # [L]
    top_ids: Tensor  # [L, K]
    top_logprobs: Tensor  # [L, K]


class Samples:
    """The tokens of one batch, on the device until they are read."""

    def __init__(
        self,
        token_ids: Tensor,
        wanted: Sequence[tuple[int, int]] = (),
        logprobs: Logprobs | None = None,
        problems: Mapping[int, str] | None = None,
        when_read: Callable[[list[int]], None] | None = None,
        is_rewritten: bool = False,
    ) -> None:
        """`wanted`: each row with logprobs, and how many of the most likely tokens it asked for. `problems`: rows
        without a token, and why. `when_read` is called with the tokens. `is_rewritten`: a later step writes its own
        into these tensors."""
        self.token_ids = token_ids
        """Integers [R]; anything where there is a problem."""
        self._wanted = wanted
        parts = (token_ids,) if logprobs is None else (token_ids, *logprobs)
        self._fetched = Fetched(parts, is_rewritten=is_rewritten)
        self._problems = problems
        self._when_read = when_read

    def read(self) -> list[SampledToken]:
        """Waits for these tokens, and for nothing that was launched after them."""
        token_ids, *logprobs = self._fetched.lists()
        if self._when_read is not None:
            self._when_read(token_ids)
        sampled = [SampledToken(token_id) for token_id in token_ids]
        if logprobs:
            for (r, num_top), logprob, rank, top_ids, top_values in zip(self._wanted, *logprobs, strict=True):
                alternatives = tuple(zip(top_ids[:num_top], top_values[:num_top], strict=True))
                sampled[r] = SampledToken(sampled[r].token_id, logprob, rank, alternatives)
        for r, problem in (self._problems or {}).items():
            sampled[r] = SampledToken(-1, problem=problem)
        return sampled
