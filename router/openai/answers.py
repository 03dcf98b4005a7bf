"""What generation tells, as OpenAI's objects: completions, chat completions, and the chunks of either. Pure.

    started            chat: a chunk with the role, for each choice
    delta              a chunk with text, and the logprobs of its tokens
    sequence_end       a chunk with the finish reason
    completed          with `include_usage`, a chunk without choices

A call with several prompts numbers the sequences of the second after those of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cluster.pb import generation_pb2 as pb

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
}

TokenBytes = Callable[[int], bytes]
"""Of a token, those of its text."""


@dataclass(frozen=True)
class Form:
    """How the answers to one call look."""

    is_chat: bool
    created: int
    """Seconds since 1970."""
    n: int
    """Sequences of each prompt."""
    wants_logprobs: bool
    includes_usage: bool
    token_bytes: TokenBytes
    stop_token_ids: frozenset[int]
    """That the client named; the model's own end is none of them."""
    names: Mapping[str, str]
    """What this client calls fields that others call otherwise, as `errors.failure_of` takes them."""

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
        """The answer to a call that does not stream; one response for each prompt."""
        choices = [choice for number, answer in enumerate(answers) for choice in self._choices(answer, number)]
        usage = _usage([answer.usage for answer in answers])
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head(answers[0], kind), "choices": choices, "usage": usage}

    def head(self, told: pb.GenerateResponse | pb.Started, kind: str) -> dict[str, Any]:
        return {"id": told.generation_id, "object": kind, "created": self.created, "model": told.model}

    def _choices(self, answer: pb.GenerateResponse, prompt: int) -> Iterable[dict[str, Any]]:
        """Those of one prompt, whole."""
        ends = {end.index: end for end in answer.ends}
        for index in range(self.n):
            deltas = [delta for delta in answer.outputs if delta.index == index]
            text = "".join(delta.text for delta in deltas)
            logprobs = [entry for delta in deltas for entry in delta.logprobs]
            told = self.logprobs(logprobs) if self.wants_logprobs else None
            content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            ending = self.ending(ends[index]) if index in ends else {"finish_reason": None}
            yield {"index": prompt * self.n + index, **content, "logprobs": told, **ending}

    def ending(self, end: pb.SequenceEnd) -> dict[str, Any]:
        """`stop_reason` as other servers tell it: the stop string or token that matched, of those that were named."""
        stop: str | int | None = end.stop_string if end.HasField("stop_string") else None
        if end.HasField("stop_token_id") and end.stop_token_id in self.stop_token_ids:
            stop = end.stop_token_id
        return {"finish_reason": _FINISH_REASONS.get(end.finish_reason, "stop"), "stop_reason": stop}

    def logprobs(self, entries: Sequence[pb.TokenLogprob], offset: int = 0) -> dict[str, Any]:
        """`offset`: characters of the choice that were told before."""
        if self.is_chat:
            return {"content": [self._entry(entry) for entry in entries], "refusal": None}
        texts = [self._text(entry.token_id) for entry in entries]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._text(entry.token_id): entry.logprob, **{self._text(a.token_id): a.logprob for a in entry.top}}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _entry(self, entry: pb.TokenLogprob) -> dict[str, Any]:
        return self._token(entry) | {"top_logprobs": [self._token(alternative) for alternative in entry.top]}

    def _token(self, token: pb.TokenLogprob | pb.TokenAlternative) -> dict[str, Any]:
        text = self.token_bytes(token.token_id)
        return {"token": text.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(text)}

    def _text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class Chunks:
    """Those of one stream: its prompts have one id, and each choice goes on where it was."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._head: dict[str, Any] = {}
        """Of the first prompt."""
        self._usages: list[pb.Usage] = []
        self._num_told = Counter[int]()
        """Characters of each choice whose logprobs were told."""

    def of(self, event: pb.GenerateStreamResponse, prompt: int) -> Iterable[dict[str, Any]]:
        """Of one event of the stream of a prompt; of many events, none."""
        n = self._form.n
        match event.WhichOneof("event"):
            case "started":
                kind = "chat.completion.chunk" if self._form.is_chat else "text_completion"
                self._head = self._head or self._form.head(event.started, kind)
                for index in range(n) if self._form.is_chat else ():
                    yield self._chunk(self._choice(prompt * n + index, role="assistant"))
            case "delta":
                delta = event.delta
                yield self._chunk(self._choice(prompt * n + delta.index, delta.text, delta.logprobs))
            case "sequence_end":
                end = event.sequence_end
                yield self._chunk(self._choice(prompt * n + end.index) | self._form.ending(end))
            case "completed":
                self._usages.append(event.completed.usage)

    def usage(self) -> dict[str, Any]:
        """The last of a stream that includes it: of all its prompts."""
        return self._chunk() | {"usage": _usage(self._usages)}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": list(choices)}
        return chunk | {"usage": None} if self._form.includes_usage else chunk

    def _choice(
        self, index: int, text: str = "", logprobs: Sequence[pb.TokenLogprob] = (), role: str = ""
    ) -> dict[str, Any]:
        told = self._form.logprobs(logprobs, self._num_told[index]) if logprobs else None
        if self._form.is_chat:
            delta = {"role": role, "content": ""} if role else {"content": text} if text or logprobs else {}
            return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}
        if told is not None:
            self._num_told[index] += sum(map(len, told["tokens"]))
        return {"index": index, "text": text, "logprobs": told, "finish_reason": None}


def _usage(usages: Sequence[pb.Usage]) -> dict[str, Any]:
    prompt, completion = (sum(getattr(u, f"{kind}_tokens") for u in usages) for kind in ("prompt", "completion"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
    }
