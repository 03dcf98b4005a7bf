"""The time that a step takes: curves over its size, and the linear cost that comes nearest to a curve.

A curve is linear (what a worker reports of itself), measured (a table, here), computed from a model's shape and a
device (`simulate.roofline`), or read from a published profile (`simulate.published`). `CurveError` says by how much one
is off. Pure: whoever measures brings the samples.
"""

from __future__ import annotations

import itertools
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
"""A measured curve may fall by this share from one point to the next: repeated measurements differ by as much. Points
whose own measurements differ by more may fall by twice the standard deviation of their difference."""
_FITS = 5
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
    """The distance of a curve from samples, as shares of what each one took."""

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

    Errors are relative to what the fit itself says, found by turns: relative to what was measured, a step that was
    held up counts less than one that was quick, and all together would come out too short. Parts that would come out
    negative are left out one after another, the most negative first: parts that always came together cannot be told
    apart.
    """
    sizes = np.array([_parts(one.step) for one in samples], dtype=np.float64)
    seconds = np.array([one.seconds for one in samples])
    found: _Floats = np.zeros(sizes.shape[1])
    scales_s = seconds
    for _ in range(_FITS):
        found = _least_squares(sizes / scales_s[:, None], seconds / scales_s)
        if not (sizes @ found > 0).all():
            break
        scales_s = sizes @ found
    return StepCost(*map(float, found))


def _least_squares(rows: _Floats, wanted: _Floats) -> _Floats:
    """The parts that are nearest to what is `wanted` of each row, none of them negative."""
    used = [part for part in range(rows.shape[1]) if rows[:, part].any()]
    found: _Floats = np.zeros(rows.shape[1])
    while used:
        scales = np.abs(rows[:, used]).max(axis=0)  # parts differ by eight orders of magnitude
        values = np.linalg.lstsq(rows[:, used] / scales, wanted, rcond=None)[0] / scales
        worst = int((values * scales).argmin())
        if values[worst] >= 0:
            found[used] = values
            break
        del used[worst]
    return found


def _parts(step: StepSize) -> tuple[int, ...]:
    return (1, step.num_prompt_tokens, step.num_attended, step.num_sequences, step.num_kv_tokens)


@dataclass(frozen=True)
class MeasuredPrompt:
    """A step that computes one prompt alone."""

    num_tokens: int
    seconds: float
    spread_s: float = 0.0
    """Standard deviation of the measurements of which `seconds` is the median."""

    def __str__(self) -> str:
        return f"a prompt of {self.num_tokens} tokens"


@dataclass(frozen=True)
class MeasuredDecode:
    """A step in which sequences get their next token."""

    num_sequences: int
    kv_tokens: int
    """KV tokens of each sequence."""
    seconds: float
    spread_s: float = 0.0
    """Standard deviation of the measurements, as of `MeasuredPrompt`."""

    def __str__(self) -> str:
        return f"{self.num_sequences} sequences of {self.kv_tokens} KV tokens"


Measured = MeasuredPrompt | MeasuredDecode


class MeasuredCurve:
    """Interpolates linearly between measured steps, and goes on with the slope of the last piece beyond them.

    Prompts are a line over their tokens, with `attended_s` for each key that a token attends to beyond those of a
    prompt that begins with the step. Decode steps are a grid of sequences and KV tokens of each. A step with both
    takes the prompt's time and what its sequences add to the least decode step. Where times fall by no more than
    measurements differ, neighbours are pooled until they rise, and `notes` has a line for it.
    """

    def __init__(
        self, prompts: Sequence[MeasuredPrompt], decodes: Sequence[MeasuredDecode], attended_s: float = 0.0
    ) -> None:
        """Raises ConfigError for a point where a curve falls by more, or a grid with gaps."""
        self._attended_s = attended_s
        self.notes: list[str] = []
        ordered = sorted(prompts, key=lambda point: point.num_tokens)
        self._check(ordered)
        self._prompt_xs = [float(point.num_tokens) for point in ordered]
        self._prompt_ys = _pooled([point.seconds for point in ordered])
        cells = {(point.num_sequences, point.kv_tokens): point for point in decodes}
        self._counts, self._lengths = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
        missing = [(n, kv) for n in self._counts for kv in self._lengths if (n, kv) not in cells]
        if missing:
            raise ConfigError(
                f"decode: {missing[0][0]} sequences of {missing[0][1]} KV tokens are missing; "
                "measure each number of sequences at the same lengths"
            )
        grid = [[cells[n, kv] for kv in self._lengths] for n in self._counts]
        for line in (*grid, *zip(*grid, strict=True)):
            self._check(line)
        self._rows = _pooled_grid([[cell.seconds for cell in row] for row in grid])

    def _check(self, points: Sequence[Measured]) -> None:
        """Notes each point that is below the highest before it. Raises ConfigError where one is so by more than the
        measurements differ, is no time, or comes twice."""
        highest: Measured | None = None
        for number, point in enumerate(points):
            if not 0 < point.seconds < math.inf:
                raise ConfigError(f"{point}: took {point.seconds!r} s; each measurement must be above 0")
            if number and str(points[number - 1]) == str(point):
                raise ConfigError(f"{point}: is there twice; keep one of the measurements")
            if highest is None or point.seconds >= highest.seconds:
                highest = point
                continue
            fall = f"{highest} took {1000 * highest.seconds:.2f} ms, and {point} {1000 * point.seconds:.2f} ms"
            differ_s = 2 * math.hypot(highest.spread_s, point.spread_s)
            if highest.seconds - point.seconds > max(MOST_FALL * highest.seconds, differ_s):
                raise ConfigError(f"the curve falls: {fall}; measure both again, or remove the wrong point")
            self.notes.append(f"{fall}, no more apart than measurements are: pooled, so that more work takes no less")

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


def _pooled(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall: those of neighbours that do become their mean (isotonic regression)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, num = pools.pop()
            mean, size = (mean * size + before * num) / (size + num), size + num
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def _pooled_grid(rows: list[list[float]]) -> list[list[float]]:
    """The same along the rows and along the columns of a grid, in turn until neither falls."""
    while True:
        columns = [_pooled(column) for column in zip(*map(_pooled, rows), strict=True)]
        rows = [list(row) for row in zip(*columns, strict=True)]
        if all(after >= before * (1 - 1e-12) for row in rows for before, after in itertools.pairwise(row)):
            return rows
