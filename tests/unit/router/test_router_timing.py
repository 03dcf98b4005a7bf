"""A request tells why it ran where it did and how long it took, in every dialect, also when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker import PREFILL, FakeWorker, failed, pair, phase, tokens
from http_door import chat, serving
from router_harness import ids, text_spec

from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from cluster.rpc import DETAILS_KEY

pytestmark = pytest.mark.asyncio


async def test_the_timing_of_responses_and_messages_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("abcd")])) as (_, http):
        bodies: dict[str, dict[str, Any]] = {
            "/v1/responses": {"input": "hello", "max_output_tokens": 4},
            "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        }
        for path, fields in bodies.items():
            body = {"model": "model", "timing": True, **fields}
            whole = await http.post(path, json=body)
            stream = await http.post(path, json=body | {"stream": True})
            plain = await http.post(path, json=body | {"timing": False})
            told = whole.json()["timing"]
            assert told["placement"] == whole.headers["x-baton-placement"] and told["decode_ms"] >= 0
            assert "timing" not in plain.json() and "x-baton-placement" not in plain.headers
            datas = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
            last = datas[-1].get("response", datas[-1])
            assert last["timing"]["placement"] and not any("timing" in json.dumps(each) for each in datas[:-1])


async def test_the_timing_that_is_asked_for_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("world!")])) as (_, http):
        whole = await http.post("/v1/completions", json={"model": "model", "prompt": "hello", "timing": True})
        stream = await http.post("/v1/chat/completions", json=chat(timing=True, stream=True))
    told = whole.json()["timing"]
    assert told["placement"] and told["time_to_first_token_ms"] >= told["queue_ms"] >= 0
    assert whole.headers["x-baton-placement"] == told["placement"]
    *chunks, last = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    assert last["choices"] == [] and last["timing"]["placement"] and not any("timing" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
    ],
)
async def test_a_request_that_fails_tells_its_timing_too(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    prefill, decode = pair()
    num_told = 0

    def answer(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        told = [tokens(admit.key, 0, ids("a"))] * num_told
        worker.emit(phase(admit.key, PREFILL), *told, failed(admit.key, worker_pb2.Failed.REASON_INVALID))

    prefill.script = answer
    body: dict[str, Any] = {"model": "model", "timing": True, **fields}
    async with serving(tmp_path, (prefill, decode)) as (router, http):
        whole = await http.post(path, json=body)
        early = await http.post(path, json=body | {"stream": True})
        plain = await http.post(path, json=body | {"timing": False})
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            spec = text_spec("hello", output=pb.OutputOptions(include_timing=True))
            await router.generation.Generate(pb.GenerateRequest(spec=spec))
        num_told = 1
        late = await http.post(path, json=body | {"stream": True})
    has_begun = path != "/v1/completions"  # the other streams begin when the request runs, before its first token
    for answered in (whole,) if has_begun else (whole, early):
        told = answered.json()["timing"]
        assert answered.status_code == 400 and told["placement"] and told["queue_ms"] >= 0
        assert answered.headers["x-baton-placement"] == told["placement"]
    assert "timing" not in plain.json() and "x-baton-placement" not in plain.headers
    for streamed in (early, late) if has_begun else (late,):
        last = json.loads(streamed.text.split("\n\n")[-2].partition("data: ")[2])
        last = last.get("response", last)
        assert last["error"]["message"] and last["timing"]["placement"]
    assert last["timing"]["time_to_first_token_ms"] > 0
    trailers: Any = refusal.value.trailing_metadata()
    assert [b"baton.v1.Timing" in value for name, value in trailers if name == DETAILS_KEY] == [True]
