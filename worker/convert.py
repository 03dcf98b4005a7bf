"""Between the wire's messages and the engine's own types, both ways. Nothing is decided here."""

from __future__ import annotations

from cluster.pb import generation_pb2, worker_pb2
from cluster.request_key import RequestKey
from engine.sampling.constraint import Constrainer
from engine.sampling.params import Finish, SampledToken, SamplingParams
from engine.sequence import Request

_FINISH_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}


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
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        n=max(1, sampling.n),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        max_output_tokens=sampling.max_output_tokens,
        min_output_tokens=sampling.min_output_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        constraint=constraint,
    )


def logprob_to_proto(sampled: SampledToken) -> generation_pb2.TokenLogprob:
    """Without a logprob it is a prompt's first token."""
    if sampled.logprob is None:
        return generation_pb2.TokenLogprob(token_id=sampled.token_id, undefined=True)
    top = [generation_pb2.TokenAlternative(token_id=i, logprob=logprob) for i, logprob in sampled.top]
    return generation_pb2.TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob, rank=sampled.rank, top=top)


def finish_to_proto(finish: Finish, tokens: worker_pb2.Tokens) -> None:
    """Marks `tokens` as the last of their sequence."""
    tokens.finish_reason = _FINISH_REASONS[finish.reason]
    if finish.stop_token_id is not None:
        tokens.stop_token_id = finish.stop_token_id
