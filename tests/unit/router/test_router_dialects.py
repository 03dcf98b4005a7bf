"""Mistakes of agents are refused by the field they are in, as each dialect names it, in the shape of its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_worker import pair
from http_door import serving
from router_harness import ids
from test_responses_api import TEMPLATE

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PNG = "data:image/png;base64,AAAA"
IMAGES: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": PNG}},
    RESPONSES: {"type": "input_image", "image_url": PNG},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    workers = pair(lambda _: [ids("yes!")])
    async with serving(tmp_path_factory.mktemp("router"), workers, chat_template=TEMPLATE) as (_, client):
        yield client


def tool(path: str, name: str = "w", schema: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    if path == MESSAGES:
        return {"name": name, "input_schema": schema or CITY, **fields}
    function = {"name": name, "parameters": schema or CITY, **fields}
    return {"type": "function", **(function if path == RESPONSES else {"function": function})}


def asked(path: str, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    conversation = [{"role": "user", "content": content}]
    return {"model": "model", "input" if path == RESPONSES else "messages": conversation, **fields} | (
        {"max_tokens": 8} if path == MESSAGES else {}
    )


async def refused(http: Any, path: str, body: dict[str, Any]) -> str:
    """The field that is named."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    error = told["error"]
    assert error["type"] == "invalid_request_error"
    field = str(error["message"]).partition(": ")[0]
    if path == MESSAGES:
        assert told["type"] == "error" and told["request_id"].startswith("req-") and set(error) == {"type", "message"}
    else:
        assert set(told) == {"error"} and set(error) == {"message", "type", "param", "code"} and error["param"] == field
    return field


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_images_are_refused_by_their_place(http: Any, path: str) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "What is this?"}
    place = "input[0].content[1]" if path == RESPONSES else "messages[0].content[1]"
    assert await refused(http, path, asked(path, [text, IMAGES[path]])) == place


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_images_in_the_result_of_a_tool_are_refused_by_their_place(http: Any, path: str) -> None:
    body, image = asked(path, tools=[tool(path)]), IMAGES[path]
    if path == RESPONSES:
        body["input"] += [{"type": "function_call", "call_id": "c", "name": "w", "arguments": "{}"}]
        body["input"] += [{"type": "function_call_output", "call_id": "c", "output": [image]}]
        place = "input[2].output[0]"
    elif path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}
        body["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        body["messages"] += [{"role": "tool", "tool_call_id": "c", "content": [image]}]
        place = "messages[2].content[0]"
    else:
        body["messages"] += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "w", "input": {}}]}
        ]
        result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
        body["messages"] += [{"role": "user", "content": [result]}]
        place = "messages[2].content[0].content[0]"
    assert await refused(http, path, body) == place


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_that_is_wrong_is_named_where_it_is(http: Any, path: str, is_streamed: bool) -> None:
    name, schema = {
        CHAT: ("tools[1].function.name", "tools[1].function.parameters"),
        RESPONSES: ("tools[1].name", "tools[1].parameters"),
        MESSAGES: ("tools[1].name", "tools[1].input_schema"),
    }[path]
    nowhere = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]}
    for wrong, place in (
        (tool(path), name),
        (tool(path, "a b"), name),
        (tool(path, "v", nowhere, strict=True), schema),
        (tool(path, "v", {"type": "string"}), schema),
        (tool(path, "v", {"type": None}), schema),
    ):
        assert await refused(http, path, asked(path, tools=[tool(path), wrong], stream=is_streamed)) == place


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_of_a_namespace_is_named_within_it(http: Any, is_streamed: bool) -> None:
    """Whatever else the model is told of or not."""
    nowhere = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]}
    space = {"type": "namespace", "name": "s", "tools": [tool(RESPONSES), tool(RESPONSES, "v", nowhere)]}
    tools = [{"type": "web_search"}, tool(RESPONSES), {"type": "custom", "name": "c"}, space]
    place = "tools[3].tools[1].parameters"
    assert await refused(http, RESPONSES, asked(RESPONSES, tools=tools, stream=is_streamed)) == place


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_choice_of_what_is_not_there_is_refused(http: Any, path: str) -> None:
    choice = {
        CHAT: {"type": "function", "function": {"name": "other"}},
        RESPONSES: {"type": "function", "name": "other"},
        MESSAGES: {"type": "tool", "name": "other"},
    }[path]
    forced = {"type": "any"} if path == MESSAGES else "required"
    for fields in ({"tools": [tool(path)], "tool_choice": choice}, {"tool_choice": forced}, {"tool_choice": 5}):
        assert await refused(http, path, asked(path, **fields)) == "tool_choice"


async def test_what_must_be_an_object_is_told_so(http: Any) -> None:
    answer = await http.post(MESSAGES, json=asked(MESSAGES, tools=[tool(MESSAGES)], tool_choice="auto"))
    assert answer.json()["error"]["message"] == "tool_choice: must be an object"


HALF = r'{"city": "\ud83d!"}'
"""Which is JSON, but half of a character is no text."""


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_half_a_character_in_a_call_is_told_and_taken_back(tmp_path: Path, path: str) -> None:
    call = f'<tool_call>\n{{"name": "w", "arguments": {HALF}}}\n</tool_call>'
    async with serving(tmp_path, pair(lambda _: [ids(call)]), chat_template=TEMPLATE) as (_, http):
        answer = await http.post(path, json=asked(path, tools=[tool(path)]))
        assert answer.status_code == 200, answer.text
        told = answer.json()
        if path == CHAT:
            message = told["choices"][0]["message"]
            (called,) = message["tool_calls"]
            assert called["function"]["arguments"] == HALF
            taken = [message, {"role": "tool", "tool_call_id": called["id"], "content": "warm"}]
        elif path == RESPONSES:
            (called,) = told["output"]
            assert called["arguments"] == HALF
            taken = [called, {"type": "function_call_output", "call_id": called["call_id"], "output": "warm"}]
        else:
            (called,) = told["content"]
            assert called["input"] == {"city": "\ufffd!"}
            result = {"type": "tool_result", "tool_use_id": called["id"], "content": "warm"}
            taken = [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": [result]}]
        again = asked(path, tools=[tool(path)])
        again["input" if path == RESPONSES else "messages"] += taken
        answer = await http.post(path, json=again)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("depth", [960, 5000])
async def test_arguments_that_nest_too_deep_are_named(http: Any, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    function = {"name": "w", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    body = {"model": "model", "messages": [{"role": "user", "content": "hi"}, call]}
    assert await refused(http, CHAT, body) == "messages[1].tool_calls[0].function.arguments"
    body = {"model": "model", "input": [{"type": "function_call", "call_id": "a", **function}]}
    assert await refused(http, RESPONSES, body) == "input[0].arguments"
