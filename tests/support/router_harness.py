"""A router in the test's own event loop, over fake workers, with a model folder that holds no weights.

The tokenizer is byte-level: token 1 + i is the i-th byte of the alphabet, 0 ends a text, so texts and ids are easy to
read off each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker import PREFILL, TRANSFER, FakeWorker, phase, tokens
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster import rpc
from cluster.errors import BatonError
from cluster.pb import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, worker_pb2
from cluster.pb import generation_pb2 as pb
from cluster.settings import RouterSettings
from cluster.state import Store
from cluster.tls import ClientTls, internal_tls_of
from router.observe.tracing import Traces
from router.program import RouterServer

VOCAB_SIZE = 300
MAX_MODEL_LEN = 256
EOS = 0
CHAT_TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor -%}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def make_model_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **generation: Any) -> Path:
    """Everything a router reads; `generation` are the fields of generation_config.json."""
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": EOS}
    tokenizer_config = {"eos_token": "<|end|>"} | ({"chat_template": chat_template} if chat_template else {})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Router:
    """A running router and stubs for it."""

    server: RouterServer
    address: str
    control_address: str
    channel: grpc.aio.Channel
    control_tls: ClientTls | None = None

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.StatusServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    async def until_health(self, status: int, service: str = "") -> None:
        async for known in self.healths(service):
            if known == status:
                return

    async def healths(self, service: str = "") -> AsyncGenerator[int, None]:
        """The status now, and each that follows."""
        call = self.health.Watch(health_pb2.HealthCheckRequest(service=service))
        try:
            async for answer in call:
                yield answer.status
        finally:
            call.cancel()

    async def until_serving(self) -> None:
        await asyncio.wait_for(self.until_health(health_pb2.HealthCheckResponse.SERVING), 20)

    async def until_all_ready(self) -> None:
        """Every worker, not only the one of each role that is enough to serve: which one comes first is chance."""

        async def ask(admin: Any) -> bool:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            return all(worker.state == admin_pb2.WorkerStatus.STATE_READY for worker in status.workers)

        async with asyncio.timeout(20), rpc.create_channel(self.control_address, tls=self.control_tls) as control:
            while not await ask(admin_pb2_grpc.StatusServiceStub(control)):
                pass

    async def stream(self, spec: pb.GenerationSpec, **call: Any) -> list[pb.GenerateStreamResponse]:
        """All messages of one stream; raises what the client would see."""
        return [event async for event in self.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec), **call)]


@contextlib.asynccontextmanager
async def running_router(
    folder: Path,
    workers: Sequence[FakeWorker] = (),
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    tls: ClientTls | None = None,
    store: Store | None = None,
    traces: Traces | None = None,
    **settings: Any,
) -> AsyncIterator[Router]:
    """Starts the workers and a router that knows them, waits until it serves with all of them, and ends all of it.

    `tls`: of the client's channel. Workers that another router has started are that one's to end.
    """
    started = [worker for worker in workers if not worker.address]
    for worker in started:
        await worker.start()
    given = {"port": 0, "drain_timeout_s": 0.0, "workers": tuple(worker.flag for worker in workers)} | settings
    model_path = str(make_model_folder(folder, chat_template=chat_template))
    complete = RouterSettings.from_values(model_path=model_path, **given)
    internal = internal_tls_of(complete.internal_tls)
    server = RouterServer(complete, lambda line: None, store, traces)
    address, control_address = await server.start()
    try:
        async with rpc.create_channel(address, tls=tls) as channel:
            router = Router(server, address, control_address, channel, internal.client if internal else None)
            if workers:
                await router.until_serving()
                await router.until_all_ready()
            yield router
    finally:
        await server.stop()
        for worker in started:
            await worker.stop()


def text_spec(text: str = "hello", **fields: Any) -> pb.GenerationSpec:
    """Greedy, with token ids in the output; `fields` are those of GenerationSpec."""
    given: dict[str, Any] = {"sampling": pb.SamplingParams(temperature=0), "output": pb.OutputOptions(token_ids=True)}
    return pb.GenerationSpec(text=text, **(given | fields))


def kinds(events: Sequence[pb.GenerateStreamResponse]) -> list[str]:
    """The kinds of events in their order, without heartbeats."""
    names = [str(event.WhichOneof("event")) for event in events]
    return [name for name in names if name != "heartbeat"]


async def begin(router: Router, prefill: FakeWorker) -> tuple[Any, list[Any], worker_pb2.RequestKey]:
    """A stream that has its first token and waits for the hand-off."""
    spec = text_spec(output=pb.OutputOptions(token_ids=True, include_timing=True))
    stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec))
    key = (await prefill.next_admit()).key
    prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")), phase(key, TRANSFER))
    events: list[Any] = []
    while "delta" not in kinds(events):
        events.append(await stream.read())
    return stream, events, key


async def rest(stream: Any) -> list[Any]:
    """What still comes of a stream."""
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refusal(call: Awaitable[Any]) -> BatonError:
    """The error that a client is given."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return rpc.from_rpc_error(error.value)


def text_of(events: Sequence[pb.GenerateStreamResponse], index: int = 0) -> str:
    return "".join(e.delta.text for e in events if e.HasField("delta") and e.delta.index == index)
