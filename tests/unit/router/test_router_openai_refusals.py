"""What the OpenAI API refuses over HTTP, and how it names what is wrong."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from fake_worker import pair
from http_door import chat, sdk, serving
from router_harness import ids

pytestmark = pytest.mark.asyncio


def nested(depth: int, around: str = "[]", most_deeply: str = "") -> Any:
    return json.loads(around[:-1] * depth + most_deeply + around[-1] * depth)


_DEEP = nested(200)
_FORMAT = "response_format", "response_format: cannot be followed"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 3.0}, "temperature", "temperature: must be between 0 and 2 (got 3)"),
    ({"temperature": "hot"}, "temperature", "temperature: should be a valid number"),
    ({"tempreature": 1.0}, "tempreature", "tempreature: is not a field that is known here; leave it out"),
    ({"model": None}, "model", "model: should be a valid string"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: must be at least 1 (got 0)"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens: must be from 0 to"),
    ({"n": 1.5}, "n", "n: should be a valid integer"),
    ({"stop": ["a"] * 17}, "stop", "stop: at most 16 stop strings are allowed (got 17)"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: needs logprobs: true"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias", "logit_bias: keys must be token ids (got 'x')"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: needs stream: true"),
    ({"messages": []}, "messages", "messages: must hold at least one message"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role: must be a string such as `user`"),
    ({"messages": "hello"}, "messages", "messages: should be a valid list"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice: asks for a call, and there are no tools"),
    ({"structured_outputs": {}}, "structured_outputs", "structured_outputs: exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "structured_outputs: exactly one"),
    (
        {"structured_outputs": {"regex": "("}},
        "structured_outputs.regex",
        "structured_outputs.regex: cannot be followed",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format",
        "response_format: cannot be set with structured_outputs",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "response_format.json_schema: must"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}}, *_FORMAT),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json: cannot be followed"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: must be at least 1 (got 0)"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "min_tokens: must be at most max_tokens, 2 (got 3)"),
    ({"messages": [{"role": "user", "content": "a", "deep": _DEEP}]}, "messages[0]", "messages[0]: nests too deep"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"deep": _DEEP}}}]},
        "tools[0]",
        "tools[0]: nests too deep",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[str(sorted(fields)) for fields, _, _ in BAD])
async def test_what_is_wrong_is_named_as_the_client_wrote_it(
    tmp_path: Path, fields: dict[str, Any], param: str, message: str
) -> None:
    async with serving(tmp_path, pair()) as (_, http):
        answer = await http.post("/v1/chat/completions", json=chat() | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(message)


@pytest.mark.parametrize(("around", "within"), [("[]", ""), ('{"a":}', "1")], ids=["lists", "objects"])
async def test_what_nests_is_taken_up_to_a_depth(tmp_path: Path, around: str, within: str) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("ok")])) as (_, http):
        for depth, status in ((31, 200), (32, 400), (45, 400), (99, 400)):
            value = nested(depth, around, within)
            messages = [{"role": "user", "content": "a", "deep": value}]
            for fields in ({"messages": messages}, {"chat_template_kwargs": {"a": value}}):
                answer = await http.post("/v1/chat/completions", json=chat() | fields)
                assert answer.status_code == status, (depth, fields.keys(), answer.text)


async def test_a_body_that_is_no_json_or_too_large_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(), max_message_bytes=5000) as (router, http):
        for content in (b"", b"{", b"\xff\xfe", b"[" * 4000, b'"text"', b"null"):
            answer = await http.post("/v1/completions", content=content)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["message"].startswith("the body "), content
            assert error["param"] is None
        answer = await http.post("/v1/completions", json={"model": "model", "prompt": "a" * 6000})
        assert answer.status_code == 400 and "larger than 5000 bytes" in answer.json()["error"]["message"]
        answer = await http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert answer.status_code == 400 and "is encoded as 'gzip'" in answer.json()["error"]["message"]
        host, port = router.server.http_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5001\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 400")  # nothing of it was sent
        writer.close()


async def test_a_disk_that_is_full_is_503_and_the_next_upload_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, ()) as (router, _), sdk(router) as client:
        with monkeypatch.context() as full:
            error = OSError(errno.ENOSPC, "No space left on device")
            full.setattr("tempfile.SpooledTemporaryFile.write", Mock(side_effect=error))
            with pytest.raises(openai.InternalServerError) as refused:
                await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        assert refused.value.status_code == 503 and refused.value.code == "store_away"
        assert "No space left on device" in caplog.text and "Traceback" not in caplog.text
        assert (await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")).id


async def test_another_site_in_a_browser_has_nothing_computed(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("ok")])) as (_, http):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/files", "/v1/batches", "/tokenize"):
            answer = await http.post(path, content=json.dumps(chat()), headers={"sec-fetch-site": "cross-site"})
            assert answer.status_code == 403, path
            assert answer.json()["error"]["type"] == "permission_error"
        for site in ("none", "same-origin"):
            answer = await http.post("/v1/chat/completions", json=chat(), headers={"sec-fetch-site": site})
            assert answer.status_code == 200
        answer = await http.get("/v1/models", headers={"sec-fetch-site": "cross-site"})
        assert answer.status_code == 200
