"""Loads: when requests come and how long they are, of a trace or generated. The same seed makes the same load.

A load is a list of `RequestShape`, by time. It is made in three steps: shapes (`read_trace`, `random_shapes`), their
times (`at_rate`, `over_a_day`; a trace has its own), and `scaled`, `at_mean_rate` or `until`. Prompts are token ids:
those of equal blocks are equal, so a load shares prefixes as its trace did. Knows no client and no cluster.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from cluster.errors import ConfigError

LEAST_TOKEN = 10
"""Lower ids are often special ones."""
_BLOCK_TOKENS = 512
"""Tokens of one block of the Mooncake traces."""
_Z90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""
_APART_S = 2.0
_MOST_TRACE_S = 400 * 86400.0
Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws the tokens of a prompt and of its output."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """When a request is sent, and its lengths."""

    at: float
    """Seconds from the start."""
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()
    """Names of the blocks of its prompt: equal names stand for equal tokens."""
    num_block_tokens: int = 0

    def prompt(self, vocab: int, seed: int, number: int) -> list[int]:
        """The tokens of its blocks, then tokens of this request number alone."""
        parts = [_tokens(f"{seed} block {block}", self.num_block_tokens, vocab) for block in self.blocks]
        tokens = [token for part in parts for token in part][: self.num_prompt_tokens]
        tokens += _tokens(f"{seed} request {number}", self.num_prompt_tokens - len(tokens), vocab)
        return tokens

    def outline(self, number: int) -> tuple[int, ...]:
        """Returns as many tokens as `prompt`, which say no more than which prompts begin with the same blocks: made in
        bulk."""
        parts = [_outline(1, block, self.num_block_tokens) for block in self.blocks]
        tokens = tuple(token for part in parts for token in part)[: self.num_prompt_tokens]
        return tokens + _outline(2, number, self.num_prompt_tokens - len(tokens))


def _outline(kind: int, number: int, num: int) -> tuple[int, ...]:
    """Tokens that begin with a number, below 2**45, and go on all alike."""
    digits = (number >> shift & 0x7FFF for shift in (0, 15, 30))
    name = tuple(LEAST_TOKEN + token for token in (kind, *digits))
    return (name + (LEAST_TOKEN,) * (num - len(name)))[:num]


def _tokens(name: str, num: int, vocab: int) -> list[int]:
    return random.Random(name).choices(range(LEAST_TOKEN, vocab), k=num)


def uniform(num_prompt_tokens: int, num_output_tokens: int, spread: float = 0.0) -> Lengths:
    """Both lengths vary uniformly by the share `spread`; 0: always the same."""

    def draw_one(draw: random.Random, num: int) -> int:
        return max(1, draw.randint(round(num * (1 - spread)), round(num * (1 + spread))))

    return lambda draw: (draw_one(draw, num_prompt_tokens), draw_one(draw, num_output_tokens))


def lognormal(prompt: tuple[float, float], output: tuple[float, float], most_tokens: int | None = None) -> Lengths:
    """Each length is lognormal, given by its mean and its 90th percentile, and at most `most_tokens`.

    Raises ValueError where no lognormal has these two.
    """
    parameters = _mu_and_sigma(*prompt), _mu_and_sigma(*output)

    def draw_both(draw: random.Random) -> tuple[int, int]:
        first, second = (max(1, round(draw.lognormvariate(mu, sigma))) for mu, sigma in parameters)
        return (first, second) if most_tokens is None else (min(first, most_tokens), min(second, most_tokens))

    return draw_both


def _mu_and_sigma(mean: float, p90: float) -> tuple[float, float]:
    """Solves mean = exp(mu + sigma² / 2) and p90 = exp(mu + z90 * sigma) for the smaller sigma."""
    most = math.exp(_Z90**2 / 2)
    if not 0 < mean <= p90 <= most * mean:
        raise ValueError(
            f"no lognormal has the mean {mean:g} and the 90th percentile {p90:g}; that lies between the mean and "
            f"{most:.2f} times the mean"
        )
    sigma = _Z90 - math.sqrt(max(0.0, _Z90**2 - 2 * math.log(p90 / mean)))
    return math.log(mean) - sigma**2 / 2, sigma


def empirical(shapes: Sequence[RequestShape]) -> Lengths:
    """Pairs of lengths as at least one request has them."""
    pairs = [(shape.num_prompt_tokens, shape.num_output_tokens) for shape in shapes]
    return lambda draw: draw.choice(pairs)


@dataclass(frozen=True)
class SharedPrefixes:
    """First tokens that prompts have in common: each prompt begins with one of `num` prefixes."""

    num_tokens: int
    num: int = 1
    skew: float = 0.0
    """The weight of prefix n is 1 / n ** skew: 0 uses all alike, 1 is Zipf's law."""


def random_shapes(num: int, lengths: Lengths, seed: int, prefixes: SharedPrefixes | None = None) -> list[RequestShape]:
    """Requests at time 0. A shared prefix comes before the prompt that `lengths` draws."""
    draw, choose = random.Random(f"{seed} lengths"), random.Random(f"{seed} prefixes")
    shapes = [RequestShape(0.0, *lengths(draw)) for _ in range(num)]
    if prefixes is None or not prefixes.num_tokens:
        return shapes
    weights = [1 / n**prefixes.skew for n in range(1, prefixes.num + 1)]
    chosen = choose.choices(range(prefixes.num), weights, k=num)
    return [
        RequestShape(
            0.0, prefixes.num_tokens + shape.num_prompt_tokens, shape.num_output_tokens, (block,), prefixes.num_tokens
        )
        for shape, block in zip(shapes, chosen, strict=True)
    ]


def arrivals(rate: float | Callable[[float], float], burstiness: float, draw: random.Random) -> Iterator[float]:
    """Instants without end, in seconds: `rate` a second on the mean, or as many as it says for the instant before.

    Intervals have a gamma distribution of shape `burstiness`, as with vLLM's `--burstiness`: 1 is a Poisson process,
    less makes bursts, more is more even.
    """
    at = 0.0
    while True:
        per_s = rate if isinstance(rate, float | int) else rate(at)
        at += draw.gammavariate(burstiness, 1 / (per_s * burstiness))
        yield at


def at_rate(shapes: Iterable[RequestShape], rate: float, burstiness: float, seed: int) -> list[RequestShape]:
    """Spaces requests out: one after another, as `arrivals` come."""
    times = arrivals(rate, burstiness, random.Random(f"{seed} arrivals"))
    return [replace(shape, at=at) for shape, at in zip(shapes, times, strict=False)]


@dataclass(frozen=True)
class DayShape:
    """The course of a day's load: its rate once from trough to peak, and the lengths to and fro beside it."""

    mean_rate: float
    """Requests a second over the whole day."""
    day_s: float = 86400.0
    peak_to_trough: float = 3.0
    """The highest rate over the lowest."""
    peak_at: float = 0.6
    """When the rate is highest, as a share of the day."""
    ratio_swing: float = 3.0
    """The highest ratio of prompt tokens to output tokens over the lowest; 1: lengths do not drift."""
    ratio_period_s: float = 7200.0
    """From one highest ratio to the next."""
    burstiness: float = 1.0

    @classmethod
    def with_peak(cls, rate: float) -> Self:
        """The usual day whose highest rate this is."""
        return cls(rate / (1 + cls(1.0)._swing))

    @property
    def _swing(self) -> float:
        return (self.peak_to_trough - 1) / (self.peak_to_trough + 1)

    def rate(self, at: float) -> float:
        return self.mean_rate * (1 + self._swing * math.cos(2 * math.pi * (at / self.day_s - self.peak_at)))

    def drift(self, at: float) -> float:
        """The factor of a prompt's length at an instant, and of an output's by division; its mean logarithm is 0."""
        return float(self.ratio_swing ** (0.25 * math.sin(2 * math.pi * at / self.ratio_period_s)))


def over_a_day(
    day: DayShape, lengths: Lengths, seed: int, prefixes: SharedPrefixes | None = None
) -> list[RequestShape]:
    """The requests of one day, `day.mean_rate * day.day_s` of them on the mean."""
    times = []
    for at in arrivals(day.rate, day.burstiness, random.Random(f"{seed} arrivals")):
        if at >= day.day_s:
            break
        times.append(at)
    shapes = random_shapes(len(times), lengths, seed, prefixes)
    return [_drifted(shape, at, day.drift(at)) for shape, at in zip(shapes, times, strict=True)]


def _drifted(shape: RequestShape, at: float, drift: float) -> RequestShape:
    """A shared prefix keeps its length."""
    num_shared = len(shape.blocks) * shape.num_block_tokens
    num_own = max(1, round((shape.num_prompt_tokens - num_shared) * drift))
    num_output = max(1, round(shape.num_output_tokens / drift))
    return RequestShape(at, num_shared + num_own, num_output, shape.blocks, shape.num_block_tokens)


def scaled(
    shapes: Iterable[RequestShape], speed: float = 1.0, length_share: float = 1.0, most_tokens: int | None = None
) -> list[RequestShape]:
    """Divides times by `speed` and multiplies lengths by `length_share`; every length is at least 1.

    Prompts and outputs of more than `most_tokens` together are cut, outputs last.
    """
    return [_scaled(shape, speed, length_share, most_tokens) for shape in shapes]


def _scaled(shape: RequestShape, speed: float, length_share: float, most_tokens: int | None) -> RequestShape:
    num_output = max(1, round(shape.num_output_tokens * length_share))
    num_prompt = max(1, round(shape.num_prompt_tokens * length_share))
    if most_tokens is not None:
        num_output = min(num_output, most_tokens - 1)
        num_prompt = min(num_prompt, most_tokens - num_output)
    num_block_tokens = max(1, round(shape.num_block_tokens * length_share)) if shape.blocks else 0
    return RequestShape(shape.at / speed, num_prompt, num_output, shape.blocks, num_block_tokens)


def at_mean_rate(shapes: Sequence[RequestShape], rate: float, seed: int) -> list[RequestShape]:
    """`rate` requests a second on the mean, with the ups and downs of `shapes`: each is left out, or comes as often as
    that takes, the second time within `_APART_S` of its own."""
    draw = random.Random(f"{seed} repetitions")
    times = rate * shapes[-1].at / len(shapes)
    repeated = [
        replace(shape, at=max(0.0, shape.at + (draw.uniform(-_APART_S, _APART_S) if number else 0.0)))
        for shape in shapes
        for number in range(int(times) + (draw.random() < times % 1))
    ]
    return sorted(repeated, key=lambda shape: shape.at)


def until(shapes: Iterable[RequestShape], seconds: float) -> list[RequestShape]:
    """The requests of the first seconds."""
    return [shape for shape in shapes if shape.at < seconds]


def read_trace(path: Path, num: int | None = None) -> list[RequestShape]:
    """The first `num` requests of a file by time, the earliest at 0: JSON lines of Mooncake, or a CSV with the columns
    of `CSV_COLUMNS`. Raises ConfigError, which names the row and the column, or says that it takes years.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _csv(file) if path.suffix == ".csv" else _mooncake(file)
            found = [shape for shape, _ in zip(read, range(num), strict=False)] if num is not None else list(read)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except _BadRow as error:
        raise ConfigError(f"{path}:{error}") from error
    if not found:
        raise ConfigError(f"{path}: holds no request")
    found.sort(key=lambda shape: shape.at)
    if (seconds := found[-1].at - found[0].at) > _MOST_TRACE_S:
        raise ConfigError(
            f"{path}: its last request comes {seconds:.4g} s after its first, and a trace may take "
            f"{_MOST_TRACE_S:.4g} s; times are in {'seconds' if path.suffix == '.csv' else 'milliseconds'}"
        )
    return [replace(shape, at=shape.at - found[0].at) for shape in found]


class _BadRow(Exception):
    """The message begins with the line."""


def _date(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


CSV_COLUMNS: Mapping[tuple[str, str, str], Callable[[str], float]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _date,
    ("arrival_timestamp", "prompt_size", "token_size"): float,
    ("at_s", "prompt_tokens", "output_tokens"): float,
}
"""The columns of Azure's traces, of splitwise-sim's, and of plain ones, with how their times are read (as dates, or in
seconds). Others are ignored."""
_JSON_FIELDS = ("timestamp", "input_length", "output_length")


def _csv(lines: Iterable[str]) -> Iterator[RequestShape]:
    reader = csv.DictReader(lines)
    try:
        columns = next((known for known in CSV_COLUMNS if set(known) <= set(reader.fieldnames or ())), None)
        if columns is None:
            wanted = "; or ".join(", ".join(known) for known in CSV_COLUMNS)
            raise _BadRow(f"1: its columns are {', '.join(reader.fieldnames or ())}; a trace has {wanted}")
        for row in reader:
            yield _csv_shape(reader.line_num, row, columns)
    except csv.Error as error:
        raise _BadRow(f"{reader.line_num}: {error}") from error


def _csv_shape(line: int, row: Mapping[str, str | None], columns: tuple[str, str, str]) -> RequestShape:
    if None in row:
        raise _BadRow(f"{line}: has more fields than the header has columns")
    if missing := [column for column in columns if row[column] is None]:
        raise _BadRow(f"{line}: ends before {missing[0]}; a row has {', '.join(columns)}")
    values: list[Any] = []
    reads: tuple[Callable[[str], float], ...] = CSV_COLUMNS[columns], int, int
    for column, read in zip(columns, reads, strict=True):
        try:
            values.append(read(row[column] or ""))
        except (ValueError, OverflowError):
            values.append(row[column])
    return _shape(line, columns, values)


def _mooncake(lines: Iterable[str]) -> Iterator[RequestShape]:
    for line, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _BadRow(f"{line}: is not JSON") from error
        if not isinstance(record, dict):
            raise _BadRow(f"{line}: is no object with {', '.join(_JSON_FIELDS)}")
        if missing := [field for field in _JSON_FIELDS if field not in record]:
            raise _BadRow(f"{line}: has no {missing[0]}; a request has {', '.join(_JSON_FIELDS)}")
        shape = _shape(line, _JSON_FIELDS, [record[field] for field in _JSON_FIELDS], 1000)
        blocks = record.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise _BadRow(f"{line}: hash_ids must be a list of whole numbers (got {blocks!r:.60})")
        yield replace(shape, blocks=tuple(blocks), num_block_tokens=_BLOCK_TOKENS) if blocks else shape


def _shape(line: int, columns: Sequence[str], values: Sequence[Any], units_per_s: int = 1) -> RequestShape:
    """`values` as `columns` name them; what could not be read of a CSV is still text, or None."""
    at, num_prompt, num_output = values
    if type(at) not in (int, float) or not abs(at) < 1e15:
        raise _BadRow(f"{line}: {columns[0]} must be a time (got {at!r:.60})")
    for column, value, least in ((columns[1], num_prompt, 1), (columns[2], num_output, 0)):
        if type(value) is not int or not least <= value < 1 << 31:
            raise _BadRow(f"{line}: {column} must be a whole number of at least {least} (got {value!r:.60})")
    return RequestShape(at / units_per_s, num_prompt, num_output)
