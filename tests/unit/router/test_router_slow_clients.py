"""Clients that take nothing, over real sockets: what is held for them is bounded, and they are given up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from author import again
from fake_worker import DECODE, LENGTH, PREFILL, FakeWorker, pair, phase, tokens
from router_harness import Router, refusal, running_router, text_of, text_spec

from cluster.errors import NotFound
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc, worker_pb2
from router.stream import client_stream

WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
"""Options of a client whose flow-control window is small and stays so."""


@asynccontextmanager
async def deaf_client(router: Router, **fields: Any) -> AsyncIterator[Any]:
    """A stream whose window closes after a thousand bytes, as nobody reads it."""
    async with grpc.aio.insecure_channel(router.address, options=WINDOW) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        yield stub.GenerateStream(pb.GenerateStreamRequest(spec=text_spec(**fields)))


async def start(prefill: FakeWorker, decode: FakeWorker) -> worker_pb2.RequestKey:
    """Of the next request, which decodes after its first token."""
    key = (await decode.next_admit()).key
    decode.emit(phase(key, PREFILL), tokens(key, 0, [2]), phase(key, DECODE))
    return key


async def flood(
    decode: FakeWorker, key: worker_pb2.RequestKey, first: int, count: int, num_alternatives: int = 0
) -> None:
    """Tokens one by one, so that the router's task may write each of them. Alternatives to each take room, also where
    many tokens are written together."""
    top = [pb.TokenAlternative(token_id=i, logprob=-1.25) for i in range(num_alternatives)]
    logprobs = [pb.TokenLogprob(token_id=3, logprob=-0.5, rank=1, top=top)] if top else []
    for index in range(first, first + count):
        decode.emit(tokens(key, index, [3], logprobs=logprobs))
        await asyncio.sleep(0)


@pytest.mark.parametrize("interval", [None, 1], ids=["", "each token"])
@pytest.mark.parametrize("fields", [{}, {"resume": pb.ResumeFrom()}], ids=["", "may resume"])
async def test_a_client_that_takes_nothing_is_given_up_and_its_generation_cancelled(
    tmp_path: Path, fields: dict[str, Any], interval: int | None
) -> None:
    prefill, decode = pair()
    output = pb.OutputOptions(token_ids=True, top_logprobs=5, stream_interval_tokens=interval)
    stopping = pb.StoppingCriteria(max_output_tokens=240)
    async with running_router(tmp_path, (prefill, decode), stalled_client_timeout_s=0.3) as router:
        async with deaf_client(router, stopping=stopping, output=output, **fields) as call:
            key = await start(prefill, decode)
            await flood(decode, key, 1, 200, num_alternatives=5)
            assert (await decode.next_cancel()).key == key
            dispatcher = router.server.dispatcher
            assert (dispatcher.num_running, dispatcher.counters.cancelled) == (0, 1)
            with pytest.raises(grpc.aio.AioRpcError) as error:  # now it reads: what was on its way, then why
                async for _ in call:
                    pass
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "does not read" in str(error.value.details())
        assert dispatcher.counters.refused["client_stalled"] == 1


async def test_what_a_client_does_not_read_is_kept_for_nobody_though_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_stream, "LOOK_S", 0.01)
    prefill, decode = pair()
    output = pb.OutputOptions(token_ids=True, top_logprobs=5)
    stopping = pb.StoppingCriteria(max_output_tokens=240)
    async with running_router(tmp_path, (prefill, decode), stalled_client_timeout_s=0.1) as router:
        async with deaf_client(router, stopping=stopping, output=output, resume=pb.ResumeFrom()) as call:
            key = await start(prefill, decode)
            top = [pb.TokenAlternative(token_id=i, logprob=-1.25) for i in range(5)]
            logprobs = [pb.TokenLogprob(token_id=3, logprob=-0.5, rank=1, top=top)] * 200
            decode.emit(tokens(key, 1, [3] * 200, logprobs=logprobs, finish_reason=LENGTH))
            async with asyncio.timeout(20):
                while not router.server.dispatcher.counters.refused["client_stalled"]:
                    await asyncio.sleep(0.01)
            assert router.server.dispatcher.counters.finished == 1
            call.cancel()
        assert isinstance(await refusal(router.stream(again(key.request_id, 0))), NotFound)


async def test_a_client_over_http_that_takes_nothing_is_given_up_and_its_connection_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode), stalled_client_timeout_s=0.3, http_port=0) as router:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, _, port = router.server.http_address.partition(":")
            deaf.connect((host, int(port)))
            messages = [{"role": "user", "content": "a"}]
            asks = {"model": "", "messages": messages, "stream": True, "logprobs": True, "top_logprobs": 20}
            body = json.dumps(asks).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
            deaf.sendall(head.encode() + body)
            key = (await decode.next_admit()).key
            decode.emit(phase(key, PREFILL), tokens(key, 0, [2]), phase(key, DECODE))
            top = [pb.TokenAlternative(token_id=i, logprob=-1.25) for i in range(20)]
            for index in range(1, 230):
                logprob = pb.TokenLogprob(token_id=3, logprob=-0.5, rank=1, top=top)
                decode.emit(tokens(key, index, [3], logprobs=[logprob]))
                await asyncio.sleep(0)
            assert (await decode.next_cancel()).key == key
            assert router.server.dispatcher.counters.refused["client_stalled"] == 1
            assert b"[DONE]" not in await asyncio.to_thread(read_to_the_end, deaf)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")], "no fault of ours"


def read_to_the_end(client: socket.socket) -> bytes:
    """Until the other side has closed the connection, in whatever way."""
    client.settimeout(20)
    told = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            told += part
    return told


async def test_more_than_may_be_held_for_a_client_ends_its_stream_before_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_stream, "MOST_PENDING_BYTES", 100 * 64)
    monkeypatch.setattr(client_stream, "LOOK_S", 0.05)
    prefill, decode = pair()
    async with (
        running_router(tmp_path, (prefill, decode), stalled_client_timeout_s=3600.0) as router,
        deaf_client(router, stopping=pb.StoppingCriteria(max_output_tokens=240)),
    ):
        key = await start(prefill, decode)
        await flood(decode, key, 1, 230)
        assert (await decode.next_cancel()).key == key


async def test_a_client_that_reads_late_gets_everything_in_its_order(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with (
        running_router(tmp_path, (prefill, decode)) as router,
        deaf_client(router, stopping=pb.StoppingCriteria(max_output_tokens=240)) as call,
    ):
        key = await start(prefill, decode)
        await flood(decode, key, 1, 200)
        decode.emit(tokens(key, 201, [3], finish_reason=LENGTH))
        async with asyncio.timeout(20):
            while router.server.dispatcher.num_running:
                await asyncio.sleep(0)
        events = [event async for event in call]
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert [delta.first_token_index for delta in deltas] == [
            sum(d.token_count for d in deltas[:index]) for index in range(len(deltas))
        ]
        assert sum(delta.token_count for delta in deltas) == 202 and len(text_of(events)) == 202
        assert len(deltas) < 202, "what waits for a client is told together"
