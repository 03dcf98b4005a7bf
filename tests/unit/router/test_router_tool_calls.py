"""Chats with tools and thinking through a router: what a client gets, and what workers are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_worker import STOP, pair
from http_door import sdk, serving
from router_harness import ids

from cluster.state import MemoryStore

pytestmark = pytest.mark.asyncio

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}<assistant>"""
THINKS = (
    TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HI: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome {\\"x\\"}"}}\n</tool_call>'
ARGUMENTS = '{"city": "Rome {\\"x\\"}"}'


async def asked(folder: Path, text: str, template: str = TEMPLATE, **body: Any) -> tuple[Any, Any, Any]:
    """The whole answer and the joined stream to one chat, and what the worker was told."""
    prefill, decode = pair(lambda _: [ids(text)], STOP)
    async with serving(folder, (prefill, decode), chat_template=template) as (router, _), sdk(router) as client:
        given: Any = {"model": "model", "messages": HI, "tools": [WEATHER], **body}
        whole = await client.chat.completions.create(**given)
        async with client.chat.completions.stream(**given) as stream:
            async for _ in stream:
                pass
            joined = await stream.get_final_completion()
    return whole, joined, decode.admits[0]


async def test_a_call_is_told_whole_and_piece_by_piece(tmp_path: Path) -> None:
    whole, joined, admit = await asked(tmp_path, f"Let me see.\n{CALL}\n{CALL}")
    for answer in (whole, joined):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == 2 * [
            ("weather", ARGUMENTS)
        ]
        call_ids = [call.id for call in choice.message.tool_calls]
        assert len(set(call_ids)) == 2 and all(each.startswith("call_") for each in call_ids)
    assert whole.id.startswith("chatcmpl-")
    assert "weather" in admit.sampling.grammar


async def test_what_is_no_call_stays_text(tmp_path: Path) -> None:
    text = 'a <tool_call>{"name": "other", "arguments": {}}</tool_call>'
    whole, _, _ = await asked(tmp_path, text)
    assert whole.choices[0].message.content.replace(" ", "") == text.replace(" ", "")
    assert whole.choices[0].message.tool_calls is None and whole.choices[0].finish_reason == "stop"


async def test_thinking_is_apart_and_counted(tmp_path: Path) -> None:
    whole, joined, admit = await asked(tmp_path, "hm, well</think>\n\nYes.", THINKS)
    for answer in (whole, joined):
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("Yes.", "hm, well")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("hm, well</think>")
    assert list(admit.prompt_token_ids)[-7:] == ids("<think>")


async def test_effort_none_turns_thinking_off_and_a_budget_bounds_it(tmp_path: Path) -> None:
    whole, _, admit = await asked(tmp_path, "Yes.", THINKS, reasoning_effort="none", tools=openai.omit)
    assert whole.choices[0].message.content == "Yes." and not admit.sampling.grammar
    *_, admit = await asked(
        tmp_path, "a</think>Yes.", THINKS, tools=openai.omit, extra_body={"thinking_token_budget": 7}
    )
    assert "max_tokens=6" in admit.sampling.grammar  # which the library looks at one token late


@pytest.mark.parametrize(
    ("choice", "begin"),
    [("required", True), ({"type": "function", "function": {"name": "weather"}}, True), ("auto", False)],
)
async def test_a_forced_call_is_held_to_its_grammar_from_the_begin(tmp_path: Path, choice: Any, begin: bool) -> None:
    *_, admit = await asked(tmp_path, CALL, tool_choice=choice)
    grammar = json.loads(admit.sampling.grammar)["grammars"][0]["lark_grammar"]
    assert ("TEXT" not in grammar) is begin


async def test_tools_that_are_not_to_be_called_are_not_named(tmp_path: Path) -> None:
    whole, _, admit = await asked(tmp_path, CALL, tool_choice="none")
    assert whole.choices[0].message.content == CALL and not admit.sampling.grammar
    assert bytes(ids("tools")) not in bytes(admit.prompt_token_ids)


async def test_a_conversation_with_calls_and_results_is_rendered(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "warm"})
    *_, admit = await asked(tmp_path, "ok", messages=messages)
    said = '<user>hi<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><tool>warm'
    assert list(admit.prompt_token_ids) == ids(f"{said}1 tools<assistant>")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [*HI, {"role": "tool", "tool_call_id": "x", "content": ""}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "owner", "content": ""}]}, "messages[0].role"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}]},
            "tools[1]",
        ),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
    ],
)
async def test_wrong_tools_are_refused_by_field(tmp_path: Path, body: dict[str, Any], field: str) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("x")]), chat_template=TEMPLATE) as (_, http):
        given = {"model": "model", "messages": HI, "tools": [WEATHER], **body}
        answer = await http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(field), answer.text


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["at its router", "at another router"])
async def test_a_resumed_stream_goes_on_within_a_call(tmp_path: Path, is_elsewhere: bool) -> None:
    workers, store = pair(lambda _: [ids(f"So: {CALL}")], STOP), MemoryStore()
    async with (
        serving(tmp_path, workers, chat_template=TEMPLATE, store=store) as (_, http),
        serving(tmp_path, workers, chat_template=TEMPLATE, store=store) as (_, other),
    ):
        given = {"model": "model", "messages": HI, "tools": [WEATHER], "stream": True}
        whole = (await http.post("/v1/chat/completions", json=given, headers={"Baton-Resume": "true"})).text
        events = [event.split("\n") for event in whole.split("\n\n") if event.startswith("id: ")]
        for number in range(len(events)):
            headers = {"Last-Event-ID": events[number][0].removeprefix("id: ")}
            door = other if is_elsewhere else http
            rest = (await door.post("/v1/chat/completions", json=given, headers=headers)).text
            told = [event.split("\n")[1] for event in rest.split("\n\n") if event.startswith("id: ")]
            assert joined([event[1] for event in events[: number + 1]] + told) == joined([e[1] for e in events])


def joined(lines: list[str]) -> tuple[str, str, set[str], str]:
    text, arguments, call_ids, why = "", "", set(), ""
    for line in lines:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["delta"].get("content", "")
        why = choice["finish_reason"] or why
        for call in choice["delta"].get("tool_calls", ()):
            arguments += call["function"]["arguments"]
            call_ids |= {call["id"]} if "id" in call else set()
    return text, arguments, call_ids, why


async def test_a_model_that_knows_no_tools_can_still_be_made_to_call(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    whole, _, _ = await asked(tmp_path, text, plain)
    assert whole.choices[0].message.content == text
    whole, joined, admit = await asked(tmp_path, text, plain, tool_choice="required")
    for answer in (whole, joined):
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.arguments == '{"city": "Oslo"}' and "weather" in admit.sampling.grammar
