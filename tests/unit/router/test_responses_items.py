"""Items of responses: every spelling is read, a wrong one is named, and they become the messages of a chat."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseItemList
from pydantic import BaseModel

from cluster.errors import InvalidRequest
from router.responses.bodies import IGNORED, ResponseBody
from router.responses.items import Item, cuts_of, encode_reasoning, is_reference, messages_of, read_items

RESPONSE_ID = "resp_" + 24 * "0f"
CALL: Item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: Item = {"type": "function_call_output", "call_id": "c1", "output": "12"}


def read(*given: Any, before: Any = ()) -> list[Item]:
    return read_items(given, RESPONSE_ID, before, lambda _: None)


def wrong(*given: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as error:
        read(*given)
    violation = error.value.violations[0]
    return violation.field, violation.description


def test_every_spelling_of_an_item_is_kept_in_one() -> None:
    items = read(
        {"role": "developer", "content": "D"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "encrypted_content": None,
        },
        {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("thought é")},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "t", "annotations": []}],
            "phase": "commentary",
        },
        CALL | {"id": "fc_x", "status": "completed", "caller": None},
        OUTPUT | {"output": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]},
    )
    assert messages_of(items) == [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "t",
            "reasoning_content": "thought é",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]
    assert [{**item, "id": ""} for item in read(*items)] == [{**item, "id": ""} for item in items]

    class Items(BaseModel):
        data: ResponseItemList

    page = {"object": "list", "data": items, "first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
    Items.model_validate({"data": page})


def test_turns_of_the_assistant_end_where_another_message_begins() -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]}
    messages = messages_of(read(said, said, thought, CALL, said, OUTPUT, thought))
    assert [message["role"] for message in messages] == ["assistant", "assistant", "assistant", "tool", "assistant"]
    assert messages[2]["reasoning_content"] == "r" and messages[2]["content"] == "a" and messages[2]["tool_calls"]


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"type": ["message"], "role": "user"}], "input[0].type"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": {}}]}], "input[0].content[0]"),
        ([{"role": "user", "content": "a", "temperature": 1}], "input[0].temperature"),
        ([OUTPUT], "input[0].call_id"),
        ([CALL, OUTPUT | {"call_id": ["c1"]}], "input[1].call_id"),
        ([CALL | {"arguments": "[1]"}], "input[0].arguments"),
        ([CALL | {"arguments": "{" * 9999}], "input[0].arguments"),
        ([CALL | {"name": ""}], "input[0].name"),
        ([{"type": "reasoning", "encrypted_content": "gAAAA"}], "input[0].encrypted_content"),
        ([{"type": "reasoning", "content": ["a"]}], "input[0].content"),
        ([{"id": "msg_1"}], "input[0].id"),
        ([], "input"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(items: list[Any], field: str) -> None:
    assert wrong(*items)[0] == field


def test_a_call_of_the_conversation_before_has_its_output_here() -> None:
    before = read(CALL)
    assert messages_of([*before, *read(OUTPUT, before=before)])[1]["role"] == "tool"


def test_a_reference_is_an_item_without_a_content() -> None:
    assert is_reference({"type": "item_reference", "id": "x"}) and is_reference({"id": "x"})
    assert not is_reference({"id": "x", "role": "user"})
    found = read_items([{"id": "x"}], RESPONSE_ID, (), lambda _: CALL)
    assert found[0]["call_id"] == "c1"


def test_a_conversation_is_cut_at_users_and_never_between_a_call_and_its_output() -> None:
    user, said = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    assert cuts_of(read(user, said, CALL, user, OUTPUT, user, said)) == [5]
    assert cuts_of(read(said, CALL, OUTPUT, said)) == [1, 3]


def test_the_docs_name_every_field_of_a_body() -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    section = text.partition("## Responses")[2].partition("## Batches")[0]
    assert set(re.findall(r"`([a-z_]+)[`.]", section)) >= set(ResponseBody.model_fields)
    (line,) = [line for line in section.splitlines() if line.endswith("taken, and without effect |")]
    assert {*IGNORED, "stream_options.include_obfuscation"} == set(re.findall(r"`([a-z_.]+)`", line))
