"""The answers of the HTTP API: the type of every object.

The types are dictionaries, from which pydantic makes the schemas of /openapi.json. They are written as JSON as they
are: with a model in between, the chunk of a token takes 5.5 us instead of 3.3.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic does not take typing's before Python 3.12

T = TypeVar("T")
Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

closed = with_config(ConfigDict(extra="forbid"))
"""A field that is answered and not declared is a mistake; this holds for the types inside, too."""


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class CachedTokens(TypedDict):
    cached_tokens: Count


class ReasoningTokens(TypedDict):
    reasoning_tokens: Count


class TokenUsage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TimingAnswer(TypedDict):
    """Why a request ran where it did, and how long its phases took; of several prompts, the first one's."""

    placement: str
    migrations: Count
    """How often another worker had to take it over."""
    fetched_tokens: Count
    """Cached prompt tokens that its worker has fetched from another one for it."""
    queue_ms: float
    prefill_ms: float
    kv_transfer_ms: float
    time_to_first_token_ms: float
    decode_ms: float


@closed
class ErrorAnswer(TypedDict):
    error: ErrorDetail
    timing: NotRequired[TimingAnswer]
    """Of a request that asks for it and has been taken in."""


class AnsweredToken(TypedDict):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatToken(AnsweredToken):
    top_logprobs: list[AnsweredToken]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that is echoed."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptToken(TypedDict):
    """As vLLM has it."""

    logprob: float
    rank: Count
    """1: the likeliest."""
    decoded_token: str


PromptLogprobsAnswer = list[dict[str, PromptToken] | None]
"""For each token of a prompt: itself and the likeliest ones by their ids; null for the first."""


class Ending(TypedDict):
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or token that matched."""


class TextChoice(Ending):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobsAnswer]


class CalledFunction(TypedDict):
    name: str
    arguments: str
    """The text of a JSON object."""


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    """Null where there are calls and no text."""
    refusal: None
    annotations: list[Any]
    reasoning_content: NotRequired[str]
    """What the model thought before its answer."""
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Ending):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None


class AnswerHead(TypedDict):
    id: str
    created: Count
    model: str


@closed
class TextCompletion(AnswerHead):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: TokenUsage
    timing: NotRequired[TimingAnswer]


@closed
class ChatCompletion(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: NotRequired[PromptLogprobsAnswer]
    timing: NotRequired[TimingAnswer]


class ChoiceChunk(TypedDict):
    index: Count
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]


class TextChoiceChunk(ChoiceChunk):
    text: str
    logprobs: TextLogprobs | None


class FunctionDelta(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallPiece(TypedDict):
    index: Count
    id: NotRequired[str]
    """With the first piece of a call, as are the type and the name."""
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str
    tool_calls: list[ToolCallPiece]


class ChatChoiceChunk(ChoiceChunk):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChunkHead(AnswerHead):
    usage: NotRequired[TokenUsage | None]
    """Present if it is asked for, and null in all chunks but the last."""
    timing: NotRequired[TimingAnswer]
    """In the last one, if it is asked for."""
    resumable: NotRequired[bool]
    """Whether a stream that may be resumed survives its router; in the first chunk and where it changes."""


@closed
class TextCompletionChunk(ChunkHead):
    object: Literal["text_completion"]
    choices: list[TextChoiceChunk]


@closed
class ChatCompletionChunk(ChunkHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoiceChunk]


@closed
class TokensAnswer(TypedDict):
    tokens: list[Count]
    count: Count
    max_model_len: Count


@closed
class TextAnswer(TypedDict):
    prompt: str


@closed
class ModelAnswer(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count
    capabilities: list[str]


@closed
class ModelsAnswer(TypedDict):
    object: Literal["list"]
    data: list[ModelAnswer]


@closed
class StatusAnswer(TypedDict):
    status: str


@closed
class VersionAnswer(TypedDict):
    version: str


@closed
class Page(TypedDict, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
