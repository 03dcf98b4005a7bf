"""What generation tells, as OpenAI's objects: completions, chat completions, and the chunks of either. Pure.

    started            chat: a chunk with the role, for each choice
    delta              a chunk with text, and the logprobs of its tokens
    sequence_end       a chunk with the finish reason
    completed          with `include_usage`, a chunk without choices

A call with several prompts numbers the sequences of the second after those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    model: str
    created: int
    """Seconds since 1970."""
    n: int
    """Sequences of each prompt."""
    wants_logprobs: bool
    includes_usage: bool
    token_bytes: TokenBytes

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
        """The answer to a call that does not stream; one response for each prompt."""
        choices = [choice for number, answer in enumerate(answers) for choice in self._choices(answer, number)]
        usage = _usage([answer.usage for answer in answers])
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(answers[0].generation_id, kind), "choices": choices, "usage": usage}

    def chunks(self, event: pb.GenerateStreamResponse, generation_id: str, prompt: int) -> Iterable[dict[str, Any]]:
        """Of one event of the stream of a prompt; of many events, none."""
        match event.WhichOneof("event"):
            case "started" if self.is_chat:
                for index in range(self.n):
                    yield self._chunk(generation_id, self._choice(prompt * self.n + index, role="assistant"))
            case "delta":
                delta = event.delta
                choice = self._choice(prompt * self.n + delta.index, delta.text, delta.logprobs)
                yield self._chunk(generation_id, choice)
            case "sequence_end":
                end = event.sequence_end
                choice = self._choice(prompt * self.n + end.index)
                yield self._chunk(generation_id, choice | _ending(end))

    def usage_chunk(self, generation_id: str, usages: Sequence[pb.Usage]) -> dict[str, Any]:
        """The last of a stream that includes it: of all its prompts."""
        return self._chunk(generation_id) | {"usage": _usage(usages)}

    def _head(self, generation_id: str, kind: str) -> dict[str, Any]:
        return {"id": generation_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, generation_id: str, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk = {**self._head(generation_id, kind), "choices": list(choices)}
        return chunk | {"usage": None} if self.includes_usage else chunk

    def _choice(
        self, index: int, text: str = "", logprobs: Sequence[pb.TokenLogprob] = (), role: str = ""
    ) -> dict[str, Any]:
        """One choice of a chunk."""
        told = self._logprobs(logprobs) if logprobs else None
        if not self.is_chat:
            return {"index": index, "text": text, "logprobs": told, "finish_reason": None}
        delta = {"role": role, "content": ""} if role else {"content": text} if text or logprobs else {}
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}

    def _choices(self, answer: pb.GenerateResponse, prompt: int) -> Iterable[dict[str, Any]]:
        """Those of one prompt, whole."""
        ends = {end.index: end for end in answer.ends}
        for index in range(self.n):
            deltas = [delta for delta in answer.outputs if delta.index == index]
            text = "".join(delta.text for delta in deltas)
            logprobs = [entry for delta in deltas for entry in delta.logprobs]
            told = self._logprobs(logprobs) if self.wants_logprobs else None
            content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            ending = _ending(ends[index]) if index in ends else {"finish_reason": None}
            yield {"index": prompt * self.n + index, **content, "logprobs": told, **ending}

    def _logprobs(self, entries: Sequence[pb.TokenLogprob]) -> dict[str, Any]:
        if self.is_chat:
            return {"content": [self._entry(entry) for entry in entries], "refusal": None}
        texts = [self._text(entry.token_id) for entry in entries]
        offsets = [sum(map(len, texts[:number])) for number in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._text(a.token_id): a.logprob for a in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _entry(self, entry: pb.TokenLogprob) -> dict[str, Any]:
        return self._token(entry) | {"top_logprobs": [self._token(alternative) for alternative in entry.top]}

    def _token(self, token: pb.TokenLogprob | pb.TokenAlternative) -> dict[str, Any]:
        text = self.token_bytes(token.token_id)
        return {"token": text.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(text)}

    def _text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _ending(end: pb.SequenceEnd) -> dict[str, Any]:
    """`stop_reason` as other servers tell it: the stop string or token that matched."""
    matched = end.WhichOneof("matched_stop")
    stop = getattr(end, matched) if matched is not None else None
    return {"finish_reason": _FINISH_REASONS.get(end.finish_reason, "stop"), "stop_reason": stop}


def _usage(usages: Sequence[pb.Usage]) -> dict[str, Any]:
    prompt, completion = (sum(getattr(u, f"{kind}_tokens") for u in usages) for kind in ("prompt", "completion"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
    }
