"""What /openapi.json says is there is there, and answers are as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
from fake_worker import pair
from router_harness import Router, ids, running_router

PATH_VALUES = {"{model}": "model", "{file_id}": "file-a", "{batch_id}": "batch_a", "{response_id}": "resp_a"}
CHAT: Any = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
RESPONSE: Any = {"model": "model", "input": "hi", "max_output_tokens": 4}
TEXT: Any = {"model": "model", "prompt": "hello", "max_tokens": 4}
CALLS: list[tuple[str, str, Any]] = [
    ("get", "/v1/models", None),
    ("get", "/v1/models/{model}", None),
    ("get", "/healthz", None),
    ("get", "/readyz", None),
    ("get", "/version", None),
    ("get", "/v1/files", None),
    ("get", "/v1/batches", None),
    ("post", "/tokenize", {"prompt": "abc"}),
    ("post", "/detokenize", {"tokens": ids("abc")}),
    ("post", "/v1/completions", TEXT | {"logprobs": 1, "n": 1}),
    ("post", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    ("post", "/v1/chat/completions", CHAT | {"temperature": 3}),
    ("post", "/v1/completions", TEXT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("post", "/v1/chat/completions", CHAT | {"stream": True}),
    ("post", "/v1/responses", RESPONSE | {"top_logprobs": 1}),
    ("post", "/v1/responses", RESPONSE | {"stream": True}),
    ("get", "/v1/responses/{response_id}", None),
    ("post", "/v1/messages", CHAT),
    ("post", "/v1/messages", CHAT | {"stream": True}),
    ("post", "/v1/messages", CHAT | {"temperature": 3}),
    ("post", "/v1/messages", CHAT | {"model": "other"}),
    ("post", "/v1/messages/count_tokens", {"model": "model", "messages": CHAT["messages"]}),
]


def client_of(router: Router) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{router.server.http_address}", timeout=20)


def schema_of(document: dict[str, Any], method: str, path: str, status: int, media_type: str) -> dict[str, Any]:
    """With all schemas that it names."""
    content = document["paths"][path][method]["responses"][str(status)]["content"]
    return content[media_type]["schema"] | {"components": document["components"]}


async def test_answers_have_the_fields_that_are_told(tmp_path: Path) -> None:
    workers = pair(lambda _: [ids("abcd")])
    async with running_router(tmp_path / "model", workers, http_port=0) as router, client_of(router) as http:
        document = (await http.get("/openapi.json")).json()
        names = {name.strip("{}"): value for name, value in PATH_VALUES.items()}
        for method, path, body in CALLS:
            given = {} if body is None else {"json": body}
            answer = await http.request(method, path.format_map(names), **given)
            media_type = answer.headers["content-type"].partition(";")[0]
            schema = schema_of(document, method, path, answer.status_code, media_type)
            assert answer.headers["x-request-id"]
            check(answer.text, media_type, schema)


def check(text: str, media_type: str, schema: dict[str, Any]) -> None:
    if media_type == "application/json":
        jsonschema.validate(json.loads(text), schema)
        return
    chunks = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    data = schema["properties"]["data"]
    if "event" not in schema["properties"]:
        assert chunks.pop() == "[DONE]"
        data = data["anyOf"][1]
    of_data = data["contentSchema"] | {"components": schema["components"]}
    assert len(chunks) > 1
    for chunk in chunks:
        jsonschema.validate(json.loads(chunk), of_data)


async def test_a_path_names_every_method_that_it_has(tmp_path: Path) -> None:
    async with running_router(tmp_path / "model", (), http_port=0) as router, client_of(router) as http:
        document = (await http.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for name, value in PATH_VALUES.items():
                path = path.replace(name, value)
            answer = await http.options(path)
            wanted = {method.upper() for method in methods} | ({"HEAD"} if "get" in methods else set())
            assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, wanted), path


async def test_every_schema_is_one(tmp_path: Path) -> None:
    async with running_router(tmp_path / "model", (), http_port=0) as router, client_of(router) as http:
        document = (await http.get("/openapi.json")).json()
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        references = json.dumps(schema).split('"#/components/schemas/')[1:]
        assert all(each.partition('"')[0] in document["components"]["schemas"] for each in references), name
