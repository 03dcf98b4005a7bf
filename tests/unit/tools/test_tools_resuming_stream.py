"""A client whose stream breaks: it calls again, and its reader sees one stream."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_router import Event, ScriptedRouter, baton, completed, delta, end, started

from cluster.errors import Aborted, NotFound, NotReachable, Unavailable
from cluster.pb import generation_pb2 as pb
from tools import generation_stream
from tools.client import BatonClient, make_spec
from tools.generation_stream import ResumingStream, StreamProgress, Transcript

LOST = Unavailable("the connection was lost")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_stream, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(generation_stream, "LONGEST_PAUSE_S", 0.0)


def text_of(index: int, first: int, upto: int) -> str:
    """Some tokens have no character, some have two."""
    return "".join("" if token % 3 == 1 else f"{index}{token}" if token % 3 else "." for token in range(first, upto))


def told_from(lengths: list[int], index: int, sizes: st.DataObject) -> Iterator[Event]:
    """What a router tells from a token on, in messages of any size."""
    yield started()
    at = [min(index, length) for length in lengths]
    todo = set(range(len(lengths)))
    while todo:
        sequence = sizes.draw(st.sampled_from(sorted(todo)))
        length = lengths[sequence]
        upto = min(length, at[sequence] + sizes.draw(st.integers(1, 4)))
        if upto > at[sequence]:
            yield delta(text_of(sequence, at[sequence], upto), at[sequence], upto - at[sequence], sequence)
        at[sequence] = upto
        if upto == length:
            todo.discard(sequence)
            yield end(length, sequence)
    yield completed()


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3), data=st.data())
def test_however_often_it_breaks_the_reader_sees_one_stream(lengths: list[int], data: st.DataObject) -> None:
    progress, transcript = StreamProgress(len(lengths)), Transcript()
    spec = make_spec("x", n=len(lengths))
    num_started = 0
    while not progress.is_complete:
        asked = progress.next_spec(spec)
        left = data.draw(st.integers(0, 12), label="messages until it breaks") or 100
        for event in told_from(lengths, asked.resume.next_token_index, data):
            if not left:
                break
            left -= 1
            new = progress.new_part(event)
            if new is not None:
                num_started += new.HasField("started")
                transcript.add(new)
    assert num_started == 1 and progress.generation_id == "gen-1"
    assert [sequence.text for sequence in transcript.sequences] == [text_of(i, 0, n) for i, n in enumerate(lengths)]
    assert [sequence.token_ids for sequence in transcript.sequences] == [list(range(n)) for n in lengths]


PIECES = [
    *(pb.OutputPart(reasoning=sign) for sign in "hm"),
    *(pb.OutputPart(text=sign) for sign in "ok"),
    pb.OutputPart(tool_call=pb.ToolCallDelta(id="call_1", name="f")),
    *(pb.OutputPart(tool_call=pb.ToolCallDelta(arguments=piece)) for piece in ('{"a"', ": 1", "}")),
    pb.OutputPart(tool_call=pb.ToolCallDelta(is_whole=True)),
]
"""One for each token."""


def joined(pieces: Iterable[pb.OutputPart]) -> pb.OutputPart:
    """Pieces that follow one another, as one message has them."""
    whole = pb.OutputPart()
    for piece in pieces:
        call, new = whole.tool_call, piece.tool_call
        if piece.HasField("tool_call"):
            call.MergeFrom(pb.ToolCallDelta(id=new.id, name=new.name, is_whole=new.is_whole))
            call.arguments += new.arguments
        elif piece.HasField("reasoning"):
            whole.reasoning += piece.reasoning
        else:
            whole.text += piece.text
    return whole


def delta_of(first: int, upto: int, index: int) -> Event:
    kinds = itertools.groupby(PIECES[first:upto], key=lambda piece: piece.WhichOneof("part"))
    parts = [joined(pieces) for _, pieces in kinds]
    text = "".join(part.text for part in parts)
    told = pb.SequenceDelta(index=index, first_token_index=first, token_count=upto - first, text=text, parts=parts)
    return Event(delta=told)


@given(data=st.data())
def test_parts_of_several_sequences_come_once_wherever_the_stream_breaks(data: st.DataObject) -> None:
    progress, found = StreamProgress(2), [list[pb.OutputPart]() for _ in range(2)]
    last = len(PIECES)
    for is_whole in (False, False, True):
        progress.next_spec(make_spec("x", n=2))
        at = [0, 0]
        for number in range(2 * last) if is_whole else range(data.draw(st.integers(0, last))):
            sequence = number % 2
            upto = min(last, at[sequence] + data.draw(st.integers(1, 4)))
            if upto > at[sequence] and (new := progress.new_part(delta_of(at[sequence], upto, sequence))) is not None:
                found[sequence] += new.delta.parts
            at[sequence] = upto
    for parts in found:
        kinds = [list(pieces) for _, pieces in itertools.groupby(parts, key=lambda part: part.WhichOneof("part"))]
        assert [joined(pieces) for pieces in kinds] == list(delta_of(0, last, 0).delta.parts)


class Calls:
    """Each call brings what is listed, up to an error."""

    def __init__(self, *calls: list[Event | Exception]) -> None:
        self._calls = [iter(call) for call in calls]
        self.specs: list[pb.GenerationSpec] = []
        self.cancelled: list[str] = []

    def open(self, spec: pb.GenerationSpec, timeout_s: float | None, is_again: bool) -> Calls:
        assert is_again == bool(self.specs)
        self.specs.append(spec)
        self._now = self._calls.pop(0)
        return self

    def __next__(self) -> Event:
        event = next(self._now)
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        return

    def stream(self, *, patience_s: float = 30.0) -> ResumingStream:
        return ResumingStream(self.open, self.cancelled.append, make_spec("x"), patience_s=patience_s)


def test_the_first_call_says_that_it_may_come_back_and_the_next_what_is_missing() -> None:
    calls = Calls([started(), delta("a", 0), LOST], [LOST], [started(), delta("b", 1), end(2), completed()])
    with calls.stream() as stream:
        kinds = [event.WhichOneof("event") for event in stream]
    assert kinds == ["started", "delta", "delta", "sequence_end", "completed"]
    first, *later = calls.specs
    assert first.HasField("resume") and not first.resume.generation_id and first.text == "x"
    assert later == [pb.GenerationSpec(resume=pb.ResumeFrom(generation_id="gen-1", next_token_index=1))] * 2
    assert calls.cancelled == []


def test_one_that_had_no_name_yet_is_asked_for_again() -> None:
    calls = Calls([Event(heartbeat=pb.Heartbeat()), LOST], [started(), delta("a", 0), end(1), completed()])
    assert len(list(calls.stream())) == 5
    assert calls.specs[0] == calls.specs[1]


@pytest.mark.parametrize("error", [NotReachable("nobody"), Unavailable("no worker")])
def test_a_call_that_never_began_is_not_repeated(error: Unavailable) -> None:
    calls = Calls([error])
    with pytest.raises(type(error)) as raised:
        next(calls.stream())
    assert raised.value is error and len(calls.specs) == 1


def test_a_broken_stream_is_given_up_when_patience_ends() -> None:
    calls = Calls([started(), LOST], [LOST])
    stream = calls.stream(patience_s=-1.0)
    next(stream)
    with pytest.raises(Unavailable):
        next(stream)
    assert len(calls.specs) == 1


def test_what_is_not_known_any_more_and_what_another_reads_ends_it() -> None:
    for error, expected in ((NotFound("not known"), Unavailable), (Aborted("taken over"), Aborted)):
        stream = Calls([started(), LOST], [error]).stream()
        next(stream)
        with pytest.raises(expected):
            next(stream)


def test_leaving_cancels_what_has_not_ended_at_the_server() -> None:
    calls = Calls([started(), delta("a", 0), LOST])
    with calls.stream() as stream:
        next(stream)
    assert calls.cancelled == ["gen-1"]
    with pytest.raises(Unavailable):
        list(stream)


async def lost_once(spec: pb.GenerationSpec) -> AsyncIterator[Event]:
    if not spec.resume.generation_id:
        yield started()
        yield delta("Hello", 0)
        raise LOST
    yield started()
    for event in (delta(" world", 1), end(2), completed()):
        yield event


def test_generate_and_chat_go_on_by_themselves(router: ScriptedRouter) -> None:
    router.script = lost_once
    done = baton("generate", "Say hello", "--address", router.address)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello world\n", "")
    assert router.specs[1].resume == pb.ResumeFrom(generation_id="gen-1", next_token_index=1)
    talked = baton("chat", "--address", router.address, stdin="hi\n")
    assert (talked.exit_code, talked.stdout) == (0, "Hello world\n")


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_no_resume_gives_up(router: ScriptedRouter, command: list[str]) -> None:
    router.script = lost_once
    done = baton(*command, "--no-resume", "--address", router.address, stdin="hi\n")
    assert done.exit_code != 0 and done.stdout == "Hello\n"
    assert len(router.specs) == 1 and not router.specs[0].HasField("resume")


def test_a_client_resumes_over_a_real_connection(router: ScriptedRouter) -> None:
    router.script = lost_once
    with BatonClient(router.address) as client, client.resuming_stream(make_spec("x"), timeout_s=30) as stream:
        transcript = Transcript()
        for event in stream:
            transcript.add(event)
    assert transcript.sequences[0].text == "Hello world"
