"""OpenAI's own client, whole and by `async`, as others ask of it: see `asked`."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from asked import (
    MERRY,
    MESSAGES,
    NUM_TOKENS,
    SCHEMA,
    TIMEOUT_S,
    TRIES,
    WRONG_TEMPERATURE,
    Told,
    answer_asked,
    told,
    told_chunks,
    told_error,
    told_whole,
)

GIVEN: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS}
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}
IS_OVER = ("completed", "failed", "expired", "cancelled")
LOOK_EVERY_S = 0.05


def client(base_url: str, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=max_retries)


def async_client(base_url: str, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=max_retries)


def chat(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        return told_whole(api.chat.completions.create(model=model, **GIVEN))


async def async_chat(base_url: str, model: str) -> Told:
    async with async_client(base_url) as api:
        return told_whole(await api.chat.completions.create(model=model, **GIVEN))


def stream(base_url: str, model: str) -> Told:
    with client(base_url) as api, api.chat.completions.create(model=model, **GIVEN, **USAGE) as chunks:
        return told_chunks(list(chunks))


async def async_stream(base_url: str, model: str) -> Told:
    async with (
        async_client(base_url) as api,
        await api.chat.completions.create(model=model, **GIVEN, **USAGE) as chunks,
    ):
        return told_chunks([chunk async for chunk in chunks])


def stop(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        return told_whole(api.chat.completions.create(model=model, **GIVEN, stop=["\n"]))


def error(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        try:
            api.chat.completions.create(model=model, **GIVEN | {"temperature": WRONG_TEMPERATURE})
        except openai.BadRequestError as refusal:
            return told_error(refusal)
    return {}


async def async_error(base_url: str, model: str) -> Told:
    async with async_client(base_url) as api:
        try:
            await api.chat.completions.create(model=model, **GIVEN | {"temperature": WRONG_TEMPERATURE})
        except openai.BadRequestError as refusal:
            return told_error(refusal)
    return {}


def retry(base_url: str, model: str) -> Told:
    with client(base_url, max_retries=TRIES) as api:
        raw = api.chat.completions.with_raw_response.create(model=model, **GIVEN)
        return told_whole(raw.parse()) | {"retries": raw.retries_taken}


async def async_retry(base_url: str, model: str) -> Told:
    async with async_client(base_url, max_retries=TRIES) as api:
        raw = await api.chat.completions.with_raw_response.create(model=model, **GIVEN)
        return told_whole(raw.parse()) | {"retries": raw.retries_taken}


def refused(base_url: str, model: str) -> Told:
    """Without another try: what the router said."""
    with client(base_url) as api:
        try:
            api.chat.completions.create(model=model, **GIVEN)
        except openai.RateLimitError as refusal:
            return told_error(refusal) | {"headers": dict(refusal.response.headers)}
    return {}


def raw_stream(base_url: str, model: str) -> Told:
    """The chunks as they came, before the client made objects of them."""
    with (
        client(base_url) as api,
        api.chat.completions.with_streaming_response.create(model=model, **GIVEN, **USAGE) as raw,
    ):
        lines = [line for line in raw.iter_lines() if line]
        return {"lines": lines, "content_type": raw.headers["content-type"], "id": raw.headers["x-request-id"]}


def structured(base_url: str, model: str) -> Told:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "Line", "schema": SCHEMA, "strict": True}}
    with client(base_url) as api:
        answer = api.chat.completions.create(model=model, **GIVEN | MERRY, response_format=wanted)
        return {"parsed": json.loads(str(answer.choices[0].message.content))}


TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("say", "sing")
]


def _called(message: Any, finish_reason: str) -> Told:
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    return {"calls": calls, "text": message.content, "finish_reason": finish_reason}


def required(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        answer = api.chat.completions.create(
            model=model, **GIVEN | MERRY, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        return _called(answer.choices[0].message, answer.choices[0].finish_reason)


def named_stream(base_url: str, model: str) -> Told:
    named: Any = {"type": "function", "function": {"name": "sing"}}
    with (
        client(base_url) as api,
        api.chat.completions.stream(model=model, **GIVEN | MERRY, tools=TOOLS, tool_choice=named) as stream,
    ):
        choice = stream.get_final_completion().choices[0]
        return _called(choice.message, choice.finish_reason)


def batch(base_url: str, model: str) -> Told:
    url = "/v1/chat/completions"
    body = {"model": model, **GIVEN}
    line = json.dumps({"custom_id": "one", "method": "POST", "url": url, "body": body}).encode()
    with client(base_url) as api:
        file = api.files.create(file=("lines.jsonl", line), purpose="batch")
        begun = api.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        until = time.monotonic() + TIMEOUT_S
        while (found := api.batches.retrieve(begun.id)).status not in IS_OVER and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)  # the API tells nobody that a batch is over
        if found.output_file_id is None:
            return {"status": found.status}
        answer = json.loads(api.files.content(found.output_file_id).text)["response"]["body"]
    choice, usage = answer["choices"][0], answer["usage"]
    said = told(
        choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
    )
    return said | {"status": found.status}


if __name__ == "__main__":
    answer_asked(
        chat,
        async_chat,
        stream,
        async_stream,
        stop,
        error,
        async_error,
        retry,
        async_retry,
        refused,
        raw_stream,
        structured,
        batch,
        required,
        named_stream,
    )
