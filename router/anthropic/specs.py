"""A body of the Messages API as the GenerationSpec that it asks for. Pure.

A conversation becomes the chat messages that templates read:

    system                       {"role": "system", "content": …}
    text of a user               {"role": "user", "content": …}
    tool_result                  {"role": "tool", "tool_call_id": …, "name": …, "content": …}, before the text
    thinking, text, tool_use     {"role": "assistant", "reasoning_content": …, "content": …, "tool_calls": […]}

Messages of one role that follow one another are one turn, as in Anthropic's API. Raises InvalidRequest, or HttpFailure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cluster.pb import generation_pb2 as pb
from router.anthropic.answers import NO_THREADS
from router.anthropic.bodies import (
    Block,
    CacheControl,
    CountBody,
    MessageParam,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    TextContent,
    ThinkingBlock,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.violations import Violations, shortened, shown
from router.openai.errors import HttpFailure
from router.openai.specs import INT32, UINT32, chat_of, set_whole

_CALL_ID, _TOOL_USE_ID = "call_", "toolu_"
_BILLING = "x-anthropic-billing-header:"
"""A block of the system prompt that begins so is Claude Code's for its vendor. It differs in each request, so that no
prompt would begin as the one before it."""


def tool_use_id(call_id: str) -> str:
    """The id of a call as clients of this API know such ids."""
    return _TOOL_USE_ID + call_id.removeprefix(_CALL_ID)


def message_spec(body: MessagesBody, request_id: str) -> pb.GenerationSpec:
    if body.thread is not None:
        raise HttpFailure(
            400, NO_THREADS, "thread: conversations are not kept here; send the whole of it, without thread"
        )
    wrong = Violations()
    spec = pb.GenerationSpec(model=body.model, request_id=request_id, chat=_chat(body, wrong))
    if body.messages and body.messages[-1].role == "assistant":
        last = f"messages[{len(body.messages) - 1}].role"
        wrong.add(last, "must not be assistant in the last message: an answer that is begun is not continued here")
    _reason(spec.reasoning, body, wrong)
    sampling, stopping = spec.sampling, spec.stopping
    if body.temperature is not None:
        sampling.temperature = body.temperature
    if body.top_p is not None:
        sampling.top_p = body.top_p
    set_whole(sampling, "top_k", "top_k", body.top_k, INT32, wrong)
    set_whole(stopping, "max_output_tokens", "max_tokens", body.max_tokens, UINT32, wrong)
    stopping.clip_to_context = True
    stopping.stop.extend(body.stop_sequences or ())
    spec.output.include_timing = body.timing
    spec.scheduling.session_id = body.session_id or ""
    longest = max((mark.ttl_s for mark in _cache_marks(body)), default=0)
    if longest:
        spec.cache.retain_for.FromSeconds(longest)
    form = body.output_config.format if body.output_config is not None else None
    form = form or body.output_format
    if form is not None:
        sampling.json_schema = json.dumps(form.schema_)
    wrong.raise_if_any()
    return spec


def count_request(body: CountBody) -> pb.TokenizeRequest:
    wrong = Violations()
    request = pb.TokenizeRequest(model=body.model, chat=_chat(body, wrong))
    _reason(request.reasoning, body, wrong)
    wrong.raise_if_any()
    return request


def has_cache_marks(body: CountBody) -> bool:
    """Whether the client asks to have a part of the prompt cached, and so wants to know what came of it."""
    return any(True for _ in _cache_marks(body))


def _cache_marks(body: CountBody) -> Iterator[CacheControl]:
    system = body.system if isinstance(body.system, list) else ()
    blocks = [block for message in body.messages if isinstance(message.content, list) for block in message.content]
    inner = [part for block in blocks if isinstance(found := getattr(block, "content", None), list) for part in found]
    for each in (body, *system, *(body.tools or ()), *blocks, *inner):
        mark = getattr(each, "cache_control", None)
        if mark is not None:
            yield mark


def _reason(reasoning: pb.ReasoningOptions, body: CountBody, wrong: Violations) -> None:
    """Fills in how much the model is to think; without `thinking` and `effort`, its template decides."""
    thinking, effort = body.thinking, body.output_config.effort if body.output_config is not None else None
    kind, budget = ("", None) if thinking is None else (thinking.type, thinking.budget_tokens)
    if (kind == "enabled") != (budget is not None):
        wrong.add("thinking.budget_tokens", "must be set with enabled, and with nothing else")
    if budget is not None and isinstance(body, MessagesBody) and budget >= body.max_tokens:
        wrong.add(
            "thinking.budget_tokens", f"must be less than max_tokens, {shown(body.max_tokens)} (got {shown(budget)})"
        )
    set_whole(reasoning, "max_tokens", "thinking.budget_tokens", budget, UINT32, wrong)
    if kind == "disabled":
        reasoning.effort = "none"
    elif effort is not None or kind == "adaptive":
        reasoning.effort = effort or "medium"


def _chat(body: CountBody, wrong: Violations) -> pb.ChatInput:
    turns = _Turns(wrong)
    system = _text(body.system)
    if system:
        turns.add("system", "system", system)
    for number, message in enumerate(body.messages):
        turns.read(message, f"messages[{number}]")
    if not body.messages:
        wrong.add("messages", "must hold at least one message")
    within = Violations()
    chat = chat_of(turns.messages, list(map(_function, body.tools or ())), {}, within)
    for found in within.found:
        wrong.add(turns.fields.get(found.field, found.field), found.description)
    _choose_tool(chat.tool_choice, body, wrong)
    return chat


def _function(tool: ToolParam) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.description is None:
        del function["description"]
    return {"type": "function", "function": {**function, **({"strict": True} if tool.strict else {})}}


def _choose_tool(wanted: pb.ToolChoice, body: CountBody, wrong: Violations) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    modes = {"none": wanted.MODE_NONE, "any": wanted.MODE_REQUIRED, "tool": wanted.MODE_REQUIRED}
    wanted.mode = modes.get(choice.type, wanted.MODE_AUTO)
    wanted.single = bool(choice.disable_parallel_tool_use)
    if (choice.type == "tool") != (choice.name is not None):
        wrong.add("tool_choice.name", "must be set with the type tool, and with no other")
    elif choice.name is not None:
        wanted.names.append(choice.name)


class _Turns:
    """The chat messages of a conversation, which `read` adds to."""

    def __init__(self, wrong: Violations) -> None:
        self._wrong = wrong
        self.messages: list[dict[str, Any]] = []
        self.fields: dict[str, str] = {}
        """The client's message, or the first of several, for each chat message: both as names of fields."""
        self._open: dict[str, str] = {}
        """Names of the tools of the last turn's calls that have no result yet, by their ids in the body."""

    def read(self, message: MessageParam, field: str) -> None:
        role, content = message.role, message.content
        blocks: list[Block] = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for index, block in enumerate(blocks):
            self._read_block(role, block, field, f"{field}.content[{index}]")
        if not blocks:
            self.add(role, field, "")

    def add(self, role: str, field: str, text: str, **more: Any) -> dict[str, Any]:
        """The turn of this role, with the text added to it."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or role == "tool":
            self.fields[f"messages[{len(self.messages)}]"] = field
            self.messages.append(last := {"role": role, "content": text, **more})
            if role != "tool":
                self._open = {}
        else:
            last["content"] = _joined(last["content"], text)
        return last

    def _read_block(self, role: str, block: Block, field: str, path: str) -> None:
        match role, block:
            case _, TextBlock():
                self.add(role, field, block.text)
            case "assistant", ThinkingBlock():
                turn = self.add(role, field, "")
                turn["reasoning_content"] = _joined(turn.get("reasoning_content", ""), block.thinking)
            case "assistant", RedactedThinkingBlock():
                self.add(role, field, "")
            case "assistant", ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                call = {"id": _call_id(block.id), "type": "function", "function": function}
                self.add(role, field, "").setdefault("tool_calls", []).append(call)
                self._open[block.id] = block.name
            case "user", ToolResultBlock():
                self._read_result(block, field, path)
            case _:
                self._wrong.add(path, f"a block of type {block.type} is not one that a message of the {role} has")

    def _read_result(self, result: ToolResultBlock, field: str, path: str) -> None:
        name = self._open.pop(result.tool_use_id, None)
        if name is None:
            what = "must be the id of a tool_use in the assistant's turn right before it, once, and before any text"
            self._wrong.add(f"{path}.tool_use_id", f"{what} (got {shortened(result.tool_use_id)!r})")
            return
        text = _text(result.content)
        text = f"Error: {text}" if result.is_error else text
        self.add("tool", field, text, tool_call_id=_call_id(result.tool_use_id), name=name)


def _call_id(tool_use_id: str) -> str:
    return tool_use_id.removeprefix(_TOOL_USE_ID)


def _text(content: TextContent | None) -> str:
    """The text of a string or of blocks, each of which begins a line."""
    return "\n".join(_texts(content))


def _texts(content: TextContent | None) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        yield from (block.text for block in content or () if not block.text.startswith(_BILLING))


def _joined(text: str, more: str) -> str:
    return f"{text}\n{more}" if text and more else text + more
