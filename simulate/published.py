"""Published profiles as step curves: splitwise-sim's table of measurements, and the coefficients of DistServe.

Neither format's data is part of Baton. A file that is cut short, or a curve that falls where it should rise, is refused
by its row or its point.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import ConfigError
from cluster.step_cost import StepSize
from simulate.curves import interpolated

_MOST_FALL = 0.2
"""A measured curve may fall by this share from one point to a later one: repeated measurements differ by as much."""
MIXED_SHARE = 1.1
"""splitwise-sim takes a step with prompts and sequences for one of as many prompt tokens, times this."""


@dataclass(frozen=True)
class PiecewiseLine:
    """A function through points with ascending x; its first and its last piece go on beyond them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        return interpolated(self.xs, self.ys, x)


@dataclass(frozen=True)
class SplitwiseCurve:
    """The time of a step of a machine as splitwise-sim has it: over the tokens in it, whatever they attend to."""

    prompt_s: PiecewiseLine
    """Seconds by prompt tokens."""
    token_s: PiecewiseLine
    """Seconds by sequences."""

    def seconds(self, step: StepSize) -> float:
        if step.num_prompt_tokens and step.num_sequences:
            return MIXED_SHARE * self.prompt_s(step.num_prompt_tokens + step.num_sequences)
        if step.num_prompt_tokens:
            return self.prompt_s(step.num_prompt_tokens)
        return self.token_s(step.num_sequences) if step.num_sequences else 0.0


class Quadratic(NamedTuple):
    """Seconds of a prefill step: fixed, for each prompt token, and for each square of a prompt's tokens."""

    fixed_s: float
    token_s: float
    square_s: float


class Plane(NamedTuple):
    """Seconds of a decode step: fixed, for each KV token that is read, and for each sequence."""

    fixed_s: float
    kv_token_s: float
    sequence_s: float


@dataclass(frozen=True)
class DistServeCurve:
    """The time of a step of one tensor-parallel group that holds the whole model, as DistServe's simulator has it."""

    prefill: Quadratic
    small: Plane
    large: Plane
    """From `large_from` sequences on."""
    large_from: int

    def seconds(self, step: StepSize) -> float:
        """A step with prompts and sequences takes a prefill's time and what its sequences add to a decode step.

        A chunk of a prompt counts as the square of its end less that of its begin, so chunks of a prompt add up to it.
        """
        decode = self.small if step.num_sequences < self.large_from else self.large
        added_s = decode.kv_token_s * step.num_kv_tokens + decode.sequence_s * step.num_sequences
        if step.num_prompt_tokens:
            squares = 2 * step.num_attended - step.num_prompt_tokens
            return (
                self.prefill.fixed_s
                + self.prefill.token_s * step.num_prompt_tokens
                + (self.prefill.square_s * squares + added_s)
            )
        return decode.fixed_s + added_s if step.num_sequences else 0.0


_COLUMNS = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "prompt_time", "token_time")


def read_splitwise(path: Path, model: str, hardware: str, tensor_parallel: int) -> SplitwiseCurve:
    """Reads splitwise-sim's perf_model.csv: the medians of both times, in milliseconds there, by the tokens of the
    batch (prompt_size times batch_size). Raises ConfigError.
    """
    times: dict[float, list[tuple[float, float]]] = defaultdict(list)
    found = set()
    for row in _rows(path):
        key = str(row["model"]), str(row["hardware"]), int(row["tensor_parallel"])
        found.add(key)
        if key == (model, hardware, tensor_parallel):
            times[row["prompt_size"] * row["batch_size"]].append((row["prompt_time"], row["token_time"]))
    name = f"{model} on {hardware} with tensor_parallel {tensor_parallel}"
    if len(times) < 2:
        known = "; ".join(f"{m} on {h} with {tp}" for m, h, tp in sorted(found))
        raise ConfigError(f"{path}: has no curve for {name}; it has {known}")
    sizes = tuple(sorted(times))
    lines = [_rising(path, name, sizes, [[pair[i] for pair in times[size]] for size in sizes], i) for i in (0, 1)]
    return SplitwiseCurve(*lines)


def _rising(
    path: Path, name: str, sizes: Sequence[float], times: Iterable[Sequence[float]], which: int
) -> PiecewiseLine:
    medians = [statistics.median(some) / 1000 for some in times]
    for i, (size, value) in enumerate(zip(sizes, medians, strict=True)):
        highest = max(medians[: i + 1])
        if value < (1 - _MOST_FALL) * highest:
            before = sizes[medians.index(highest)]
            raise ConfigError(
                f"{path}: the curve of {name} falls: {_COLUMNS[5 + which]} is {1000 * highest:.1f} ms at {before:g} "
                f"tokens and {1000 * value:.1f} ms at {size:g}; remove the wrong point"
            )
    return PiecewiseLine(tuple(sizes), tuple(medians))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Each row with its numbers, in a file that has the columns."""
    for line, row in enumerate(csv.DictReader(_text(path).splitlines()), 2):
        values: dict[str, Any] = {}
        for number, column in enumerate(_COLUMNS):
            text = row.get(column)
            values[column] = text if number < 2 and text else _positive(text)
            if values[column] is None:
                raise ConfigError(f"{path}:{line}: {column} must be a number above 0 (got {text!r:.60})")
        yield values


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def read_distserve(path: Path, model: str, tensor_parallel: int) -> DistServeCurve:
    """Reads the JSON of DistServe's profiler, in milliseconds there. Raises ConfigError."""
    models = _object(path, _json(path), "")
    by_size = _object(path, _entry(path, models, model, "model"), model)
    place = f"{model}.{tensor_parallel}"
    entry = _object(path, _entry(path, by_size, str(tensor_parallel), f"tensor_parallel of {model}"), place)
    large_from = entry.get("decoding_large_small_bs_threshold")
    if type(large_from) is not int or large_from < 1:
        raise ConfigError(f"{path}: {place}.decoding_large_small_bs_threshold must be a whole number above 0")
    curve = DistServeCurve(
        Quadratic(*_three(path, entry, place, "prefill")),
        Plane(*_three(path, entry, place, "decoding_smallbs")),
        Plane(*_three(path, entry, place, "decoding_largebs")),
        large_from,
    )
    for tokens in (1, 1 << 12):
        if curve.seconds(StepSize.of_prompt(tokens)) >= curve.seconds(StepSize.of_prompt(2 * tokens)):
            raise ConfigError(f"{path}: {place}.prefill falls between prompts of {tokens} and of {2 * tokens} tokens")
    return curve


def tensor_parallel_sizes(path: Path, model: str) -> list[int]:
    """Returns the sizes that a profile of DistServe's has for a model. Raises ConfigError."""
    return sorted(int(size) for size in _object(path, _entry(path, _json(path), model, "model"), model))


def read_max_num_tokens(path: Path, model: str) -> dict[tuple[int, int], int]:
    """Reads DistServe's max_num_tokens.csv: KV tokens that fit, by (tensor_parallel, pipeline_parallel). Raises
    ConfigError."""
    found = {}
    for line, row in enumerate(csv.DictReader(_text(path).splitlines()), 2):
        numbers = [row.get(column) or "" for column in ("tp", "pp", "max_num_tokens")]
        if not all(text.isdecimal() for text in numbers):
            raise ConfigError(f"{path}:{line}: tp, pp and max_num_tokens must be whole numbers (got {numbers})")
        if row.get("model") == model:
            found[int(numbers[0]), int(numbers[1])] = int(numbers[2])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error


def _object(path: Path, value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {place or 'the whole'} must be an object")
    return value


def _entry(path: Path, among: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in among:
        raise ConfigError(f"{path}: has no {what} {key}; it has {', '.join(among)}")
    return among[key]


def _three(path: Path, entry: Mapping[str, Any], place: str, key: str) -> list[float]:
    """Three numbers, in seconds."""
    values = entry.get(key)
    if not isinstance(values, list) or len(values) != 3 or not all(type(v) in (int, float) for v in values):
        raise ConfigError(f"{path}: {place}.{key} must be a list of three numbers")
    return [value / 1000 for value in values]
