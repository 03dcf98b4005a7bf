"""The sampling parameters of a request: their defaults, and the values that each may have. Pure.

A new number needs a line in SAMPLING_RANGES, or a check in `resolve_sampling`; the engine gets it by its name in
`SamplingParams` of proto/generation.proto. Constraints and what ends a sequence are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import CheckpointError
from cluster.pb import generation_pb2 as pb
from router.api.call import MOST_BIASED_TOKENS
from router.api.violations import Violations

SAMPLING_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}
"""Parameters that are numbers with a fraction, and the lowest and highest value of each."""
_ABOVE = ("top_p", "repetition_penalty")
"""Parameters that must be above the low end of their range."""
_USUAL = pb.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, n=1)
MOST_BIAS = 100.0
_LARGEST_NUMBER = 1e30
_MOST_TOP_K = 2**31 - 1


def default_sampling(**given: float) -> pb.SamplingParams:
    """The values for fields that a client leaves unset: those that are `given`, else the usual ones."""
    defaults = pb.SamplingParams()
    defaults.CopyFrom(_USUAL)
    defaults.MergeFrom(pb.SamplingParams(**given))  # type: ignore[arg-type]  # the stubs name each field
    return defaults


def model_defaults(generation: Mapping[str, Any]) -> pb.SamplingParams:
    """The defaults that a model's generation_config.json sets. Raises CheckpointError for what is no number."""
    given = {name: _number(generation, name) for name in SAMPLING_RANGES if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    top_k = 0 if generation.get("top_k") is None else int(_number(generation, "top_k"))
    return default_sampling(**given, top_k=max(0, min(top_k, _MOST_TOP_K)))


def _number(generation: Mapping[str, Any], name: str) -> float:
    value = generation[name]
    if type(value) not in (int, float) or not abs(value) <= _LARGEST_NUMBER:
        raise CheckpointError(f"generation_config.json: {name} must be a number (got {value!r:.100})")
    return float(value)


def resolve_sampling(
    params: pb.SamplingParams,
    defaults: pb.SamplingParams,
    wrong: Violations,
    *,
    vocab_size: int,
    max_sequences: int,
    fresh_seed: int,
) -> pb.SamplingParams:
    """The parameters that the engine gets: the client's, else the model's defaults."""
    resolved = pb.SamplingParams(seed=fresh_seed)
    resolved.MergeFrom(defaults)
    resolved.MergeFrom(params)
    resolved.ClearField("constraint")
    for name, allowed in SAMPLING_RANGES.items():
        wrong.number(f"sampling.{name}", getattr(resolved, name), *allowed, above=name in _ABOVE)
    wrong.number("sampling.n", resolved.n, 1, max_sequences)
    if resolved.top_k < -1:
        wrong.add("sampling.top_k", f"must be at least 1, or 0 or -1 for off (got {resolved.top_k})")
    resolved.top_k = max(0, min(resolved.top_k, vocab_size))
    if wrong.at_most("sampling.logit_bias", params.logit_bias, MOST_BIASED_TOKENS, "entries"):
        wrong.token_ids("sampling.logit_bias", params.logit_bias, vocab_size)
        for token_id, bias in params.logit_bias.items():
            wrong.number(f"sampling.logit_bias[{token_id}]", bias, -MOST_BIAS, MOST_BIAS)
    if wrong.at_most("sampling.allowed_token_ids", params.allowed_token_ids, vocab_size, "ids"):
        wrong.token_ids("sampling.allowed_token_ids", params.allowed_token_ids, vocab_size)
        resolved.allowed_token_ids[:] = sorted(set(params.allowed_token_ids))
    return resolved
