"""Which requests are sent, and when: random lengths, or those of a trace. The same seed makes the same load. A `Sample`
is what the client of one request saw.

Prompts are token ids, or the text of such. Prompts of a trace with block hashes share prefixes as its own did.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

from tokenizers import Tokenizer

from cluster.errors import ConfigError

LEAST_TOKEN = 10
"""Lower ids are often special ones."""
_BLOCK_TOKENS = 512
"""Tokens of one block of the Mooncake traces."""
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
    """How often the request moved to another worker, by the server's account."""
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


@dataclass(frozen=True)
class RequestShape:
    """When a request is sent, and its lengths."""

    at: float
    """Seconds from the start."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    """So many first tokens are the same in every prompt."""
    blocks: tuple[int, ...] = ()
    """Names of the blocks of its prompt: equal names stand for equal tokens."""
    num_block_tokens: int = 0

    def prompt(self, vocab: int, seed: int, number: int) -> list[int]:
        """Shared tokens, then those of its blocks, then tokens of this request number alone."""
        parts = [_tokens(f"{seed} shared", self.num_shared_tokens, vocab)]
        parts += [_tokens(f"{seed} block {block}", self.num_block_tokens, vocab) for block in self.blocks]
        tokens = [token for part in parts for token in part][: self.num_prompt_tokens]
        tokens += _tokens(f"{seed} request {number}", self.num_prompt_tokens - len(tokens), vocab)
        return tokens


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


def random_shapes(
    num: int, num_prompt_tokens: int, num_output_tokens: int, spread: float, num_shared_tokens: int, seed: int
) -> list[RequestShape]:
    """Requests at time 0. Lengths vary uniformly by the share `spread`; each prompt begins with `num_shared_tokens`
    more."""
    draw = random.Random(f"{seed} lengths")
    return [
        RequestShape(
            0.0,
            num_shared_tokens + _spread(draw, num_prompt_tokens, spread),
            _spread(draw, num_output_tokens, spread),
            num_shared_tokens,
        )
        for _ in range(num)
    ]


def at_rate(shapes: Iterable[RequestShape], rate: float, burstiness: float, seed: int) -> list[RequestShape]:
    """Spaces requests out: one after another, `rate` a second on the mean.

    Intervals have a gamma distribution of shape `burstiness`, as with vLLM's `--burstiness`: 1 is a Poisson process,
    less makes bursts, more is more even.
    """
    draw = random.Random(f"{seed} arrivals")
    at, timed = 0.0, []
    for shape in shapes:
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        timed.append(replace(shape, at=at))
    return timed


def read_trace(path: Path, num: int, speed: float, length_share: float, most_tokens: int) -> list[RequestShape]:
    """The first `num` requests of a Mooncake trace (JSON lines) or one of Azure (CSV).

    `speed` divides its times and `length_share` multiplies its lengths; prompts and outputs of more than `most_tokens`
    together are cut. Raises ConfigError, which names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _azure(file) if path.suffix == ".csv" else _mooncake(file)
            found = [shape for shape, _ in zip(read, range(num), strict=False)]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except _BadLine as error:
        raise ConfigError(f"{path}:{error.line}: {error.what}") from error
    if not found:
        raise ConfigError(f"{path}: holds no request")
    found.sort(key=lambda shape: shape.at)
    return [_scaled(shape, found[0].at, speed, length_share, most_tokens) for shape in found]


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


class _BadLine(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line
        self.what = what


def _mooncake(lines: Iterable[str]) -> Iterator[RequestShape]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            lengths = int(record["input_length"]), int(record["output_length"])
            blocks = tuple(map(int, record.get("hash_ids", ())))
            at = record["timestamp"] / 1000
            if not math.isfinite(at):
                raise ValueError(at)
            yield RequestShape(at, *lengths, blocks=blocks, num_block_tokens=_BLOCK_TOKENS)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            form = '{"timestamp": ms, "input_length": …, "output_length": …, "hash_ids": […]}'
            raise _BadLine(number, f"is not {form}") from error


def _azure(lines: Iterable[str]) -> Iterator[RequestShape]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            yield RequestShape(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise _BadLine(number, "needs the columns TIMESTAMP, ContextTokens and GeneratedTokens") from error


def _scaled(shape: RequestShape, begun: float, speed: float, length_share: float, most_tokens: int) -> RequestShape:
    num_output = min(max(1, round(shape.num_output_tokens * length_share)), most_tokens - 1)
    num_prompt = min(max(1, round(shape.num_prompt_tokens * length_share)), most_tokens - num_output)
    num_block_tokens = max(1, round(shape.num_block_tokens * length_share))
    return replace(
        shape,
        at=(shape.at - begun) / speed,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_block_tokens=num_block_tokens,
    )


def _spread(draw: random.Random, num: int, spread: float) -> int:
    return max(1, draw.randint(round(num * (1 - spread)), round(num * (1 + spread))))


def _tokens(name: str, num: int, vocab: int) -> list[int]:
    return random.Random(name).choices(range(LEAST_TOKEN, vocab), k=num)
