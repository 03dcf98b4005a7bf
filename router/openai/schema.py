"""What the HTTP door takes, as an OpenAPI document: made from `bodies`, so that it says what is checked. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai.batch_body import BatchBody
from router.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue a text"),
    "/v1/chat/completions": (ChatBody, "Answer in a conversation"),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
    "/v1/batches": (BatchBody, "Answer the lines of a file in idle capacity"),
}
_GETS = {
    "/v1/models": "The served model",
    "/metrics": "Metrics for Prometheus",
    "/healthz": "Whether the router lives",
    "/readyz": "Whether workers are ready",
    "/version": "Baton's version",
    "/openapi.json": "This document",
}
_OF_FILES = {
    ("/v1/files", "get"): "Files that were uploaded, and results",
    ("/v1/files/{file_id}", "get"): "One file",
    ("/v1/files/{file_id}", "delete"): "Delete a file",
    ("/v1/files/{file_id}/content", "get"): "The bytes of a file",
    ("/v1/batches", "get"): "Batches, the newest first",
    ("/v1/batches/{batch_id}", "get"): "One batch",
    ("/v1/batches/{batch_id}/cancel", "post"): "Cancel a batch",
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
_FAILURES = ("400", "401", "403", "404", "409", "413", "429", "503", "504")


def openapi(version: str) -> dict[str, Any]:
    kinds = [(kind, "validation") for kind, _ in _POSTS.values()]
    _, told = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the mode is a Literal
    schemas = told["$defs"] | {"Error": _ERROR}
    paths = {path: {"post": _post(kind, summary)} for path, (kind, summary) in _POSTS.items()}
    paths |= {path: {"get": _get(summary)} for path, summary in _GETS.items()}
    for (path, method), summary in _OF_FILES.items():
        queries = _QUERIES.get(path, {}) if method == "get" else {}
        told_of = [{"name": name, "in": "query", "schema": schema} for name, schema in queries.items()]
        paths.setdefault(path, {})[method] = _get(summary) | {"parameters": [*_in_path(path), *told_of]}
    upload = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    paths["/v1/files"]["post"] = _get("Upload the lines of a batch") | {"requestBody": upload}
    model = _get("One model") | {"parameters": _in_path("/v1/models/{model}")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths | {"/v1/models/{model}": {"get": model}},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _post(kind: type[BaseModel], summary: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return _get(summary) | {"requestBody": {"required": True, "content": body}}


def _in_path(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _get(summary: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {status: {"description": "Refused", "content": error} for status in _FAILURES}
    return {"summary": summary, "responses": {"200": {"description": "Done"}, **failures}}


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
