"""Events of responses, made of hand-made messages of a generation: each is the vendor's, and they add up."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.pb import generation_pb2 as pb
from router.openai.errors import HttpFailure
from router.responses.answers import Event
from router.responses.bodies import ResponseBody
from router.responses.call import _answer_head
from router.responses.events import ResponseEvents
from router.responses.items import ItemReference
from router.responses.position import ToldEvents

RESPONSE_ID = "resp_" + 24 * "ab"
MODEL = pb.Model(name="m", default_sampling=pb.SamplingParams(temperature=0.7, top_p=1.0))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STARTED = pb.GenerateStreamResponse(started=pb.Started(generation_id="gen-1"))


def head(**fields: Any) -> Any:
    body = ResponseBody.model_validate({"model": "m", "input": "hi", **fields})
    return _answer_head(body, RESPONSE_ID, MODEL, is_stored=True)


def text(value: str) -> pb.OutputPart:
    return pb.OutputPart(text=value)


def reasoning(value: str) -> pb.OutputPart:
    return pb.OutputPart(reasoning=value)


def call(index: int, arguments: str = "", *, name: str = "", is_whole: bool = False) -> pb.OutputPart:
    call_id = f"call_{index}" if name else ""
    piece = pb.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments, is_whole=is_whole)
    return pb.OutputPart(tool_call=piece)


ANSWER = [
    *(reasoning("I think "), reasoning("so. ")),
    *(text("Let me "), text("see.")),
    *(call(0, name="weather"), call(0, '{"city": '), call(0, '"Rome"}', is_whole=True)),
    *(call(1, '{"city": "Oslo"', name="weather"), call(1, "}", is_whole=True)),
]


def stream(parts: Sequence[pb.OutputPart], end: int = pb.FINISH_REASON_STOP) -> list[pb.GenerateStreamResponse]:
    """Each part in a delta of its own."""
    deltas = [
        pb.SequenceDelta(text=part.text, parts=[] if part.HasField("text") else [part], token_count=1) for part in parts
    ]
    usage = pb.Usage(prompt_tokens=5, completion_tokens=9, cached_tokens=4, reasoning_tokens=2)
    return [
        STARTED,
        *(pb.GenerateStreamResponse(delta=delta) for delta in deltas),
        pb.GenerateStreamResponse(sequence_end=pb.SequenceEnd(finish_reason=end)),
        pb.GenerateStreamResponse(completed=pb.Completed(usage=usage)),
    ]


def run(events: ResponseEvents, messages: Sequence[pb.GenerateStreamResponse]) -> list[Event]:
    """The events, each as its client reads it."""
    told = [event for message in messages for event in events.of(message)]
    for event in told:
        EVENT.validate_json(json.dumps(event), strict=True)
    return told


def joined(events: Sequence[Event]) -> list[str]:
    """What the deltas of each item add up to."""
    items: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            items[event["output_index"]] = items.get(event["output_index"], "") + event["delta"]
    return [items[index] for index in sorted(items)]


def content_of(answer: Any) -> list[str]:
    return [item["content"][0]["text"] if "content" in item else item["arguments"] for item in answer["output"]]


def test_items_follow_one_another_as_the_vendors_do() -> None:
    events = run(ResponseEvents(head()), stream(ANSWER))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        "output_item.added",
        *("function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    answer = events[-1]["response"]
    assert (
        joined(events)
        == content_of(answer)
        == [
            *("I think so. ", "Let me see."),
            *('{"city": "Rome"}', '{"city": "Oslo"}'),
        ]
    )
    Response.model_validate_json(json.dumps(answer), strict=True)
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    ids = [item["id"] for item in answer["output"]]
    assert [each.split("_")[0] for each in ids] == ["rs", "msg", "fc", "fc"]
    assert [ItemReference.parse(each) for each in ids] == [ItemReference(RESPONSE_ID, number) for number in range(4)]


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
def test_a_summary_is_the_whole_reasoning(field: str) -> None:
    events = run(ResponseEvents(head(reasoning={field: "auto"}), encodes_reasoning=True), stream(ANSWER))
    plain = run(ResponseEvents(head()), stream(ANSWER))
    kinds = ("reasoning_summary_part.added", *2 * ("reasoning_summary_text.delta",), "reasoning_summary_text.done")
    told = [*kinds, "reasoning_summary_part.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events[3:9]] == told
    assert joined(events) == joined(plain) and len(events) == len(plain)
    answer = events[-1]["response"]
    Response.model_validate_json(json.dumps(answer), strict=True)
    item = answer["output"][0]
    assert answer["reasoning"]["summary"] == "detailed" and item["encrypted_content"]
    assert item["summary"] == [{"type": "summary_text", "text": "I think so. "}]
    assert item["content"] == plain[-1]["response"]["output"][0]["content"]


def test_a_call_that_is_cut_off_is_no_call_of_the_response() -> None:
    events = run(ResponseEvents(head()), stream([text("So."), *ANSWER[4:6]], pb.FINISH_REASON_LENGTH))
    kinds = [event["type"] for event in events]
    assert kinds.count("response.output_item.done") == 1 and "response.function_call_arguments.done" not in kinds
    answer = events[-1]["response"]
    assert (kinds[-1], answer["status"]) == ("response.incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"} and content_of(answer) == ["So."]


def test_text_that_is_cut_off_is_incomplete() -> None:
    answer = run(ResponseEvents(head()), stream([text("So")], pb.FINISH_REASON_LENGTH))[-1]["response"]
    assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None


def test_calls_above_the_most_are_left_out() -> None:
    answer = run(ResponseEvents(head(max_tool_calls=1)), stream([*ANSWER, text("Done.")]))[-1]["response"]
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "message"]


def test_nothing_is_an_empty_message() -> None:
    assert content_of(run(ResponseEvents(head()), stream([]))[-1]["response"]) == [""]


def test_a_failure_ends_the_response_with_what_there_is() -> None:
    events = ResponseEvents(head())
    told = run(events, stream(ANSWER)[:4])
    failed = events.fail(HttpFailure(503, "unavailable", "a worker was lost"))
    EVENT.validate_json(json.dumps(failed), strict=True)
    assert failed["sequence_number"] == len(told) and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "a worker was lost"}


@pytest.mark.parametrize("seed", range(40))
def test_a_response_goes_on_elsewhere_as_if_nothing_had_happened(seed: int) -> None:
    """Wherever it breaks off, and however the rest is cut."""
    chance = random.Random(seed)
    whole = run(background(None), stream(ANSWER))
    first = background(None)
    messages = stream(cut(ANSWER, chance))
    told = run_background(first, messages[: chance.randrange(1, len(messages) - 1)])
    second = background(first.told)
    rest = run(second, stream(cut(ANSWER, chance)))
    events = [*told, *rest]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert joined(events) == joined(whole)
    assert events[-1]["response"]["output"] == whole[-1]["response"]["output"]
    not_deltas = [event["type"] for event in events if not event["type"].endswith(".delta")]
    assert not_deltas == ["response.created", "response.queued"] + [
        event["type"] for event in whole if not event["type"].endswith(".delta") and "created" not in event["type"]
    ]


def test_a_stream_goes_on_behind_every_event_as_if_it_had_not_broken() -> None:
    for seed in range(5):
        chance = random.Random(seed)
        messages = stream(cut(ANSWER, chance))
        asked: Any = {"reasoning": {"summary": "auto"}} if seed % 2 else {}
        first, marked = ResponseEvents(head(**asked)), list[tuple[Event, ToldEvents]]()
        for message in messages:
            marked += zip(first.of(message), first.marks, strict=True)
        for count, (_, mark) in enumerate(marked, start=1):
            rest = run(ResponseEvents(head(**asked), told=mark), stream(cut(ANSWER, chance)))
            events = [*(event for event, _ in marked[:count]), *rest]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert joined(events) == joined([event for event, _ in marked])
            kinds, expected = (
                [event["type"] for event in each if not event["type"].endswith(".delta")]
                for each in (events, [event for event, _ in marked])
            )
            assert kinds == expected and content_of(events[-1]["response"]) == content_of(marked[-1][0]["response"])


def background(told: ToldEvents | None) -> ResponseEvents:
    answer = head(background=told is not None)
    answer["background"] = True
    return ResponseEvents(answer, told=told)


def run_background(events: ResponseEvents, messages: Sequence[pb.GenerateStreamResponse]) -> list[Event]:
    return [*events.begin(), *run(events, messages)]


def cut(parts: Sequence[pb.OutputPart], chance: random.Random) -> list[pb.OutputPart]:
    """The same in other pieces."""
    pieces: list[pb.OutputPart] = []
    for part in parts:
        kind = str(part.WhichOneof("part"))
        value = part.tool_call.arguments if kind == "tool_call" else getattr(part, kind)
        at = chance.randrange(len(value) + 1)
        if kind == "tool_call":
            piece = part.tool_call
            pieces.append(call(piece.index, value[:at], name=piece.name))
            pieces.append(call(piece.index, value[at:], is_whole=piece.is_whole))
        else:
            pieces += [pb.OutputPart(**{kind: half}) for half in (value[:at], value[at:]) if half]
    return pieces
