"""Bodies of Anthropic's Messages API as requests: the chat that a template reads, and what is refused by its field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from router.anthropic.bodies import IGNORED, CountBody, MessagesBody, TextBlock, ToolParam, ToolUseBlock
from router.anthropic.specs import count_request, has_cache_marks, message_spec
from router.openai.http import checked

HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "at": 1}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "at": 1}}}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object", "properties": {}}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "warm"}
CALLED = [HI, {"role": "assistant", "content": [USE]}]
MARK = {"type": "ephemeral", "ttl": "1h"}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def body_of(**fields: Any) -> MessagesBody:
    return checked({"model": "m", "max_tokens": 9, "messages": [HI], **fields}, MessagesBody)


def spec_of(**fields: Any) -> pb.GenerationSpec:
    return message_spec(body_of(**fields), "req")


def chat_of(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(spec_of(**fields).chat.json)
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([HI], [HI]),
        (
            [{"role": "user", "content": [text("a"), text("b", citations=None, cache_control=MARK)]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        ([HI, {"role": "user", "content": "there"}], [{"role": "user", "content": "hi\nthere"}]),
        (
            [
                HI,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("yes"), USE],
                },
                {"role": "user", "content": [RESULT]},
            ],
            [
                HI,
                {"role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "content": "warm", "tool_call_id": "1", "name": "weather"},
            ],
        ),
        (
            [
                *CALLED,
                {
                    "role": "user",
                    "content": [{**RESULT, "content": [text("warm"), text("dry")], "is_error": True}, text("so?")],
                },
            ],
            [
                HI,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "Error: warm\ndry", "tool_call_id": "1", "name": "weather"},
                {"role": "user", "content": "so?"},
            ],
        ),
        (
            [
                HI,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                {"role": "system", "content": "be brief"},
                HI,
            ],
            [HI, {"role": "assistant", "content": ""}, {"role": "system", "content": "be brief"}, HI],
        ),
    ],
)
def test_messages_become_those_that_a_template_reads(given: Any, expected: Any) -> None:
    assert chat_of(messages=given)["messages"] == expected


def test_the_system_prompt_comes_first_without_what_changes_in_each_request() -> None:
    system = [text("x-anthropic-billing-header: cch=1a2b;"), text("You are"), text("kind.")]
    assert chat_of(system=system)["messages"] == [{"role": "system", "content": "You are\nkind."}, HI]
    assert chat_of(system="Be kind.")["messages"][0] == {"role": "system", "content": "Be kind."}


def test_tools_become_functions() -> None:
    function = {"name": "weather", "description": "Of a city.", "parameters": TOOL["input_schema"]}
    tools = [{**TOOL, "type": "custom", "strict": True, "cache_control": MARK, "eager_input_streaming": True}]
    assert chat_of(tools=tools)["tools"] == [{"type": "function", "function": {**function, "strict": True}}]


@pytest.mark.parametrize(
    ("given", "mode", "names", "is_single"),
    [
        ({"type": "auto"}, pb.ToolChoice.MODE_AUTO, [], False),
        ({"type": "auto", "disable_parallel_tool_use": True}, pb.ToolChoice.MODE_AUTO, [], True),
        ({"type": "any"}, pb.ToolChoice.MODE_REQUIRED, [], False),
        ({"type": "tool", "name": "weather"}, pb.ToolChoice.MODE_REQUIRED, ["weather"], False),
        ({"type": "none"}, pb.ToolChoice.MODE_NONE, [], False),
    ],
)
def test_a_choice_of_tools_is_the_services(given: Any, mode: int, names: list[str], is_single: bool) -> None:
    choice = spec_of(tools=[TOOL], tool_choice=given).chat.tool_choice
    assert (choice.mode, list(choice.names), choice.single) == (mode, names, is_single)


@pytest.mark.parametrize(
    ("given", "effort", "budget"),
    [
        ({}, "", None),
        ({"thinking": {"type": "disabled"}}, "none", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "", 5),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "max"}}, "max", 5),
        ({"thinking": {"type": "adaptive"}}, "medium", None),
        ({"output_config": {"effort": "low"}}, "low", None),
    ],
)
def test_thinking_is_the_services(given: Any, effort: str, budget: int | None) -> None:
    reasoning = spec_of(**given).reasoning
    assert reasoning.effort == effort
    assert (reasoning.max_tokens if reasoning.HasField("max_tokens") else None) == budget


def test_sampling_and_the_form_of_the_output_are_taken_over() -> None:
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "schema": schema}}
    spec = spec_of(temperature=1, top_p=0.5, top_k=7, stop_sequences=["END"], output_config=form)
    sampling, stopping = spec.sampling, spec.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.5, 7)
    assert (stopping.max_output_tokens, list(stopping.stop)) == (9, ["END"])
    assert (
        json.loads(sampling.json_schema)
        == schema
        == json.loads(spec_of(output_format=form["format"]).sampling.json_schema)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": MARK},
        {"system": [text("a", cache_control=MARK)]},
        {"tools": [{**TOOL, "cache_control": MARK}]},
        {"messages": [{"role": "user", "content": [text("a", cache_control=MARK)]}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [text("a", cache_control=MARK)]}]}]},
    ],
)
def test_a_mark_of_the_cache_is_seen_wherever_it_is(fields: Any) -> None:
    assert has_cache_marks(body_of(**fields)) and not has_cache_marks(body_of())


def test_tokens_are_counted_of_the_conversation_that_would_be_answered() -> None:
    fields = {"system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = count_request(checked({"model": "m", "messages": [HI], **fields}, CountBody))
    spec = spec_of(**fields)
    assert (counted.chat, counted.reasoning) == (spec.chat, spec.reasoning)


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (user({"type": "image", "source": {}}), "messages[0].content[0]: is of type image, which is not served"),
        (user(text("a"), {"type": "document"}), "messages[0].content[1]: is of type document, which is not served"),
        (user({"text": "a"}), "messages[0].content[0]: is of type None"),
        (user(7), "messages[0].content[0]"),
        (user(text("a", colour="red")), "messages[0].content[0].colour: is not a field that is known here"),
        (user({"type": "text"}), "messages[0].content[0].text: must be set"),
        (user(RESULT), "messages[0].content[0].tool_use_id: must be the id of a tool_use"),
        (user(USE), "messages[0].content[0]: a block of type tool_use is not one that a message of the user has"),
        ({"messages": [*CALLED, user(RESULT, RESULT)["messages"][0]]}, "messages[2].content[1].tool_use_id"),
        ({"messages": [*CALLED, user(text("a"), RESULT)["messages"][0]]}, "messages[2].content[1].tool_use_id"),
        (
            {"messages": [*CALLED, user({**RESULT, "content": [{"type": "image"}]})["messages"][0]]},
            "messages[2].content[0].content[0]: is of type image",
        ),
        ({"messages": [{"role": "owner", "content": ""}]}, "messages[0].role"),
        (
            {"messages": [HI, {"role": "assistant", "content": "So"}]},
            "messages[1].role: must not be assistant in the last message",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": []}, "messages: must hold at least one message"),
        ({"messages": [HI] * 2049}, "messages: at most 2048 messages"),
        ({"system": [{"type": "image"}]}, "system[0]: is of type image"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: is web_search_20250305, a tool of Anthropic's",
        ),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: must be set"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: must be set with enabled"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking.budget_tokens: must be less than max_tokens, 9",
        ),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ({"container": "c"}, "container: is not a field that is known here"),
        ({"speed": "fast"}, "speed"),
        ({"max_tokens": -1}, "max_tokens: must be from 0"),
        ({"top_k": 2**40}, "top_k"),
        (
            {"messages": [*CALLED[:1], {"role": "assistant", "content": [{**USE, "input": {"a": float("nan")}}]}, HI]},
            "messages",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(fields: Any, wrong: str) -> None:
    with pytest.raises(BatonError) as error:
        spec_of(**fields)
    assert error.value.grpc_code in ("INVALID_ARGUMENT", "UNIMPLEMENTED")
    assert error.value.message.startswith(wrong), error.value.message


def test_the_docs_name_every_field_and_block_that_is_taken() -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", text.partition("## Anthropic's")[2].partition("### Answers")[0]))
    assert named >= {name for kind in (MessagesBody, ToolParam, TextBlock, ToolUseBlock) for name in kind.model_fields}
    ignored = re.search(r"\| (`metadata`[^|]*) \| ignored", text)
    assert ignored is not None and set(re.findall(r"\w+", ignored[1])) >= set(IGNORED)


def test_marks_ask_for_the_kv_to_be_kept_as_long_as_the_longest_of_them() -> None:
    short = {"type": "ephemeral"}
    for fields, seconds in (
        ({}, 0),
        ({"cache_control": short}, 300),
        ({"system": [text("a", cache_control=short)], "tools": [{**TOOL, "cache_control": MARK}]}, 3600),
    ):
        assert spec_of(**fields).cache.retain_for.seconds == seconds, fields
    assert spec_of(session_id="chat").scheduling.session_id == "chat" and spec_of().scheduling.session_id == ""
