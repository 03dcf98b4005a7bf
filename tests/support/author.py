"""A decode worker that writes fixed texts, as far as the test lets it, and goes on from whatever tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from fake_worker import DECODE, LENGTH, PREFILL, FakeWorker, Key, phase, tokens
from router_harness import Router, ids, text_spec

from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2


class Author:
    """Every request gets `texts`, one for each sequence; `limit`: tokens of each that are told so far."""

    def __init__(self, *texts: str, limit: int | None = None) -> None:
        self.texts = [ids(text) for text in texts]
        self.limit = max(map(len, self.texts)) if limit is None else limit
        self.worker = FakeWorker("decode-0", worker_pb2.ROLE_DECODE, self._begin)
        self._written: list[tuple[Key, list[int]]] = []

    def allow(self, limit: int) -> None:
        """Tells more, to everybody who waits for it."""
        self.limit = limit
        for key, positions in self._written:
            self._go_on(key, positions)

    def finish(self) -> None:
        self.allow(max(map(len, self.texts)))

    def _begin(self, worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        positions = [0] * len(self.texts)
        for known in admit.known_tokens:
            told = self.texts[known.sequence_index][: len(known.token_ids)]
            assert list(known.token_ids) == told, "what is known is not what was written"
            positions[known.sequence_index] = len(told)
        self._written.append((admit.key, positions))
        worker.emit(phase(admit.key, PREFILL), phase(admit.key, DECODE))
        self._go_on(admit.key, positions)

    def _go_on(self, key: Key, positions: list[int]) -> None:
        for index, text in enumerate(self.texts):
            while positions[index] < min(self.limit, len(text)):
                position = positions[index]
                logprob = pb.TokenLogprob(token_id=text[position], logprob=-1 - position, rank=1)
                self.worker.emit(
                    tokens(
                        key,
                        position,
                        [text[position]],
                        sequence_index=index,
                        logprobs=[logprob],
                        finish_reason=LENGTH if position == len(text) - 1 else 0,
                    )
                )
                positions[index] += 1


ALONE: dict[str, Any] = {"needs_prefill": False}
"""Settings of a router without prefill workers."""


def resumable(num_sequences: int = 1, *, stop: Sequence[str] = (), **fields: Any) -> pb.GenerationSpec:
    """The first call of a client that may come back."""
    given: dict[str, Any] = {
        "sampling": pb.SamplingParams(temperature=0, n=num_sequences),
        "output": pb.OutputOptions(token_ids=True, top_logprobs=0, stream_interval_tokens=1),
        "stopping": pb.StoppingCriteria(max_output_tokens=100, stop=stop),
        "resume": pb.ResumeFrom(),
    }
    return text_spec("hello", **(given | fields))


def again(generation_id: str, index: int) -> pb.GenerationSpec:
    return pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=generation_id, next_token_index=index))


@dataclass
class Reading:
    """A client's call, with what it has been told."""

    call: Any
    generation_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    """Index of the first token that was told of each sequence."""
    ends: dict[int, pb.SequenceEnd] = field(default_factory=dict)
    completed: pb.Completed | None = None
    resumable: list[bool] = field(default_factory=list)
    """Whether another router could go on, each time that it was told."""

    @classmethod
    def start(cls, router: Router, spec: pb.GenerationSpec) -> Reading:
        return cls(router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec)))

    async def until_started(self) -> None:
        while not self.generation_id:
            self._note(await self.call.read())

    async def until_tokens(self, count: int) -> None:
        """Of all sequences together, at least."""
        while sum(map(len, self.tokens.values())) < count:
            self._note(await self.call.read())

    async def to_the_end(self) -> Reading:
        while (event := await self.call.read()) is not grpc.aio.EOF:
            self._note(event)
        assert self.completed is not None
        return self

    async def leave(self) -> None:
        self.call.cancel()

    def _note(self, event: pb.GenerateStreamResponse) -> None:
        assert self.completed is None
        if event.HasField("resumable"):
            self.resumable.append(event.resumable)
        if event.HasField("started"):
            assert not self.generation_id, "it has started twice"
            self.generation_id = event.started.generation_id
        elif event.HasField("delta"):
            self._add(event.delta)
        elif event.HasField("sequence_end"):
            assert event.sequence_end.index not in self.ends
            self.ends[event.sequence_end.index] = event.sequence_end
        elif event.HasField("completed"):
            self.completed = event.completed

    def _add(self, delta: pb.SequenceDelta) -> None:
        assert self.generation_id and delta.index not in self.ends
        first = self.first.setdefault(delta.index, delta.first_token_index)
        told = self.tokens.setdefault(delta.index, [])
        assert delta.first_token_index == first + len(told), "a gap, or a token told twice"
        told.extend(delta.token_ids)
        self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
        self.logprobs.setdefault(delta.index, []).extend(entry.logprob for entry in delta.logprobs)


async def whole(folder: Path, router: Router, spec: pb.GenerationSpec) -> Reading:
    """An undisturbed run."""
    return await Reading.start(router, spec).to_the_end()
