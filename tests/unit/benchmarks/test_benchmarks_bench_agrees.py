"""What holds `baton bench` against another client: figures, what differs, and the relay that gives both one run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import h11
import httpx2
import numpy as np
import pytest

from benchmarks import bench_relay
from benchmarks.bench_agrees import FIGURES, Load, figures, judged, prompts_of
from benchmarks.bench_relay import HttpRelay, Meeting
from simulate.workload import random_shapes, uniform
from tools.bench.figures import figures_of
from tools.bench.workload import Sample, make_requests

NUM_TOKENS = 3


def seen(sent_at: float, *told: float, num_output: int, ended_at: float) -> dict[str, Any]:
    counted = {"num_prompt_tokens": 10, "num_output_tokens": num_output}
    return {"sent_at": sent_at, "told": list(told), "ended_at": ended_at, **counted}


def test_figures_of_a_run_that_is_worked_out_by_hand() -> None:
    found = figures([seen(0, 1, 2, 4, num_output=5, ended_at=4.5), seen(1, 4, num_output=1, ended_at=5)])
    assert set(found) == set(FIGURES)
    assert (found["completed"], found["duration"], found["output_throughput"]) == (2, 5, pytest.approx(6 / 5))
    assert (found["mean_ttft_ms"], found["p90_ttft_ms"]) == (2000, pytest.approx(2800))
    assert found["mean_tpot_ms"] == 750, "one token has none after it"
    assert (found["mean_itl_ms"], found["median_e2el_ms"]) == (1500, 3500)


def test_figures_mean_what_those_of_baton_bench_do() -> None:
    """Two programs, one meaning: of random instants."""
    draw = np.random.default_rng(0)
    ours, theirs = [], []
    for number in range(50):
        told = number + np.cumsum(draw.uniform(0.01, 0.2, draw.integers(2, 20)))
        num, end = len(told) + 2, float(told[-1] + 0.01)
        ours.append(seen(number, *told.tolist(), num_output=num, ended_at=end))
        theirs.append(Sample(10, number, told.tolist(), num, ended_at=end))
    duration_s = max(sample.ended_at for sample in theirs) - min(sample.sent_at for sample in theirs)
    bench, other = figures_of(theirs, duration_s, {}), figures(ours)
    assert {name: bench[name] for name in FIGURES} == pytest.approx(other)


def test_what_differs_from_either_is_named() -> None:
    def run(client: float, relay: float) -> dict[str, Any]:
        values = {"bench": 100.0, "witness": client, "relay": relay}
        return judged({"figures": {"mean_ttft_ms": values}}, within=0.02)

    assert run(98.1, 101.9)["differ"] == []
    assert run(97.9, 100.0)["differ"] == run(100.0, 102.1)["differ"] == ["mean_ttft_ms"]
    assert run(0.0, 100.0)["differ"] == ["mean_ttft_ms"]


def test_the_other_client_asks_what_baton_bench_does() -> None:
    load = Load(num_prompts=5, most_at_once=1, input_len=20, output_len=4, seed=6, num_warm=2, vocab=500)
    asks = random_shapes(5, uniform(20, 4), 6)
    for name, some, seed in (("warm", asks[:2], 7), ("counted", asks, 6)):
        offered = [(request.prompt, request.num_output_tokens) for request in make_requests(some, 500, seed)]
        assert prompts_of(load, None)[name] == offered


class Upstream:
    """Answers each completion in `NUM_TOKENS` messages, one after the other; or breaks off after the first."""

    def __init__(self, *, breaks_off: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._breaks_off = breaks_off

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, request, body = h11.Connection(h11.SERVER), None, b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(2**16))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
        assert request is not None

        async def send(*events: Any) -> None:
            writer.write(b"".join(connection.send(event) or b"" for event in events))
            await writer.drain()

        await send(h11.Response(status_code=200, headers=[("transfer-encoding", "chunked")]))
        if request.method == b"GET":
            await send(h11.Data(data=b'{"data": [{"id": "m"}]}'), h11.EndOfMessage())
        else:
            self.bodies.append(json.loads(body))
            for number in range(NUM_TOKENS):
                last = (
                    {"usage": {"prompt_tokens": 2, "completion_tokens": NUM_TOKENS}} if number == NUM_TOKENS - 1 else {}
                )
                chunk = {"choices": [{"text": f"t{number}"}], **last}
                await send(h11.Data(data=f"data: {json.dumps(chunk)}\n\n".encode()))
                if self._breaks_off:
                    break
            else:
                await send(h11.EndOfMessage())
        writer.close()


async def complete(http: httpx2.AsyncClient, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "who": str(http.base_url)}
    return (await http.post("completions", json=body, timeout=20)).text


@contextlib.asynccontextmanager
async def two_clients(port: int, meeting: Meeting) -> AsyncIterator[tuple[httpx2.AsyncClient, httpx2.AsyncClient]]:
    async with (
        HttpRelay("127.0.0.1", port, meeting).running() as (first, second),
        httpx2.AsyncClient(base_url=f"http://{first}/v1") as one,
        httpx2.AsyncClient(base_url=f"http://{second}/v1") as other,
    ):
        yield one, other


async def test_two_clients_have_one_run_of_the_server() -> None:
    upstream, meeting = Upstream(), Meeting(num_warm=1)
    async with upstream.running() as port, two_clients(port, meeting) as (one, other):
        assert (await one.get("models")).json() == (await other.get("models")).json() == {"data": [{"id": "m"}]}
        warm = asyncio.create_task(complete(one, [0, 0]))
        assert await complete(other, [0, 0]) == await warm
        assert not meeting.begun.is_set()
        late = [asyncio.create_task(complete(other, [n, n])) for n in (1, 2, 3)]  # and in another order
        texts = await asyncio.gather(*(complete(one, [n, n]) for n in (3, 1, 2)), *late)
        assert meeting.begun.is_set()
    assert len(set(texts)) == 1 and texts[0].count("data: ") == NUM_TOKENS
    assert sorted(body["prompt"] for body in upstream.bodies) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert {body["who"] for body in upstream.bodies} == {str(one.base_url)}, "the first client's request went on"
    assert meeting.problems == [] and len(meeting.counted) == 3
    for pair in meeting.counted:
        assert (len(pair.told), pair.num_prompt_tokens, pair.num_output_tokens) == (NUM_TOKENS, 2, NUM_TOKENS)
        assert pair.sent_at < pair.told[0] <= pair.told[-1] <= pair.ended_at


@pytest.mark.parametrize("who", [bench_relay.FIRST, bench_relay.SECOND])
async def test_what_only_one_of_them_asks_is_a_problem_and_no_run(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_relay, "MEET_S", 0.1)
    upstream, meeting = Upstream(), Meeting(num_warm=0)
    async with upstream.running() as port, two_clients(port, meeting) as clients:
        with pytest.raises(httpx2.RemoteProtocolError):
            await complete(clients[who], [1])
    assert upstream.bodies == []
    assert meeting.problems == ["within 0.1 s only one of the clients asked this"]


async def test_an_answer_that_breaks_off_breaks_off_for_both() -> None:
    upstream, meeting = Upstream(breaks_off=True), Meeting(num_warm=0)
    async with upstream.running() as port, two_clients(port, meeting) as clients:
        ended = await asyncio.gather(*(complete(client, [1]) for client in clients), return_exceptions=True)
    assert [type(error) for error in ended] == [httpx2.RemoteProtocolError] * 2
    assert len(meeting.problems) == 1 and "RemoteProtocolError" in meeting.problems[0]
