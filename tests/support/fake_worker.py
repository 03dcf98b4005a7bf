"""A worker without a model: a real gRPC WorkerService server that speaks the real protocol and does what a test says.

Every command it hears can be awaited; events go out when the test emits them, or by a script that answers each Admit.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from waiting import Changes

from cluster import rpc
from cluster.pb import generation_pb2, worker_pb2, worker_pb2_grpc
from cluster.tls import ServerTls

PREFILL = generation_pb2.Heartbeat.PHASE_PREFILL
TRANSFER = generation_pb2.Heartbeat.PHASE_TRANSFER
DECODE = generation_pb2.Heartbeat.PHASE_DECODE
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH

HEARTBEAT_S = 0.5
Key = worker_pb2.RequestKey
Outputs = Callable[[worker_pb2.Admit], Sequence[Sequence[int]]]
"""What the model would have written: the tokens of each sequence."""


def phase(key: Key, entered: generation_pb2.Heartbeat.Phase, num_cached_tokens: int = 0) -> worker_pb2.Event:
    changed = worker_pb2.PhaseChanged(key=key, phase=entered, num_cached_tokens=num_cached_tokens)
    return worker_pb2.Event(phase=changed)


def tokens(key: Key, first_token_index: int, token_ids: Sequence[int], **fields: Any) -> worker_pb2.Event:
    """`fields`: sequence_index, logprobs, finish_reason, stop_token_id."""
    return worker_pb2.Event(
        tokens=worker_pb2.Tokens(key=key, first_token_index=first_token_index, token_ids=token_ids, **fields)
    )


def prompt_logprobs(key: Key, first_token_index: int, token_ids: Sequence[int], logprob: float) -> worker_pb2.Event:
    """Each token with the same logprob but the prompt's first, which has none."""
    logprobs = [
        generation_pb2.TokenLogprob(token_id=token_id, logprob=logprob, rank=1)
        if index
        else generation_pb2.TokenLogprob(token_id=token_id, undefined=True)
        for index, token_id in enumerate(token_ids, start=first_token_index)
    ]
    told = worker_pb2.PromptLogprobs(key=key, first_token_index=first_token_index, logprobs=logprobs)
    return worker_pb2.Event(prompt_logprobs=told)


def failed(key: Key, reason: worker_pb2.Failed.Reason, message: str = "it broke") -> worker_pb2.Event:
    return worker_pb2.Event(failed=worker_pb2.Failed(key=key, reason=reason, message=message))


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`script(worker, admit)` is called for each Admit; without one the test emits events itself."""

    def __init__(
        self,
        worker_id: str,
        role: worker_pb2.Role,
        script: Callable[[FakeWorker, worker_pb2.Admit], None] | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self.tls = tls
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.address = ""
        self.incarnation = uuid.uuid4().hex
        self.weights_revision = ""
        self.admits: list[worker_pb2.Admit] = []
        self.cancels: list[worker_pb2.Cancel] = []
        self.protocol = ""
        """Versions that it says it speaks."""
        self.num_sessions = 0
        """Calls of Session so far; `until_sessions` waits for them."""
        self._sessions_begun = Changes()
        self.is_silent = False
        """Says nothing but what is emitted, as a stopped process says nothing at all."""
        self._heard: asyncio.Queue[worker_pb2.Command] = asyncio.Queue()
        self._sessions: set[asyncio.Queue[worker_pb2.EventBatch]] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> str:
        """Listens; returns host:port. A worker that is started again has another incarnation."""
        self.incarnation = uuid.uuid4().hex
        self._server, bound = rpc.create_server(port=port, tls=self.tls)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"
        return self.address

    async def stop(self) -> None:
        """At once, as by kill -9: sessions break."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def flag(self) -> str:
        """This worker in the form of RouterSettings.workers."""
        return f"{'prefill' if self.role == worker_pb2.ROLE_PREFILL else 'decode'}:{self.worker_id}={self.address}"

    def emit(self, *events: worker_pb2.Event) -> None:
        """One batch to every open session."""
        for session in self._sessions:
            session.put_nowait(worker_pb2.EventBatch(events=events))

    async def next_admit(self) -> worker_pb2.Admit:
        return (await self._next("admit")).admit

    async def next_cancel(self) -> worker_pb2.Cancel:
        return (await self._next("cancel")).cancel

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.Command], context: Any) -> AsyncIterator[Any]:
        session: asyncio.Queue[worker_pb2.EventBatch] = asyncio.Queue()
        self.note_session()
        info = worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            weights_revision=self.weights_revision,
            protocol=self.protocol,
        )
        session.put_nowait(worker_pb2.EventBatch(events=[worker_pb2.Event(info=info)]))
        self._sessions.add(session)
        reader = asyncio.create_task(self._listen(request_iterator))
        try:
            while True:
                try:
                    batch = await asyncio.wait_for(session.get(), HEARTBEAT_S)
                except TimeoutError:
                    batch = worker_pb2.EventBatch()
                if batch.events or not self.is_silent:
                    yield batch
        finally:
            reader.cancel()
            self._sessions.discard(session)

    def note_session(self) -> None:
        self.num_sessions += 1
        self._sessions_begun.tell()

    async def until_sessions(self, count: int) -> None:
        """Until Session has been called so often."""
        await self._sessions_begun.until(lambda: self.num_sessions >= count)

    async def _listen(self, commands: AsyncIterator[worker_pb2.Command]) -> None:
        async for command in commands:
            self._heard.put_nowait(command)
            if command.HasField("admit"):
                self.admits.append(command.admit)
                if self.script is not None:
                    self.script(self, command.admit)
            elif command.HasField("cancel"):
                self.cancels.append(command.cancel)

    async def next_update(self) -> str:
        return (await self._next("update_settings")).update_settings.json

    async def _next(self, kind: str) -> worker_pb2.Command:
        """The next command of this kind; those before it are dropped."""
        while True:
            command = await asyncio.wait_for(self._heard.get(), 20)
            if command.WhichOneof("command") == kind:
                return command


def prefill_script(
    outputs: Outputs, num_cached_tokens: int = 0, end: int = LENGTH
) -> Callable[[FakeWorker, worker_pb2.Admit], None]:
    """Prefills at once: phases, and the first token of each sequence. `end`: why sequences end."""

    def answer(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        sequences = outputs(admit)
        firsts = [
            tokens(admit.key, 0, sequence[:1], sequence_index=index, finish_reason=end if len(sequence) == 1 else 0)
            for index, sequence in enumerate(sequences)
        ]
        rest = [phase(admit.key, TRANSFER)] if any(len(sequence) > 1 for sequence in sequences) else []
        worker.emit(phase(admit.key, PREFILL, num_cached_tokens), *firsts, *rest)

    return answer


def decode_script(outputs: Outputs, end: int = LENGTH) -> Callable[[FakeWorker, worker_pb2.Admit], None]:
    """Decodes at once, one token of each sequence in a batch. `end`: why sequences end."""

    def answer(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        sequences = outputs(admit)
        longest = max(len(sequence) for sequence in sequences)
        if longest > 1:
            worker.emit(phase(admit.key, DECODE))
        for position in range(1, longest):
            worker.emit(
                *(
                    tokens(
                        admit.key,
                        position,
                        [sequence[position]],
                        sequence_index=index,
                        finish_reason=end if position == len(sequence) - 1 else 0,
                    )
                    for index, sequence in enumerate(sequences)
                    if position < len(sequence)
                )
            )

    return answer


def pair(outputs: Outputs | None = None, end: int = LENGTH) -> tuple[FakeWorker, FakeWorker]:
    """A prefill and a decode worker; with `outputs` they answer by themselves. `end`: why sequences end."""
    return (
        FakeWorker("prefill-0", worker_pb2.ROLE_PREFILL, prefill_script(outputs, end=end) if outputs else None),
        FakeWorker("decode-0", worker_pb2.ROLE_DECODE, decode_script(outputs, end) if outputs else None),
    )
