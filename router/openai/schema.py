"""What the HTTP door takes and answers, as an OpenAPI document: made from `bodies`, so that it says what is checked,
and from `answer_schema`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai.answer_schema import ANSWERS, event_of
from router.openai.bodies import BatchBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_EVERY = (500,)
_KEY = (401, 403, *_EVERY)
_ASKS = (400, *_KEY, 503)
"""Of a call that reaches the service or the store."""
_BODY = (*_ASKS, 408)
_GENERATES = (*_BODY, 404, 409, 429, 499, 504)


@dataclass(frozen=True)
class _Operation:
    """One method of one path."""

    summary: str
    answer: str
    """Of 200, among `ANSWERS`; empty: it is no JSON."""
    failures: tuple[int, ...]
    body: type[BaseModel] | None = None
    media_type: str = "application/json"
    """Of 200."""
    chunk: str = ""
    """Of 200 as a stream, among `ANSWERS`; empty: there is none."""
    answers: tuple[tuple[int, str], ...] = ()
    """Further ones than an Error, by status."""


_TEXT, _EVENTS, _BYTES = "text/plain", "text/event-stream", "application/octet-stream"
_OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("/v1/completions", "post"): _Operation(
        "Continue a text", "Completion", _GENERATES, CompletionBody, chunk="CompletionChunk"
    ),
    ("/v1/chat/completions", "post"): _Operation(
        "Answer in a conversation", "ChatCompletion", _GENERATES, ChatBody, chunk="ChatCompletionChunk"
    ),
    ("/tokenize", "post"): _Operation("Token ids of a text or a conversation", "Tokens", (*_BODY, 404), TokenizeBody),
    ("/detokenize", "post"): _Operation("Text of token ids", "Text", (*_BODY, 404), DetokenizeBody),
    ("/v1/models", "get"): _Operation("The served model", "Models", _KEY),
    ("/v1/models/{model}", "get"): _Operation("One model", "Model", (*_KEY, 404)),
    ("/metrics", "get"): _Operation("Metrics for Prometheus", "", _KEY, media_type=_TEXT),
    ("/healthz", "get"): _Operation("Whether the router lives", "Status", _EVERY),
    ("/readyz", "get"): _Operation("Whether workers are ready", "Status", _EVERY, answers=((503, "Status"),)),
    ("/version", "get"): _Operation("Baton's version", "Version", _EVERY),
    ("/openapi.json", "get"): _Operation("This document", "Document", _EVERY),
    ("/v1/files", "post"): _Operation("Upload the lines of a batch", "File", (*_BODY, 413)),
    ("/v1/files", "get"): _Operation("Files that were uploaded, and results", "Files", _ASKS),
    ("/v1/files/{file_id}", "get"): _Operation("One file", "File", (*_ASKS, 404)),
    ("/v1/files/{file_id}", "delete"): _Operation("Delete a file", "DeletedFile", (*_ASKS, 404, 409)),
    ("/v1/files/{file_id}/content", "get"): _Operation("The bytes of a file", "", (*_ASKS, 404), media_type=_BYTES),
    ("/v1/batches", "post"): _Operation(
        "Answer the lines of a file in idle capacity", "Batch", (*_BODY, 404), BatchBody
    ),
    ("/v1/batches", "get"): _Operation("Batches, the newest first", "Batches", _ASKS),
    ("/v1/batches/{batch_id}", "get"): _Operation("One batch", "Batch", (*_ASKS, 404)),
    ("/v1/batches/{batch_id}/cancel", "post"): _Operation("Cancel a batch", "Batch", (*_ASKS, 404, 409)),
}
_QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/files": {
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "order": {"enum": ["asc", "desc"]},
        "purpose": {"type": "string"},
    },
    "/v1/batches": {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100}},
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


def openapi(version: str) -> dict[str, Any]:
    kinds = [(each.body, "validation") for each in _OPERATIONS.values() if each.body is not None]
    _, told = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the mode is a Literal
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), operation in _OPERATIONS.items():
        paths.setdefault(path, {})[method] = _told(path, method, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {
            "schemas": told["$defs"] | ANSWERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _told(path: str, method: str, operation: _Operation) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
    parameters = _in_path(path) + _in_query(path, method)
    if parameters:
        told["parameters"] = parameters
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": _json(operation.body.__name__)}
    elif (path, method) == ("/v1/files", "post"):
        told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    return told


def _responses(operation: _Operation) -> dict[str, Any]:
    good = _json(operation.answer) if operation.answer else {operation.media_type: {"schema": {"type": "string"}}}
    if operation.chunk:
        good |= {_EVENTS: {"schema": event_of(operation.chunk)}}
    told = {status: {"description": "Refused", "content": _json("Error")} for status in operation.failures}
    told |= {status: {"description": "Not done", "content": _json(name)} for status, name in operation.answers}
    answers = {200: {"description": "Done", "content": good}} | told
    return {str(status): answer | {"headers": _HEADERS} for status, answer in sorted(answers.items())}


_HEADERS = {"x-request-id": {"required": True, "schema": {"type": "string"}}}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _in_path(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(path: str, method: str) -> list[dict[str, Any]]:
    queries = _QUERIES.get(path, {}) if method == "get" else {}
    return [{"name": name, "in": "query", "schema": schema} for name, schema in queries.items()]
