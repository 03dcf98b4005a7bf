"""LangChain's chat model for OpenAI's API, as others ask of it: see `asked`."""

from __future__ import annotations

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
    told_error,
)
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI


def chat_model(base_url: str, model: str, **more: Any) -> ChatOpenAI:
    given: Any = {"temperature": 0, "max_tokens": NUM_TOKENS, "timeout": TIMEOUT_S, "max_retries": 0, **more}
    return ChatOpenAI(base_url=base_url, model=model, api_key="none", **given)


def told_message(message: Any) -> Told:
    assert isinstance(message, AIMessage) and message.usage_metadata is not None
    usage = message.usage_metadata
    reason = message.response_metadata["finish_reason"]
    return told(str(message.content), reason, usage["input_tokens"], usage["output_tokens"])


def told_chunks(chunks: list[Any]) -> Told:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return told_message(whole) | {"num_chunks": len(chunks)}


def chat(base_url: str, model: str) -> Told:
    return told_message(chat_model(base_url, model).invoke(MESSAGES))


async def async_chat(base_url: str, model: str) -> Told:
    return told_message(await chat_model(base_url, model).ainvoke(MESSAGES))


def stream(base_url: str, model: str) -> Told:
    return told_chunks(list(chat_model(base_url, model, stream_usage=True).stream(MESSAGES)))


async def async_stream(base_url: str, model: str) -> Told:
    chunks = chat_model(base_url, model, stream_usage=True).astream(MESSAGES)
    return told_chunks([chunk async for chunk in chunks])


def stop(base_url: str, model: str) -> Told:
    return told_message(chat_model(base_url, model).invoke(MESSAGES, stop=["\n"]))


def error(base_url: str, model: str) -> Told:
    try:
        chat_model(base_url, model, temperature=WRONG_TEMPERATURE).invoke(MESSAGES)
    except openai.BadRequestError as refusal:
        return told_error(refusal)
    return {}


async def async_error(base_url: str, model: str) -> Told:
    try:
        await chat_model(base_url, model, temperature=WRONG_TEMPERATURE).ainvoke(MESSAGES)
    except openai.BadRequestError as refusal:
        return told_error(refusal)
    return {}


def retry(base_url: str, model: str) -> Told:
    return told_message(chat_model(base_url, model, max_retries=TRIES).invoke(MESSAGES))


async def async_retry(base_url: str, model: str) -> Told:
    return told_message(await chat_model(base_url, model, max_retries=TRIES).ainvoke(MESSAGES))


def structured(base_url: str, model: str) -> Told:
    chain = chat_model(base_url, model, **MERRY).with_structured_output(SCHEMA, method="json_schema", strict=True)
    return {"parsed": chain.invoke(MESSAGES)}


if __name__ == "__main__":
    answer_asked(chat, async_chat, stream, async_stream, stop, error, async_error, retry, async_retry, structured)
