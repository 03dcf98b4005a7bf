"""The bodies that clients of the OpenAI API send: every field that is known here, with its type.

An unknown field is refused by name, so that nothing is ignored silently; `IGNORED` are those that clients send as a
matter of course and that change nothing of an answer. `router.api.validate`, which every front end shares, checks the
values of what generation takes. Checking a body costs no more when it is wrong: a list is given up at its first wrong
entry, and what may not be long is not looked into when it is.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from starlette.datastructures import UploadFile

from router.api.call import MOST_BIASED_TOKENS, MOST_MESSAGES, MOST_TOOLS, Effort
from router.batches.store import KEPT_S

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
)
"""Accepted, and without effect."""
MOST_PROMPTS = 128
"""Prompts in one call of /v1/completions."""
MOST_METADATA = 16
"""Pairs in the metadata of a batch."""
_MOST_FIELDS = 128
"""Fields of one object of a body, more than any has."""
MOST_LEVELS = 256
"""Lists and objects of a body within one another."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A text of JSON; one without an end goes to that of the body."""
_STEPS = [1 if byte in b"[{" else -1 for byte in range(256)]
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
LEAST_KEPT_S = 3600
MOST_FILES = 10_000
"""Files of one tenant, and on one page."""
MOST_BATCHES = 100
"""Batches on one page."""


def read_json(data: bytes) -> object:
    """Raises ValueError for what is not JSON in UTF-8, or nests deeper than MOST_LEVELS."""
    text = data.decode("utf-8")
    if _nests_too_deep(data):
        raise ValueError("nests too deep")
    found: object = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    return found


def _nests_too_deep(data: bytes) -> bool:
    """Known before it is parsed: at the end of Python's stack, whatever else runs there fails as well."""
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS:
        return False
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MOST_LEVELS


def _check_number(items: Any, most: int, what: str) -> None:
    """Raises PydanticCustomError, which names the number."""
    if isinstance(items, dict | list) and len(items) > most:
        numbers = {"most": most, "what": what, "number": len(items)}
        raise PydanticCustomError("too_many", "at most {most} {what} are allowed (got {number})", numbers)


def at_most(most: int, what: str) -> BeforeValidator:
    """Refuses a list or an object with more entries before any of them is looked at."""

    def check(found: Any) -> Any:
        _check_number(found, most, what)
        return found

    return BeforeValidator(check)


def _check_prompts(found: Any) -> Any:
    is_one = isinstance(found, list) and bool(found) and isinstance(found[0], int)
    if not is_one:
        _check_number(found, MOST_PROMPTS, "prompts")
    return found


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which one wrong entry is reported."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, found: Any) -> Any:
        _check_number(found, _MOST_FIELDS, "fields")
        return found


Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {"type": "object", "required": ["role"], "properties": {"role": {"type": "string", "minLength": 1}}}
    ),
]
"""The chat template decides what else a message may have."""
Messages = Annotated[Items[Message], at_most(MOST_MESSAGES, "messages")]


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class SomeTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(Body):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


Tools = Annotated[Items[ToolBody], at_most(MOST_TOOLS, "tools")]
ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools
_AT_LEAST_ONE: dict[str, Any] = {"minItems": 1}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Without effect: chunks are not padded."""


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """A constraint on the whole output, as vLLM's clients write it."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Sampling(Body):
    """Fields of both kinds of completions: OpenAI's, then those of other servers that Baton has, too."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Items[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MOST_BIASED_TOKENS, "entries")] | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    cache_salt: str | None = None
    priority: int | None = None
    """Higher ones run first, as in `spec.scheduling.priority`."""
    session_id: str | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    """Alternatives beside each token of the prompt, as vLLM's clients write it."""
    timing: bool = False
    """Why the request ran where it did, and how long its phases took."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None


class CompletionBody(_Sampling):
    """POST /v1/completions."""

    prompt: Annotated[str | Items[str] | Items[int] | Items[Items[int]], BeforeValidator(_check_prompts)]
    logprobs: int | None = None
    """Alternatives beside each token."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[Any] = self.prompt
        return [prompts] if prompts and isinstance(prompts[0], int) else prompts


class ChatBody(_Sampling):
    """POST /v1/chat/completions."""

    messages: Messages = Field(json_schema_extra=_AT_LEAST_ONE)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)
    """Most tokens of thinking, as vLLM's clients write it."""
    response_format: ResponseFormat | None = None
    modalities: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


def _exactly_one(*names: str) -> dict[str, Any]:
    """A rule for the document; `specs.tokenize_request` checks it."""
    return {"oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]}


class TokenizeBody(Body):
    """POST /tokenize."""

    model_config = ConfigDict(json_schema_extra=_exactly_one("prompt", "messages"))

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = Field(default=None, json_schema_extra=_AT_LEAST_ONE)
    tools: Tools | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: Items[int]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_KEPT_S, le=KEPT_S)


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], at_most(MOST_METADATA, "pairs")] | None = None
    output_expires_after: ExpiresAfter | None = None


class UploadBody(Body):
    """POST /v1/files, the parts of a multipart body."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    file: Annotated[UploadFile, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(default=None, alias="expires_after[anchor]")
    seconds: int | None = Field(default=None, alias="expires_after[seconds]", ge=LEAST_KEPT_S, le=KEPT_S)


class FilesQuery(Body):
    """GET /v1/files."""

    after: str | None = None
    limit: int = Field(default=MOST_FILES, ge=1, le=MOST_FILES)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchesQuery(Body):
    """GET /v1/batches."""

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=MOST_BATCHES)
