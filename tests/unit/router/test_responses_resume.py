"""A response that its client waits for goes on after any of its events, at its router or another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_worker import STOP, pair
from http_door import serving
from router_harness import ids
from test_responses_api import CALL, THINKS, WEATHER, body, checked

from cluster.state import MemoryStore

pytestmark = pytest.mark.asyncio
ASKED = {"Baton-Resume": "true"}
PATH = "/v1/responses"


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Ids and events of a stream that was read to its end."""
    *blocks, last, nothing = text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    found = []
    for block in blocks:
        event_id, _, data = block.split("\n")
        found.append((event_id.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_stream_goes_on_within_thinking_text_and_a_call(tmp_path: Path, is_elsewhere: bool) -> None:
    workers, store = pair(lambda _: [ids(f"Hm, well.</think>So: {CALL}")], STOP), MemoryStore()
    given = body("hi", tools=[WEATHER], stream=True)
    async with (
        serving(tmp_path, workers, chat_template=THINKS, store=store) as (_, http),
        serving(tmp_path, workers, chat_template=THINKS, store=store) as (_, other),
    ):
        whole = events_of((await http.post(PATH, json=given, headers=ASKED)).text)
        final = whole[-1][1]["response"]
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
        assert len({event_id for event_id, _ in whole}) == len(whole)
        door = other if is_elsewhere else http
        for count, (event_id, _) in enumerate(whole, start=1):
            rest = events_of((await door.post(PATH, json=given, headers={"Last-Event-ID": event_id})).text)
            events = [event for _, event in [*whole[:count], *rest]]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert _deltas(events) == _deltas([event for _, event in whole])
            again = events[-1]["response"]
            assert events[-1]["type"] == "response.completed"
            assert (again["id"], again["created_at"], again["output"]) == (
                final["id"],
                final["created_at"],
                final["output"],
            )
        kept = checked(await door.get(f"{PATH}/{final['id']}"))
        assert kept["output"] == final["output"]
        if not is_elsewhere:
            going_on = body(
                [{"type": "function_call_output", "call_id": final["output"][2]["call_id"], "output": "ok"}]
            )
            checked(await http.post(PATH, json=going_on | {"previous_response_id": final["id"], "tools": [WEATHER]}))


def _deltas(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The kinds of events in their order, with what the deltas between them add up to."""
    found: list[tuple[str, str]] = []
    for event in events:
        kind, delta = event["type"], event.get("delta", "")
        if delta and found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + delta)
        else:
            found.append((kind, delta))
    return found


async def test_an_id_that_names_nothing_and_a_call_that_cannot_be_resumed_are_refused_by_name(tmp_path: Path) -> None:
    workers = pair(lambda _: [ids("hello")], STOP)
    async with serving(tmp_path, workers) as (_, http):
        given = body("hi", stream=True)
        last, _ = events_of((await http.post(PATH, json=given, headers=ASKED)).text)[3]
        generation, secret, rest = last.split(".", 2)
        foreign = ".".join((generation, 48 * "0", rest))
        for event_id in ("x", last + ".9", f"gen-{24 * '0'}.{secret}.{rest}"):
            answer = await http.post(PATH, json=given, headers={"Last-Event-ID": event_id})
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "Last-Event-ID"), event_id
        for headers, fields in (
            (ASKED, {"stream": False}),
            ({"Last-Event-ID": last}, {"input": "another"}),
            ({"Last-Event-ID": foreign}, {}),
        ):
            answer = await http.post(PATH, json=given | fields, headers=headers)
            assert answer.status_code == 400, answer.text
