"""The OpenAPI document of the HTTP API, made from the operations and the types that they declare. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from router.openai.http import EVENTS, JSON, Operation, id_headers

Schema = dict[str, Any]
_RESUMING: list[Schema] = [
    {"name": "Baton-Resume", "in": "header", "schema": {"const": "true"}, "description": "The stream may be resumed"},
    {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": {"type": "string"},
        "description": "The stream goes on after it",
    },
]
_HEADERS = {name: {"required": True, "schema": {"type": "string"}} for name in id_headers("")}


def openapi(version: str, operations: Sequence[Operation]) -> dict[str, Any]:
    modes: dict[Any, Literal["validation", "serialization"]] = {}
    for each in operations:
        modes |= {kind: "validation" for kind in (each.body,) if kind is not None}
        answered = (each.answer, each.chunk, each.dialect.error, *each.others.values())
        modes |= {kind: "serialization" for kind in answered if kind is not None}
    inputs = [(kind, mode, TypeAdapter(kind)) for kind, mode in modes.items()]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    paths: dict[str, Schema] = {}
    for each in operations:
        path = each.path.replace(":path}", "}")
        described = _operation(each, path, lambda k: schemas[k, modes[k]])
        first = paths.setdefault(path, {}).setdefault(each.method.lower(), described)
        if first is not described:
            _add_answers(first, described, each.header)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _add_answers(operation: Schema, other: Schema, header: str) -> None:
    """Adds those of another operation of the method and path, for requests with a header."""
    named = {"name": header, "in": "header", "schema": {"type": "string"}, "description": other["summary"]}
    operation["parameters"] = [*operation.get("parameters", ()), named]
    for status, answer in other["responses"].items():
        content = operation["responses"].setdefault(status, answer)["content"]
        for kind, of_kind in answer["content"].items():
            if content.setdefault(kind, of_kind) is not of_kind:
                content[kind] = {"schema": {"anyOf": [content[kind]["schema"], of_kind["schema"]]}}


def _operation(operation: Operation, path: str, schema_of: Callable[[Any], Schema]) -> Schema:
    described: Schema = {"summary": operation.summary, "responses": _responses(operation, schema_of)}
    parameters = _in_path(path) + _in_query(operation.query) + (_RESUMING if operation.can_resume else [])
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {operation.body_media_type: {"schema": schema_of(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(operation: Operation, schema_of: Callable[[Any], Schema]) -> Schema:
    schema = {"type": "string"} if operation.answer is None else schema_of(operation.answer)
    good = {operation.media_type: {"schema": schema}}
    error = schema_of(operation.dialect.error)
    if operation.chunk is not None:
        data = {"anyOf": [schema_of(operation.chunk), error]}
        good[EVENTS] = {"schema": _event(data, is_named=operation.dialect.has_named_events)}
    answers = {200: {"description": "Done", "content": good}}
    for status in operation.failures:
        answers[status] = {"description": "Refused", "content": {JSON: {"schema": error}}}
    for status, kind in operation.others.items():
        answers[status] = {"description": "Not done", "content": {JSON: {"schema": schema_of(kind)}}}
    return {str(status): answer | {"headers": _HEADERS} for status, answer in sorted(answers.items())}


def _event(data: Schema, *, is_named: bool) -> Schema:
    """One server-sent event of a stream."""
    chunk: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    if is_named:
        properties = {"event": {"type": "string"}, "data": chunk}
    else:
        properties = {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, chunk]}}
    return {"type": "object", "required": list(properties), "properties": properties}


def _in_path(path: str) -> list[Schema]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(query: type[BaseModel] | None) -> list[Schema]:
    fields = {} if query is None else query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
