"""Custom tools of Responses: their input is text, and no text is changed on its way through a function's arguments."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_worker import STOP, FakeWorker, pair
from http_door import sdk, serving
from hypothesis import given
from hypothesis import strategies as st
from router_harness import ids
from test_responses_api import TEMPLATE, WEATHER, body, checked, events_of
from test_responses_events import call, cut, head, run, stream

from router.responses.answers import Event
from router.responses.custom_tools import InputReader, arguments_of
from router.responses.events import ResponseEvents
from router.responses.position import ToldEvents

PATH = "/v1/responses"
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
TEXT = '*** Begin\n-a "b"\n+c\\d \t🎉é'


@given(st.text(), st.lists(st.integers(0, 200)), st.booleans(), st.sampled_from(['{"input":', ' { "input" : ']))
def test_input_is_read_out_of_arguments_wherever_they_are_cut(
    text: str, cuts: list[int], is_ascii: bool, begin: str
) -> None:
    arguments = begin + json.dumps(text, ensure_ascii=is_ascii) + "}"
    places = sorted({0, len(arguments), *(each for each in cuts if each < len(arguments))})
    reader = InputReader()
    pieces = [reader.read(arguments[a:b]) for a, b in itertools.pairwise(places)]
    assert "".join(pieces) == text and not any("\ud800" <= char <= "\udfff" for piece in pieces for char in piece)
    assert json.loads(arguments_of(text)) == {"input": text}


def test_half_a_character_is_told_as_one_that_is_unknown() -> None:
    reader = InputReader()
    text = "".join(map(reader.read, ('{"input": "a\\ud83', "dz\\udf89", "\\ud83d\\u0041", '\\n\\ud83d"}')))
    assert text == "a\ufffdz\ufffd\ufffdA\n\ufffd"


def test_a_call_of_a_custom_tool_is_told_as_its_input_and_goes_on_behind_every_event() -> None:
    arguments = arguments_of(TEXT)
    parts = [call(0, arguments[:14], name="apply_patch"), call(0, arguments[14:], is_whole=True)]
    parts += [call(1, '{"a": 1}', name="other", is_whole=True)]
    for seed in range(10):
        chance = random.Random(seed)
        events, marked = ResponseEvents(head(tools=[PATCH])), list[tuple[Event, ToldEvents]]()
        for message in stream(cut(parts, chance)):
            marked += zip(events.of(message), events.marks, strict=True)
        whole = [event for event, _ in marked]
        assert (
            run(ResponseEvents(head(tools=[PATCH])), stream(parts))[-1]["response"]["output"] == events.answer["output"]
        )
        outputs: list[Any] = events.answer["output"]
        first, second = outputs
        assert first["type"] == "custom_tool_call" and first["input"] == TEXT and first["id"].startswith("ctc_")
        assert second["type"] == "function_call"
        deltas = [event["delta"] for event in whole if event["type"] == "response.custom_tool_call_input.delta"]
        (done,) = (event for event in whole if event["type"] == "response.custom_tool_call_input.done")
        assert "".join(deltas) == TEXT == done["input"]
        for count, (_, mark) in enumerate(marked, start=1):
            rest = run(ResponseEvents(head(tools=[PATCH]), told=mark), stream(cut(parts, chance)))
            both = [*whole[:count], *rest]
            assert [event["sequence_number"] for event in both] == list(range(len(both)))
            assert "".join(e["delta"] for e in both if e["type"] == "response.custom_tool_call_input.delta") == TEXT


def answering(text: str) -> tuple[FakeWorker, FakeWorker]:
    called = json.dumps({"name": "apply_patch", "arguments": {"input": text}}, ensure_ascii=False)
    return pair(lambda _: [ids(f"<tool_call>\n{called}\n</tool_call>")], STOP)


@pytest.mark.asyncio
async def test_a_custom_tool_is_called_and_its_output_read_by_openais_client(tmp_path: Path) -> None:
    text = '-a "b"\n+c'
    workers = answering(text)
    async with serving(tmp_path, workers, chat_template=TEMPLATE) as (router, http):
        choice = {"type": "custom", "name": "apply_patch"}
        asked = body("hi", tools=[PATCH], tool_choice=choice)
        first = checked(await http.post(PATH, json=asked))
        (item,) = first["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", text)
        assert first["tools"] == [PATCH | {"format": {"type": "text"}}] and first["tool_choice"] == choice
        events = events_of((await http.post(PATH, json=asked | {"stream": True})).text)
        assert events[-1]["response"]["output"][0]["input"] == text
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
        going_on = [{"role": "user", "content": "hi"}, item, output]
        alone = await http.post(PATH, json=body(going_on, tools=[PATCH]))
        kept = await http.post(PATH, json=body([output], tools=[PATCH], previous_response_id=first["id"]))
        assert checked(alone) and checked(kept)
        prompts = [list(admit.prompt_token_ids) for admit in workers[1].admits[-2:]]
        assert prompts[0] == prompts[1]
        async with sdk(router) as client:
            stated: Any = await client.responses.create(**asked)
            assert stated.output[0].input == text


@pytest.mark.asyncio
async def test_a_regular_expression_holds_for_the_input_and_another_grammar_is_refused_by_name(tmp_path: Path) -> None:
    workers = answering("ab")
    async with serving(tmp_path, workers, chat_template=TEMPLATE) as (_, http):
        regex = {"type": "grammar", "syntax": "regex", "definition": "a|b+"}
        answer = checked(await http.post(PATH, json=body("hi", tools=[PATCH | {"format": regex}])))
        assert answer["tools"][0]["format"] == regex
        assert "^(?:a|b+)$" in workers[1].admits[-1].sampling.grammar
        for form, why in (
            ({**regex, "syntax": "lark"}, "has the syntax lark, which is not served"),
            ({"type": "grammar", "syntax": "regex"}, "must have a definition"),
            ({"type": "text", "definition": "a"}, "must have a definition"),
            ({**regex, "definition": "a(?=b)"}, "look-around"),
        ):
            refused = await http.post(PATH, json=body("hi", tools=[PATCH | {"format": form}]))
            error = refused.json()["error"]
            assert refused.status_code == 400 and "tools[0]" in error["message"] and why in error["message"], error
        lone = await http.post(PATH, json=body([{"type": "custom_tool_call_output", "call_id": "x", "output": "y"}]))
        assert lone.status_code == 400 and lone.json()["error"]["param"] == "input[0].call_id"


@pytest.mark.asyncio
async def test_a_custom_tool_in_a_namespace_is_told_with_it_and_read_back(tmp_path: Path) -> None:
    """As the model knows it, beside a function and a custom tool of the same name outside."""
    called = json.dumps({"name": "code__apply_patch", "arguments": {"input": TEXT}}, ensure_ascii=False)
    workers = pair(lambda _: [ids(f"<tool_call>\n{called}\n</tool_call>")], STOP)
    regex = {"type": "grammar", "syntax": "regex", "definition": "(?s:.)+"}
    space = {"type": "namespace", "name": "code", "description": "d", "tools": [PATCH | {"format": regex}, WEATHER]}
    async with serving(tmp_path, workers, chat_template=TEMPLATE) as (router, http):
        asked = body("hi", tools=[PATCH, space])
        first = checked(await http.post(PATH, json=asked))
        (item,) = first["output"]
        assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "code", "apply_patch")
        assert item["input"] == TEXT and first["tools"][1]["tools"][0] == PATCH | {"format": regex}
        events = events_of((await http.post(PATH, json=asked | {"stream": True})).text)
        assert [each["item"]["namespace"] for each in events if "output_item" in each["type"]] == ["code", "code"]
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
        going_on = [{"role": "user", "content": "hi"}, item, output]
        assert checked(await http.post(PATH, json=body(going_on, tools=[PATCH, space])))
        alone = list(workers[1].admits[-1].prompt_token_ids)
        assert checked(
            await http.post(PATH, json=body([output], tools=[PATCH, space], previous_response_id=first["id"]))
        )
        assert alone == list(workers[1].admits[-1].prompt_token_ids)
        async with sdk(router) as client:
            stated: Any = await client.responses.create(**asked)
            assert (stated.output[0].namespace, stated.output[0].input) == ("code", TEXT)
        for wrong, param in (
            ({"format": {**regex, "syntax": "lark"}}, "tools[0].tools[1].format"),
            ({"type": "namespace"}, "tools[0].tools[1].type"),
            ({"type": "shell"}, "tools[0].tools[1].type"),
        ):
            bad = space | {"tools": [WEATHER, PATCH | wrong]}
            refused = await http.post(PATH, json=body("hi", tools=[bad]))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
