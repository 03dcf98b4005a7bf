"""The OpenAI API over real sockets and two fake workers: what OpenAI's own client sees, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_worker import PREFILL, STOP, FakeWorker, pair, phase, tokens
from http_door import chat, sdk, serving
from router_harness import MAX_MODEL_LEN, ids

from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.openai.bodies import IGNORED, ChatBody, CompletionBody

pytestmark = pytest.mark.asyncio


async def test_a_completion_is_what_the_same_request_over_grpc_is(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("world!")])
    async with serving(tmp_path, (prefill, decode)) as (router, _), sdk(router) as client:
        answer = await client.completions.create(model="model", prompt="hello", max_tokens=6, temperature=0, seed=-5)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("world!", "length", 0, None)
    assert answer.object == "text_completion" and answer.model == "model" and answer.id.startswith("cmpl-")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 0
    sampling = decode.admits[0].sampling
    assert (sampling.stopping.max_output_tokens, sampling.params.temperature, sampling.params.seed) == (
        6,
        0.0,
        2**64 - 5,
    )


async def test_a_chat_goes_through_the_models_template(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("yes")])
    async with serving(tmp_path, (prefill, decode)) as (router, _), sdk(router) as client:
        parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        answer = await client.chat.completions.create(model="model", messages=[{"role": "user", "content": parts}])
    message = answer.choices[0].message
    assert (message.role, message.content, answer.object) == ("assistant", "yes", "chat.completion")
    assert list(decode.admits[0].prompt_token_ids or prefill.admits[0].prompt_token_ids) == ids("<user>ab<assistant>")


async def test_prompts_of_one_call_are_answered_one_after_another(tmp_path: Path) -> None:
    workers = pair(lambda admit: [ids("x")] * admit.sampling.params.n)
    async with serving(tmp_path, workers) as (router, _), sdk(router) as client:
        answer = await client.completions.create(model="model", prompt=["a", "bc"], n=2)
        whole = await client.completions.create(model="model", prompt=[5, 6, 7])
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 4
    assert whole.usage is not None and whole.usage.prompt_tokens == 3


async def test_a_stream_tells_text_and_reasons_and_usage_if_asked(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("one"), ids("second")])) as (router, _), sdk(router) as client:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "hi"}], n=2, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    for index, text in enumerate(("one", "second")):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and [c.delta.role for c in mine[1:]] == [None] * (len(mine) - 1)
        assert "".join(c.delta.content or "" for c in mine) == text
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
    assert not chunks[-1].choices and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_wire_of_a_stream_is_server_sent_events_to_the_last_line(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("é!")])) as (_, http):
        body = {"model": "model", "prompt": "a", "stream": True}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "mine"
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2]]
    assert "".join(texts) == "é!"


async def test_logprobs_name_tokens_by_their_text(tmp_path: Path) -> None:
    def answered(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        if worker.role == worker_pb2.ROLE_PREFILL:
            top = [pb.TokenAlternative(token_id=ids("b")[0], logprob=-2.0)]
            logprob = pb.TokenLogprob(token_id=ids("a")[0], logprob=-0.5, rank=1, top=top)
            reply = tokens(admit.key, 0, ids("a"), logprobs=[logprob], finish_reason=STOP)
            worker.emit(phase(admit.key, PREFILL), reply)

    workers = tuple(FakeWorker(w.worker_id, w.role, answered) for w in pair())
    async with serving(tmp_path, workers) as (router, _), sdk(router) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        said = await client.chat.completions.create(model="model", messages=messages, logprobs=True, top_logprobs=1)
        text = await client.completions.create(model="model", prompt="hi", logprobs=1)
    reply = said.choices[0].logprobs
    assert reply is not None and reply.content is not None
    assert [(t.token, t.bytes, t.logprob, t.top_logprobs[0].token) for t in reply.content] == [("a", [97], -0.5, "b")]
    other = text.choices[0].logprobs
    assert other is not None and (other.tokens, other.token_logprobs, other.text_offset) == (["a"], [-0.5], [0])
    assert other.top_logprobs == [{"a": -0.5, "b": -2.0}], "the chosen token is among them, likely or not"
    assert said.choices[0].finish_reason == "stop"


async def test_offsets_of_a_stream_go_on_where_they_were(tmp_path: Path) -> None:
    def answered(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        logprobs = [pb.TokenLogprob(token_id=token, logprob=-0.5) for token in ids("abc")]
        if worker.role == worker_pb2.ROLE_PREFILL:
            worker.emit(phase(admit.key, PREFILL), tokens(admit.key, 0, ids("a"), logprobs=logprobs[:1]))
        else:
            worker.emit(tokens(admit.key, 1, ids("bc"), logprobs=logprobs[1:], finish_reason=STOP))

    workers = tuple(FakeWorker(w.worker_id, w.role, answered) for w in pair())
    async with serving(tmp_path, workers) as (router, _), sdk(router) as client:
        stream = await client.completions.create(model="model", prompt="hi", logprobs=0, stream=True)
        reply = [chunk.choices[0].logprobs async for chunk in stream]
    offsets = [offset for each in reply if each is not None for offset in each.text_offset or ()]
    assert offsets == [0, 1, 2]


async def test_who_leaves_or_stops_in_the_middle_of_a_body_is_no_fault_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, pair(), stalled_client_timeout_s=0.3) as (router, http):
        host, _, port = router.server.http_address.partition(":")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{"
        for sent in (head, b"\x16\x03\x01 no HTTP at all\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        assert (await http.get("/healthz")).status_code == 200
    assert not [record for record in caplog.records if record.name.startswith(("router", "uvicorn"))]


async def test_errors_are_those_that_the_sdk_knows(tmp_path: Path) -> None:
    async with serving(tmp_path, pair()) as (router, http), sdk(router) as client:
        with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here") as unknown:
            await client.completions.create(model="gpt", prompt="a")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(model="model", prompt="a" * MAX_MODEL_LEN)
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="model", input="a")
        assert (await http.get("/v1/completions")).status_code == 405


async def test_who_cannot_be_taken_on_is_told_when_to_try_again(tmp_path: Path) -> None:
    workers = pair()
    async with serving(tmp_path, workers, max_running_requests=1, max_queued_requests=0) as (router, http):
        first = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await workers[0].next_admit()
        answer = await http.post("/v1/chat/completions", json=chat(stream=True))
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        async with sdk(router) as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="model", prompt="a")
            again = asyncio.create_task(
                client.with_options(max_retries=9).completions.create(model="model", prompt="a")
            )
            refused = router.server.dispatcher.counters.refused
            before = refused.total()
            async with asyncio.timeout(20):
                while refused.total() == before:
                    await asyncio.sleep(0)
            first.cancel()
            key = (await workers[0].next_admit()).key
            workers[0].emit(phase(key, PREFILL), tokens(key, 0, ids("b"), finish_reason=STOP))
            assert (await again).choices[0].text == "b"


async def test_a_client_that_hangs_up_ends_its_generation(tmp_path: Path) -> None:
    for is_streaming in (False, True):
        prefill, decode = pair()
        async with serving(tmp_path, (prefill, decode)) as (_, http):
            call = asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=is_streaming)))
            admit = await prefill.next_admit()
            call.cancel()
            cancel = await asyncio.wait_for(prefill.next_cancel(), 10)
            assert cancel.key == admit.key


async def test_what_fails_in_the_middle_of_a_stream_is_an_error_in_it(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with serving(tmp_path, (prefill, decode)) as (router, _), sdk(router) as client:
        stream = await asyncio.gather(
            client.completions.create(model="model", prompt="a", stream=True), _first_token(prefill, decode)
        )
        with pytest.raises(openai.APIError, match="the router is shutting down"):
            await router.server.dispatcher.drain(0.0)
            async for _ in stream[0]:
                continue


async def _first_token(prefill: FakeWorker, decode: FakeWorker) -> None:
    key = (await prefill.next_admit()).key
    await decode.next_admit()
    prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")))


async def test_keys_open_what_their_scopes_say(tmp_path: Path) -> None:
    keys = (
        ApiKey("alice", digest_of("baton-a"), "acme", ("generate",)),
        ApiKey("op", digest_of("baton-o"), "o", ("admin",)),
    )
    (tmp_path / "keys.yaml").write_text(render_keys(keys))
    workers = pair(lambda _: [ids("ok")])
    async with serving(tmp_path, workers, keys_file=str(tmp_path / "keys.yaml")) as (router, http):
        async with sdk(router, "baton-a") as client:
            assert (await client.completions.create(model="model", prompt="a")).choices[0].text == "ok"
            assert [model.id async for model in client.models.list()] == ["model"]
        async with sdk(router, "baton-x") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="model", prompt="a")
        async with sdk(router, "baton-o") as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.models.list()
        assert (await http.get("/metrics")).status_code == 401
        operator = await http.get("/metrics", headers={"authorization": "Bearer baton-o"})
        assert "baton_" in operator.text
        by_name = await http.get("/v1/models", headers={"x-api-key": "baton-a", "x-request-id": "mine"})
        assert (by_name.status_code, by_name.headers["request-id"]) == (200, "mine")
        both = {"x-api-key": "baton-a", "authorization": "Bearer baton-x"}
        assert (await http.get("/v1/models", headers=both)).status_code == 401, "authorization comes first"
        assert (await http.get("/healthz")).status_code == (await http.get("/readyz")).status_code == 200


async def test_machines_can_ask_whether_it_lives_serves_and_what_it_takes(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (_, http):
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert (await http.get("/readyz")).status_code == 503
        assert set((await http.get("/version")).json()) == {"version"}
        reply = (await http.get("/openapi.json")).json()
        assert "/v1/chat/completions" in reply["paths"] and "ChatBody" in reply["components"]["schemas"]
        model = (await http.get("/v1/models/model")).json()
        assert (model["id"], model["max_model_len"]) == ("model", MAX_MODEL_LEN)


async def test_tokens_and_text_become_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (_, http):
        reply = (await http.post("/tokenize", json={"prompt": "abc"})).json()
        assert reply == {"tokens": ids("abc"), "count": 3, "max_model_len": MAX_MODEL_LEN}
        said = await http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
        assert said.json()["tokens"] == ids("<user>a<assistant>")
        wrong = (await http.post("/tokenize", json={"messages": [{"content": "a"}]})).json()["error"]
        assert wrong["param"] == "messages[0].role" and wrong["message"].startswith("messages[0].role: must be")
        assert (await http.post("/detokenize", json={"tokens": ids("abc")})).json() == {"prompt": "abc"}
        nothing = {"role": "assistant", "content": None, "tool_calls": []}
        said = await http.post("/tokenize", json={"messages": [nothing]})
        assert said.json()["tokens"] == ids("<assistant><assistant>"), "null is no text, not the word None"
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [999]}, "tokens"),
            ("/v1/completions", {"model": "", "prompt": [[]]}, "prompt"),
            ("/v1/completions", {"model": "", "prompt": [999]}, "prompt"),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_fields_without_effect_are_taken_and_others_of_other_servers_have_theirs(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("ab")])
    async with serving(tmp_path, (prefill, decode)) as (_, http):
        body = chat(user="me", metadata={"a": "b"}, store=False, top_k=3, min_tokens=1, stop_token_ids=[9], priority=2)
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    sampling = decode.admits[0].sampling
    assert sampling.params.top_k == 3
    stopping = sampling.stopping
    assert (stopping.min_output_tokens, list(stopping.stop_token_ids)) == (1, [0, 9])


async def test_a_stop_string_ends_it_and_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("one. two")])) as (_, http):
        choice = (await http.post("/v1/chat/completions", json=chat(stop="."))).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ".")


@pytest.mark.parametrize(("named", "reason"), [([], None), ([9], 9), ([5], None)])
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_token_that_ends_it_is_named_if_the_client_did(
    tmp_path: Path, named: list[int], reason: int | None, is_streaming: bool
) -> None:
    """The model's own end is no reason that anybody gave: vLLM tells null."""

    def answered(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        if worker.role == worker_pb2.ROLE_PREFILL:
            end = {"finish_reason": STOP, "stop_token_id": 9}
            worker.emit(phase(admit.key, PREFILL), tokens(admit.key, 0, [*ids("a"), 9], **end))

    workers = tuple(FakeWorker(w.worker_id, w.role, answered) for w in pair())
    async with serving(tmp_path, workers) as (router, _), sdk(router) as client:
        given = {"model": "", "prompt": "a", "extra_body": {"stop_token_ids": named}}
        if is_streaming:
            chunks = [chunk async for chunk in await client.completions.create(**given, stream=True)]
            answer, choice = chunks[0], chunks[-1].choices[0]
        else:
            answer = await client.completions.create(**given)
            choice = answer.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)
    assert answer.model == "model", "one that names no model is answered with which it was"


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
async def test_the_docs_name_every_field_that_is_taken(kind: type[CompletionBody] | type[ChatBody]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    taken = text.partition("## Fields")[2].partition("## Answers")[0]
    assert set(re.findall(r"`([a-z_]+)`", taken)) >= set(kind.model_fields)
    without_effect = taken.partition("without effect:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)`", without_effect)) == set(IGNORED)


@pytest.mark.parametrize("prompt", ["hé", [ids("h")[0], *ids("é")]])
async def test_a_prompt_is_repeated_if_asked(tmp_path: Path, prompt: Any) -> None:
    async with (
        serving(tmp_path, pair(lambda admit: [ids("!")] * admit.sampling.params.n)) as (router, _),
        sdk(router) as client,
    ):
        whole = await client.completions.create(model="model", prompt=prompt, echo=True, n=2)
        stream = await client.completions.create(model="model", prompt=prompt, echo=True, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert [choice.text for choice in whole.choices] == ["hé!", "hé!"] and "".join(texts) == "hé!"
