"""Streams over HTTP that go on after any of their events, at the same router or another; and who may not resume one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from author import ALONE, Author
from http_door import chat, serving
from router_harness import ids

from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.state import MemoryStore

pytestmark = pytest.mark.asyncio
ASKED = {"Baton-Resume": "true"}
TEXT = "aéb🎉c"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "model", "prompt": "hello", "logprobs": 0},
    "/v1/chat/completions": chat("hello", logprobs=True),
}


@dataclass
class Event:
    """One event with data, and the last id before it."""

    event_id: str
    data: str

    @property
    def chunk(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.data)
        return parsed


@dataclass
class Told:
    """What a client ends up with."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)
    offsets: dict[int, list[int]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    heads: set[tuple[str, int]] = field(default_factory=set)
    usages: list[dict[str, int]] = field(default_factory=list)
    num_done: int = 0

    @classmethod
    def of(cls, events: list[Event]) -> Told:
        told = cls()
        for event in events:
            assert not told.num_done
            if event.data == "[DONE]":
                told.num_done = 1
                continue
            chunk = event.chunk
            told.heads.add((chunk["id"], chunk["created"]))
            if chunk.get("usage"):
                told.usages.append(chunk["usage"])
            for choice in chunk["choices"]:
                told._add(choice)
        return told

    def _add(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice.get("delta", {})
        assert index not in self.ends, "a choice goes on behind its end"
        if "role" in delta:
            self.begun.append(index)
        self.texts[index] = self.texts.get(index, "") + (choice.get("text") or delta.get("content") or "")
        named = choice["logprobs"] or {}
        self.tokens.setdefault(index, []).extend(named.get("tokens") or named.get("content") or [])
        self.offsets.setdefault(index, []).extend(named.get("text_offset") or [])
        if choice["finish_reason"]:
            self.ends[index] = choice["finish_reason"]


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    event_id = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield Event(event_id, value)


async def read(http: Any, path: str, last: str = "", num_tokens: int | None = None, **body: Any) -> list[Event]:
    """All events of a stream that may be resumed, or those with the first tokens of one that is then left."""
    headers = {"Last-Event-ID": last} if last else ASKED
    async with http.stream("POST", path, json=BODIES[path] | {"stream": True} | body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        events: list[Event] = []
        async for event in events_of(answer.aiter_lines()):
            events.append(event)
            if num_tokens is not None and len(Told.of(events).tokens.get(0, ())) >= num_tokens:
                break
        return events


@pytest.mark.parametrize("path", BODIES)
async def test_the_rest_follows_from_every_event(tmp_path: Path, path: str) -> None:
    author = Author(TEXT, "xy")
    asked: dict[str, Any] = {"n": 2, "stream_options": {"include_usage": True}}
    async with serving(tmp_path, (author.worker,), **ALONE) as (_, http):
        events = await read(http, path, **asked)
        whole = Told.of(events)
        assert whole.texts == {0: TEXT, 1: "xy"} and whole.num_done == 1 and len(whole.usages) == 1
        assert [event.chunk["resumable"] for event in events[:-1] if "resumable" in event.chunk] == [False]
        for count, event in enumerate(events[:-1], start=1):
            rest = await read(http, path, event.event_id, **asked)
            assert Told.of(events[:count] + rest) == whole, event.event_id
    assert len(author.worker.admits) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_goes_on_at_another_router(tmp_path: Path, path: str) -> None:
    author, store = Author("hello world", limit=3), MemoryStore()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with (
        serving(tmp_path / "one", (author.worker,), store=store, **ALONE) as (_, one),
        serving(tmp_path / "two", (author.worker,), store=store, **ALONE) as (_, two),
    ):
        first = await read(one, path, num_tokens=3)  # what has been told is in the journal
        author.limit = 11
        rest = await read(two, path, first[-1].event_id)
        told = Told.of(first + rest)
    assert told.texts == {0: "hello world"} and told.ends == {0: "length"} and len(told.heads) == 1
    assert len(told.tokens[0]) == 11 and told.num_done == 1
    if "chat" not in path:
        assert told.offsets == {0: list(range(11))}
    assert [list(known.token_ids) for known in author.worker.admits[1].known_tokens] == [ids("hel")]


async def test_hanging_up_cancels_what_did_not_ask_to_be_resumed(tmp_path: Path) -> None:
    author = Author("hello", limit=2)
    async with serving(tmp_path, (author.worker,), **ALONE) as (_, http):
        body = BODIES["/v1/completions"] | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for event in events_of(answer.aiter_lines()):
                assert event.event_id == "" and "resumable" not in event.chunk
                break
        await author.worker.next_cancel()


async def test_an_id_that_names_nothing_is_refused_by_name(tmp_path: Path) -> None:
    keys = [ApiKey(name, digest_of(f"baton-{name}"), name, ("generate",)) for name in ("alice", "bob")]
    (tmp_path / "keys.yaml").write_text(render_keys(keys))
    path, author = "/v1/completions", Author("hello")
    async with serving(tmp_path, (author.worker,), keys_file=str(tmp_path / "keys.yaml"), **ALONE) as (_, http):
        http.headers["Authorization"] = "Bearer baton-alice"
        last = (await read(http, path))[-2].event_id
        known, _, rest = last.partition(".")
        created = rest.partition(".")[0]
        assert last == f"{known}.{created}.5+5e"
        beyond, unknown = f"{known}.{created}.6", f"gen-{24 * '0'}.{created}.2"
        for event_id in ("x", "", last + ".9", beyond, unknown, 9000 * "1", f"{known}.{created}.²"):
            headers = {"Last-Event-ID": event_id.encode()}
            answer = await http.post(path, json=BODIES[path] | {"stream": True}, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "not_found"), event_id
            assert error["param"] == "Last-Event-ID" and "spec." not in error["message"] and len(error["message"]) < 400
        http.headers["Authorization"] = "Bearer baton-bob"
        answer = await http.post(path, json=BODIES[path] | {"stream": True}, headers={"Last-Event-ID": last})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "Last-Event-ID")


async def test_a_call_that_cannot_be_resumed_is_refused_before_it_begins(tmp_path: Path) -> None:
    path, author = "/v1/completions", Author("hello")
    async with serving(tmp_path, (author.worker,), **ALONE) as (_, http):
        last = (await read(http, path))[0].event_id
        for headers, body, param in (
            (ASKED, {"stream": False}, "stream"),
            (ASKED, {"prompt": ["a", "b"]}, "prompt"),
            ({"Baton-Resume": "yes"}, {}, "Baton-Resume"),
            ({"Last-Event-ID": last}, {"prompt": "another"}, "spec"),
        ):
            answer = await http.post(path, json=BODIES[path] | {"stream": True} | body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert len(author.worker.admits) == 1
