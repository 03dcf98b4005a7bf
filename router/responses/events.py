"""The events of one response, made of what GenerationService streams, and the response that they add up to. Pure.

    begin       in the background: response.created, response.queued
    started     (response.created,) response.in_progress
    delta       for each piece of text, reasoning or a call: of the open item, or of a new one once that is done
    completed   the open item's end, and response.completed or response.incomplete
    fail        response.failed

An item is told as done once it is whole. A call that was cut off never is: it is not in the response, so that nobody
carries it out.

A response that another router goes on with, or a client whose stream broke, is fed from its begin once more. `told`
says how far its events went: what was told then changes the state and is not told again, however differently the text
is cut now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from cluster.pb import generation_pb2 as pb
from router.api.call import parts_of
from router.openai.answers import ChatToken
from router.openai.errors import HttpFailure, timing_of
from router.responses.answers import (
    CallItem,
    CustomCallItem,
    Event,
    Incomplete,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseAnswer,
    ResponseFailure,
    ResponseStatus,
    ResponseUsage,
    SummaryText,
)
from router.responses.custom_tools import InputReader
from router.responses.items import encode_reasoning, item_id, name_in
from router.responses.position import ToldEvents

Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
_AT_BEGIN = ("response.created", "response.queued", "response.in_progress")
NameTokens = Callable[[Sequence[pb.TokenLogprob]], list[ChatToken]]


@dataclass
class _OpenItem:
    """The item that grows."""

    kind: Kind
    index: int
    item_id: str
    text: str = ""
    """So far; of a call, its arguments or its input."""
    logprobs: list[ChatToken] = field(default_factory=list)
    call_index: int = -1
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    input: InputReader | None = None
    """Of a call of a custom tool."""

    @property
    def is_call(self) -> bool:
        return self.kind in ("function_call", "custom_tool_call")

    @property
    def part(self) -> OutputText | ReasoningText:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    @property
    def summary(self) -> SummaryText:
        return {"type": "summary_text", "text": self.text}

    def item(self, status: ItemStatus, *, is_encoded: bool = False, is_summarized: bool = False) -> OutputItem:
        has_content = status != "in_progress"
        if self.kind == "function_call":
            call: CallItem = {
                "id": self.item_id,
                "type": "function_call",
                "status": status,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
            }
            if self.namespace:
                call["namespace"] = self.namespace
            return call
        if self.kind == "custom_tool_call":
            custom: CustomCallItem = {
                "id": self.item_id,
                "type": "custom_tool_call",
                "status": status,
                "call_id": self.call_id,
                "name": self.name,
                "input": self.text,
            }
            if self.namespace:
                custom["namespace"] = self.namespace
            return custom
        if self.kind == "message":
            message: MessageItem = {
                "id": self.item_id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [cast("OutputText", self.part)] if has_content else [],
            }
            return message
        reasoning: ReasoningItem = {
            "id": self.item_id,
            "type": "reasoning",
            "status": status,
            "summary": [self.summary] if has_content and is_summarized else [],
            "content": [cast("ReasoningText", self.part)] if has_content else [],
        }
        if is_encoded and has_content:
            reasoning["encrypted_content"] = encode_reasoning(self.text)
        return reasoning


class ResponseEvents:
    """`answer` is the response so far; its `output` holds the items that are done."""

    def __init__(
        self,
        answer: ResponseAnswer,
        *,
        name_tokens: NameTokens | None = None,
        encodes_reasoning: bool = False,
        told: ToldEvents | None = None,
    ) -> None:
        """`answer`: with an empty output. `name_tokens`: of logprobs; None: none are told."""
        self.answer = answer
        self._name_tokens = name_tokens
        self._encodes_reasoning = encodes_reasoning
        named = [("", tool) for tool in answer["tools"] if tool["type"] != "namespace"]
        named += [(space["name"], tool) for space in answer["tools"] for tool in space.get("tools", ())]
        self._tools = {name_in(space, tool["name"]): (space, tool["name"], tool["type"]) for space, tool in named}
        """By the name that the model knows: the namespace or nothing, the name there, and its type."""
        self._is_summarized = answer["reasoning"]["summary"] is not None
        self._told = told or ToldEvents()
        self._num_events = self._told.num_events
        self._position = self._num_here = 0
        self._open: _OpenItem | None = None
        self._unnamed: list[ChatToken] = []
        """Logprobs of tokens whose text has not come yet."""
        self._end = pb.FINISH_REASON_STOP
        self._events: list[Event] = []
        self._marks: list[ToldEvents] = []
        self.marks: list[ToldEvents] = []
        """How far each of the events goes that were returned last."""

    @property
    def told(self) -> ToldEvents:
        """How far the events that were returned go."""
        return ToldEvents(self._num_events, max(self._position, self._told.position))

    def begin(self) -> list[Event]:
        """The events of a response that waits to be begun."""
        if not self._num_events:
            self._tell_response("response.created", "queued")
            self._tell_response("response.queued", "queued")
        return self._taken()

    def of(self, event: pb.GenerateStreamResponse) -> list[Event]:
        """The events for one of the generation's; for many of them, none."""
        match event.WhichOneof("event"):
            case "started":
                self.answer["status"] = "in_progress"
                if not self._num_events:
                    self._tell_response("response.created", "in_progress")
                if self._num_events <= (2 if self.answer["background"] else 1):
                    self._tell_response("response.in_progress", "in_progress")
            case "delta":
                self._read(event.delta)
            case "sequence_end":
                self._end = event.sequence_end.finish_reason
            case "completed":
                self._complete(event.completed)
        return self._taken()

    def whole(self, found: pb.GenerateResponse) -> ResponseAnswer:
        """The response to a call that does not stream."""
        for delta in found.outputs:
            self._read(delta)
        for end in found.ends:
            self._end = end.finish_reason
        self._complete(found)
        return self.answer

    def fail(self, failure: HttpFailure) -> Event:
        """The response ends here, by a failure."""
        answer, item = self.answer, self._open
        if item is not None and not item.is_call:
            answer["output"].append(item.item("incomplete", is_summarized=self._is_summarized))
        code: Any = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(failure.status, "server_error")
        answer["error"] = cast("ResponseFailure", {"code": code, "message": failure.body["error"]["message"]})
        if "timing" in failure.body:
            answer["timing"] = failure.body["timing"]
        self._told = ToldEvents()
        self._tell_response("response.failed", "failed")
        return self._taken()[-1]

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        self.marks, self._marks = self._marks, []
        return events

    def _read(self, delta: pb.SequenceDelta) -> None:
        if delta.logprobs and self._name_tokens is not None:
            self._unnamed += self._name_tokens(delta.logprobs)
        for part in parts_of(delta):
            match part.WhichOneof("part"):
                case "text":
                    self._grow("message", part.text)
                case "reasoning":
                    self._unnamed = []
                    self._grow("reasoning", part.reasoning)
                case "tool_call":
                    self._unnamed = []
                    self._read_call(part.tool_call)

    def _grow(self, kind: Literal["message", "reasoning"], text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._close("completed")
            self._begin(kind)
        item = self._open
        assert item is not None
        new = self._advance(text)
        logprobs, self._unnamed = self._unnamed, []
        item.text += text
        item.logprobs += logprobs
        if new and kind == "message":
            self._piece(item, "response.output_text.delta", delta=new, logprobs=logprobs, content_index=0)
        elif new:
            self._tell_thought(item, "delta", delta=new)

    def _read_call(self, piece: pb.ToolCallDelta) -> None:
        most = self.answer["max_tool_calls"]
        if most is not None and piece.index >= most:
            self._close("completed")
            self._advance(piece.arguments, int(bool(piece.name)) + int(piece.is_whole))
            return
        if self._open is None or self._open.call_index != piece.index:
            self._close("completed")
            *_, kind = self._tools.get(piece.name, ("function",))
            self._begin("custom_tool_call" if kind == "custom" else "function_call", piece)
            self._advance("", 1)
        item = self._open
        assert item is not None
        new = self._advance(piece.arguments)
        if item.input is not None:
            item.text += item.input.read(piece.arguments[: len(piece.arguments) - len(new)])
            new = item.input.read(new)
            item.text += new
        else:
            item.text += piece.arguments
        if new:
            is_custom = item.input is not None
            kind = "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
            self._piece(item, f"{kind}.delta", delta=new)
        if piece.is_whole:
            self._close("completed")
            self._advance("", 1)

    def _begin(self, kind: Kind, call: pb.ToolCallDelta | None = None) -> None:
        index = len(self.answer["output"])
        self._open = item = _OpenItem(kind, index, item_id(kind, self.answer["id"], index))
        if call is not None:
            item.call_index, item.call_id = call.index, call.id
            item.input = InputReader() if kind == "custom_tool_call" else None
            item.namespace, item.name, _ = self._tools.get(call.name, ("", call.name, ""))
        self._tell("response.output_item.added", output_index=index, item=item.item("in_progress"))
        self._tell_part(item, "added")

    def _close(self, status: ItemStatus) -> None:
        """The open item, if there is one, is done."""
        item, self._open = self._open, None
        if item is None:
            return
        match item.kind:
            case "message":
                logprobs = list(item.logprobs)
                self._piece(item, "response.output_text.done", content_index=0, text=item.text, logprobs=logprobs)
            case "reasoning":
                self._tell_thought(item, "done", text=item.text)
            case "function_call":
                self._piece(item, "response.function_call_arguments.done", name=item.name, arguments=item.text)
            case "custom_tool_call":
                self._piece(item, "response.custom_tool_call_input.done", input=item.text)
        self._tell_part(item, "done")
        done = item.item(status, is_encoded=self._encodes_reasoning, is_summarized=self._is_summarized)
        self.answer["output"].append(done)
        self._tell("response.output_item.done", output_index=item.index, item=done)

    def _complete(self, over: pb.Completed | pb.GenerateResponse) -> None:
        if self._position < self._told.position:
            self._told = ToldEvents()  # an end is told, whatever came before it
        reason = _INCOMPLETE.get(self._end)
        if self._open is None and not self.answer["output"]:
            self._begin("message")
        if self._open is not None and self._open.is_call:
            self._open = None
        self._close("completed" if reason is None else "incomplete")
        answer = self.answer
        answer["usage"] = _usage(over.usage)
        if over.HasField("timing"):
            answer["timing"] = timing_of(over.timing)
        if reason is None:
            answer["completed_at"] = int(time.time())
            self._tell_response("response.completed", "completed")
        else:
            answer["incomplete_details"] = reason
            self._tell_response("response.incomplete", "incomplete")

    def _advance(self, text: str, num_more: int = 0) -> str:
        """Goes on by this text, or so many steps without any. Returns what of the text is told now."""
        num_told = min(max(0, self._told.position - self._position), len(text))
        if text or num_more:
            self._position += len(text) + num_more
            self._num_here = 0
        return text[num_told:]

    def _tell_response(self, kind: str, status: ResponseStatus) -> None:
        self.answer["status"] = status
        self._tell(kind, response={**self.answer, "output": list(self.answer["output"])})

    def _tell_part(self, item: _OpenItem, what: Literal["added", "done"]) -> None:
        """The part of an item that is no call begins or ends: reasoning is told as its summary where one is wanted."""
        if item.kind == "reasoning" and self._is_summarized:
            self._piece(item, f"response.reasoning_summary_part.{what}", summary_index=0, part=item.summary)
        elif not item.is_call:
            self._piece(item, f"response.content_part.{what}", content_index=0, part=item.part)

    def _tell_thought(self, item: _OpenItem, what: Literal["delta", "done"], **text: str) -> None:
        if self._is_summarized:
            self._piece(item, f"response.reasoning_summary_text.{what}", summary_index=0, **text)
        else:
            self._piece(item, f"response.reasoning_text.{what}", content_index=0, **text)

    def _piece(self, item: _OpenItem, kind: str, **fields: Any) -> None:
        self._tell(kind, item_id=item.item_id, output_index=item.index, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        is_counted = kind not in _AT_BEGIN and not kind.endswith(".delta")  # whether the others are told is known here
        self._num_here += is_counted
        if not is_counted or (self._position, self._num_here) > (self._told.position, self._told.num_here):
            self._events.append({"type": kind, "sequence_number": self._num_events, **fields})
            self._num_events += 1
            self._marks.append(ToldEvents(self._num_events, self._position, self._num_here))


_INCOMPLETE: dict[int, Incomplete] = {
    pb.FINISH_REASON_LENGTH: {"reason": "max_output_tokens"},
    pb.FINISH_REASON_CONTENT_FILTER: {"reason": "content_filter"},
}


def _usage(usage: pb.Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
