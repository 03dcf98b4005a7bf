"""How long a step takes: curves over its size, and the linear cost that comes nearest to a curve.

A curve is linear (what a worker reports of itself), measured (a table, here), computed from a model's shape and a
device (`simulate.roofline`), or read from a published profile (`simulate.published`). `CurveError` says by how much one
is off. Pure: whoever measures brings the samples.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError
from cluster.step_cost import StepCost, StepSize

MOST_FALL = 0.1
"""A measured curve may fall by this share from one point to the next: repeated measurements differ by as much."""
_Floats = npt.NDArray[np.float64]


class StepCurve(Protocol):
    """Seconds of a step of any size."""

    def seconds(self, step: StepSize) -> float: ...


@dataclass(frozen=True)
class LinearCurve:
    """A sum over the parts of a step."""

    cost: StepCost

    def seconds(self, step: StepSize) -> float:
        return self.cost.of(step)


@dataclass(frozen=True)
class StepSample:
    """A step, and the seconds that it took or should take."""

    step: StepSize
    seconds: float


@dataclass(frozen=True)
class CurveError:
    """How far a curve is from samples, as shares of what each one took."""

    median: float
    p90: float
    num_samples: int

    @classmethod
    def of(cls, curve: StepCurve, samples: Iterable[StepSample]) -> Self:
        errors = sorted(abs(curve.seconds(one.step) / one.seconds - 1) for one in samples)
        if not errors:
            return cls(0.0, 0.0, 0)
        return cls(errors[(len(errors) - 1) // 2], errors[math.ceil(0.9 * len(errors)) - 1], len(errors))


def fit_cost(samples: Sequence[StepSample]) -> StepCost:
    """The linear cost with the least squares of relative errors, without a negative part.

    Parts that would come out negative are left out one after another, the most negative first: parts that always came
    together cannot be told apart.
    """
    sizes = np.array([_parts(one.step) for one in samples], dtype=np.float64)
    weights = 1 / np.array([one.seconds for one in samples])
    rows = sizes * weights[:, None]
    used = [part for part in range(rows.shape[1]) if rows[:, part].any()]
    found: _Floats = np.zeros(rows.shape[1])
    while used:
        scales = np.abs(rows[:, used]).max(axis=0)  # parts differ by eight orders of magnitude
        values = np.linalg.lstsq(rows[:, used] / scales, np.ones(len(samples)), rcond=None)[0] / scales
        worst = int((values * scales).argmin())
        if values[worst] >= 0:
            found[used] = values
            break
        del used[worst]
    return StepCost(*map(float, found))


def _parts(step: StepSize) -> tuple[int, ...]:
    return (1, step.num_prompt_tokens, step.num_attended, step.num_sequences, step.num_kv_tokens)


@dataclass(frozen=True)
class MeasuredPrompt:
    """A step that computes one prompt alone."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class MeasuredDecode:
    """A step in which sequences get their next token."""

    num_sequences: int
    kv_tokens: int
    """Of each sequence."""
    seconds: float


class MeasuredCurve:
    """Interpolates linearly between measured steps, and goes on with the slope of the last piece beyond them.

    Prompts are a line over their tokens, with `attended_s` for each key that a token attends to beyond those of a
    prompt that begins with the step. Decode steps are a grid of sequences and KV tokens of each. A step with both
    takes the prompt's time and what its sequences add to the least decode step.
    """

    def __init__(
        self, prompts: Sequence[MeasuredPrompt], decodes: Sequence[MeasuredDecode], attended_s: float = 0.0
    ) -> None:
        """Raises ConfigError for a point where a curve falls, or a grid with gaps."""
        self._attended_s = attended_s
        ordered = sorted(prompts, key=lambda point: point.num_tokens)
        self._prompt_xs = [float(point.num_tokens) for point in ordered]
        self._prompt_ys = _rising([p.seconds for p in ordered], [f"a prompt of {p.num_tokens} tokens" for p in ordered])
        cells = {(point.num_sequences, point.kv_tokens): point.seconds for point in decodes}
        self._counts, self._lengths = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
        missing = [(n, kv) for n in self._counts for kv in self._lengths if (n, kv) not in cells]
        if missing:
            raise ConfigError(
                f"decode: {missing[0][0]} sequences of {missing[0][1]} KV tokens are missing; "
                "measure each number of sequences at the same lengths"
            )
        for n in self._counts:
            names = [f"{n} sequences of {kv} KV tokens" for kv in self._lengths]
            rising = _rising([cells[n, kv] for kv in self._lengths], names)
            cells.update({(n, kv): value for kv, value in zip(self._lengths, rising, strict=True)})
        for kv in self._lengths:
            names = [f"{n} sequences of {kv} KV tokens" for n in self._counts]
            rising = _rising([cells[n, kv] for n in self._counts], names)
            cells.update({(n, kv): value for n, value in zip(self._counts, rising, strict=True)})
        self._rows = [[cells[n, kv] for kv in self._lengths] for n in self._counts]

    def seconds(self, step: StepSize) -> float:
        prompt_s = self._of_prompt(step) if step.num_prompt_tokens else 0.0
        if not step.num_sequences or not self._rows:
            return prompt_s
        decode_s = self._of_sequences(step.num_sequences, step.num_kv_tokens / step.num_sequences)
        return prompt_s + decode_s - self._rows[0][0] if step.num_prompt_tokens else decode_s

    def _of_prompt(self, step: StepSize) -> float:
        if not self._prompt_xs:
            return 0.0
        tokens = step.num_prompt_tokens
        more = step.num_attended - tokens * (tokens + 1) // 2
        whole_s = interpolated(self._prompt_xs, self._prompt_ys, tokens)
        return max(self._prompt_ys[0] / 2, whole_s + more * self._attended_s)

    def _of_sequences(self, num: float, kv_tokens: float) -> float:
        by_count = [interpolated(self._lengths, row, kv_tokens) for row in self._rows]
        return max(interpolated(self._counts, by_count, num), self._rows[0][0] / 2)


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Between the points around x; beyond them along the first or the last piece. One point: the same everywhere."""
    if len(xs) == 1:
        return ys[0]
    piece = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[piece - 1], xs[piece], ys[piece - 1], ys[piece]
    return y0 + (y1 - y0) / (x1 - x0) * (x - x0)


def _rising(values: Sequence[float], names: Sequence[str]) -> list[float]:
    """The values, lifted to the highest before them. Raises ConfigError where one falls by more than `MOST_FALL`, is no
    time, or comes twice."""
    risen: list[float] = []
    for number, (value, name) in enumerate(zip(values, names, strict=True)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: took {value!r} s; each measurement must be above 0")
        if number and names[number - 1] == name:
            raise ConfigError(f"{name}: is there twice; keep one of the measurements")
        highest = max(risen, default=0.0)
        if value < (1 - MOST_FALL) * highest:
            before = names[risen.index(highest)]
            raise ConfigError(
                f"the curve falls: {before} took {1000 * highest:.2f} ms, and {name} {1000 * value:.2f} ms; measure "
                "both again, or remove the wrong point"
            )
        risen.append(max(highest, value))
    return risen
