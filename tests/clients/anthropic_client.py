"""Anthropic's own client, whole and by `async`, as others ask of it: see `asked`. It validates every answer and every
event, and one with a field that it does not know fails."""

from __future__ import annotations

from typing import Any

import anthropic
import pydantic
from anthropic import beta_tool
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
    checked,
    told,
    told_error,
)
from weather import DESCRIPTION, MOST_TURNS, NAME, PARAMETERS, QUESTION, Weather

GREEDY: Any = {"extra_body": {"temperature": 0}}
GIVEN: Any = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, **GREEDY}
REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
TOOL: Any = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}


def _options(base_url: str, max_retries: int) -> Any:
    return {
        "base_url": base_url.removesuffix("/v1"),
        "api_key": "none",
        "timeout": TIMEOUT_S,
        "max_retries": max_retries,
        "_strict_response_validation": True,
    }


def client(base_url: str, max_retries: int = 0) -> anthropic.Anthropic:
    return anthropic.Anthropic(**_options(base_url, max_retries))


def async_client(base_url: str, max_retries: int = 0) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**_options(base_url, max_retries))


def told_message(message: Any) -> Told:
    usage = checked(message).usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    text = "".join(block.text for block in message.content if block.type == "text")
    return told(text, REASONS[message.stop_reason], prompt, usage.output_tokens)


def chat(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        return told_message(api.messages.create(model=model, **GIVEN))


async def async_chat(base_url: str, model: str) -> Told:
    async with async_client(base_url) as api:
        return told_message(await api.messages.create(model=model, **GIVEN))


def stream(base_url: str, model: str) -> Told:
    with client(base_url) as api, api.messages.stream(model=model, **GIVEN) as events:
        chunks = list(events.text_stream)
        message = events.get_final_message()
    assert "".join(chunks) == message.content[0].text
    return told_message(message) | {"num_chunks": len(chunks)}


async def async_stream(base_url: str, model: str) -> Told:
    async with async_client(base_url) as api:
        events = [checked(event) async for event in await api.messages.create(model=model, **GIVEN, stream=True)]
        async with api.messages.stream(model=model, **GIVEN) as stream:
            message = await stream.get_final_message()
    return told_message(message) | {"num_chunks": len(events)}


def stop(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        message = api.messages.create(model=model, **GIVEN, stop_sequences=["\n"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n")
    return told_message(message)


def error(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        try:
            api.messages.create(model=model, **GIVEN | {"extra_body": {"temperature": WRONG_TEMPERATURE}})
        except anthropic.BadRequestError as refusal:
            assert refusal.type == "invalid_request_error" and refusal.request_id
            return told_error(refusal)
    return {}


async def async_error(base_url: str, model: str) -> Told:
    async with async_client(base_url) as api:
        try:
            await api.messages.create(model=model, **GIVEN | {"extra_body": {"temperature": WRONG_TEMPERATURE}})
        except anthropic.BadRequestError as refusal:
            return told_error(refusal)
    return {}


def retry(base_url: str, model: str) -> Told:
    with client(base_url, max_retries=TRIES) as api:
        raw = api.messages.with_raw_response.create(model=model, **GIVEN)
        return told_message(raw.parse()) | {"retries": raw.retries_taken}


async def async_retry(base_url: str, model: str) -> Told:
    async with async_client(base_url, max_retries=TRIES) as api:
        raw = await api.messages.with_raw_response.create(model=model, **GIVEN)
        return told_message(await raw.parse()) | {"retries": raw.retries_taken}


def refused(base_url: str, model: str) -> Told:
    """Without another try: what the router said."""
    with client(base_url) as api:
        try:
            api.messages.create(model=model, **GIVEN)
        except anthropic.OverloadedError as refusal:
            return told_error(refusal) | {"headers": dict(refusal.response.headers), "type": refusal.type}
    return {}


def structured(base_url: str, model: str) -> Told:
    class Line(pydantic.BaseModel):
        mood: str
        verses: int

    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    merry = {name: value for name, value in MERRY.items() if name == "temperature"}
    with client(base_url) as api:
        given: Any = {"messages": MESSAGES, "max_tokens": MERRY["max_tokens"], "extra_body": merry}
        message = api.messages.create(model=model, **given, output_config=form)
        line = Line.model_validate_json(message.content[0].text)
    return {"parsed": line.model_dump()}


def count(base_url: str, model: str) -> Told:
    """Tokens as they are counted, and as an answer says that they were."""
    given: Any = {"model": model, "messages": MESSAGES, "system": "Be kind."}
    with client(base_url) as api:
        counted = checked(api.messages.count_tokens(**given)).input_tokens
        return {"counted": counted, "used": told_message(api.messages.create(**given, max_tokens=1))["prompt_tokens"]}


ASKED: Any = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2000}


def thinking(base_url: str, model: str) -> Told:
    """Of a stream: the kinds of its events in their order, and what came of them."""
    thinks: Any = {"type": "enabled", "budget_tokens": 1024}
    with client(base_url) as api, api.messages.stream(model=model, **ASKED, tools=[TOOL], thinking=thinks) as stream:
        kinds = [checked(event).type for event in stream]
        message = checked(stream.get_final_message())
    return {"kinds": kinds, "content": [block.model_dump() for block in message.content], "reason": message.stop_reason}


def loop(base_url: str, model: str) -> Told:
    """Calls the tool for as long as the model asks for it; each answer goes back with its thinking."""
    weather, messages = Weather(), list(ASKED["messages"])
    with client(base_url) as api:
        for _ in range(MOST_TURNS):
            given = ASKED | {"messages": messages}
            message = checked(api.messages.create(model=model, **given, tools=[TOOL]))
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return weather.told(message.content[-1].text) | {"reason": message.stop_reason}
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": weather.of(**call.input)} for call in calls
            ]
            messages += [message.to_param(), {"role": "user", "content": results}]
    return weather.told(None)


def runner(base_url: str, model: str) -> Told:
    """The client's own loop over tools, whose answers are streamed."""
    weather, last = Weather(), None
    tool = beta_tool(weather.of, name=NAME, description=DESCRIPTION, input_schema=PARAMETERS)
    with client(base_url) as api:
        for stream in api.beta.messages.tool_runner(model=model, **ASKED, tools=[tool], stream=True):
            last = checked(stream.get_final_message())
    assert last is not None
    return weather.told(last.content[-1].text) | {"reason": last.stop_reason}


def models(base_url: str, model: str) -> Told:
    with client(base_url) as api:
        (listed,) = checked(api.models.list()).data
        assert checked(api.models.retrieve(model)) == listed
    return {"id": listed.id, "most": listed.max_input_tokens}


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
        structured,
        count,
        thinking,
        loop,
        runner,
        models,
    )
