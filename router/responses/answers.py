"""The answers of /v1/responses: the type of every object and every event.

Dictionaries, as those of `router.openai.answers`, and for the same reason. Every field that OpenAI's description of the
API requires is there, null where it has no value.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict  # pydantic does not take typing's before Python 3.12

from router.openai.answers import ChatToken, Count, ReasoningTokens, TimingAnswer, closed

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatToken]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


class MessageItem(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    """The whole text, where the body asks for a summary."""
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]
    """The text again, encoded, where `include` asks for it."""


class CallItem(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str]
    """Of a function that is in one."""


class CustomCallItem(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: NotRequired[str]
    """Of a tool that is in one."""


OutputItem: TypeAlias = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(TypedDict):
    cached_tokens: Count
    cache_write_tokens: Count
    """Always 0: what is written to prefix caches is not counted."""


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class ResponseFailure(TypedDict):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens", "content_filter"]


@closed
class ResponseAnswer(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    background: bool
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: Count
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    timing: NotRequired[TimingAnswer]
    """Of one that asks for it and is over."""


@closed
class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


@closed
class ItemPage(TypedDict):
    """Items of an input, which are as their client sent them but for ids."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Event(TypedDict):
    sequence_number: Count
    """One more than that of the event before; the first has 0."""


class ResponseEvent(_Event):
    """The response began, goes on, or has ended."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class _ItemEvent(_Event):
    output_index: Count


class ItemEvent(_ItemEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class _PieceEvent(_ItemEvent):
    item_id: str


class PartEvent(_PieceEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Count
    part: OutputText | ReasoningText


class TextDelta(_PieceEvent):
    type: Literal["response.output_text.delta"]
    content_index: Count
    delta: str
    logprobs: list[ChatToken]


class TextDone(_PieceEvent):
    type: Literal["response.output_text.done"]
    content_index: Count
    text: str
    logprobs: list[ChatToken]


class ReasoningDelta(_PieceEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: Count
    delta: str


class ReasoningDone(_PieceEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: Count
    text: str


class SummaryPartEvent(_PieceEvent):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: Count
    part: SummaryText


class SummaryDelta(_PieceEvent):
    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: Count
    delta: str


class SummaryDone(_PieceEvent):
    type: Literal["response.reasoning_summary_text.done"]
    summary_index: Count
    text: str


class ArgumentsDelta(_PieceEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_PieceEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(_PieceEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(_PieceEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


Event = dict[str, Any]
"""One that is made: a StreamedEvent."""


StreamedEvent: TypeAlias = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartEvent
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
