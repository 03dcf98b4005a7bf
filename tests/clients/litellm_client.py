"""LiteLLM, as others ask of it: see `asked`. It takes Baton for any server that speaks OpenAI's API."""

from __future__ import annotations

import json
import os
from typing import Any

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
    told_chunks,
    told_error,
    told_whole,
)

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read while it is imported: the list of prices stays unfetched

import litellm

GIVEN: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "api_key": "none", "timeout": TIMEOUT_S}
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}


def asking(base_url: str, model: str, **more: Any) -> Any:
    return {**GIVEN, "model": f"openai/{model}", "api_base": base_url, "max_retries": 0, **more}


def chat(base_url: str, model: str) -> Told:
    return told_whole(litellm.completion(**asking(base_url, model)))


async def async_chat(base_url: str, model: str) -> Told:
    return told_whole(await litellm.acompletion(**asking(base_url, model)))


def stream(base_url: str, model: str) -> Told:
    return told_chunks(list(litellm.completion(**asking(base_url, model, **USAGE))))


async def async_stream(base_url: str, model: str) -> Told:
    chunks: Any = await litellm.acompletion(**asking(base_url, model, **USAGE))
    return told_chunks([chunk async for chunk in chunks])


def stop(base_url: str, model: str) -> Told:
    return told_whole(litellm.completion(**asking(base_url, model, stop=["\n"])))


def error(base_url: str, model: str) -> Told:
    try:
        litellm.completion(**asking(base_url, model, temperature=WRONG_TEMPERATURE))
    except litellm.BadRequestError as refusal:
        return told_error(refusal)
    return {}


async def async_error(base_url: str, model: str) -> Told:
    try:
        await litellm.acompletion(**asking(base_url, model, temperature=WRONG_TEMPERATURE))
    except litellm.BadRequestError as refusal:
        return told_error(refusal)
    return {}


def retry(base_url: str, model: str) -> Told:
    return told_whole(litellm.completion(**asking(base_url, model, max_retries=TRIES)))


async def async_retry(base_url: str, model: str) -> Told:
    return told_whole(await litellm.acompletion(**asking(base_url, model, max_retries=TRIES)))


def structured(base_url: str, model: str) -> Told:
    wanted = {"type": "json_schema", "json_schema": {"name": "Line", "schema": SCHEMA, "strict": True}}
    answer: Any = litellm.completion(**asking(base_url, model, response_format=wanted, **MERRY))
    return {"parsed": json.loads(answer.choices[0].message.content)}


if __name__ == "__main__":
    answer_asked(chat, async_chat, stream, async_stream, stop, error, async_error, retry, async_retry, structured)
