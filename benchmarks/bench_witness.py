"""A client that shares nothing with `baton bench` but the load: OpenAI's own SDK, or the stubs that protoc generates.

A process of its own. Reads what to ask from a file, `{"warm": [[prompt, tokens], ...], "counted": [...]}`, asks what
is warm, says `ready`, waits for a line on stdin, asks what counts, so many at a time, and says what it saw of each
request. It makes no figure of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from openai import AsyncOpenAI

from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc
from cluster.settings import JsonSettings

TIMEOUT_S = 600.0
Ask = Callable[[Any, int], Awaitable[dict[str, Any]]]
"""Of a prompt and how many tokens are wanted; what was seen, with instants in seconds of one clock."""


@dataclass(frozen=True)
class WitnessSettings(JsonSettings):
    """`address`: HOST:PORT of Baton's gRPC, or the base URL of an OpenAI API."""

    address: str
    model: str
    asks: str
    most_at_once: int
    ignore_eos: bool
    """Whether the server knows the field."""


def over_openai(http: AsyncOpenAI, settings: WitnessSettings) -> Ask:
    extra = {"ignore_eos": True} if settings.ignore_eos else {}

    async def ask(prompt: Any, num_tokens: int) -> dict[str, Any]:
        told: list[float] = []
        usage = None
        # Token ids that are given as `prompt` are looked at one by one, which takes the SDK 30 ms for a thousand.
        given = extra if isinstance(prompt, str) else {**extra, "prompt": prompt}
        sent_at = time.perf_counter()
        stream = await http.completions.create(
            model=settings.model,
            prompt=prompt if isinstance(prompt, str) else "",
            max_tokens=num_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=given,
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                told.append(time.perf_counter())
            usage = chunk.usage or usage
        ended_at = time.perf_counter()
        assert usage is not None, "the server told no usage"
        return _seen(sent_at, told, ended_at, usage.prompt_tokens, usage.completion_tokens)

    return ask


def over_grpc(stub: Any) -> Ask:
    async def ask(prompt: Any, num_tokens: int) -> dict[str, Any]:
        told: list[float] = []
        usage = pb.Usage()
        sent_at = time.perf_counter()
        spec = pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StoppingCriteria(max_output_tokens=num_tokens, ignore_eos=True),
        )
        async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=TIMEOUT_S):
            if event.HasField("delta"):
                told.append(time.perf_counter())
            elif event.HasField("completed"):
                usage = event.completed.usage
        return _seen(sent_at, told, time.perf_counter(), usage.prompt_tokens, usage.completion_tokens)

    return ask


def _seen(sent_at: float, told: list[float], ended_at: float, num_prompt: int, num_output: int) -> dict[str, Any]:
    """As the relay keeps it."""
    seen = {"sent_at": sent_at, "told": told, "ended_at": ended_at}
    return seen | {"num_prompt_tokens": num_prompt, "num_output_tokens": num_output}


async def keep_asking(ask: Ask, wanted: Iterable[tuple[Any, int]], most_at_once: int) -> list[dict[str, Any]]:
    """A closed loop."""
    left, seen = iter(wanted), list[dict[str, Any]]()

    async def one_after_another() -> None:
        for prompt, num_tokens in left:
            seen.append(await ask(prompt, num_tokens))

    async with asyncio.TaskGroup() as group:
        for _ in range(most_at_once):
            group.create_task(one_after_another())
    return seen


async def witness(settings: WitnessSettings, ask: Ask) -> None:
    wanted = json.loads(Path(settings.asks).read_text())
    await keep_asking(ask, wanted["warm"], settings.most_at_once)
    _say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    _say("done", seen=await keep_asking(ask, wanted["counted"], settings.most_at_once))


def _say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    settings = WitnessSettings.from_json(parser.parse_args().settings)
    if settings.address.startswith("http"):
        async with AsyncOpenAI(base_url=settings.address, api_key="none", max_retries=0, timeout=TIMEOUT_S) as http:
            await witness(settings, over_openai(http, settings))
    else:
        async with grpc.aio.insecure_channel(settings.address) as channel:
            await witness(settings, over_grpc(generation_pb2_grpc.GenerationServiceStub(channel)))


if __name__ == "__main__":
    asyncio.run(main())
