"""/v1/responses over real sockets and two fake workers: what OpenAI's own client sees, and what is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_worker import DECODE, PREFILL, STOP, TRANSFER, FakeWorker, pair, phase, tokens
from http_door import sdk, serving
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from router_harness import MAX_MODEL_LEN, TOKENIZER, ids

from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from cluster.state import MemoryStore

pytestmark = pytest.mark.asyncio

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}{% endfor %}<assistant>"""
THINKS = TEMPLATE + "<think>"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
RESULT = {"type": "function_call_output", "output": "warm"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def body(text: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "model", "input": text, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is one that the vendor's client knows, strictly."""
    *blocks, last, nothing = text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    events = []
    for number, block in enumerate(blocks):
        head, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}" and event["sequence_number"] == number
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        events.append(event)
    return events


def checked(answer: Any) -> dict[str, Any]:
    """A response, held to the vendor's model."""
    assert answer.status_code == 200, answer.text
    Response.model_validate_json(answer.text, strict=True)
    found: dict[str, Any] = answer.json()
    assert set(Response.model_fields) - found.keys() <= _NOT_ANSWERED
    return found


_NOT_ANSWERED = {
    "access_programs",
    "conversation",
    "image",
    "input_transformations",
    "moderation",
    "prompt",
    "prompt_cache_diagnostics",
    "prompt_cache_options",
    "prompt_cache_retention",
    "tool_usage",
}


async def test_a_response_has_every_field_and_is_streamed_as_the_vendor_does(tmp_path: Path) -> None:
    workers = pair(lambda _: [ids("yes!")], STOP)
    async with serving(tmp_path, workers) as (_, http):
        found = checked(await http.post("/v1/responses", json=body(instructions="Be brief", metadata={"a": "b"})))
        stream = await http.post("/v1/responses", json=body(stream=True))
    assert (found["status"], found["error"], found["store"], found["metadata"]) == ("completed", None, True, {"a": "b"})
    (item,) = found["output"]
    assert item["content"] == [{"type": "output_text", "text": "yes!", "annotations": [], "logprobs": []}]
    assert found["id"].startswith("resp_") and item["id"].startswith("msg_")
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + 4
    events = events_of(stream.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(e["delta"] for e in events if e["type"].endswith("output_text.delta")) == "yes!"
    assert events[-1]["response"]["output"] == [events[-2]["item"]] and events[0]["response"]["status"] == "in_progress"


async def test_thinking_text_and_calls_are_items(tmp_path: Path) -> None:
    workers = pair(lambda _: [ids(f"hm</think>\n\nSo.\n{CALL}\n{CALL}")], STOP)
    async with serving(tmp_path, workers, chat_template=THINKS) as (router, http), sdk(router) as client:
        given = body(tools=[WEATHER], include=["reasoning.encrypted_content"])
        found = checked(await http.post("/v1/responses", json=given))
        events = events_of((await http.post("/v1/responses", json=given | {"stream": True})).text)
        async with client.responses.stream(model="model", input="hi", tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            joined = await stream.get_final_response()
    for output in (found["output"], events[-1]["response"]["output"], [item.to_dict() for item in joined.output]):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
        assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and output[0]["summary"] == []
        assert output[1]["content"][0]["text"] == "So."
        assert [(call["name"], json.loads(call["arguments"])) for call in output[2:]] == 2 * [
            ("weather", {"city": "Rome"})
        ]
        assert len({call["call_id"] for call in output[2:]}) == 2
    assert found["output"][0]["encrypted_content"] and "encrypted_content" not in joined.output[0].to_dict()
    assert kinds.count("response.function_call_arguments.done") == 2 and "response.reasoning_text.delta" in kinds
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == 2 * '{"city": "Rome"}'


async def test_a_function_of_a_namespace_is_called_within_it_and_web_search_is_left_out(tmp_path: Path) -> None:
    """As Codex has them."""
    prefill, decode = pair(in_turn(f"So.{CALL.replace('weather', 'sky__weather')}", "It is warm."), STOP)
    sky = {"type": "namespace", "name": "sky", "description": "Of the sky", "tools": [WEATHER]}
    tools = [sky, {"type": "web_search", "external_web_access": False}]
    async with serving(tmp_path, (prefill, decode), chat_template=TEMPLATE) as (_, http):
        first = checked(await http.post("/v1/responses", json=body(tools=tools)))
        called = first["output"][1]
        items = [{"role": "user", "content": "hi"}, called, {"call_id": called["call_id"], **RESULT}]
        checked(await http.post("/v1/responses", json=body(items, tools=tools)))
    assert (called["namespace"], called["name"]) == ("sky", "weather")
    assert [tool["name"] for tool in first["tools"]] == ["sky"]
    assert '{"name": "sky__weather"' in TOKENIZER.decode(list(decode.admits[1].prompt_token_ids))


async def test_a_conversation_goes_on_from_what_is_kept(tmp_path: Path) -> None:
    prefill, decode = pair(in_turn(f"hm</think>So.{CALL}", "x</think>It is warm.", "y</think>Bye.", "z</think>."), STOP)
    async with serving(tmp_path, (prefill, decode), chat_template=THINKS) as (router, _), sdk(router) as client:
        first = await client.responses.create(model="model", input="hi", tools=[WEATHER], instructions="Be brief")
        call: Any = first.output[2]
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"}]
        second = await client.responses.create(
            model="model", input=result, previous_response_id=first.id, tools=[WEATHER]
        )
        third = await client.responses.create(model="model", input="Thanks", previous_response_id=second.id)
        assert (second.output_text, third.output_text, third.previous_response_id) == (
            "It is warm.",
            "Bye.",
            second.id,
        )
        read = await client.responses.retrieve(second.id)
        assert read == second
        items = await client.responses.input_items.list(second.id)
        assert [item.type for item in items.data] == ["function_call_output"]
        again: Any = [{"type": "item_reference", "id": first.output[1].id}, {"role": "user", "content": "?"}]
        await client.responses.create(model="model", input=again)
        prompts = ["".join(map(text_of, admit.prompt_token_ids)) for admit in decode.admits]
        turn = "<user>hi<assistant><think>hm</think>So."
        assert prompts[0] == "<system>Be brief<user>hi<assistant><think>"
        assert prompts[1].startswith(turn) and prompts[1].endswith(f"{CALL}<tool>warm<assistant><think>")
        assert prompts[2].startswith(prompts[1] + "x</think>It is warm.<user>Thanks")
        assert prompts[3].startswith("<assistant>So.<user>?")
        sessions = [admit.session_id for admit in decode.admits] if hasattr(decode.admits[0], "session_id") else []
        assert len(set(sessions)) <= 2
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not kept any more") as error:
            await client.responses.create(model="model", input="?", previous_response_id=second.id)
        assert error.value.param == "previous_response_id"


async def test_a_response_in_the_background_is_polled_streamed_again_and_cancelled(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with serving(tmp_path, (prefill, decode)) as (router, http), sdk(router) as client:
        begun = await client.responses.create(model="model", input="hi", background=True, stream=True)
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")), phase(key, TRANSFER))
        seen = []
        async for event in begun:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await begun.close()  # which does not end it
        response_id = seen[0].response.id
        assert (await client.responses.retrieve(response_id)).status == "in_progress"
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("bc"), finish_reason=STOP))
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert seen[-1].type == "response.completed" and seen[-1].response.output_text == "abc"
        done = await client.responses.retrieve(response_id)
        assert done == seen[-1].response and (await client.responses.cancel(response_id)) == done

        second = await client.responses.create(model="model", input="hi", background=True)
        assert second.status == "queued"
        key = (await prefill.next_admit()).key
        cancelled = await client.responses.cancel(second.id)
        assert cancelled.status == "cancelled" and (await prefill.next_cancel()).key == key
        checked(await http.get(f"/v1/responses/{second.id}"))
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.responses.create(model="model", input="hi", background=True, temperature=9)


async def test_a_response_goes_on_at_another_router(tmp_path: Path) -> None:
    """The first one ends in the middle of it."""
    store, workers = MemoryStore(), pair()
    prefill = workers[0]
    for name in "ab":
        (tmp_path / name).mkdir()
    shared = {"store": store, "batch_store": str(tmp_path / "batches.db")}
    async with serving(tmp_path / "a", workers, **shared) as (router, _):
        async with sdk(router) as client:
            begun = await client.responses.create(model="model", input="hi", background=True)
            key = (await prefill.next_admit()).key
            prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")), phase(key, TRANSFER))
            stream = await client.responses.retrieve(begun.id, stream=True)
            seen = []
            async for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
        async with serving(tmp_path / "b", workers, **shared) as (other, _), sdk(other) as client:
            await router.server.stop()
            after = seen[-1].sequence_number
            follow = asyncio.create_task(client.responses.retrieve(begun.id, stream=True, starting_after=after))
            key = (await prefill.next_admit()).key
            prefill.emit(phase(key, PREFILL), tokens(key, 1, ids("b"), finish_reason=STOP))
            seen += [event async for event in await follow]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == "ab"


async def test_another_tenants_response_is_not_there(tmp_path: Path) -> None:
    keys = [ApiKey(name, digest_of(f"baton-{name}"), name, ("generate",)) for name in ("acme", "other")]
    (tmp_path / "keys.yaml").write_text(render_keys(tuple(keys)))
    workers = pair(lambda _: [ids("yes")], STOP)
    async with serving(tmp_path, workers, keys_file=str(tmp_path / "keys.yaml")) as (router, http):
        async with sdk(router, "baton-acme") as mine:
            kept = await mine.responses.create(model="model", input="hi")
            gone = await mine.responses.create(model="model", input="hi", store=False)
            assert not gone.to_dict()["store"]
            with pytest.raises(openai.NotFoundError):
                await mine.responses.retrieve(gone.id)
            assert await mine.responses.retrieve(kept.id) == kept
        async with sdk(router, "baton-other") as others:
            for call in (
                others.responses.retrieve(kept.id),
                others.responses.retrieve(kept.id, stream=True),
                others.responses.delete(kept.id),
                others.responses.cancel(kept.id),
                others.responses.input_items.list(kept.id),
                others.responses.create(model="model", input="a", previous_response_id=kept.id),
                others.responses.create(model="model", input=[{"type": "item_reference", "id": kept.output[0].id}]),
            ):
                with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as error:
                    await call
                assert "yes" not in str(error.value)
        assert (await http.get(f"/v1/responses/{kept.id}")).status_code == 401


async def test_an_output_follows_a_schema_and_is_parsed(tmp_path: Path) -> None:
    class Weather(BaseModel):
        city: str

    prefill, decode = pair(lambda _: [ids('{"city": "Rome"}')], STOP)
    async with serving(tmp_path, (prefill, decode)) as (router, _), sdk(router) as client:
        answer = await client.responses.parse(model="model", input="hi", text_format=Weather)
        assert answer.output_parsed == Weather(city="Rome")
    assert json.loads(decode.admits[0].sampling.grammar)


async def test_logprobs_are_told_with_their_text(tmp_path: Path) -> None:
    def answered(worker: FakeWorker, admit: Any) -> None:
        if worker.role == worker_pb2.ROLE_PREFILL:
            top = [pb.TokenAlternative(token_id=ids("b")[0], logprob=-2.0)]
            logprob = pb.TokenLogprob(token_id=ids("a")[0], logprob=-0.5, rank=1, top=top)
            reply = tokens(admit.key, 0, ids("a"), logprobs=[logprob], finish_reason=STOP)
            worker.emit(phase(admit.key, PREFILL), reply)

    workers = tuple(FakeWorker(w.worker_id, w.role, answered) for w in pair())
    async with serving(tmp_path, workers) as (_, http):
        given = body(include=["message.output_text.logprobs"], top_logprobs=1)
        found = checked(await http.post("/v1/responses", json=given))
        events = events_of((await http.post("/v1/responses", json=given | {"stream": True})).text)
    wanted = {"token": "a", "logprob": -0.5, "bytes": [97]}
    wanted["top_logprobs"] = [{"token": "b", "logprob": -2.0, "bytes": [98]}]
    assert found["output"][0]["content"][0]["logprobs"] == [wanted]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[wanted]]


async def test_truncation_leaves_out_the_oldest_items(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("yes")], STOP)
    items = [{"role": "user", "content": f"{number}" * 30} for number in range(9)]
    async with serving(tmp_path, (prefill, decode)) as (_, http):
        refused = await http.post("/v1/responses", json=body(items))
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        given = body(items, truncation="auto", instructions="Be brief", max_output_tokens=100)
        found = checked(await http.post("/v1/responses", json=given))
        listed = (await http.get(f"/v1/responses/{found['id']}/input_items?order=asc&limit=4")).json()
        after = f"/v1/responses/{found['id']}/input_items?order=asc&after={listed['last_id']}"
        rest = (await http.get(after)).json()
    prompt = "".join(map(text_of, decode.admits[0].prompt_token_ids))
    assert prompt.startswith("<system>Be brief<user>6666") and len(prompt) <= MAX_MODEL_LEN - 100
    assert (len(listed["data"]), listed["has_more"], len(rest["data"]), rest["has_more"]) == (4, True, 5, False)
    ResponseItemList.model_validate(listed)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "web_search"}, {"type": "file_search"}]}, "tools[1].type"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [WEATHER | {"name": 5}]}]}, "tools[0].tools[0].name"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"temperature": 9, "stream": True}, "temperature"),
    ({"temperature": 9}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 999, "stream": True}, "max_output_tokens"),
    ({"include": ["everything"]}, "include[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": []}, "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True, "store": False}, "store"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"model": "gpt"}, "model"),
]


async def test_what_is_wrong_is_refused_by_its_name(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("yes")])) as (_, http):
        for fields, param in WRONG:
            answer = await http.post("/v1/responses", json=body() | fields)
            assert answer.status_code in (400, 404), fields
            assert answer.json()["error"]["param"] == param, answer.text
        many = await http.post("/v1/responses", json=body(input=[{"role": "user", "content": "hi"}] * 2049))
        assert many.json()["error"]["message"].startswith("input: at most 2048 items are allowed (got 2049)")


async def test_responses_are_answered_where_none_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("yes")]), batch_store="") as (_, http):
        assert not checked(await http.post("/v1/responses", json=body()))["store"]
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            answer = await http.post("/v1/responses", json=body(**fields))
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(fields))
        assert (await http.get("/v1/responses/resp_1")).status_code == 400


def in_turn(*texts: str) -> Any:
    """The answers to requests, in the order in which they come."""
    answers: dict[str, str] = {}
    left = iter(texts)

    def outputs(admit: Any) -> list[list[int]]:
        request_id = admit.key.request_id
        if request_id not in answers:
            answers[request_id] = next(left)
        return [ids(answers[request_id])]

    return outputs


def text_of(token_id: int) -> str:
    return str(TOKENIZER.decode([token_id]))
