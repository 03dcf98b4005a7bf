"""Which requests come, and when: random lengths, or those of a trace. Pure, and the same for the same seed.

Prompts are token ids, or the text of such. Those of a trace with block hashes share prefixes as its prompts did.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer

from cluster.errors import ConfigError

LEAST_TOKEN = 10
"""Lower ids are often special ones."""
_BLOCK_TOKENS = 512
"""Of one block of the Mooncake traces."""
Prompt = list[int] | str
"""Token ids, or text."""


@dataclass(frozen=True)
class BenchRequest:
    """What a server is sent, and when, in seconds from the start."""

    at: float
    prompt: Prompt
    num_prompt_tokens: int
    """That were drawn, which a prompt as text need not have exactly."""
    num_output_tokens: int


@dataclass(frozen=True)
class RequestShape:
    """One request: when it comes, in seconds from the start, and how long it is."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    """So many first ones are everybody's."""
    blocks: tuple[int, ...] = ()
    """Names of what its prompt consists of: equal ones stand for equal tokens."""
    num_block_tokens: int = 0

    def prompt(self, vocab: int, seed: int, number: int) -> list[int]:
        """What is neither shared nor of a block is this number's own."""
        parts = [_tokens(f"{seed} shared", self.num_shared_tokens, vocab)]
        parts += [_tokens(f"{seed} block {block}", self.num_block_tokens, vocab) for block in self.blocks]
        tokens = [token for part in parts for token in part][: self.num_prompt_tokens]
        tokens += _tokens(f"{seed} request {number}", self.num_prompt_tokens - len(tokens), vocab)
        return tokens


def requests_of(
    asks: Iterable[RequestShape], vocab: int, seed: int, as_text: Callable[[list[int]], str] | None = None
) -> list[BenchRequest]:
    """`as_text`: for a server that takes no token ids."""
    drawn = [(ask, ask.prompt(vocab, seed, number)) for number, ask in enumerate(asks)]
    return [
        BenchRequest(ask.at, as_text(tokens) if as_text else tokens, len(tokens), ask.num_output_tokens)
        for ask, tokens in drawn
    ]


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Decoded; text of random tokens has more of its own than were drawn, and is cut to as many. A few may still be
    missing or too many, which the server tells.
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


def random_asks(
    num: int, num_prompt_tokens: int, num_output_tokens: int, spread: float, num_shared_tokens: int, seed: int
) -> list[RequestShape]:
    """All at 0. Lengths are uniform within a share `spread` of what is given; `num_shared_tokens` more begin each."""
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


def at_rate(asks: Iterable[RequestShape], rate: float, burstiness: float, seed: int) -> list[RequestShape]:
    """One after another, `rate` a second on the mean.

    Intervals are of a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even (as vLLM's `--burstiness`).
    """
    draw = random.Random(f"{seed} arrivals")
    at, timed = 0.0, []
    for ask in asks:
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        timed.append(replace(ask, at=at))
    return timed


def read_trace(path: Path, num: int, speed: float, length_share: float, most_tokens: int) -> list[RequestShape]:
    """The first `num` requests of a Mooncake trace (JSON lines) or one of Azure (CSV).

    `speed`: times faster than it was; `length_share`: of its lengths; longer ones than `most_tokens` together are cut.
    Raises ConfigError, naming the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _azure(file) if path.suffix == ".csv" else _mooncake(file)
            found = [ask for ask, _ in zip(read, range(num), strict=False)]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except _BadLine as error:
        raise ConfigError(f"{path}:{error.line}: {error.what}") from error
    if not found:
        raise ConfigError(f"{path}: holds no request")
    found.sort(key=lambda ask: ask.at)
    return [_scaled(ask, found[0].at, speed, length_share, most_tokens) for ask in found]


class _BadLine(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line
        self.what = what


def _mooncake(lines: Iterable[str]) -> Iterator[RequestShape]:
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            lengths = int(told["input_length"]), int(told["output_length"])
            blocks = tuple(map(int, told.get("hash_ids", ())))
            at = told["timestamp"] / 1000
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


def _scaled(ask: RequestShape, begun: float, speed: float, length_share: float, most_tokens: int) -> RequestShape:
    num_output = min(max(1, round(ask.num_output_tokens * length_share)), most_tokens - 1)
    num_prompt = min(max(1, round(ask.num_prompt_tokens * length_share)), most_tokens - num_output)
    num_block_tokens = max(1, round(ask.num_block_tokens * length_share))
    return replace(
        ask,
        at=(ask.at - begun) / speed,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_block_tokens=num_block_tokens,
    )


def _spread(draw: random.Random, num: int, spread: float) -> int:
    return max(1, draw.randint(round(num * (1 - spread)), round(num * (1 + spread))))


def _tokens(name: str, num: int, vocab: int) -> list[int]:
    return random.Random(name).choices(range(LEAST_TOKEN, vocab), k=num)
