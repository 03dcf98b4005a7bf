"""Requests that ask for far more work than their bytes should: each is refused, by name, for what a good one costs."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_worker import pair
from http_door import chat, sdk, serving
from router_harness import ids, refusal, running_router

from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from router.api.call import MOST_MESSAGES
from router.api.service import MOST_CANCELLED
from router.api.violations import MOST_FOUND
from router.openai.bodies import MOST_LEVELS, ChatBody, CompletionBody, read_json
from router.openai.errors import failure_of
from router.openai.generating import BodyKind, CompletionCall
from router.openai.http import json_of

BODY_BYTES = 300_000
LARGEST_ANSWER = 1500
SLOWER = 8
"""How many times the processor time of a good body a wrong one may cost. It was 300 times."""
DIGITS = "9" * 5000

WRONG: dict[str, tuple[str, str, str]] = {
    "prompts that are objects": ('{"model": "m", "prompt": [%s]}', "{}", "prompt"),
    "prompts that are lists of texts": ('{"model": "m", "prompt": [%s]}', '["a", "b"]', "prompt"),
    "too many prompts": ('{"model": "m", "prompt": [%s]}', "[1]", "prompt"),
    "a prompt of negative ids": ('{"model": "m", "prompt": [[%s]]}', "-1", "prompt[0]"),
    "too many messages": ('{"model": "m", "messages": [%s]}', '{"role": "user"}', "messages"),
    "messages that are numbers": ('{"model": "m", "messages": [%s]}', "1", "messages"),
    "messages full of values": (
        '{"model": "m", "messages": [{"role": "user", "content": [%s]}]}',
        "[]",
        "messages[0]",
    ),
    "tools that are lists": ('{"model": "m", "messages": [{"role": "user"}], "tools": [%s]}', "[]", "tools"),
    "stops that are numbers": ('{"model": "m", "prompt": "a", "stop": [%s]}', "1", "stop"),
    "biases that are texts": ('{"model": "m", "prompt": "a", "logit_bias": {%s}}', '"%d": ""', "logit_bias"),
    "too many biases": ('{"model": "m", "prompt": "a", "logit_bias": {%s}}', '"%d": 1', "logit_bias"),
    "unknown fields": ('{"model": "m", "prompt": "a", %s}', '"x%d": 1', "body"),
    "unknown fields within": ('{"model": "m", "prompt": "a", "stream_options": {%s}}', '"x%d": 1', "stream_options"),
    "choices that are numbers": (
        '{"model": "m", "prompt": "a", "structured_outputs": {"choice": [%s]}}',
        "1",
        "structured_outputs.choice[0]",
    ),
}


def filled(frame: str, entry: str, size: int) -> bytes:
    """The frame around as many entries as make `size` bytes."""
    entries: list[str] = []
    left = size - len(frame)
    while left > 0:
        entries.append(entry % len(entries) if "%d" in entry else entry)
        left -= len(entries[-1]) + 1
    return frame.replace("%s", ",".join(entries)).encode()


def kind_of(body: bytes) -> BodyKind:
    return ChatBody if b'"messages"' in body[:100] else CompletionBody


def read(body: bytes) -> CompletionCall:
    return CompletionCall.read(json_of(body), kind_of(body), "id", lambda _: b"")


def cost_of(work: Callable[[], object]) -> float:
    """Processor time of the quickest of three."""

    def once() -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    gc.disable()  # which takes as long as there are objects of other tests
    try:
        return min(once() for _ in range(3))
    finally:
        gc.enable()


def refused(body: bytes) -> BatonError:
    with pytest.raises(BatonError) as error:
        read(body)
    return error.value


@pytest.mark.parametrize("shape", WRONG)
def test_a_wrong_body_is_refused_by_name_and_costs_what_a_good_one_does(shape: str) -> None:
    frame, entry, param = WRONG[shape]
    good = filled('{"model": "m", "prompt": [%s]}', "7", BODY_BYTES)
    body = filled(frame, entry, BODY_BYTES)
    error = refused(body)
    failure = failure_of(error)
    assert (failure.status, failure.body["error"]["param"]) == (400, param)
    assert len(error.violations) <= MOST_FOUND
    assert len(json.dumps(failure.body)) < LARGEST_ANSWER
    assert cost_of(lambda: refused(body)) < SLOWER * cost_of(lambda: read(good))


def test_a_good_body_may_be_as_long_as_it_was() -> None:
    frame = '{"model": "m", "prompt": [%s]}'
    assert len(read(filled(frame, "7", BODY_BYTES)).specs[0].token_ids.ids) == (BODY_BYTES - len(frame)) // 2
    message = '{"role": "user", "content": "%s"}' % ("a" * 1000)
    assert (
        len(read(filled('{"model": "m", "messages": [%s]}', message, BODY_BYTES)).specs[0].chat.json)
        > BODY_BYTES - 1000
    )


NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {DIGITS: 1.0}}, "logit_bias"),
    ({"logit_bias": {"-" + DIGITS: 1.0}}, "logit_bias"),
    ({"logit_bias": {"١": 1.0}}, "logit_bias"),
    ({"logit_bias": {"1": math.inf}}, "logit_bias[1]"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias.1"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"seed": -(10**4299)}, "seed"),
    ({"seed": 10**4299}, "seed"),
    ({"n": 10**4299}, "n"),
    ({"priority": -(10**4299)}, "priority"),
    ({"stop_token_ids": [10**4299]}, "stop_token_ids"),
    ({"messages": [{"role": "user", "content": 10**400}]}, "messages[0]"),
    ({"chat_template_kwargs": {"a": [-(10**400)]}}, "chat_template_kwargs"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 10**400}}}]}, "tools[0]"),
]


async def test_a_number_of_any_length_is_refused_by_name(tmp_path: Path) -> None:
    """A bias for a token of 5,000 digits was a fault of ours, and so was a number in a message that no float holds."""
    async with serving(tmp_path, pair()) as (_, http):
        for fields, param in NUMBERS:
            answer = await http.post("/v1/chat/completions", content=json.dumps(chat() | fields))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert len(answer.content) < LARGEST_ANSWER
        for prompt in ([10**4299], [[1], [10**4299]]):
            answer = await http.post("/v1/completions", content=json.dumps({"model": "model", "prompt": prompt}))
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prompt")
        for path, fields in (("/tokenize", chat()), ("/detokenize", {"tokens": [10**4299]})):
            sent = {"model": "model", **fields}
            sent.get("messages", [{}])[0]["deep"] = 10**400
            answer = await http.post(path, content=json.dumps(sent))
            assert answer.status_code == 400, answer.text
        for text in (
            '{"n": ' + DIGITS + "}",
            '{"n": 1e999999999}',
            "[" * 100_000,
            '{"a":' * 100_000,
            '{"model": "\\ud800"}',
        ):
            answer = await http.post("/v1/completions", content=text)
            assert answer.status_code == 400, text[:20]


def nested(levels: int) -> str:
    return '{"type":"object","a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


async def test_what_nests_too_deep_is_known_before_it_is_parsed(tmp_path: Path) -> None:
    """What could just be read could not be written as JSON again."""
    async with serving(tmp_path, pair(lambda _: [ids("ok")])) as (_, http):
        for levels in (200, MOST_LEVELS, 300, *range(880, 1000, 7), 100_000):
            body = '{"model": "model", "prompt": "a", "structured_outputs": {"json": ' + nested(levels - 2) + "}}"
            answer = await http.post("/v1/completions", content=body)
            assert answer.status_code in ((200, 400) if levels <= MOST_LEVELS else (400,)), levels
            assert ("nests deeper than 256 levels" in answer.text) is (levels > MOST_LEVELS), levels
        text = "[" * 1000 + '\\"' + "{" * 1000
        answer = await http.post("/v1/completions", content='{"model": "model", "prompt": "a", "user": "' + text + '"}')
        assert answer.status_code == 200, "brackets in a text nest nothing"


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000, '"' + "\\" * 999_999, "[" * 1_000_000, '["",' * 300_000])
def test_a_look_at_how_deep_it_nests_takes_no_longer_than_its_length(text: str) -> None:
    data = b"[" * (MOST_LEVELS + 1) + text.encode()

    def refuse() -> None:
        with pytest.raises(ValueError):
            read_json(data)

    assert cost_of(refuse) < 2.0, "a square of its length would take an hour"


HEAD = b'--x\r\ncontent-disposition: form-data; name="file"; filename="%s"\r\n\r\n{}\r\n'
REST = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'


async def test_a_file_name_in_any_charset_is_taken_or_refused(tmp_path: Path) -> None:
    """UTF-7 writes half of a surrogate pair, and one of Python's codecs refuses every text."""
    async with serving(tmp_path, ()) as (router, http), sdk(router) as client:
        for charset, name, status in (("utf-7", b"+2AA-", 200), ("undefined", b"a", 400), ("no-such", b"a", 200)):
            given = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
            answer = await http.post("/v1/files", content=HEAD % name + REST, headers=given)
            assert answer.status_code == status, (charset, answer.text)
        assert [file.filename async for file in client.files.list()] == ["a", "?"]
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve("file-+2AA-")


async def test_lists_over_grpc_have_bounds(tmp_path: Path) -> None:
    async with running_router(tmp_path / "model") as router:
        many = pb.CancelGenerationRequest(generation_ids=["gen"] * (MOST_CANCELLED + 1))
        error = await refusal(router.generation.CancelGeneration(many))
        assert error.violations[0].field == "generation_ids" and "at most 256 ids" in error.message
        talk = pb.ChatInput()
        for _ in range(MOST_MESSAGES + 1):
            talk.messages.add()["role"] = ""
        for call, request, field in (
            (router.generation.Tokenize, pb.TokenizeRequest(chat=talk), "chat.messages"),
            (router.generation.Generate, pb.GenerateRequest(spec=pb.GenerationSpec(chat=talk)), "spec.chat.messages"),
        ):
            error = await refusal(call(request))
            assert [v.field for v in error.violations] == [field] and "at most 2048 messages" in error.message
        del talk.messages[-1]
        error = await refusal(router.generation.Tokenize(pb.TokenizeRequest(chat=talk)))
        assert "(and 19 more)" in error.message
