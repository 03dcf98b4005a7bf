"""What GenerationService answers, as a message of Anthropic's API: whole, and event by event, from any event on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import Unavailable
from cluster.pb import generation_pb2 as pb
from router.anthropic.events import MessageEvents, MessageForm, MessagePosition

FORM = MessageForm(max_tokens=100)
GENERATION_ID = "gen-" + "0" * 24
USAGE = pb.Usage(prompt_tokens=50, cached_tokens=32, completion_tokens=9, reasoning_tokens=4)
Token = list[pb.OutputPart]
"""The parts that one token adds."""


def text(value: str) -> pb.OutputPart:
    return pb.OutputPart(text=value)


def thought(value: str) -> pb.OutputPart:
    return pb.OutputPart(reasoning=value)


def call(index: int, arguments: str = "", name: str = "", *, is_whole: bool = False) -> pb.OutputPart:
    call_id = f"call_{index}" if name else ""
    piece = pb.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments, is_whole=is_whole)
    return pb.OutputPart(tool_call=piece)


ANSWER: list[Token] = [
    [thought("hm")],
    [thought(", well"), text("See"), text(".")],
    [call(0, "", "weather"), call(0, '{"city":')],
    [call(0, ' "Rome"}', is_whole=True), call(1, '{"a": 1}', "other", is_whole=True)],
]


def delta(first: int, tokens: Sequence[Token]) -> pb.SequenceDelta:
    parts = [part for token in tokens for part in token]
    is_text = all(part.HasField("text") for part in parts)
    said = "".join(part.text for part in parts)
    return pb.SequenceDelta(first_token_index=first, token_count=len(tokens), text=said, parts=[] if is_text else parts)


def stream(
    tokens: Sequence[Token], cuts: Iterable[int] = (), first: int = 0, **end: Any
) -> list[pb.GenerateStreamResponse]:
    """The service's events from this token on, whose deltas begin at the cuts."""
    bounds = sorted({first, *(cut for cut in cuts if first < cut < len(tokens)), len(tokens)})
    deltas = [delta(begin, tokens[begin:until]) for begin, until in pairwise(bounds)]
    started = pb.Started(generation_id=GENERATION_ID, model="m", prompt_tokens=50, cached_tokens=32)
    ended = pb.SequenceEnd(token_count=len(tokens), **{"finish_reason": pb.FINISH_REASON_TOOL_CALLS} | end)
    return [
        pb.GenerateStreamResponse(started=started),
        *(pb.GenerateStreamResponse(delta=each) for each in deltas),
        pb.GenerateStreamResponse(sequence_end=ended),
        pb.GenerateStreamResponse(completed=pb.Completed(usage=USAGE)),
    ]


def told(events: MessageEvents, given: Iterable[pb.GenerateStreamResponse]) -> list[tuple[str, Mapping[str, Any]]]:
    """Each event with its id."""
    return [(events.event_id, dict(event)) for each in given for event in events.of(each)]


def folded(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events, whose order it checks."""
    message: dict[str, Any] = {}
    is_open, pieces = False, ""
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = json.loads(json.dumps(event["message"]))
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open, pieces = True, ""
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, piece = message["content"][-1], event["delta"]
                for kind, field in (
                    ("text_delta", "text"),
                    ("thinking_delta", "thinking"),
                    ("signature_delta", "signature"),
                ):
                    if piece["type"] == kind:
                        block[field] += piece[field]
                pieces += piece.get("partial_json", "")
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(pieces)
            case "message_delta":
                assert not is_open
                message = {**message, **event["delta"], "usage": {**message["usage"], **event["usage"]}}
            case _:
                assert event["type"] == "message_stop" and event is not None
    return message


def whole(tokens: Sequence[Token], form: MessageForm = FORM, **end: Any) -> dict[str, Any]:
    ended = pb.SequenceEnd(token_count=len(tokens), **{"finish_reason": pb.FINISH_REASON_TOOL_CALLS} | end)
    answer = pb.GenerateResponse(
        generation_id=GENERATION_ID, model="m", outputs=[delta(0, tokens)], ends=[ended], usage=USAGE
    )
    return dict(form.whole(answer))


def test_a_message_has_a_block_for_each_part() -> None:
    message = whole(ANSWER)
    assert message["id"] == "msg_" + "0" * 24
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm, well", "signature": message["id"]},
        {"type": "text", "text": "See."},
        {
            "type": "tool_use",
            "id": "toolu_0",
            "name": "weather",
            "input": {"city": "Rome"},
            "caller": {"type": "direct"},
        },
        {"type": "tool_use", "id": "toolu_1", "name": "other", "input": {"a": 1}, "caller": {"type": "direct"}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@given(st.sets(st.integers(1, 3)))
@settings(max_examples=8)
def test_events_join_to_the_whole_message_however_they_are_cut(cuts: set[int]) -> None:
    assert folded(event for _, event in told(MessageEvents(FORM, "req"), stream(ANSWER, cuts))) == whole(ANSWER)


PARTS = st.one_of(
    st.text("ab", min_size=1, max_size=3).map(text),
    st.text("cd", min_size=1, max_size=3).map(thought),
    st.integers(0, 99).map(lambda number: call(0, json.dumps({"n": number}), "f", is_whole=True)),
)


def numbered(tokens: list[Token]) -> list[Token]:
    """With calls that have numbers of their own, cut into their pieces."""
    found, index = [], 0
    for token in tokens:
        parts = []
        for part in token:
            if part.HasField("tool_call"):
                arguments = part.tool_call.arguments
                parts += [call(index, arguments[:3], "f"), call(index, arguments[3:]), call(index, is_whole=True)]
                index += 1
            else:
                parts.append(part)
        found.append(parts)
    return found


@given(st.lists(st.lists(PARTS, max_size=3), max_size=6).map(numbered), st.sets(st.integers(1, 5)), st.data())
@settings(max_examples=60)
def test_a_stream_goes_on_after_any_event_without_a_piece_lost_or_repeated(
    tokens: list[Token], cuts: set[int], data: st.DataObject
) -> None:
    events = told(MessageEvents(FORM, "req", may_resume=True), stream(tokens, cuts))
    expected = whole(tokens)
    at = data.draw(st.integers(0, len(events) - 1))
    position = MessagePosition.parse(events[at][0])
    assert position is not None and str(position) == events[at][0]
    others = data.draw(st.sets(st.integers(1, 5)))
    rest = stream(tokens, others, first=position.num_tokens)
    resumed = told(MessageEvents(FORM, "req", may_resume=True, resumed=position), rest)
    joined = [event for _, event in events[: at + 1]] + [event for _, event in resumed]
    assert folded(joined) == expected
    assert [event["type"] for event in joined].count("message_stop") == 1 + (at == len(events) - 1)


@pytest.mark.parametrize(
    ("end", "reason", "stop"),
    [
        ({"finish_reason": pb.FINISH_REASON_STOP}, "end_turn", None),
        ({"finish_reason": pb.FINISH_REASON_STOP, "stop_string": "END"}, "stop_sequence", "END"),
        ({"finish_reason": pb.FINISH_REASON_LENGTH, "token_count": 100}, "max_tokens", None),
        ({"finish_reason": pb.FINISH_REASON_LENGTH, "token_count": 99}, "model_context_window_exceeded", None),
        ({"finish_reason": pb.FINISH_REASON_CONTENT_FILTER}, "refusal", None),
    ],
)
def test_a_message_says_why_it_ends(end: dict[str, Any], reason: str, stop: str | None) -> None:
    ending = FORM.ending(pb.SequenceEnd(**end))
    assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, stop)


def test_a_call_that_was_cut_off_leaves_its_block_unfinished_and_is_none_in_a_whole_message() -> None:
    tokens = [[text("a"), call(0, '{"x"', "f")]]
    events = [
        event for _, event in told(MessageEvents(FORM, "req"), stream(tokens, finish_reason=pb.FINISH_REASON_LENGTH))
    ]
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] != "tool_use"


def test_thinking_that_is_not_to_be_shown_has_its_signature_alone() -> None:
    form = MessageForm(max_tokens=100, shows_thinking=False)
    block = whole(ANSWER, form)["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": "msg_" + "0" * 24}
    assert folded(event for _, event in told(MessageEvents(form, "req"), stream(ANSWER, (1,)))) == whole(ANSWER, form)


def test_usage_tells_what_the_prefix_cache_held_and_what_is_new_there_if_asked() -> None:
    usage = whole(ANSWER)["usage"]
    fields = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    assert [usage[field] for field in fields] == [18, 32, 0, 9]
    assert usage["output_tokens_details"] == {"thinking_tokens": 4}
    marked = whole(ANSWER, MessageForm(max_tokens=100, wants_cache_usage=True))["usage"]
    assert [marked[field] for field in fields] == [0, 32, 18, 9]


def test_a_failure_is_told_in_the_dialects_words() -> None:
    failure = MessageEvents(FORM, "req-1").failure(Unavailable("a worker was lost", retry_after_s=1.5))
    error = {"type": "api_error", "message": "a worker was lost"}
    assert failure.body == {"type": "error", "error": error, "request_id": "req-1"}
    assert (failure.status, failure.headers["retry-after"]) == (503, "2")
