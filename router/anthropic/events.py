"""Messages, made of what GenerationService answers: whole, or event by event. Pure.

    started         message_start
    delta           content_block_start for each part that begins, content_block_delta with its text or JSON, and
                    content_block_stop: for a call with its last piece, for text and thinking before the next part
    sequence_end    content_block_stop, where a block is open
    completed       message_delta with the reason and the usage, message_stop

Where a stream may be resumed, the id of each event says how far the client has come with it: a delta makes several
events, and may be cut elsewhere the next time, so that what the client has of it is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from router.anthropic.answers import (
    AnswerBlock,
    BlockDelta,
    DeltaUsage,
    MessageAnswer,
    MessageEnding,
    StopReason,
    TextAnswerBlock,
    ThinkingAnswerBlock,
    ToolUseAnswerBlock,
)
from router.anthropic.bodies import MessagesBody
from router.anthropic.errors import NAMES, told
from router.anthropic.specs import has_cache_marks, tool_use_id
from router.api.call import parts_of, read_arguments
from router.openai.completions import GENERATION_ID, joined_calls
from router.openai.errors import HttpFailure, failure_of, timing_of

_REASONS: dict[int, StopReason] = {
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
    pb.FINISH_REASON_CONTENT_FILTER: "refusal",
}
_POSITION = re.compile(r"(gen-[0-9a-f]{24})\.(\d{1,9})\+(\d{1,9})\.(\d{1,9})(-|t|r|s|c\d{1,9})(e?)", re.ASCII)


@dataclass(frozen=True)
class MessageForm:
    """The form of the answer to one call."""

    max_tokens: int
    shows_thinking: bool = True
    wants_cache_usage: bool = False

    @classmethod
    def of(cls, body: MessagesBody) -> MessageForm:
        is_shown = body.thinking is None or body.thinking.display != "omitted"
        return cls(body.max_tokens, is_shown, has_cache_marks(body))

    def whole(self, answer: pb.GenerateResponse) -> MessageAnswer:
        """The answer to a call that does not stream."""
        (end,), message = answer.ends, self.begun(answer, answer.usage)
        message["content"] = self._blocks(answer, message["id"])
        message["usage"] = {**message["usage"], **self.usage(answer.usage)}
        if answer.HasField("timing"):
            message["timing"] = timing_of(answer.timing)
        return {**message, **self.ending(end)}

    def _blocks(self, answer: pb.GenerateResponse, signature: str) -> list[AnswerBlock]:
        blocks: list[AnswerBlock] = []
        parts = [part for delta in answer.outputs for part in parts_of(delta)]
        calls = {call.index: call for call in joined_calls(parts) if call.is_whole}
        for part in parts:
            last = blocks[-1] if blocks else None
            if part.HasField("tool_call"):
                call = calls.pop(part.tool_call.index, None)
                if call is not None:
                    blocks.append(_tool_use(call, read_arguments(call.arguments) or {}))
            elif part.HasField("reasoning"):
                if last is None or last["type"] != "thinking":
                    last = ThinkingAnswerBlock(type="thinking", thinking="", signature=signature)
                    blocks.append(last)
                last["thinking"] += part.reasoning if self.shows_thinking else ""
            else:
                if last is None or last["type"] != "text":
                    last = TextAnswerBlock(type="text", text="")
                    blocks.append(last)
                last["text"] += part.text
        return blocks

    def begun(self, source: pb.GenerateResponse | pb.Started, usage: pb.Usage) -> MessageAnswer:
        """The message without its content and end."""
        return {
            "id": "msg_" + source.generation_id.removeprefix(GENERATION_ID),
            "type": "message",
            "role": "assistant",
            "model": source.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                **self.usage(usage),
                "cache_creation": None,
                "inference_geo": None,
                "service_tier": "standard",
            },
            "diagnostics": None,
        }

    def ending(self, end: pb.SequenceEnd) -> MessageEnding:
        reason: StopReason = _REASONS.get(end.finish_reason, "end_turn")
        stop = end.stop_string if end.HasField("stop_string") else None
        if reason == "max_tokens" and end.token_count < self.max_tokens:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}

    def usage(self, usage: pb.Usage) -> DeltaUsage:
        computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "input_tokens": 0 if self.wants_cache_usage else computed,
            "cache_creation_input_tokens": computed if self.wants_cache_usage else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "server_tool_use": None,
        }


@dataclass
class MessagePosition:
    """How far a client has come with a stream that can be resumed: what the id of an event says.

    `gen-….7+3.1t`: 7 tokens and 3 units of what follows them, in one block so far, which is text and open. A unit is a
    character, the begin of a call, or the end of one.
    """

    generation_id: str
    num_tokens: int = 0
    num_units: int = 0
    num_blocks: int = 0
    open: str = "-"
    """The open block: t(ext), r(easoning), s: that with its signature, c(all) with its number; -: none is."""
    has_ended: bool = False
    """The client has message_delta."""

    def __str__(self) -> str:
        end = "e" if self.has_ended else ""
        return f"{self.generation_id}.{self.num_tokens}+{self.num_units}.{self.num_blocks}{self.open}{end}"

    @classmethod
    def parse(cls, text: str) -> MessagePosition | None:
        """None for what is no such id."""
        found = _POSITION.fullmatch(text)
        if found is None:
            return None
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), found[5], bool(found[6]))


class MessageEvents:
    """The events of one stream, as `router.openai.generating.Events`."""

    keep_alive, last = b'event: ping\ndata: {"type":"ping"}\n\n', b""

    def __init__(
        self, form: MessageForm, request_id: str, *, may_resume: bool = False, resumed: MessagePosition | None = None
    ) -> None:
        """`resumed`: what the client has already, for a stream that goes on."""
        self._form = form
        self._request_id = request_id
        self._may_resume = may_resume
        self._is_resumed = resumed is not None
        self._at = resumed or MessagePosition("")
        self._num_held = self._at.num_units
        """Units that come and the client has."""
        self._signature = ""
        """What clients send back with thinking, and nobody reads: the id of the message."""
        self._end: pb.SequenceEnd | None = None

    @property
    def event_id(self) -> str:
        return str(self._at) if self._may_resume else ""

    def of(self, event: pb.GenerateStreamResponse, prompt: int = 0) -> Iterable[Mapping[str, Any]]:
        match event.WhichOneof("event"):
            case "started":
                yield from self._begin(event.started)
            case "delta":
                yield from self._delta(event.delta)
            case "sequence_end":
                self._end = event.sequence_end
                yield from self._stop()
            case "completed":
                assert self._end is not None
                if not self._at.has_ended:
                    self._at.has_ended = True
                    usage = self._form.usage(event.completed.usage)
                    yield {"type": "message_delta", "delta": self._form.ending(self._end), "usage": usage}
                timing = event.completed.timing if event.completed.HasField("timing") else None
                yield {"type": "message_stop", **({} if timing is None else {"timing": timing_of(timing)})}

    def end(self) -> Iterable[Mapping[str, Any]]:
        return ()

    def failure(self, error: BatonError) -> HttpFailure:
        return told(failure_of(error, NAMES), self._request_id)

    def _begin(self, started: pb.Started) -> Iterable[Mapping[str, Any]]:
        usage = pb.Usage(prompt_tokens=started.prompt_tokens, cached_tokens=started.cached_tokens)
        message = self._form.begun(started, usage)
        self._at.generation_id, self._signature = started.generation_id, message["id"]
        if not self._is_resumed:
            yield {"type": "message_start", "message": message}

    def _delta(self, delta: pb.SequenceDelta) -> Iterable[Mapping[str, Any]]:
        at, num_held, before = self._at, self._num_held, 0
        at.num_tokens, at.num_units = delta.first_token_index, num_held
        for part in parts_of(delta):
            num_units = _num_units(part)
            if before + num_units > num_held:
                yield from self._part(part, before, max(0, num_held - before))
            before += num_units
        self._num_held = max(0, num_held - before)

    def _part(self, part: pb.OutputPart, before: int, num_held: int) -> Iterable[Mapping[str, Any]]:
        """`before`: units of the delta before the part's own, of which the client has `num_held`."""
        at, call = self._at, part.tool_call
        at.num_units = before + num_held
        if part.HasField("text"):
            yield from self._start("t", {"type": "text", "text": ""})
            at.num_units = before + len(part.text)
            yield self._piece({"type": "text_delta", "text": part.text[num_held:]})
        elif part.HasField("reasoning"):
            yield from self._start("r", {"type": "thinking", "thinking": "", "signature": ""})
            at.num_units = before + len(part.reasoning)
            if self._form.shows_thinking:
                yield self._piece({"type": "thinking_delta", "thinking": part.reasoning[num_held:]})
        else:
            begin = 1 if call.name else 0
            if begin and not num_held:
                yield from self._stop()
                at.num_units = before + begin
                yield from self._start(f"c{call.index}", _tool_use(call, {}))
            arguments = call.arguments[max(0, num_held - begin) :]
            if arguments:
                at.num_units = before + begin + len(call.arguments)
                yield self._piece({"type": "input_json_delta", "partial_json": arguments})
            if call.is_whole:
                at.num_units = before + _num_units(part)
                yield from self._stop()

    def _piece(self, delta: BlockDelta) -> Mapping[str, Any]:
        return {"type": "content_block_delta", "index": self._at.num_blocks - 1, "delta": delta}

    def _start(self, kind: str, block: AnswerBlock) -> Iterable[Mapping[str, Any]]:
        """Opens a block, unless the open one is it."""
        if self._at.open != kind:
            yield from self._stop()
            self._at.num_blocks, self._at.open = self._at.num_blocks + 1, kind
            yield {"type": "content_block_start", "index": self._at.num_blocks - 1, "content_block": block}

    def _stop(self) -> Iterable[Mapping[str, Any]]:
        """Closes the open block, if one is."""
        if self._at.open == "r":
            self._at.open = "s"
            yield self._piece({"type": "signature_delta", "signature": self._signature})
        if self._at.open != "-":
            self._at.open = "-"
            yield {"type": "content_block_stop", "index": self._at.num_blocks - 1}


def _num_units(part: pb.OutputPart) -> int:
    call = part.tool_call
    return len(part.text) + len(part.reasoning) + bool(call.name) + len(call.arguments) + call.is_whole


def _tool_use(call: pb.ToolCallDelta, arguments: dict[str, Any]) -> ToolUseAnswerBlock:
    call_id = tool_use_id(call.id)
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": arguments, "caller": {"type": "direct"}}
