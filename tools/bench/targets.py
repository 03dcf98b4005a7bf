"""Servers that can be measured: Baton over gRPC, and any server with OpenAI's completions over HTTP.

Both ask for greedy outputs of exactly the wanted length. An error of the server goes into the sample; none is raised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc
import httpx2

from cluster import rpc
from cluster.errors import NotReachable
from cluster.pb import generation_pb2, generation_pb2_grpc
from tools.bench.workload import BenchRequest, Sample
from tools.client import make_spec

Metadata = Sequence[tuple[str, str]]


class Target(Protocol):
    """A server."""

    async def send(self, request: BenchRequest, sent_at: float) -> Sample: ...


class GrpcTarget:
    """Baton's own API, which also shows lost and repeated tokens, and moves between workers."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = (), timeout_s: float | None = None) -> None:
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._metadata = metadata
        self._timeout_s = timeout_s

    async def send(self, request: BenchRequest, sent_at: float) -> Sample:
        sample = Sample(request.num_prompt_tokens, sent_at)
        num = request.num_output_tokens
        spec = make_spec(request.prompt, max_output_tokens=num, temperature=0.0, ignore_eos=True, include_timing=True)
        await self.stream(spec, sample)
        return sample

    async def stream(self, spec: generation_pb2.GenerationSpec, sample: Sample) -> None:
        """Sends any request with one output and fills in its sample."""
        request = generation_pb2.GenerateStreamRequest(spec=spec)
        try:
            async for event in self._stub.GenerateStream(request, timeout=self._timeout_s, metadata=self._metadata):
                match event.WhichOneof("event"):
                    case "delta":
                        sample.message_times.append(time.perf_counter())
                        sample.num_gaps += event.delta.first_token_index != sample.num_output_tokens
                        sample.message_tokens.append(event.delta.token_count)
                        sample.num_output_tokens += event.delta.token_count
                        sample.token_ids += event.delta.token_ids
                    case "completed":
                        sample.num_prompt_tokens = event.completed.usage.prompt_tokens
                        sample.num_cached_tokens = event.completed.usage.cached_tokens
                        sample.num_moves = event.completed.timing.migrations
                        sample.placement = event.completed.timing.placement
        except grpc.aio.AioRpcError as error:
            sample.was_refused = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            sample.error = str(rpc.from_rpc_error(error))


class OpenAiTarget:
    """OpenAI's completions. `http` has the server's base URL, such as http://127.0.0.1:8000/v1, and the API key.
    `extra` adds fields to each body; None leaves one out."""

    def __init__(self, http: httpx2.AsyncClient, model: str, extra: Mapping[str, Any]) -> None:
        self._http = http
        usual = {"model": model, "temperature": 0.0, "stream": True, "ignore_eos": True}
        body = {**usual, "stream_options": {"include_usage": True}, **extra}
        self._body = {name: value for name, value in body.items() if value is not None}

    async def send(self, request: BenchRequest, sent_at: float) -> Sample:
        sample = Sample(request.num_prompt_tokens, sent_at)
        await self._stream(self._body | {"prompt": request.prompt, "max_tokens": request.num_output_tokens}, sample)
        return sample

    async def _stream(self, body: Mapping[str, Any], sample: Sample) -> None:
        try:
            async with self._http.stream("POST", "completions", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    sample.was_refused = answer.status_code == 429
                    sample.error = f"status {answer.status_code}: {text[:300]}"
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _add_chunk(json.loads(line.removeprefix("data: ")), sample)
        except (httpx2.HTTPError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"


def _add_chunk(chunk: dict[str, Any], sample: Sample) -> None:
    if "error" in chunk:
        sample.error = str(chunk["error"])[:300]
    if any(choice.get("text") for choice in chunk.get("choices", ())):
        sample.message_times.append(time.perf_counter())
    usage = chunk.get("usage")
    if usage:
        sample.num_prompt_tokens = usage["prompt_tokens"]
        sample.num_output_tokens = usage["completion_tokens"]
        sample.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def first_model(http: httpx2.AsyncClient) -> str:
    """The first model that a server lists. Raises NotReachable."""
    try:
        answer = await http.get("models")
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise NotReachable(
            f"{http.base_url} does not list its models ({type(error).__name__}: {error}); is it the URL of an OpenAI "
            "API, such as http://127.0.0.1:8000/v1, and does it need an API key?"
        ) from error


async def model_over_grpc(channel: grpc.aio.Channel, metadata: Metadata) -> str:
    """The model that Baton serves. Raises the call's error."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    try:
        answer = await stub.GetModel(generation_pb2.GetModelRequest(), metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from error
    return str(answer.model.name)
