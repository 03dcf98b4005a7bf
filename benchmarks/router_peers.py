"""What stands around a router while it is measured, each a process of its own, without a model.

    workers  a prefill and a decode worker that speak the real protocol, and write a token for every sequence in each
             step, as fast as they are read
    echo     a bare gRPC server that streams the same messages to the same calls
    load     clients, many streams at a time, that wait for a word on stdin

Prints one JSON line when it is ready, as Baton's own programs do, and ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from cluster import rpc
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from cluster.settings import JsonSettings
from tools.client import make_spec

HEARTBEAT_S = 0.5
PROMPT = tuple(range(100, 116))
"""Token ids; no word in them."""
PIECE = " word"
"""What the echo calls a token's text: as long as a token's text is here."""
_OUTPUT_IDS = range(300, 900)


@dataclass(frozen=True)
class PeerSettings(JsonSettings):
    """`kind`: workers, echo or load."""

    kind: str


@dataclass
class _Sequence:
    key: worker_pb2.RequestKey
    index: int
    num_told: int
    most: int

    def next_event(self) -> worker_pb2.Event:
        told, self.num_told = self.num_told, self.num_told + 1
        reason = pb.FINISH_REASON_LENGTH if self.num_told == self.most else pb.FINISH_REASON_UNSPECIFIED
        token_id = _OUTPUT_IDS[told % len(_OUTPUT_IDS)]
        tokens = worker_pb2.Tokens(
            key=self.key,
            sequence_index=self.index,
            first_token_index=told,
            token_ids=[token_id],
            finish_reason=reason,
        )
        return worker_pb2.Event(tokens=tokens)


@dataclass
class _Session:
    """What one router has asked of one worker."""

    sequences: list[_Sequence] = field(default_factory=list)
    phases: list[worker_pb2.Event] = field(default_factory=list)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self) -> worker_pb2.EventBatch:
        """What happened since the last one, and a token for each sequence."""
        events = self.phases + [sequence.next_event() for sequence in self.sequences]
        self.phases = []
        self.sequences = [s for s in self.sequences if s.num_told < s.most]
        return worker_pb2.EventBatch(events=events)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A prefill worker tells the first token of each output, a decode worker the rest."""

    def __init__(self, role: worker_pb2.Role) -> None:
        self._is_prefill = role == worker_pb2.ROLE_PREFILL
        self._info = worker_pb2.WorkerInfo(
            worker_id=f"{'prefill' if self._is_prefill else 'decode'}-0",
            incarnation="1",
            role=role,
            block_size=16,
            num_blocks=2**16,
            max_num_seqs=1024,
        )

    async def Session(self, requests: AsyncIterator[worker_pb2.Command], context: Any) -> None:
        session = _Session()
        await context.write(worker_pb2.EventBatch(events=[worker_pb2.Event(info=self._info)]))
        listener = asyncio.create_task(self._listen(requests, session))
        try:
            while True:
                while session.sequences or session.phases:
                    await context.write(session.step())
                session.has_more.clear()
                try:
                    await asyncio.wait_for(session.has_more.wait(), HEARTBEAT_S)
                except TimeoutError:
                    await context.write(worker_pb2.EventBatch())
        finally:
            listener.cancel()

    async def _listen(self, requests: AsyncIterator[worker_pb2.Command], session: _Session) -> None:
        async for command in requests:
            if command.HasField("admit"):
                self._admit(command.admit, session)
            elif command.HasField("cancel"):
                session.sequences = [s for s in session.sequences if s.key != command.cancel.key]
        raise asyncio.CancelledError

    def _admit(self, admit: worker_pb2.Admit, session: _Session) -> None:
        most = admit.sampling.stopping.max_output_tokens
        is_local = not self._is_prefill and not admit.expect_handoff
        heartbeat = pb.Heartbeat
        entered = heartbeat.PHASE_PREFILL if self._is_prefill or is_local else heartbeat.PHASE_DECODE
        session.phases.append(worker_pb2.Event(phase=worker_pb2.PhaseChanged(key=admit.key, phase=entered)))
        for index in range(admit.sampling.params.n):
            if self._is_prefill:
                first = _Sequence(admit.key, index, 0, most).next_event()
                session.phases.append(first)
            elif is_local or most > 1:
                session.sequences.append(_Sequence(admit.key, index, 0 if is_local else 1, most))
        session.has_more.set()


class Echo(generation_pb2_grpc.GenerationServiceServicer):
    """The messages of a stream, and nothing behind them."""

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> None:
        prompt_tokens, most = len(request.spec.token_ids.ids), request.spec.stopping.max_output_tokens
        started = pb.Started(generation_id="gen-" + "0" * 24, model="tiny-shakespeare", prompt_tokens=prompt_tokens)
        await context.write(pb.GenerateStreamResponse(started=started))
        for index in range(most):
            token_id = _OUTPUT_IDS[index % len(_OUTPUT_IDS)]
            delta = pb.SequenceDelta(first_token_index=index, token_count=1, token_ids=[token_id], text=PIECE)
            await context.write(pb.GenerateStreamResponse(delta=delta))
        end = pb.SequenceEnd(finish_reason=pb.FINISH_REASON_LENGTH, token_count=most)
        await context.write(pb.GenerateStreamResponse(sequence_end=end))
        usage = pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=most)
        await context.write(pb.GenerateStreamResponse(completed=pb.Completed(usage=usage)))


async def run_stream(stub: Any, num_tokens: int, *, is_paced: bool = False, may_resume: bool = False) -> float:
    """Seconds of one stream; raises AssertionError for a token that is missing, or told twice."""
    spec = make_spec(PROMPT, max_output_tokens=num_tokens, temperature=0.0, ignore_eos=True, token_ids=True)
    spec.cache.bypass_prefix_cache = True
    if not is_paced:
        spec.output.stream_interval_tokens = 1
    if may_resume:
        spec.resume.SetInParent()
    begun, count = time.perf_counter(), 0
    async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)):
        if event.HasField("delta"):
            assert event.delta.first_token_index == count, f"token {event.delta.first_token_index} came, not {count}"
            count += event.delta.token_count
    assert count == num_tokens, f"{count} tokens came, not {num_tokens}"
    return time.perf_counter() - begun


async def load() -> None:
    """Does what each line of stdin says: so many streams at once, so often."""
    loop = asyncio.get_running_loop()
    _say("ready")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        wanted = json.loads(line)
        async with rpc.create_channel(wanted["address"]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            begun = time.perf_counter()
            try:
                how = {name: wanted[name] for name in ("is_paced", "may_resume")}
                streams = (run_stream(stub, wanted["tokens"], **how) for _ in range(wanted["streams"]))
                await asyncio.gather(*streams)
                problem = ""
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            _say("done", begun=begun, ended=time.perf_counter(), problem=problem)


async def serve(kind: str) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    servers, flags = [], []
    for name in ("prefill", "decode") if kind == "workers" else ("echo",):
        server, port = rpc.create_server(max_message_bytes=rpc.INTERNAL_MESSAGE_BYTES)
        if kind == "workers":
            role = worker_pb2.ROLE_PREFILL if name == "prefill" else worker_pb2.ROLE_DECODE
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(role), server)
        else:
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(Echo(), server)
        await server.start()
        servers.append(server)
        flags.append(f"{name}:{name}-0=127.0.0.1:{port}" if kind == "workers" else f"127.0.0.1:{port}")
    _say("ready", addresses=flags)
    await stop.wait()
    await asyncio.gather(*(server.stop(0.2) for server in servers))


def _say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    settings = PeerSettings.from_json(parser.parse_args().settings)
    asyncio.run(load() if settings.kind == "load" else serve(settings.kind))


if __name__ == "__main__":
    main()
