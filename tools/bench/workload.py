"""Sends the requests of a load (`simulate.workload`), each at its time. A `Sample` is what the client of one request
saw. Prompts are token ids, or the text of such.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from tokenizers import Tokenizer

from cluster.errors import ConfigError
from simulate.workload import RequestShape

Prompt = list[int] | str
"""Token ids, or text."""


@dataclass(frozen=True)
class BenchRequest:
    """A request to send."""

    at: float
    """Seconds from the start."""
    prompt: Prompt
    num_prompt_tokens: int
    """Tokens that were drawn; a prompt as text may have a few more or less."""
    num_output_tokens: int


@dataclass
class Sample:
    """One request as its client saw it, filled in while the answer comes. Instants are of one clock, in seconds."""

    num_prompt_tokens: int
    sent_at: float
    message_times: list[float] = field(default_factory=list)
    """When each message with output came."""
    num_output_tokens: int = 0
    message_tokens: list[int] = field(default_factory=list)
    """Tokens in each message. Only gRPC reports it."""
    token_ids: list[int] = field(default_factory=list)
    """The output, where the request asked for token ids."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that came from a cache, by the server's account."""
    num_moves: int = 0
    """Times that the request moved to another worker, by the server's account."""
    num_gaps: int = 0
    """Messages that do not continue the one before: tokens were lost or repeated. Only gRPC numbers tokens."""
    placement: str = ""
    """Baton's `Timing.placement`."""
    ended_at: float = 0.0
    was_refused: bool = False
    """Refused because of load or a quota."""
    error: str = ""
    """Why the request did not complete."""

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.message_times)

    @property
    def ttft_s(self) -> float:
        return self.message_times[0] - self.sent_at

    @property
    def e2el_s(self) -> float:
        return self.message_times[-1] - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; 0 for one token."""
        num_later = self.num_output_tokens - 1
        return (self.message_times[-1] - self.message_times[0]) / num_later if num_later > 0 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Seconds between messages; a server may send several tokens in one."""
        return [after - before for before, after in zip(self.message_times, self.message_times[1:], strict=False)]


def make_requests(
    shapes: Iterable[RequestShape], vocab: int, seed: int, as_text: Callable[[list[int]], str] | None = None
) -> list[BenchRequest]:
    """`as_text`: for a server that takes no token ids."""
    drawn = [(shape, shape.prompt(vocab, seed, number)) for number, shape in enumerate(shapes)]
    return [
        BenchRequest(shape.at, as_text(tokens) if as_text else tokens, len(tokens), shape.num_output_tokens)
        for shape, tokens in drawn
    ]


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Decodes tokens. Text of random tokens encodes to more tokens than were drawn and is cut to as many, so a few may
    be missing or too many; the server's usage has the number.
    """
    text = str(tokenizer.decode(tokens))
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[: len(tokens)]))


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json, or the Hugging Face folder that holds one. Raises ConfigError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not a tokenizer.json: {error}") from error


class Timed(Protocol):
    """A request with the time at which it is sent."""

    @property
    def at(self) -> float:
        """Seconds from the start."""
        ...


R = TypeVar("R", bound=Timed)
S = TypeVar("S", bound=Sample)


async def send_all(
    requests: Sequence[R],
    send: Callable[[R, float], Awaitable[S]],
    *,
    most_at_once: int | None,
    on_end: Callable[[S], object],
) -> list[S]:
    """Sends each request at its time and waits until all have ended; returns their samples in the same order.

    `send` gets a request and the instant that it is timed from, and puts errors of the server into the sample.
    `most_at_once` limits the requests under way. Without it a request is timed from when it should have been sent, so
    that a client that is late counts as latency. `on_end` is called with each sample.
    """
    slots = asyncio.Semaphore(most_at_once or len(requests))
    begun = time.perf_counter()

    async def one(request: R) -> S:
        async with slots:
            sample = await send(request, begun + request.at if most_at_once is None else time.perf_counter())
            sample.ended_at = time.perf_counter()
        on_end(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, begun + request.at - time.perf_counter()))
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]
