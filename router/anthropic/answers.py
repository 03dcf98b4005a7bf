"""The answers of Anthropic's Messages API: the type of every object and event, as dictionaries (`router.openai.answers`
says why)."""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict

from router.openai.answers import Count, TimingAnswer, closed

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]

NO_THREADS: Final = "thread_unsupported_request"
"""The code at which clients go on without threads."""


class FailureCode(TypedDict):
    error_code: Literal["thread_unsupported_request"]


class FailureDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[FailureCode]
    """Where clients look for its code."""


@closed
class FailureAnswer(TypedDict):
    type: Literal["error"]
    error: FailureDetail
    request_id: str
    timing: NotRequired[TimingAnswer]
    """Of a request that asks for it and has been taken in."""


class TextAnswerBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingAnswerBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class Caller(TypedDict):
    type: Literal["direct"]


class ToolUseAnswerBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller


AnswerBlock = TextAnswerBlock | ThinkingAnswerBlock | ToolUseAnswerBlock


class ThinkingTokens(TypedDict):
    thinking_tokens: Count


class DeltaUsage(TypedDict):
    """Tokens of the prompt are those of all three of its fields together."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingTokens
    server_tool_use: None


class MessageUsage(DeltaUsage):
    cache_creation: None
    inference_geo: None
    service_tier: Literal["standard"]


class MessageEnding(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    container: None


@closed
class MessageAnswer(MessageEnding):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    diagnostics: None
    timing: NotRequired[TimingAnswer]
    """Of an answer that is not streamed and asks for it."""


@closed
class TokenCount(TypedDict):
    input_tokens: Count


@closed
class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageAnswer


@closed
class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: Count
    content_block: AnswerBlock


class TextBlockDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = TextBlockDelta | ThinkingDelta | SignatureDelta | InputDelta


@closed
class BlockDeltaEvent(TypedDict):
    type: Literal["content_block_delta"]
    index: Count
    delta: BlockDelta


@closed
class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: Count


@closed
class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnding
    usage: DeltaUsage


@closed
class MessageStop(TypedDict):
    type: Literal["message_stop"]
    timing: NotRequired[TimingAnswer]
    """Of a stream that asks for it."""


@closed
class Ping(TypedDict):
    type: Literal["ping"]


MessageEvent = MessageStart | BlockStart | BlockDeltaEvent | BlockStop | MessageDelta | MessageStop | Ping


@closed
class ModelInfo(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """When the router was started, as RFC 3339 has it."""
    max_input_tokens: Count
    max_tokens: Count
    lifecycle: Literal["active"]
    capabilities: None
    line: None
    deprecated_at: None
    retires_at: None


@closed
class ModelList(TypedDict):
    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str
    last_id: str
