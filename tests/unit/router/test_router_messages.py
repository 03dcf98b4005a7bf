"""Anthropic's Messages API over real sockets and two fake workers: answers, streams, errors, and their headers."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fake_worker import STOP, pair
from http_door import serving
from router_harness import MAX_MODEL_LEN, ids
from test_router_message_events import folded

from cluster.api_keys import ApiKey, digest_of, render_keys

pytestmark = pytest.mark.asyncio

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}<assistant>"""
THINKS = TEMPLATE + "{% if enable_thinking | default(true) %}<think>{% else %}<think></think>{% endif %}"
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HI = {"role": "user", "content": "hi"}
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "model", "max_tokens": 100, "messages": [HI], **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names it checks."""
    found = []
    for event in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = json.loads(lines["data"])
        assert lines["event"] == data["type"]
        found.append(data)
    return found


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    """What is the same in two answers to one request."""
    text = json.dumps(message).replace(message["id"], "msg_")
    for block in message["content"]:
        text = text.replace(block.get("id", "msg_"), "toolu_")
    found: dict[str, Any] = json.loads(text)
    return found


async def asked(folder: Path, text: str, template: str = TEMPLATE, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The answer, which is the same whole and streamed, and what the worker was told."""
    prefill, decode = pair(lambda _: [ids(text)], STOP)
    async with serving(folder, (prefill, decode), chat_template=template) as (_, http):
        whole = await http.post(PATH, json=body(**fields))
        streamed = await http.post(PATH, json=body(**fields, stream=True))
    assert whole.status_code == streamed.status_code == 200, whole.text + streamed.text
    message: dict[str, Any] = whole.json()
    assert without_id(folded(events_of(streamed.text))) == without_id(message)
    assert whole.headers["request-id"] and streamed.headers["content-type"].startswith("text/event-stream")
    return message, decode.admits[0]


async def test_a_message_is_answered_in_blocks(tmp_path: Path) -> None:
    message, admit = await asked(tmp_path, f"well</think>Let me see.\n{CALL}", THINKS, tools=[TOOL], system="Be kind.")
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    thinking, said, called = message["content"]
    assert (thinking["thinking"], said["text"], called["input"]) == ("well", "Let me see.", {"city": "Rome"})
    assert message["id"].startswith("msg_") and called["id"].startswith("toolu_")
    assert message["stop_reason"] == "tool_use" and message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert list(admit.prompt_token_ids) == ids("<system>Be kind.<user>hi1 tools<assistant><think>")


async def test_a_result_comes_back_to_the_call_that_the_model_wrote(tmp_path: Path) -> None:
    first, _ = await asked(tmp_path, CALL, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "warm"}
    messages = [HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second, admit = await asked(tmp_path, "It is warm.", messages=messages)
    assert second["content"][0]["text"] == "It is warm." and second["stop_reason"] == "end_turn"
    assert list(admit.prompt_token_ids) == ids(f"<user>hi<assistant>{CALL}<tool>warm<assistant>")


async def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    message, _ = await asked(tmp_path, "one END two", stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert message["content"][0]["text"] == "one "


async def test_max_tokens_may_be_more_than_the_context_holds(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("abc")])
    async with serving(tmp_path, (prefill, decode)) as (_, http):
        message = (await http.post(PATH, json=body(max_tokens=64_000))).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    num_prompt = message["usage"]["input_tokens"]
    assert decode.admits[0].sampling.stopping.max_output_tokens == MAX_MODEL_LEN - num_prompt


async def test_tokens_are_counted_as_an_answer_counts_them(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("ok")], STOP), chat_template=THINKS) as (_, http):
        for more in ({}, {"tools": [TOOL]}, {"thinking": {"type": "disabled"}}):
            usage = (await http.post(PATH, json=body(**more))).json()["usage"]
            counted = await http.post(COUNT, json={"model": "model", "messages": [HI], **more})
            assert counted.json() == {"input_tokens": usage["input_tokens"]}, more


async def test_a_stream_goes_on_after_any_of_its_events(tmp_path: Path) -> None:
    workers = pair(lambda _: [ids(f"hm</think>So: {CALL}")], STOP)
    async with serving(tmp_path, workers, chat_template=THINKS) as (_, http):
        given = body(tools=[TOOL], stream=True)
        text = (await http.post(PATH, json=given, headers={"baton-resume": "true"})).text
        events, ids_of_events = [], []
        for event in text.strip().split("\n\n"):
            head, rest = event.split("\n", 1)
            ids_of_events.append(head.removeprefix("id: "))
            events.append(rest)
        whole = folded(events_of("\n\n".join(events)))
        for number, event_id in enumerate(ids_of_events[:-1]):
            rest = (await http.post(PATH, json=given, headers={"last-event-id": event_id})).text
            more = [event.split("\n", 1)[1] for event in rest.strip().split("\n\n")]
            assert folded(events_of("\n\n".join(events[: number + 1] + more))) == whole
        lost = await http.post(PATH, json=given, headers={"last-event-id": "gen-1"})
        assert lost.status_code == 404 and lost.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"),
    [
        ({"temperature": 3}, 400, "invalid_request_error", "temperature: must be between 0 and 2 (got 3)"),
        ({"colour": "red"}, 400, "invalid_request_error", "colour: is not a field that is known here; leave it out"),
        ({"model": "gpt"}, 404, "not_found_error", "model 'gpt' is not served here"),
        ({"stop_sequences": ["x" * 999]}, 400, "invalid_request_error", "stop_sequences[0]: must be"),
        ({"tools": [{**TOOL, "name": "a b"}]}, 400, "invalid_request_error", "tools[0].name: must be"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "no"}}]},
            400,
            "invalid_request_error",
            "tools[0].input_schema: ",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice: asks for a call"),
        (
            {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]},
            400,
            "invalid_request_error",
            "prompt is too long: ",
        ),
    ],
)
async def test_a_refusal_is_anthropics(
    tmp_path: Path, fields: dict[str, Any], status: int, kind: str, message: str
) -> None:
    async with serving(tmp_path, pair(), chat_template=TEMPLATE) as (_, http):
        answer = await http.post(PATH, json=body(**fields), headers={"x-request-id": "mine"})
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind), answer.text
    assert found["error"]["message"].startswith(message), answer.text
    assert found["request_id"] == answer.headers["request-id"] == "mine"


async def test_what_is_refused_before_a_route_is_reached_is_refused_in_its_dialect(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (_, http):
        refused = {
            405: await http.get(PATH),
            404: await http.post(f"{PATH}/batches"),
            403: await http.post(PATH, headers={"sec-fetch-site": "cross-site"}),
        }
        others = await http.get("/v1/messages_of_others")
    for status, answer in refused.items():
        told = answer.json()
        assert (answer.status_code, told["type"], told["request_id"]) == (status, "error", answer.headers["request-id"])
    assert refused[405].headers["allow"] == "POST"
    assert set(others.json()) == {"error"}


async def test_load_keys_and_long_bodies_have_their_statuses(tmp_path: Path) -> None:
    keys = (ApiKey("alice", digest_of("baton-a"), "acme", ("generate",)),)
    (tmp_path / "keys.yaml").write_text(render_keys(keys))
    workers = pair()
    limits = {"max_running_requests": 1, "max_queued_requests": 0, "max_message_bytes": 4096}
    async with serving(tmp_path, workers, keys_file=str(tmp_path / "keys.yaml"), **limits) as (_, http):
        key = {"x-api-key": "baton-a", "anthropic-version": "2023-06-01"}
        assert (await http.post(PATH, json=body())).json()["error"]["type"] == "authentication_error"
        large = await http.post(PATH, json=body(system="a" * 5000), headers=key)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        first = asyncio.create_task(http.post(PATH, json=body(), headers=key))
        await workers[0].next_admit()
        busy = await http.post(PATH, json=body(stream=True), headers=key)
        assert (busy.status_code, busy.json()["error"]["type"]) == (529, "overloaded_error")
        assert int(busy.headers["retry-after"]) >= 1
        first.cancel()


async def test_anthropics_clients_get_models_in_their_form_and_others_in_openais(tmp_path: Path) -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with serving(tmp_path, (), chat_template=TEMPLATE) as (_, http):
        theirs = (await http.get("/v1/models", headers=version)).json()
        one = (await http.get("/v1/models/model", headers=version)).json()
        none = await http.get("/v1/models/other", headers=version)
        openais = (await http.get("/v1/models")).json()
        document = (await http.get("/openapi.json")).json()["paths"]
    assert theirs == {"data": [one], "has_more": False, "first_id": "model", "last_id": "model"}
    assert (one["type"], one["id"], one["lifecycle"]) == ("model", "model", "active")
    assert one["max_input_tokens"] == MAX_MODEL_LEN - 1
    assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
    assert none.status_code == 404 and none.json()["error"]["type"] == "not_found_error"
    assert openais["object"] == "list" and openais["data"][0]["owned_by"] == "baton"
    for path in ("/v1/models", "/v1/models/{model}"):
        told = document[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert len(told["anyOf"]) == 2
        assert "anthropic-version" in {each["name"] for each in document[path]["get"]["parameters"]}
