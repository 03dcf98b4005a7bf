"""OpenAI's own client over Responses, as others ask of it: see `asked`. It validates every answer and every event, and
one with a field that it does not know fails."""

from __future__ import annotations

import json
import time
from typing import Any

import asked
import openai
from asked import TIMEOUT_S, Told, answer_asked
from pydantic import BaseModel
from weather import AT_ONCE, DESCRIPTION, MOST_TURNS, NAME, PARAMETERS, QUESTION, Weather

TOOL: Any = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": False}
SPEECH = "Speak at length."
OPEN = ("queued", "in_progress")
LOOK_EVERY_S = 0.02


OPEN_RESPONSES = ("store", "presence_penalty", "frequency_penalty")
"""Fields of a response that Open Responses has, and OpenAI's client has not."""


class Warmest(BaseModel):
    city: str


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=base_url,
        api_key="none",
        timeout=TIMEOUT_S,
        max_retries=0,
        _strict_response_validation=True,
    )


def checked(answer: Any) -> Any:
    return asked.checked(answer, OPEN_RESPONSES)


def settled(api: openai.OpenAI, response: Any) -> Any:
    """A response in the background, once it is over."""
    until = time.monotonic() + TIMEOUT_S
    while response.status in OPEN and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)  # the API tells nobody that a response is over
        response = api.responses.retrieve(response.id)
    return checked(response)


def outputs_of(response: Any, weather: Weather) -> list[Any]:
    """What came of each call of a response."""
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": weather.of(**json.loads(call.arguments)),
        }
        for call in response.output
        if call.type == "function_call"
    ]


def stateless(base_url: str, model: str) -> Told:
    """A loop of which nothing is kept at the server: its client sends all items in each turn."""
    weather, items = Weather(), [{"role": "user", "content": QUESTION}]
    given: Any = {"model": model, "tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
    with client(base_url) as api:
        for _ in range(MOST_TURNS):
            response = checked(api.responses.create(**given, input=items))
            outputs = outputs_of(response, weather)
            if not outputs:
                return weather.told(response.output_text)
            items += [*(item.to_dict() for item in response.output), *outputs]
    return weather.told(None)


def _continued(base_url: str, model: str, question: str, answer: Any) -> Told:
    """A loop whose turns are kept at the server. `answer` makes the response of one turn."""
    weather, turn = Weather(), {"input": question}
    with client(base_url) as api:
        for _ in range(MOST_TURNS):
            response = answer(api, {"model": model, "tools": [TOOL], **turn})
            kept = checked(api.responses.retrieve(response.id))
            assert (kept.status, kept.usage) == ("completed", response.usage)
            assert [(item.type, item.id) for item in kept.output] == [(item.type, item.id) for item in response.output]
            outputs = outputs_of(response, weather)
            if not outputs:
                items = [item.type for item in api.responses.input_items.list(response.id, order="asc")]
                assert items == ["function_call_output"] * len(turn["input"])
                api.responses.delete(response.id)
                return weather.told(response.output_text)
            turn = {"input": outputs, "previous_response_id": response.id}
    return weather.told(None)


def _streamed(api: openai.OpenAI, given: Any) -> Any:
    with api.responses.stream(**given) as stream:
        for event in stream:
            checked(event)
        return stream.get_final_response()


def _in_background(api: openai.OpenAI, given: Any) -> Any:
    return settled(api, api.responses.create(**given, background=True))


def stored(base_url: str, model: str) -> Told:
    return _continued(base_url, model, QUESTION, lambda api, given: checked(api.responses.create(**given)))


def streamed(base_url: str, model: str) -> Told:
    return _continued(base_url, model, QUESTION, _streamed)


def parallel(base_url: str, model: str) -> Told:
    return _continued(base_url, model, AT_ONCE, _streamed)


def background(base_url: str, model: str) -> Told:
    return _continued(base_url, model, QUESTION, _in_background)


def resumed(base_url: str, model: str) -> Told:
    """A stream in the background that is left after a few events, and read on from there: the numbers of its events,
    the text that their pieces add up to, and the one that is kept."""
    events: list[Any] = []
    with client(base_url) as api:
        with api.responses.create(model=model, input=SPEECH, background=True, stream=True) as stream:
            for event in stream:
                events.append(checked(event))
                if len(events) == 9:
                    break
        response_id = events[0].response.id
        after = events[-1].sequence_number
        with api.responses.retrieve(response_id, stream=True, starting_after=after) as stream:
            events += map(checked, stream)
        kept = checked(api.responses.retrieve(response_id))
    assert events[-1].response == kept and kept.background is True
    return {
        "numbers": [event.sequence_number for event in events],
        "text": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "kept": kept.output_text,
    }


def cancelled(base_url: str, model: str) -> Told:
    """One that is cancelled once it has begun to speak."""
    with client(base_url) as api:
        with api.responses.create(model=model, input=SPEECH, background=True, stream=True) as stream:
            begun = next(event.response.id for event in stream if event.type == "response.created")
            next(event for event in stream if event.type == "response.output_text.delta")
        first = checked(api.responses.cancel(begun))
        again = checked(api.responses.cancel(begun))
        kept = checked(api.responses.retrieve(begun))
    return {"statuses": [first.status, again.status, kept.status]}


def parsed(base_url: str, model: str) -> Told:
    """An object of a class of pydantic's, of both of OpenAI's dialects, and a call with arguments of one."""
    question, tool = f"As JSON: {QUESTION}", openai.pydantic_function_tool(Warmest)
    messages: Any = [{"role": "user", "content": question}]
    with client(base_url) as api:
        response = checked(api.responses.parse(model=model, input=question, text_format=Warmest))
        chat = api.chat.completions.parse(model=model, messages=messages, response_format=Warmest)
        messages = [{"role": "user", "content": f"As a call: {QUESTION}"}]
        calling = api.chat.completions.parse(model=model, messages=messages, tools=[tool])
    call: Any = calling.choices[0].message.tool_calls
    found = [response.output_parsed, chat.choices[0].message.parsed, call[0].function.parsed_arguments]
    assert all(isinstance(each, Warmest) for each in found), found
    return {"cities": [each.city for each in found]}


def open_responses(base_url: str, model: str) -> Told:
    """Every answer and every event is one of the models that are made of Open Responses' description. Returns the kinds
    of items that answers had."""
    import openresponses_types as described

    kinds = {next(iter(each.model_fields["type"].annotation)).value: each for each in _described(described)}
    said, system = {"role": "user", "content": "Good morrow."}, {"role": "system", "content": "Be brief."}
    turns = [said, {"role": "assistant", "content": "Good morrow, cousin."}, said]
    calls: Any = {"input": QUESTION, "tools": [TOOL], "tool_choice": "auto"}
    items = []
    with client(base_url) as api:
        for given in ({"input": "Good morrow."}, {"input": [system, said]}, {"input": turns}, calls):
            raw = api.responses.with_raw_response.create(model=model, **given)
            answer = described.ResponseResource.model_validate_json(raw.text, strict=True)
            assert answer.status == "completed"
            items += [item.type for item in answer.output]
            with api.responses.with_streaming_response.create(model=model, **given, stream=True) as stream:
                data = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
            for each in data:
                # OpenAI, and the clients of both, have another name for these.
                renamed = each.replace('"response.reasoning_text.', '"response.reasoning.')
                kinds[json.loads(renamed)["type"]].model_validate_json(renamed, strict=True)
    return {"items": items}


def _described(described: Any) -> list[Any]:
    return [each for name, each in vars(described).items() if name.startswith("Response") and "StreamingEvent" in name]


if __name__ == "__main__":
    answer_asked(stateless, stored, streamed, parallel, background, resumed, cancelled, parsed, open_responses)
