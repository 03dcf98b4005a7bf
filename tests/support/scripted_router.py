"""A router that answers as a test says, on a real gRPC connection, and the `baton` program against it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from typer.testing import CliRunner, Result

from cli.main import app
from cluster import rpc
from cluster.errors import (
    BatonError,
)
from cluster.pb import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from cluster.pb import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
Event = pb.GenerateStreamResponse
Script = Callable[[pb.GenerationSpec], AsyncIterator[Event]]


def started() -> Event:
    return Event(started=pb.Started(generation_id="gen-1", model="bard", prompt_tokens=3))


def delta(text: str, first: int, count: int = 1, index: int = 0) -> Event:
    ids = range(first, first + count)
    return Event(
        delta=pb.SequenceDelta(index=index, first_token_index=first, token_count=count, token_ids=ids, text=text)
    )


def end(count: int, index: int = 0) -> Event:
    reason = pb.FINISH_REASON_LENGTH
    return Event(sequence_end=pb.SequenceEnd(index=index, finish_reason=reason, token_count=count))


def completed(num_tokens: int = 2) -> Event:
    timing = pb.Timing(placement="disaggregated")
    timing.time_to_first_token.FromMilliseconds(31)
    timing.decode.FromMilliseconds(8)
    usage = pb.Usage(prompt_tokens=3, completion_tokens=num_tokens, cached_tokens=1)
    return Event(completed=pb.Completed(usage=usage, timing=timing))


async def hello(_: pb.GenerationSpec) -> AsyncIterator[Event]:
    for event in (started(), delta("Hello", 0), delta(" world", 1), end(2), completed()):
        yield event


def failing(error: BatonError, *before: Event) -> Script:
    async def script(_: pb.GenerationSpec) -> AsyncIterator[Event]:
        for event in before:
            yield event
        raise error

    return script


class ScriptedRouter(generation_pb2_grpc.GenerationServiceServicer, admin_pb2_grpc.StatusServiceServicer):
    """Answers as `script` says and remembers what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.script: Script = hello
        self.specs: list[pb.GenerationSpec] = []
        self.cancelled = threading.Event()
        self.go_on = threading.Event()
        self.status = admin_pb2.GetStatusResponse()
        self.activity = admin_pb2.GetActivityResponse()
        self.cache = admin_pb2.GetCacheResponse()

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> AsyncIterator[Event]:
        self.specs.append(request.spec)
        is_cancelled = True  # a client that leaves while a message is on its way closes this generator, no more
        try:
            async for event in self.script(request.spec):
                yield event
            is_cancelled = False
        except BatonError as error:
            is_cancelled = False
            await rpc.abort(context, error)
        finally:
            if is_cancelled:
                self.cancelled.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """The end of what the script says."""
        self.specs.append(request.spec)
        try:
            events = [event async for event in self.script(request.spec)]
        except BatonError as error:
            await rpc.abort(context, error)
        return pb.GenerateResponse(usage=events[-1].completed.usage)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=request.text.encode())

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusResponse:
        return self.status

    async def GetActivity(self, request: admin_pb2.GetActivityRequest, context: Any) -> admin_pb2.GetActivityResponse:
        return self.activity

    async def GetCache(self, request: admin_pb2.GetCacheRequest, context: Any) -> admin_pb2.GetCacheResponse:
        return self.cache

    async def hello_then_wait(self, _: pb.GenerationSpec) -> AsyncIterator[Event]:
        yield started()
        yield delta("Hello", 0)
        await asyncio.to_thread(self.go_on.wait, 20)
        yield delta(" world", 1)
        yield end(2)
        yield completed()

    async def hello_then_hang(self, _: pb.GenerationSpec) -> AsyncIterator[Event]:
        yield started()
        yield delta("Hello", 0)
        await asyncio.Event().wait()


def baton(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@contextmanager
def start_baton(*arguments: str, **kwargs: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program as a process, which is waited for at the end, or killed when the test has failed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli.main", *arguments]
    with subprocess.Popen(command, env=environment, cwd=ROOT, **kwargs) as process:
        try:
            yield process
            process.wait(30)
        finally:
            process.kill()


def read_until(descriptor: int, wanted: bytes) -> bytes:
    """Everything up to and including `wanted`, which must come within 30 s."""
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([descriptor], [], [], 30)
        piece = os.read(descriptor, 1000) if ready else b""
        assert piece, f"{wanted!r} never came; this did: {seen!r}"
        seen += piece
    return seen


def interrupt_until(process: subprocess.Popen[bytes], descriptor: int, wanted: bytes) -> None:
    """Sends SIGINT until it is answered: one that comes just before a prompt begins to wait is seen at the next key."""
    seen = b""
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        while wanted not in seen and select.select([descriptor], [], [], 1.5)[0]:
            seen += os.read(descriptor, 1000)
        if wanted in seen:
            return
    raise AssertionError(f"{wanted!r} never came; this did: {seen!r}")


def contents(spec: pb.GenerationSpec) -> list[tuple[str, str]]:
    messages = [json_format.MessageToDict(message) for message in spec.chat.messages]
    return [(message["role"], message["content"]) for message in messages]
