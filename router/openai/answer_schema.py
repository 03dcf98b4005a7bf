"""What the HTTP door answers, as JSON Schema: every field of every object that `answers`, `app`, `files` and `batches`
tell. Objects are closed: a field that is told and not named here is a mistake. Pure.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_ID = _TEXT


def _object(**fields: Schema) -> Schema:
    """All of its fields are always told."""
    return {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}


def _at_most(**fields: Schema) -> Schema:
    """Some of its fields may not be told."""
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _with(schema: Schema, **fields: Schema) -> Schema:
    """And these, which may not be told."""
    return schema | {"properties": schema["properties"] | fields}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _page(item: str) -> Schema:
    ends = {"first_id": _maybe(_ID), "last_id": _maybe(_ID), "has_more": {"type": "boolean"}}
    return _object(object={"const": "list"}, data=_list(_ref(item)), **ends)


_COUNT_OF_TOKENS = {"prompt_tokens": _WHOLE, "completion_tokens": _WHOLE, "total_tokens": _WHOLE}
_USAGE = _object(
    **_COUNT_OF_TOKENS,
    prompt_tokens_details=_object(cached_tokens=_WHOLE),
    completion_tokens_details=_object(reasoning_tokens=_WHOLE),
)
_REASON: Schema = {"enum": ["stop", "length", "tool_calls", "content_filter"]}
_STOP: Schema = {"type": ["string", "integer", "null"], "description": "The stop string or token that matched"}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_CHAT_LOGPROBS = _object(
    content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))), refusal={"type": "null"}
)
_LOGPROBS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_NUMBER),
    top_logprobs=_list({"type": "object", "additionalProperties": _NUMBER}),
    text_offset=_list(_WHOLE),
)
_ENDING = {"finish_reason": _REASON, "stop_reason": _STOP}
_HEAD = {"id": _ID, "created": _WHOLE, "model": _TEXT}
_MESSAGE = _object(role={"const": "assistant"}, content=_TEXT)
_STREAMED = {"index": _WHOLE, "finish_reason": _maybe(_REASON)}
_DELTA = _at_most(role={"const": "assistant"}, content=_TEXT)


def _chunk(kind: str, **choice: Schema) -> Schema:
    """`usage` is there if it is asked for, and null but for the last."""
    choices = _list(_with(_object(**_STREAMED, **choice), stop_reason=_STOP))
    return _with(_object(**_HEAD, object={"const": kind}, choices=choices), usage=_maybe(_ref("Usage")))


_STATUS: Schema = {
    "enum": ["validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired"]
}
_TIMES = ("in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired")
_PROBLEM = _object(code=_TEXT, message=_TEXT, line=_maybe(_WHOLE), param=_maybe(_TEXT))

ANSWERS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_maybe(_TEXT), code=_TEXT)),
    "Usage": _USAGE,
    "Completion": _object(
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list(_object(index=_WHOLE, text=_TEXT, logprobs=_maybe(_LOGPROBS), **_ENDING)),
        usage=_ref("Usage"),
    ),
    "ChatCompletion": _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list(_object(index=_WHOLE, message=_MESSAGE, logprobs=_maybe(_CHAT_LOGPROBS), **_ENDING)),
        usage=_ref("Usage"),
    ),
    "CompletionChunk": _chunk("text_completion", text=_TEXT, logprobs=_maybe(_LOGPROBS)),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", delta=_DELTA, logprobs=_maybe(_CHAT_LOGPROBS)),
    "Tokens": _object(tokens=_list(_WHOLE), count=_WHOLE, max_model_len=_WHOLE),
    "Text": _object(prompt=_TEXT),
    "Model": _object(
        id=_ID,
        object={"const": "model"},
        created=_WHOLE,
        owned_by=_TEXT,
        max_model_len=_WHOLE,
        capabilities=_list(_TEXT),
    ),
    "Models": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Status": _object(status=_TEXT),
    "Version": _object(version=_TEXT),
    "Document": {"type": "object"},
    "File": _object(
        id=_ID,
        object={"const": "file"},
        bytes=_WHOLE,
        created_at=_WHOLE,
        expires_at=_WHOLE,
        filename=_TEXT,
        purpose={"enum": ["batch", "batch_output"]},
        status={"const": "processed"},
    ),
    "Files": _page("File"),
    "DeletedFile": _object(id=_ID, object={"const": "file"}, deleted={"type": "boolean"}),
    "Batch": _object(
        id=_ID,
        object={"const": "batch"},
        endpoint=_TEXT,
        errors=_maybe(_object(object={"const": "list"}, data=_list(_PROBLEM))),
        input_file_id=_ID,
        completion_window=_TEXT,
        status=_STATUS,
        output_file_id=_maybe(_ID),
        error_file_id=_maybe(_ID),
        created_at=_WHOLE,
        expires_at=_WHOLE,
        **{f"{status}_at": _maybe(_WHOLE) for status in _TIMES},
        request_counts=_object(total=_WHOLE, completed=_WHOLE, failed=_WHOLE),
        usage=_maybe({"type": "object"}),
        metadata=_maybe({"type": "object", "additionalProperties": _TEXT}),
    ),
    "Batches": _page("Batch"),
}


def event_of(chunk: str) -> Schema:
    """One server-sent event of a stream of these chunks."""
    told = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(chunk), _ref("Error")]}}
    data: Schema = {"type": "string", "anyOf": [{"const": "[DONE]"}, told]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
