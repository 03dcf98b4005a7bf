"""A step curve from a file: measured steps as a table (CSV or JSON), or the parts of a linear cost (JSON).

    prompt_tokens,tokens_before,sequences,kv_tokens,seconds
    512,0,0,0,0.0213              a step that computes 512 tokens of a prompt, after 0 others
    0,0,8,1024,0.0104             a step in which 8 sequences of 1024 KV tokens each get their next token
    512,0,8,1024,0.0287           both

JSON holds a list of objects with these names, or an object with `steps`; a linear cost is the object that
`cluster.step_cost.StepCost` has the fields of. `tokens_before` may be missing. A table without a gap is interpolated
(`simulate.curves.MeasuredCurve`), and steps measured several times count with their median; any other steps, such as
those of an engine's log, are fitted, each measurement by itself.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import ConfigError
from cluster.step_cost import StepCost, StepSize
from simulate.curves import (
    CurveError,
    LinearCurve,
    MeasuredCurve,
    MeasuredDecode,
    MeasuredPrompt,
    StepCurve,
    StepSample,
    fit_cost,
)

_COUNTS = ("prompt_tokens", "tokens_before", "sequences", "kv_tokens")
_COLUMNS = ("prompt_tokens", "sequences", "kv_tokens", "seconds")
_WANTED = f"{', '.join(_COLUMNS)}, and tokens_before if it is not 0"


@dataclass(frozen=True)
class FileCurve:
    """A curve, and how far it is from the steps that it was made from."""

    curve: StepCurve
    kind: str
    """`linear`, `interpolated` or `fitted`."""
    error: CurveError
    notes: tuple[str, ...] = ()
    """Lines on points that were pooled, as they fell by no more than their measurements differ."""


class _Step(NamedTuple):
    prompt_tokens: int
    tokens_before: int
    sequences: int
    kv_tokens: int
    """KV tokens of each sequence."""

    @property
    def size(self) -> StepSize:
        prompt = StepSize.of_prompt(self.prompt_tokens, self.tokens_before)
        return prompt + StepSize(num_sequences=self.sequences, num_kv_tokens=self.sequences * self.kv_tokens)


def read_curve(path: Path) -> FileCurve:
    """Raises ConfigError, which names the row and the column, or the point at which the curve falls."""
    try:
        text = path.read_text(encoding="utf-8")
        is_csv = path.suffix == ".csv"
        document = None if is_csv else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is neither CSV (by its name) nor JSON: {error}") from error
    return _median_curve(path, _csv_rows(path, text)) if is_csv else curve_in(path, document)


def curve_in(path: Path, document: Any) -> FileCurve:
    """The same of a JSON document that has been read. `path` names it in errors."""
    if isinstance(document, dict) and "steps" not in document:
        return FileCurve(LinearCurve(_cost(path, document)), "linear", CurveError(0.0, 0.0, 0))
    return _median_curve(path, _listed(path, document))


def _median_curve(path: Path, steps: Iterable[tuple[str, Mapping[str, Any]]]) -> FileCurve:
    times: dict[_Step, list[float]] = defaultdict(list)
    for place, row in steps:
        step, seconds = _read(place, row)
        times[step].append(seconds)
    return _curve_of(path, times)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with its place. Raises ConfigError for a column that the header does not have, or a row that ends
    before it."""
    reader = csv.DictReader(text.splitlines(), restval="")
    try:
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(
                f"{path}:1: has no column {', '.join(missing)}; its columns are "
                f"{', '.join(reader.fieldnames or ()) or 'none'}, and steps have {_WANTED}"
            )
        for row in reader:
            if None in row:
                raise ConfigError(f"{path}:{reader.line_num}: has more fields than the header has columns")
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: {error}") from error


def _listed(path: Path, document: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each step with its place."""
    steps = document["steps"] if isinstance(document, dict) else document
    if not isinstance(steps, list):
        raise ConfigError(f"{path}: must be a list of steps, or an object with steps or the parts of a cost")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, dict):
            raise ConfigError(f"{path}: step {number} is no object with {_WANTED}")
        missing = [name for name in _COLUMNS if name not in step]
        if missing:
            raise ConfigError(f"{path}: step {number} has no {', '.join(missing)}; a step has {_WANTED}")
        yield f"{path}: step {number}", step


def _read(place: str, row: Mapping[str, Any]) -> tuple[_Step, float]:
    counts = []
    for name in _COUNTS:
        value = row.get(name, 0)
        value = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if type(value) is not int or not 0 <= value < 1 << 40:
            raise ConfigError(f"{place}: {name} must be a whole number of at least 0 (got {value!r:.60})")
        counts.append(value)
    step, value = _Step(*counts), row.get("seconds")
    try:
        seconds = float(value) if isinstance(value, str | float | int) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{place}: seconds must be a number above 0 (got {value!r:.60})")
    if not step.prompt_tokens and not step.sequences:
        raise ConfigError(f"{place}: computes nothing: prompt_tokens and sequences are 0")
    return step, seconds


def _curve_of(path: Path, measured: Mapping[_Step, list[float]]) -> FileCurve:
    if not measured:
        raise ConfigError(f"{path}: holds no step")
    if not _is_table(measured):
        log = [StepSample(step.size, seconds) for step, some in measured.items() for seconds in some]
        fitted = LinearCurve(fit_cost(log))
        return FileCurve(fitted, "fitted", CurveError.of(fitted, log))
    times = {step: statistics.median(some) for step, some in measured.items()}
    samples = [StepSample(step.size, seconds) for step, seconds in times.items()]
    spread_s = {step: statistics.stdev(some) if len(some) > 1 else 0.0 for step, some in measured.items()}
    prompts = [MeasuredPrompt(s.prompt_tokens, times[s], spread_s[s]) for s in times if s.prompt_tokens]
    decodes = [MeasuredDecode(s.sequences, s.kv_tokens, times[s], spread_s[s]) for s in times if s.sequences]
    try:
        curve = MeasuredCurve(prompts, decodes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return FileCurve(curve, "interpolated", CurveError.of(curve, samples), tuple(curve.notes))


def _is_table(steps: Iterable[_Step]) -> bool:
    """Whether prompts are whole and alone, and sequences form a grid."""
    if any(step.tokens_before or (step.prompt_tokens and step.sequences) for step in steps):
        return False
    cells = {(step.sequences, step.kv_tokens) for step in steps if step.sequences}
    return len(cells) == len({n for n, _ in cells}) * len({kv for _, kv in cells})


def _cost(path: Path, document: Mapping[str, Any]) -> StepCost:
    names = [field.name for field in fields(StepCost)]
    wrong = [name for name in document if name not in names]
    if wrong or not document:
        raise ConfigError(
            f"{path}: {wrong[0] if wrong else 'nothing'} is no part of a cost; those are {', '.join(names)}"
        )
    for name, value in document.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"{path}: {name} must be a number of at least 0 (got {value!r:.60})")
    return StepCost(**{name: float(document.get(name, 0.0)) for name in names})
