"""Responses in the background over one store and routers that come and go: scripted generations, no workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import Aborted, InvalidRequest, NotFound, Overloaded, Unavailable
from cluster.pb import generation_pb2 as pb
from router.api.call import ANYONE, Call
from router.batches.sqlite_store import SqliteStore
from router.responses.answers import Event
from router.responses.background import MOST_LOST_ROUTERS, BackgroundRuns
from router.responses.bodies import ResponseBody
from router.responses.call import ResponseReader
from router.responses.store import EVENTS_IN_PIECE, INPUT, ResponseStore

LEASE_S = 0.3
TEXT = "The quick brown fox jumps over the lazy dog. " * 3
GENERATION_ID = "gen-" + 24 * "0"


async def get_model(request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
    return pb.GetModelResponse(model=pb.Model(name="m", max_context_tokens=100))


async def tokenize(request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
    raise NotImplementedError


class Generation:
    """What all routers compute: TEXT, in deltas of `size` characters, up to character `until` for now."""

    def __init__(self, size: int = 7, until: int = len(TEXT), parts: list[pb.OutputPart] | None = None) -> None:
        """`parts`: instead of the text; `until` counts them then."""
        self.size = size
        self.until = until
        self.parts = parts
        self.calls: list[pb.GenerationSpec] = []
        self.cancelled: list[str] = []
        self.is_known = True
        """Whether it can be resumed."""
        self.failure: Exception | None = None
        self.go_on = asyncio.Event()

    async def stream(self, request: pb.GenerateStreamRequest, call: Call) -> None:
        self.calls.append(request.spec)
        if request.spec.resume.generation_id and not self.is_known:
            raise NotFound("it is not known")
        if self.failure is not None:
            raise self.failure
        call.opened(GENERATION_ID)
        await call.write(pb.GenerateStreamResponse(started=pb.Started(generation_id=GENERATION_ID)))
        for begin in range(0, len(TEXT), self.size) if self.parts is None else range(len(self.parts)):
            if begin >= self.until:
                await self.go_on.wait()
                if self.failure is not None:
                    raise self.failure
            delta = pb.SequenceDelta(text=TEXT[begin : begin + self.size])
            if self.parts is not None:
                delta = pb.SequenceDelta(text=self.parts[begin].text, parts=[self.parts[begin]])
            await call.write(pb.GenerateStreamResponse(delta=delta))
        await call.write(pb.GenerateStreamResponse(sequence_end=pb.SequenceEnd(finish_reason=pb.FINISH_REASON_STOP)))
        await call.write(pb.GenerateStreamResponse(completed=pb.Completed()))

    async def cancel(self, request: pb.CancelGenerationRequest, call: Call) -> pb.CancelGenerationResponse:
        self.cancelled += request.generation_ids
        return pb.CancelGenerationResponse()


def halved(parts: list[pb.OutputPart]) -> list[pb.OutputPart]:
    """The same in other pieces."""
    pieces = []
    for part in parts:
        kind, call = part.WhichOneof("part"), part.tool_call
        text = call.arguments if kind == "tool_call" else getattr(part, str(kind))
        half = len(text) // 2
        if kind == "tool_call":
            pieces.append(piece(call.index, text[:half], call.name))
            pieces.append(piece(call.index, text[half:], is_whole=call.is_whole))
        else:
            pieces += [pb.OutputPart(**{str(kind): each}) for each in (text[:half], text[half:])]
    return pieces


def piece(index: int, arguments: str, name: str = "", *, is_whole: bool = False) -> pb.OutputPart:
    call_id = f"call_{index}" if name else ""
    call = pb.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments, is_whole=is_whole)
    return pb.OutputPart(tool_call=call)


PARTS = [
    *(pb.OutputPart(reasoning=text) for text in ("Let me ", "think of it. ")),
    pb.OutputPart(text="So: "),
    *(piece(0, "", "weather"), piece(0, '{"city": '), piece(0, '"Rome"}', is_whole=True)),
    *(piece(1, '{"city": "Os', "weather"), piece(1, 'lo"}'), piece(1, "", is_whole=True)),
]


def kinds(events: list[Event]) -> list[str]:
    return [event["type"] for event in events if not event["type"].endswith(".delta")]


def outputs(events: list[Event]) -> list[dict[str, Any]]:
    """The items at the end, which have other ids in each response."""
    return [{**item, "id": ""} for item in events[-1]["response"]["output"]]


class World:
    def __init__(self) -> None:
        self.store = ResponseStore(SqliteStore(None))

    def router(self, generation: Generation, lease_s: float = LEASE_S) -> tuple[ResponseReader, BackgroundRuns]:
        reader = ResponseReader(self.store, get_model, tokenize, lambda _: b"")
        runs = BackgroundRuns(
            self.store, reader, generation.stream, generation.cancel, lambda _: ANYONE, lease_s=lease_s
        )
        return reader, runs

    async def begin(self, generation: Generation, **body: Any) -> tuple[BackgroundRuns, str]:
        """A router with one response."""
        reader, runs = self.router(generation)
        asked = ResponseBody.model_validate({"model": "m", "input": "hi", "background": True, **body})
        answer = await runs.start(await reader.read(asked, Call(), "req"), Call())
        assert answer["status"] == "queued" and answer["background"]
        return runs, answer["id"]

    async def read(self, runs: BackgroundRuns, response_id: str, first: int = 0, num: int = 10**9) -> list[Event]:
        """Events of a response, as many as were asked for or there are."""
        events: list[Event] = []
        async with asyncio.timeout(20):
            async for event in runs.follow("", response_id, first):
                events.append(event)
                if len(events) >= num:
                    break
        return events

    async def until(self, response_id: str, is_so: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(20):
            while not is_so((await self.store.find("", response_id)).response):
                await asyncio.sleep(0.01)
        return (await self.store.find("", response_id)).response


def text_of(events: list[Event]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def check(events: list[Event], first: int = 0) -> None:
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))


def kill(runs: BackgroundRuns) -> None:
    """As if its process were gone: nothing is written any more."""
    for run in runs._runs.values():
        run.kept = None  # type: ignore[assignment]
        assert run.task is not None
        run.task.cancel()


async def test_a_response_runs_without_a_client_and_is_streamed_to_whoever_asks() -> None:
    world = World()
    runs, response_id = await world.begin(Generation(size=1))
    events, others = await asyncio.gather(world.read(runs, response_id), world.read(runs, response_id, 5, 3))
    check(events)
    assert text_of(events) == TEXT and events[-1]["type"] == "response.completed" and others == events[5:8]
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    _, other = world.router(Generation())
    assert len(events) < EVENTS_IN_PIECE and await world.read(other, response_id) == events
    assert await world.read(other, response_id, 50) == events[50:] and await world.read(other, response_id, 999) == []
    kept = await world.store.find("", response_id)
    assert (await world.store.answer(kept.response)) == events[-1]["response"]


async def test_events_of_many_pieces_are_read_from_any_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("store", "background_run"):
        monkeypatch.setattr(f"router.responses.{module}.EVENTS_IN_PIECE", 8)
    world = World()
    runs, response_id = await world.begin(Generation(size=2, until=50))
    first = await world.read(runs, response_id, 0, 20)
    kill(runs)
    generation = Generation(size=5)
    _, other = world.router(generation)
    events = await world.read(other, response_id)
    check(events)
    assert events[:20] == first and text_of(events) == TEXT
    for begin in range(len(events)):
        assert await world.read(other, response_id, begin) == events[begin:]


async def test_the_next_router_goes_on_where_a_lost_one_was() -> None:
    world = World()
    runs, response_id = await world.begin(Generation(until=40))
    first = await world.read(runs, response_id, 0, 9)
    kill(runs)
    generation = Generation(size=3)
    _, other = world.router(generation)
    events = await world.read(other, response_id)
    check(events)
    assert events[:9] == first and text_of(events) == TEXT
    assert generation.calls[0].resume.generation_id == GENERATION_ID
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    assert events[-1]["response"]["created_at"] == events[0]["response"]["created_at"]


@pytest.mark.parametrize("until", [1, 3, 5, 8])
async def test_the_next_router_goes_on_within_thinking_and_within_a_call(until: int) -> None:
    """What is told of a call, its begin and its end included, is told once."""
    world, parts = World(), PARTS
    runs, response_id = await world.begin(Generation(parts=parts, until=until))
    first = await world.read(runs, response_id, 0, 4 + until)
    kill(runs)
    events = await world.read(world.router(Generation(parts=halved(parts)))[1], response_id)
    check(events)
    whole = await world.read(*await world.begin(Generation(parts=parts)))
    assert events[: len(first)] == first
    assert kinds(events) == kinds(whole) and outputs(events) == outputs(whole)


async def test_what_cannot_go_on_has_failed_and_what_was_not_begun_begins() -> None:
    world = World()
    runs, response_id = await world.begin(Generation(until=40))
    await world.read(runs, response_id, 0, 9)
    kill(runs)
    generation = Generation()
    generation.is_known = False
    _, other = world.router(generation)
    events = await world.read(other, response_id)
    check(events)
    assert events[-1]["type"] == "response.failed" and "was lost" in events[-1]["response"]["error"]["message"]
    runs, response_id = await world.begin(Generation(until=0))
    await world.read(runs, response_id, 0, 3)
    kill(runs)
    events = await world.read(other, response_id)
    check(events)
    assert text_of(events) == TEXT and not generation.calls[-1].resume.generation_id


async def test_a_router_that_ends_leaves_its_responses_to_the_next_one_at_once() -> None:
    world = World()
    generation = Generation(until=40)
    reader, runs = world.router(generation, lease_s=600.0)
    asked = ResponseBody.model_validate({"model": "m", "input": "hi", "background": True})
    answer = await runs.start(await reader.read(asked, Call(), "req"), Call())
    await world.read(runs, answer["id"], 0, 9)
    runs.stop()
    generation.failure = Unavailable("the router is shutting down")
    generation.go_on.set()
    await world.until(answer["id"], lambda response: response.held_until <= time.time())
    await runs.close()
    _, other = world.router(Generation(size=2))
    events = await world.read(other, answer["id"])
    check(events)
    assert text_of(events) == TEXT


async def test_a_router_goes_on_with_what_a_lost_one_left_though_nobody_asks() -> None:
    world = World()
    runs, response_id = await world.begin(Generation(until=40))
    await world.read(runs, response_id, 0, 9)
    kill(runs)
    others = [world.router(Generation(size=3))[1] for _ in range(3)]
    can_serve = False
    for other in others:
        other.watch(lambda: can_serve)
    await world.until(response_id, lambda response: response.held_until < time.time() - LEASE_S)
    assert len((await world.store.find("", response_id)).response.runs) == 1
    can_serve = True
    over = await world.until(response_id, lambda response: not response.is_open)
    assert over.status == "completed" and len(over.runs) == 2 and not await world.store.left(10)
    events = await world.read(others[0], response_id)
    check(events)
    assert text_of(events) == TEXT
    for other in others:
        await other.close()


async def test_a_response_with_which_every_router_is_lost_is_not_gone_on_with_for_ever() -> None:
    world = World()
    runs, response_id = await world.begin(Generation(until=0))
    await world.read(runs, response_id, 0, 3)
    kill(runs)
    for _ in range(2 * MOST_LOST_ROUTERS):  # these leave in order, before there is an event
        await world.until(response_id, lambda response: response.held_until <= time.time())
        generation = Generation(until=-1)
        _, leaving = world.router(generation)
        await leaving.settled(await world.store.find("", response_id))
        async with asyncio.timeout(20):
            while not generation.calls:
                await asyncio.sleep(0)
        await leaving.close()
    assert (await world.store.find("", response_id)).response.runs == [3]
    for _ in range(MOST_LOST_ROUTERS):
        await world.until(response_id, lambda response: response.held_until <= time.time())
        _, next_one = world.router(Generation(until=-1))
        await next_one.settled(await world.store.find("", response_id))
        kill(next_one)
    _, last = world.router(Generation())
    events = await world.read(last, response_id)
    check(events)
    assert "5 routers were lost" in events[-1]["response"]["error"]["message"]


async def test_one_that_cannot_be_read_keeps_no_other_from_being_gone_on_with() -> None:
    world = World()
    ids = []
    for _ in range(2):
        runs, response_id = await world.begin(Generation(until=40))
        await world.read(runs, response_id, 0, 9)
        kill(runs)
        ids.append(response_id)
    await world.store._store.put_piece(ids[0], INPUT, b"not what was packed")
    _, other = world.router(Generation(size=3))
    other.watch(lambda: True)
    assert (await world.until(ids[1], lambda response: not response.is_open)).status == "completed"
    await other.close()


async def test_cancelling_ends_it_here_and_elsewhere() -> None:
    world = World()
    for is_elsewhere in (False, True):
        generation = Generation(until=40)
        runs, response_id = await world.begin(generation)
        await world.read(runs, response_id, 0, 9)
        kept = await world.store.find("", response_id)
        _, other = world.router(generation)
        answer = await (other if is_elsewhere else runs).cancel(kept)
        assert answer["status"] == "cancelled" and generation.cancelled == [GENERATION_ID]
        generation.failure = Aborted("it was cancelled")
        generation.go_on.set()
        events = await world.read(runs, response_id)
        check(events)
        assert not events[-1]["type"].endswith(("completed", "failed"))
        assert (await world.store.answer((await world.store.find("", response_id)).response)) == answer
        assert await runs.cancel(await world.store.find("", response_id)) == answer
        await runs.close()
        assert (await world.store.find("", response_id)).response.status == "cancelled"


async def test_what_is_refused_at_once_is_refused_and_not_kept() -> None:
    world = World()
    generation = Generation()
    generation.failure = InvalidRequest("temperature: is too high")
    with pytest.raises(InvalidRequest):
        await world.begin(generation)
    generation.failure = Overloaded("too much")
    with pytest.raises(Overloaded):
        await world.begin(generation)
    assert await world.store._store.page("response", "", after=None, limit=9, is_ascending=True) == []


@pytest.mark.parametrize("is_taken_over", [False, True])
async def test_what_fails_later_has_failed_and_names_fields_as_the_body_has_them(is_taken_over: bool) -> None:
    world, generation = World(), Generation(until=40)
    tools = [{"type": "namespace", "name": "space", "tools": [{"type": "function", "name": name} for name in "ab"]}]
    runs, response_id = await world.begin(generation, tools=tools)
    await world.read(runs, response_id, 0, 5)
    if is_taken_over:
        kill(runs)
        runs = world.router(generation)[1]
    generation.failure = Unavailable("spec.chat.tools[1].function.parameters: their worker was lost")
    generation.go_on.set()
    events = await world.read(runs, response_id)
    check(events)
    failed = events[-1]["response"]
    what = {"code": "server_error", "message": "tools[0].tools[1].parameters: their worker was lost"}
    assert (failed["status"], failed["error"]) == ("failed", what)
    assert is_taken_over or failed["output"][0]["status"] == "incomplete"
    asked = ResponseBody.model_validate({"model": "m", "input": "hi", "previous_response_id": response_id})
    with pytest.raises(InvalidRequest, match="is failed"):
        await world.router(generation)[0].read(asked, Call(), "req")


async def test_a_deleted_response_ends() -> None:
    world = World()
    generation = Generation(until=40)
    runs, response_id = await world.begin(generation)
    kept = await world.store.find("", response_id)
    await world.store.delete(kept)
    await runs.end(kept.response)
    with pytest.raises(NotFound):
        await world.read(runs, response_id)
    assert not runs._runs


async def test_a_long_hold_is_renewed() -> None:
    world = World()
    runs, response_id = await world.begin(Generation(until=40))
    held_until = (await world.store.find("", response_id)).response.held_until
    await world.until(response_id, lambda response: response.held_until > held_until + LEASE_S)
    await runs.close()
