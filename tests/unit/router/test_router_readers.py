"""Two calls that read one generation, one after the other: the first ends, the second misses nothing."""

from __future__ import annotations

import asyncio

from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids
from wired_router import ManualClock, run

from cluster.pb import generation_pb2 as pb
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import validate
from router.stream.detokenizer import Detokenizer
from router.stream.request import LiveRequest

MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
BYTES = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))


def new_detokenizers() -> list[Detokenizer]:
    return [BYTES.new_detokenizer(ids("hi"))]


def live_request() -> LiveRequest:
    spec = pb.GenerationSpec(text="hi", stopping=pb.StoppingCriteria(max_output_tokens=60))
    request = validate(spec, MODEL, lambda text: tuple(ids(str(text))), try_grammar=lambda _, text: text, fresh_seed=1)
    return LiveRequest(
        "gen-1", request, new_detokenizers(), model="m", now=0.0, arrival_time_s=0.0, is_streaming=True, may_resume=True
    )


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_replaced_reader_wakes_from_its_pause_at_once() -> None:
    async def scenario(clock: ManualClock) -> None:
        live = live_request()
        first = asyncio.create_task(live.output.pause(60.0))
        await steps(1)
        live.rewind([0], new_detokenizers(), is_streaming=True)
        second = asyncio.create_task(live.output.pause(0.05))
        await steps(3)
        assert first.done() and not second.done()
        await clock.advance(0.1)
        assert second.done()

    run(scenario)


def test_every_reader_wakes_from_its_pause_when_the_generation_ends() -> None:
    async def scenario(_: ManualClock) -> None:
        live = live_request()
        pauses = [asyncio.create_task(live.output.pause(60.0)) for _ in range(2)]
        await steps(1)
        live.cancel(1.0, "by the test")
        await steps(3)
        assert all(pause.done() for pause in pauses)

    run(scenario)


def test_a_replaced_reader_takes_no_wake_up_from_its_successor() -> None:
    async def scenario(_: ManualClock) -> None:
        live = live_request()
        first = asyncio.ensure_future(live.output.wait())
        await steps(1)
        live.rewind([0], new_detokenizers(), is_streaming=True)
        await live.output.wait()
        live.cancel(1.0, "by the test")  # before the first one has run again
        await first
        second = asyncio.ensure_future(live.output.wait())
        await steps(3)
        assert second.done()

    run(scenario)
