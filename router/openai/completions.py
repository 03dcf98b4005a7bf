"""Completions and chat completions, made of what GenerationService answers: whole, or chunk by chunk. Pure.

    started            chat: a chunk with the role, for each choice
    delta              a chunk with text, thinking and pieces of calls, and the logprobs of its tokens
    sequence_end       a chunk with the finish reason
    completed          with `include_usage`, a chunk without choices

A call with several prompts numbers the sequences of the second after those of the first. Where a stream may be resumed,
the id of each chunk says how far the client has come with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import FieldViolation
from cluster.pb import generation_pb2 as pb
from router.api.violations import invalid
from router.openai.answers import (
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Ending,
    FinishReason,
    FunctionDelta,
    TextLogprobs,
    TimingAnswer,
    TokenUsage,
    ToolCallPiece,
)
from router.openai.bodies import ChatBody, CompletionBody
from router.openai.errors import timing_of
from router.openai.logprobs import TokenBytes, chat_logprobs, prompt_logprobs, text_logprobs, text_of

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
}

GENERATION_ID = "gen-"
"""What the id of a generation begins with; that of an answer begins as clients expect."""


@dataclass(frozen=True)
class Form:
    """The form of the answers to one call."""

    is_chat: bool
    created: int
    """Seconds since 1970."""
    n: int
    """Sequences of each prompt."""
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    includes_usage: bool
    wants_timing: bool
    echoes: tuple[str, ...]
    """Texts of the prompts, which their outputs begin with; empty: they do not."""
    token_bytes: TokenBytes
    stop_token_ids: frozenset[int]
    """Stop tokens that the client named; the model's own end-of-sequence tokens are not among them."""

    @classmethod
    def of(cls, body: CompletionBody | ChatBody, token_bytes: TokenBytes) -> Form:
        """Raises InvalidRequest."""
        if body.stream_options is not None and not body.stream:
            raise invalid((FieldViolation("stream_options", "needs stream: true"),))
        echoes: tuple[str, ...] = ()
        if isinstance(body, CompletionBody) and body.echo:
            echoes = tuple(each if isinstance(each, str) else text_of(token_bytes, each) for each in body.prompts)
        return cls(
            is_chat=isinstance(body, ChatBody),
            created=int(time.time()),
            n=1 if body.n is None else body.n,
            wants_logprobs=bool(body.logprobs) if isinstance(body, ChatBody) else body.logprobs is not None,
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            includes_usage=body.stream_options is not None and body.stream_options.include_usage,
            wants_timing=body.timing,
            echoes=echoes,
            token_bytes=token_bytes,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
        )

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
        """The answer to a call that does not stream; one response for each prompt."""
        choices = [choice for number, answer in enumerate(answers) for choice in self._choices(answer, number)]
        usage = _usage([answer.usage for answer in answers])
        kind = "chat.completion" if self.is_chat else "text_completion"
        answer = {**self.head(answers[0], kind), "choices": choices, "usage": usage}
        if self.is_chat and self.wants_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(answers[0].prompt_logprobs, self.token_bytes)
        return answer | {"timing": timing_of(answers[0].timing)} if self.wants_timing else answer

    def echo(self, prompt: int) -> str:
        """What the outputs of a prompt begin with."""
        return self.echoes[prompt] if self.echoes else ""

    def head(self, source: pb.GenerateResponse | pb.Started, kind: str) -> dict[str, Any]:
        name = source.generation_id.removeprefix(GENERATION_ID)
        answer_id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{name}"
        return {"id": answer_id, "object": kind, "created": self.created, "model": source.model}

    def _choices(self, answer: pb.GenerateResponse, prompt: int) -> Iterable[dict[str, Any]]:
        """The finished choices of one prompt."""
        ends = {end.index: end for end in answer.ends}
        for index in range(self.n):
            deltas = [delta for delta in answer.outputs if delta.index == index]
            text = self.echo(prompt) + "".join(delta.text for delta in deltas)
            echoed = answer.prompt_logprobs if self.echoes else ()
            logprobs = [*echoed, *(entry for delta in deltas for entry in delta.logprobs)]
            named = self.logprobs(logprobs) if self.wants_logprobs else None
            content: dict[str, Any] = {"message": message_of(text, deltas)} if self.is_chat else {"text": text}
            if self.wants_prompt_logprobs and not self.is_chat:
                content["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self.token_bytes)
            yield {"index": prompt * self.n + index, **content, "logprobs": named, **self.ending(ends[index])}

    def ending(self, end: pb.SequenceEnd) -> Ending:
        """`stop_reason` as in other servers: the stop string or token that matched, of those that the client named."""
        stop: str | int | None = end.stop_string if end.HasField("stop_string") else None
        if end.HasField("stop_token_id") and end.stop_token_id in self.stop_token_ids:
            stop = end.stop_token_id
        return {"finish_reason": _FINISH_REASONS.get(end.finish_reason, "stop"), "stop_reason": stop}

    def logprobs(self, entries: Sequence[pb.TokenLogprob], offset: int = 0) -> ChatLogprobs | TextLogprobs:
        """`offset`: characters of the choice whose logprobs were sent before."""
        if self.is_chat:
            return chat_logprobs(entries, self.token_bytes)
        return text_logprobs(entries, self.token_bytes, offset)


@dataclass
class ChoicePosition:
    """The part of one choice that a client has been sent."""

    has_begun: bool = False
    num_tokens: int = 0
    num_characters: int = 0
    """Characters whose logprobs were sent, from which text offsets follow."""
    has_ended: bool = False

    def __str__(self) -> str:
        if not self.has_begun:
            return "-"
        characters = f"+{self.num_characters}" if self.num_characters else ""
        return f"{self.num_tokens}{characters}{'e' if self.has_ended else ''}"


@dataclass
class StreamPosition:
    """The place in a stream of one prompt that a client has come to: the id of an event, without what the body says
    again.

    gen-0123456789abcdef01234567.1764000000.12.7+31e.-.u: the generation, when it was created, 12 tokens of the first
    choice, all 7 of the second with 31 characters of logprobs, nothing of the third, and the usage.
    """

    generation_id: str
    created: int
    choices: list[ChoicePosition]
    has_usage: bool = False

    def __str__(self) -> str:
        parts = (self.generation_id, self.created, *self.choices, *(["u"] if self.has_usage else ()))
        return ".".join(map(str, parts))

    @classmethod
    def parse(cls, text: str) -> StreamPosition | None:
        """None for what is no such id."""
        found = _EVENT_ID.fullmatch(text)
        if found is None:
            return None
        parts = (_CHOICE.fullmatch(part) for part in found[3][1:].split("."))
        choices = [ChoicePosition(part[1] is not None, *_counts(part), bool(part[4])) for part in parts if part]
        return cls(found[1], int(found[2]), choices, bool(found[4]))


_EVENT_ID = re.compile(r"(gen-[0-9a-f]{24})\.(\d{1,12})((?:\.(?:-|\d{1,9}(?:\+\d{1,9})?e?)){1,1024})(\.u)?", re.ASCII)
_CHOICE = re.compile(r"-|((\d+)(?:\+(\d+))?(e?))", re.ASCII)


def _counts(part: re.Match[str]) -> tuple[int, int]:
    return int(part[2] or 0), int(part[3] or 0)


class Chunks:
    """The chunks of one stream: all its prompts have one id, and the text offsets of each choice go on."""

    def __init__(self, form: Form, resumed: StreamPosition | None = None) -> None:
        """`resumed`: what the client has already, for a stream that goes on."""
        self._form = form
        self._generation_id = ""
        """Of the first prompt that has begun."""
        self._head: dict[str, Any] = {}
        """Fields of every chunk, from that prompt's start."""
        self._usages: list[pb.Usage] = []
        self._timing: TimingAnswer | None = None
        self._choices = [] if resumed is None else resumed.choices
        self.has_usage = resumed is not None and resumed.has_usage
        self._change: dict[str, bool] = {}
        """Whether the stream may be resumed elsewhere, for the next chunk where that has changed."""

    @property
    def event_id(self) -> str:
        """Names how far the client has come with the last chunk."""
        return str(StreamPosition(self._generation_id, self._form.created, self._choices, self.has_usage))

    def of(self, event: pb.GenerateStreamResponse, prompt: int) -> Iterable[dict[str, Any]]:
        """The chunks for one event of a prompt's stream; for many events, none."""
        n = self._form.n
        if event.HasField("resumable"):
            self._change = {"resumable": event.resumable}
        match event.WhichOneof("event"):
            case "started":
                kind = "chat.completion.chunk" if self._form.is_chat else "text_completion"
                self._generation_id = self._generation_id or event.started.generation_id
                self._head = self._head or self._form.head(event.started, kind)
                for index in range(prompt * n, prompt * n + n):
                    has_begun, self._at(index).has_begun = self._at(index).has_begun, True
                    if not has_begun and (self._form.is_chat or self._form.echoes):
                        echoed = event.started.prompt_logprobs if self._form.wants_logprobs else ()
                        yield self._chunk(self._choice(index, self._form.echo(prompt), echoed, is_first=True))
            case "delta":
                delta = event.delta
                self._at(prompt * n + delta.index).num_tokens = delta.first_token_index + delta.token_count
                yield self._chunk(self._choice(prompt * n + delta.index, delta.text, delta.logprobs, delta.parts))
            case "sequence_end":
                end, at = event.sequence_end, self._at(prompt * n + event.sequence_end.index)
                if not at.has_ended:
                    at.has_ended = True
                    yield self._chunk({**self._choice(prompt * n + end.index), **self._form.ending(end)})
            case "completed":
                self._usages.append(event.completed.usage)
                self._timing = self._timing or timing_of(event.completed.timing)

    def last(self) -> dict[str, Any]:
        """The last chunk of a stream that includes its usage, that of all its prompts, or its timing."""
        self.has_usage = True
        chunk = self._chunk()
        if self._form.includes_usage:
            chunk["usage"] = _usage(self._usages)
        return chunk | {"timing": self._timing} if self._form.wants_timing else chunk

    def _at(self, index: int) -> ChoicePosition:
        while len(self._choices) <= index:
            self._choices.append(ChoicePosition())
        return self._choices[index]

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk, self._change = {**self._head, "choices": list(choices), **self._change}, {}
        return chunk | {"usage": None} if self._form.includes_usage else chunk

    def _choice(
        self,
        index: int,
        text: str = "",
        logprobs: Sequence[pb.TokenLogprob] = (),
        parts: Sequence[pb.OutputPart] = (),
        *,
        is_first: bool = False,
    ) -> dict[str, Any]:
        named: Any = self._form.logprobs(logprobs, self._at(index).num_characters) if logprobs else None
        if self._form.is_chat:
            begun: ChatDelta = {"role": "assistant", "content": "", "refusal": None}
            delta = begun if is_first else {"content": text} if text or (logprobs and not parts) else {}
            thought = "".join(part.reasoning for part in parts)
            if thought:
                delta["reasoning_content"] = thought
            calls = [_call_piece(part.tool_call) for part in parts if part.HasField("tool_call")]
            if calls:
                delta["tool_calls"] = calls
            return {"index": index, "delta": delta, "logprobs": named, "finish_reason": None}
        if named is not None:
            self._at(index).num_characters += sum(map(len, named["tokens"]))
        return {"index": index, "text": text, "logprobs": named, "finish_reason": None}


def message_of(text: str, deltas: Sequence[pb.SequenceDelta]) -> ChatMessage:
    """The message of one finished sequence, which holds whole calls alone."""
    parts = [part for delta in deltas for part in delta.parts]
    calls = [call for call in joined_calls(parts) if call.is_whole]
    message: ChatMessage = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
        "annotations": [],
    }
    thought = "".join(part.reasoning for part in parts)
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def joined_calls(parts: Iterable[pb.OutputPart]) -> list[pb.ToolCallDelta]:
    """The calls of a sequence, their pieces joined."""
    calls: dict[int, pb.ToolCallDelta] = {}
    for part in parts:
        if part.HasField("tool_call"):
            piece = part.tool_call
            call = calls.setdefault(piece.index, pb.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name))
            call.arguments += piece.arguments
            call.is_whole = piece.is_whole
    return list(calls.values())


def _call_piece(piece: pb.ToolCallDelta) -> ToolCallPiece:
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function: FunctionDelta = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _usage(usages: Sequence[pb.Usage]) -> TokenUsage:
    prompt, completion = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
    }
