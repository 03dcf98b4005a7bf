"""What the HTTP door takes, as an OpenAPI document: made from `bodies`, so that it says what is checked. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue a text"),
    "/v1/chat/completions": (ChatBody, "Answer in a conversation"),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
}
_GETS = {
    "/v1/models": "The served model",
    "/metrics": "Metrics for Prometheus",
    "/healthz": "Whether the router lives",
    "/readyz": "Whether workers are ready",
    "/version": "Baton's version",
    "/openapi.json": "This document",
}
_FAILURES = ("400", "401", "403", "404", "429", "503", "504")


def openapi(version: str) -> dict[str, Any]:
    kinds = [(kind, "validation") for kind, _ in _POSTS.values()]
    _, told = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the mode is a Literal
    schemas = told["$defs"] | {"Error": _ERROR}
    paths = {path: {"post": _post(kind, summary)} for path, (kind, summary) in _POSTS.items()}
    paths |= {path: {"get": _get(summary)} for path, summary in _GETS.items()}
    model = _get("One model") | {
        "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    }
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
