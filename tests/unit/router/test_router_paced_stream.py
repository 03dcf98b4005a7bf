"""A stream whose client takes its time: tokens in order, each once, one write at a time, and the end behind them."""

from __future__ import annotations

import asyncio

import pytest
from fake_worker import LENGTH, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids, kinds

from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.api.call import Call
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.service import GenerationService
from router.api.tokenizer import Tokenizer
from router.api.validate import validate
from router.stream.client_stream import StreamReader
from router.stream.request import LiveRequest

MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
BYTES = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))
KEY = worker_pb2.RequestKey(request_id="gen-1", attempt=1)
TEXT = "a text of some thirty characters"


class Client:
    """A client of one stream, which takes a message when it is told to."""

    def __init__(self, n: int = 1) -> None:
        output = pb.OutputOptions(token_ids=True, stream_interval_tokens=1)
        spec = pb.GenerationSpec(text="hi", output=output, sampling=pb.SamplingParams(n=n))
        request = validate(
            spec, MODEL, lambda text: tuple(ids(str(text))), try_grammar=lambda _, text: text, fresh_seed=1
        )
        detokenizers = [BYTES.new_detokenizer(()) for _ in range(n)]
        self.live = LiveRequest("gen-1", request, detokenizers, model="m", now=0, arrival_time_s=0, is_streaming=True)
        self.written: list[pb.GenerateStreamResponse] = []
        self.writes: list[asyncio.Future[None]] = []
        self.num_given = [0] * n
        service = object.__new__(GenerationService)
        service._stalled_client_timeout_s = 60.0
        self.task = asyncio.create_task(service._send(StreamReader(self.live), Call(write=self.write)))

    async def write(self, message: pb.GenerateStreamResponse) -> None:
        assert all(write.done() for write in self.writes), "one write at a time"
        self.written.append(message)
        self.writes.append(asyncio.get_running_loop().create_future())
        await self.writes[-1]

    def give(self, count: int = 1, index: int = 0) -> None:
        """The next tokens of a sequence come from a worker."""
        first = self.num_given[index]
        end = self.num_given[index] = min(first + count, len(TEXT))
        reason = LENGTH if end == len(TEXT) else 0
        given = tokens(KEY, first, ids(TEXT[first:end]), sequence_index=index, finish_reason=reason)
        self.live.on_tokens(given.tokens, 1.0)

    def take(self) -> None:
        for write in self.writes:
            if not write.done():
                write.set_result(None)

    async def rest(self) -> None:
        """All tokens come, and the client takes everything."""
        for index in range(len(self.num_given)):
            self.give(len(TEXT), index)
        self.live.finish(2.0)
        while not self.task.done():
            self.take()
            await asyncio.sleep(0)
        await self.task


async def until(client: Client, num_written: int) -> None:
    while len(client.written) < num_written:
        client.take()
        await asyncio.sleep(0)


def check(events: list[pb.GenerateStreamResponse], n: int) -> None:
    """Raises AssertionError unless the client has been sent everything, in order and once."""
    names = [name for name in kinds(events) if name != "heartbeat"]
    assert names[0] == "started" and names[-1] == "completed"
    for index in range(n):
        told = [event for event in events if event.HasField("delta") and event.delta.index == index]
        (end,) = (event for event in events if event.HasField("sequence_end") and event.sequence_end.index == index)
        assert "".join(event.delta.text for event in told) == TEXT and events.index(told[-1]) < events.index(end)
        position = 0
        for event in told:
            assert event.delta.first_token_index == position
            position += event.delta.token_count


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(n=st.integers(1, 2), steps=st.lists(st.integers(0, 9), max_size=60))
def test_whatever_comes_when_each_token_is_written_once_and_in_order(n: int, steps: list[int]) -> None:
    async def scenario() -> None:
        client = Client(n)
        for step in steps:
            if step < 4:
                client.give(1 + step % 2, index=step % n)
            elif step < 6:
                client.take()
            elif step == 6:
                client.live.output.heartbeat()
            else:
                await asyncio.sleep(0)
        await client.rest()
        check(client.written, n)

    asyncio.run(scenario())


def test_tokens_that_come_while_one_is_written_are_written_together() -> None:
    async def scenario() -> None:
        client = Client()
        client.give()
        await until(client, 2)
        client.give()
        client.give()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(client.written) == 2
        await until(client, 3)
        assert [event.delta.token_count for event in client.written[1:]] == [1, 2]
        await client.rest()
        check(client.written, 1)

    asyncio.run(scenario())


def test_a_write_that_fails_ends_the_stream() -> None:
    async def scenario() -> None:
        client = Client()
        client.give()
        await until(client, 2)
        client.writes[-1].set_exception(ConnectionError("gone"))
        with pytest.raises(ConnectionError):
            await client.task
        client.give()  # is nobody's any more

    asyncio.run(scenario())
