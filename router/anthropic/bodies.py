"""The bodies that clients of Anthropic's Messages API send: every field that is known here, with its type.

As in `router.openai.bodies`, an unknown field is refused by name. Blocks and tools that are not served are refused by
their type. `IGNORED` are fields that change nothing of an answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from router.api.call import MOST_MESSAGES, MOST_TOOLS
from router.api.violations import shortened
from router.openai.bodies import Body, Items, at_most

IGNORED = ("metadata", "service_tier", "diagnostics", "context_management")
"""Accepted, and without effect."""
_MOST_BLOCKS = 1024
"""Blocks of one message."""


class CacheControl(Body):
    """Every prompt is kept in the prefix cache; with this, longer than others, and usage says how much was new."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> int:
        return 3600 if self.ttl == "1h" else 300


class _Marked(Body):
    cache_control: CacheControl | None = None


class TextBlock(_Marked):
    type: Literal["text"]
    text: str
    citations: Any = None


class ThinkingBlock(Body):
    """What the model thought in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Not checked."""


class RedactedThinkingBlock(Body):
    """Another server's, which no template can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Marked):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


def _tag(found: Any) -> str:
    """Names the type of a block, in a way that is no name of a field: paths of errors leave it out."""
    return f"<{found.get('type') if isinstance(found, dict) else getattr(found, 'type', None)}>"


def _served(kinds: tuple[str, ...]) -> BeforeValidator:
    """Refuses a block of another type."""

    def check(found: Any) -> Any:
        if isinstance(found, dict) and found.get("type") not in kinds:
            given = {"kind": shortened(str(found.get("type"))), "kinds": ", ".join(kinds)}
            raise PydanticCustomError("not_served", "is of type {kind}, which is not served here; send {kinds}", given)
        return found

    return BeforeValidator(check)


def _content_tag(found: Any) -> str:
    return "<string>" if isinstance(found, str) else "<blocks>"


Texts = Annotated[Items[Annotated[TextBlock, _served(("text",))]], at_most(_MOST_BLOCKS, "blocks")]
TextContent = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Texts, Tag("<blocks>")], Discriminator(_content_tag)
]


class ToolResultBlock(_Marked):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent | None = None
    is_error: bool | None = None
    toolset_name: Any = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_tag),
    _served(("text", "thinking", "redacted_thinking", "tool_use", "tool_result")),
]
Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[Annotated[Items[Block], at_most(_MOST_BLOCKS, "blocks")], Tag("<blocks>")],
    Discriminator(_content_tag),
]


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolParam(_Marked):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    """The JSON schema of its input, an object."""
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: Any = None
    input_examples: Any = None


def _is_custom(found: Any) -> Any:
    if isinstance(found, dict) and found.get("type") not in (None, "custom"):
        given = {"kind": shortened(str(found["type"]))}
        raise PydanticCustomError(
            "not_served",
            "is {kind}, a tool of Anthropic's, which is not served here; send your own, with an input_schema",
            given,
        )
    return found


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """With `tool`, of that tool."""
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    """With `enabled`: most tokens of thinking."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(_Marked):
    """POST /v1/messages/count_tokens: a conversation."""

    model: str
    messages: Annotated[Items[MessageParam], at_most(MOST_MESSAGES, "messages")] = Field(
        json_schema_extra={"minItems": 1}
    )
    system: TextContent | None = None
    tools: Annotated[Items[Annotated[ToolParam, BeforeValidator(_is_custom)]], at_most(MOST_TOOLS, "tools")] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """As `output_config.format`, where earlier clients have it."""
    speed: Literal["standard"] | None = None
    context_management: Any = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Items[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    metadata: Any = None
    service_tier: Any = None
    diagnostics: Any = None
    thread: Any = None
    """Refused in a way that clients know: they go on without."""
    session_id: str | None = None
    """Baton's own: the conversation, whose turns go to the same workers and whose KV may be kept."""
    timing: bool = False
    """Baton's own: the answer, or its error, tells why it ran where it did and how long it took."""
