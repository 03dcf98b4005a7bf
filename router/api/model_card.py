"""What clients are told about the served model. Pure."""

from __future__ import annotations

from cluster.pb import generation_pb2
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer

_CAPABILITIES = (
    "text",
    "token_ids",
    "streaming",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "stop_strings",
    "prefix_cache",
)


def model_card(model: ServedModel, tokenizer: Tokenizer, weights_revision: str) -> generation_pb2.Model:
    """`weights_revision` is what the workers say, empty while none has."""
    defaults = model.defaults
    return generation_pb2.Model(
        name=model.name,
        max_context_tokens=model.max_model_len,
        max_input_tokens=model.max_model_len - 1,
        max_output_tokens=model.max_model_len - 1,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_sha256=tokenizer.sha256,
        weights_revision=weights_revision,
        default_sampling=generation_pb2.SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            n=1,
        ),
        capabilities=[*_CAPABILITIES, *(["chat"] if tokenizer.chat_template.is_present else [])],
    )
