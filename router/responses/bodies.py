"""The bodies and queries that clients of /v1/responses send: every field that is known here, with its type.

As in `router.openai.bodies`, an unknown field is refused by name. The items of an input are of many types, and are
looked at one by one in `router.responses.items`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from router.api.call import MOST_MESSAGES, MOST_TOOLS, Effort
from router.api.violations import shortened
from router.openai.bodies import MOST_METADATA, Body, Items, at_most

IGNORED = (
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "client_metadata",
)
"""Accepted, and without effect; `user` and `safety_identifier` are answered as they were sent."""
LONGEST_KEY, LONGEST_VALUE = 64, 512
MOST_ITEMS = 100
"""Items on one page."""
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""All but the first two are of tools and inputs that are not served, so there is nothing to include."""
Item = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "properties": {"type": {"type": "string"}}})]
InputItems = Annotated[Items[Item], at_most(MOST_MESSAGES, "items")]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None


class CustomFormat(Body):
    """What the input of a custom tool must be: any text, or what a regular expression matches as a whole."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CustomFormat:
        if self.type == "grammar" and self.syntax != "regex":
            given = {"syntax": shortened(str(self.syntax))}
            what = "has the syntax {syntax}, which is not served: input is held to one of the syntax regex, or is text"
            raise PydanticCustomError("not_served", what, given)
        if (self.type == "grammar") != (self.definition is not None):
            raise PydanticCustomError("definition", "must have a definition where its type is grammar, and only there")
        return self


class CustomTool(Body):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: Literal[False] | None = None


def _tool_tag(found: Any) -> str:
    """Names the type of a tool in a way that is no name of a field, so that paths of errors leave it out."""
    kind = str(found.get("type") if isinstance(found, dict) else getattr(found, "type", None))
    if kind in ("namespace", "custom"):
        return f"<{kind}>"
    return "<search>" if kind.startswith("web_search") else "<function>"


def _named_tool_tag(found: Any) -> str:
    return "<custom>" if _tool_tag(found) == "<custom>" else "<function>"


NamedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], Discriminator(_named_tool_tag)
]


class NamespaceTool(Body):
    """Functions and custom tools whose names hold within it."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    """Without effect: each of its tools has its own."""
    tools: Annotated[Items[NamedTool], at_most(MOST_TOOLS, "tools")]


class WebSearchTool(BaseModel):
    """A tool that OpenAI runs by itself. Nothing runs it here, so the model is not told of it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[WebSearchTool, Tag("<search>")],
    Discriminator(_tool_tag),
]


class ChosenFunction(Body):
    type: Literal["function", "custom"]
    name: str


class ChosenFunctions(Body):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ChosenFunction]


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Each tells the reasoning whole: no shorter one is made."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Its old name."""
    context: Any = None
    """Without effect."""

    @property
    def is_summarized(self) -> bool:
        return (self.summary or self.generate_summary) is not None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Any = None
    """Without effect."""


class ResponseStreamOptions(Body):
    include_obfuscation: bool = False
    """Without effect: events are not padded."""


class ResponseBody(Body):
    """POST /v1/responses: OpenAI's fields, then those of other servers that Baton's chats have, too."""

    model: str
    input: str | InputItems
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[Items[Tool], at_most(MOST_TOOLS, "tools")] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | ChosenFunctions | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Items[Included] | None = None
    metadata: Annotated[dict[str, str], at_most(MOST_METADATA, "pairs")] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_key: str | None = None
    """Turns with one key go to the workers of the turn before, as those with one `session_id` do."""
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=2**31 - 1)
    chat_template_kwargs: dict[str, Any] | None = None
    timing: bool = False
    """Baton's own: the response, or its error, tells why it ran where it did and how long it took."""


AS_IN_CHATS = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "cache_salt",
    "priority",
    "thinking_token_budget",
    "chat_template_kwargs",
    "timing",
)
"""Fields that mean what they mean in a chat's body."""


class ResponseQuery(Body):
    """GET /v1/responses/{id}."""

    stream: Literal["true", "false"] = "false"
    starting_after: int = Field(default=-1, ge=0)
    """The sequence number of the last event that the client has."""
    include: str | None = None
    included: str | None = Field(default=None, alias="include[]")
    """Without effect, as `include`: a response has what it was created with."""
    include_obfuscation: str | None = None


class ItemsQuery(Body):
    """GET /v1/responses/{id}/input_items."""

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=MOST_ITEMS)
    order: Literal["asc", "desc"] = "desc"
    include: str | None = None
    included: str | None = Field(default=None, alias="include[]")
