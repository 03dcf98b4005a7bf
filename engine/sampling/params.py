"""The plain types of sampling: what a request asks for, what the sampler takes and returns, and when a sequence ends.

No tensors. The router validates ranges; values are used here as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

from cluster.pb import worker_pb2
from engine.sampling.constraint import Constraint

_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "logit_bias": dict,
    "allowed_token_ids": tuple,
    "stop_token_ids": frozenset,
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Keep one object for a request's life: the sampler caches by identity.

    A field has the name that it has in proto/generation.proto; the constraint is made of the proto's `grammar`.
    """

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this mass, counted within top_k; 1: off."""
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    """Least probability, as a fraction of the most likely token's; 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output."""
    repetition_penalty: float = 1.0
    """Tokens of prompt and output: a positive logit is divided by it, a negative one multiplied (arXiv:1909.05858)."""
    seed: int = 0
    """Taken modulo 2**64."""
    n: int = 1
    """Sequences for one prompt."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: every token."""
    max_output_tokens: int = 16
    min_output_tokens: int = 0
    """No stop token is chosen before this many tokens (unless nothing else is allowed)."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ends a sequence and is its last token; includes the end-of-sequence ids unless the client ignores them."""
    top_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only."""
    constraint: Constraint | None = None
    """The grammar that the output must match; None: anything. Where it is complete, a stop token may follow."""

    @classmethod
    def from_proto(cls, message: worker_pb2.Sampling, constraint: Constraint | None = None) -> Self:
        values: dict[str, Any] = {"constraint": constraint}
        for part in (message.params, message.stopping, message):
            for field_, value in part.ListFields():  # those that are set
                name = field_.name
                if name in _NAMES:
                    values[name] = _CONTAINERS[name](value) if name in _CONTAINERS else value
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_NAMES = frozenset(each.name for each in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The sequence behind one row of logits."""

    params: SamplingParams
    sequence_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_unread: int = 0
    """Output tokens behind those, which were sampled and are still on the device."""

    @property
    def position(self) -> int:
        """How many output tokens come before the sampled one."""
        return len(self.output_token_ids) + self.num_unread


class SampledToken(NamedTuple):
    """A chosen token, or one of a prompt.

    Logprob, 1-based rank and most likely tokens are of the model's own distribution, before any rule.
    """

    token_id: int
    logprob: float | None = None
    """None unless the request asked for logprobs, and for the first token of a prompt; so is `rank`."""
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    problem: str = ""
    """Why there is no token, and the sequence cannot go on; empty where there is one."""


@dataclass(frozen=True)
class Finish:
    """Why a sequence ended, and at which stop token if at one."""

    reason: Literal["stop", "length"]
    stop_token_id: int | None = None


def check_finish(params: SamplingParams, output_token_ids: Sequence[int]) -> Finish | None:
    """Looks at the newest token only; call it after each one."""
    num_tokens = len(output_token_ids)
    if num_tokens > params.min_output_tokens and output_token_ids[-1] in params.stop_token_ids:
        return Finish("stop", output_token_ids[-1])
    return Finish("length") if num_tokens >= params.max_output_tokens else None
