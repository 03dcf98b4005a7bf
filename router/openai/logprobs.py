"""Logprobs of tokens as the OpenAI API and vLLM write them: of outputs, and of prompts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from cluster.pb import generation_pb2 as pb
from router.openai.answers import (
    AnsweredToken,
    ChatLogprobs,
    ChatToken,
    PromptLogprobsAnswer,
    PromptToken,
    TextLogprobs,
)

TokenBytes = Callable[[int], bytes]
"""Returns the bytes of a token's text."""


def text_of(token_bytes: TokenBytes, token_ids: Iterable[int]) -> str:
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")


def chat_logprobs(entries: Iterable[pb.TokenLogprob], token_bytes: TokenBytes) -> ChatLogprobs:
    def named(token: pb.TokenLogprob | pb.TokenAlternative) -> AnsweredToken:
        text = token_bytes(token.token_id)
        return {"token": text.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(text)}

    content: list[ChatToken] = [{**named(entry), "top_logprobs": list(map(named, entry.top))} for entry in entries]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[pb.TokenLogprob], token_bytes: TokenBytes, offset: int = 0) -> TextLogprobs:
    """`offset`: characters of the choice before these tokens. A prompt's first token has no logprob: null."""
    texts = [text_of(token_bytes, (entry.token_id,)) for entry in entries]
    return {
        "tokens": texts,
        "token_logprobs": [None if entry.undefined else entry.logprob for entry in entries],
        "top_logprobs": [
            None
            if entry.undefined
            else {text: entry.logprob, **{text_of(token_bytes, (a.token_id,)): a.logprob for a in entry.top}}
            for text, entry in zip(texts, entries, strict=True)
        ],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


def prompt_logprobs(entries: Iterable[pb.TokenLogprob], token_bytes: TokenBytes) -> PromptLogprobsAnswer:

    def named(token_id: int, logprob: float, rank: int) -> PromptToken:
        return {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_bytes, (token_id,))}

    found: PromptLogprobsAnswer = []
    for entry in entries:
        own = {str(entry.token_id): named(entry.token_id, entry.logprob, entry.rank)}
        others = {str(a.token_id): named(a.token_id, a.logprob, rank) for rank, a in enumerate(entry.top, start=1)}
        found.append(None if entry.undefined else {**own, **others})
    return found
