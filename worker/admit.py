"""Turns a router's request into the engine's own types, and checks that this worker can run it."""

from __future__ import annotations

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from engine.sampling.constraint import Constrainer
from engine.sampling.params import SamplingParams
from engine.sequence import Request


def request_of(admit: worker_pb2.Admit, enable_prefix_cache: bool, constrainer: Constrainer | None) -> Request:
    """Raises ValueError for a grammar that cannot be followed here."""
    return Request(
        key=RequestKey.of(admit.key),
        prompt_token_ids=tuple(admit.prompt_token_ids),
        params=_params_of(admit.sampling, constrainer),
        cache_salt=admit.cache_salt,
        use_prefix_cache=enable_prefix_cache and not admit.bypass_prefix_cache,
        known_tokens={known.sequence_index: tuple(known.token_ids) for known in admit.known_tokens},
        prompt_logprobs=admit.prompt_logprobs if admit.HasField("prompt_logprobs") else None,
    )


def _params_of(sampling: worker_pb2.Sampling, constrainer: Constrainer | None) -> SamplingParams:
    constraint = None
    if sampling.grammar:
        if constrainer is None:
            raise ValueError("this worker's model folder has no tokenizer.json, which constrained output needs")
        constraint = constrainer.new(sampling.grammar)
    return SamplingParams.from_proto(sampling, constraint)


def problem_of(request: Request, vocab_size: int, max_model_len: int) -> str:
    """Why a request cannot run, or nothing. The router has checked; one bad id would end the step of everybody."""
    num_prompt_tokens, max_output_tokens = len(request.prompt_token_ids), request.params.max_output_tokens
    known = [token_id for token_ids in request.known_tokens.values() for token_id in token_ids]
    ids = (*request.prompt_token_ids, *known, *request.params.logit_bias, *request.params.allowed_token_ids)
    if num_prompt_tokens == 0:
        return "the prompt is empty"
    if max(ids) >= vocab_size:
        return f"token id {max(ids)} is outside the vocabulary of {vocab_size}"
    if num_prompt_tokens + max_output_tokens > max_model_len:
        total = f"{num_prompt_tokens} prompt + {max_output_tokens} output tokens"
        return f"{total} exceed max_model_len {max_model_len}"
    if len(request.known_start) >= max_output_tokens:
        return f"{len(request.known_start)} output tokens are known, and {max_output_tokens} are the most"
    return ""
