"""The file that `baton profile` writes: what one worker's steps took, and what the worker is.

A JSON object with `steps`, so that `simulate.curve_file` reads its curve, and beside them the facts that a plan needs.
`baton_profile` is its version; keys are added, never changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from cluster.errors import ConfigError
from cluster.step_cost import StepCost
from simulate.curve_file import FileCurve, curve_in, read_curve
from simulate.curves import CurveError

VERSION = 1
MESSAGES, HANDED_MESSAGES = 4, 6
"""On the way of a request to its first token: to the router and a worker, and back; with a hand-off, which is announced
and reserved for before its prompt is computed."""


class ProfiledStep(NamedTuple):
    """A step that was measured; `kv_tokens` are those of each sequence."""

    prompt_tokens: int
    sequences: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True)
class ProfiledWorker:
    """The worker's account of itself."""

    model: str
    device: str
    tensor_parallel: int
    dtype: str
    block_size: int
    kv_tokens: int
    """Tokens that its KV pool holds."""
    max_num_seqs: int
    max_model_len: int

    @classmethod
    def from_document(cls, path: Path, values: Any) -> Self:
        try:
            found = cls(**values)
        except TypeError as error:
            raise ConfigError(f"{path}: worker must be an object with {', '.join(cls.__annotations__)}") from error
        for name in ("tensor_parallel", "block_size", "kv_tokens", "max_num_seqs", "max_model_len"):
            if type(getattr(found, name)) is not int or getattr(found, name) < 1:
                raise ConfigError(
                    f"{path}: worker.{name} must be a whole number above 0 (got {getattr(found, name)!r})"
                )
        return found


@dataclass(frozen=True)
class WorkerProfile:
    """A profile as it was read."""

    worker: ProfiledWorker
    curve: FileCurve
    message_s: float | None
    """Seconds of each message on the way to a first token, and of what programs do for it; None: not measured."""
    cores: int | None
    """Cores of the one machine that all workers and whoever profiled them ran on; None: there are several, or GPUs."""
    num_threads: int
    """Cores that a step keeps busy there."""


def profile_document(
    worker: ProfiledWorker,
    steps: Sequence[ProfiledStep],
    reported: StepCost | None,
    reported_error: CurveError | None,
    fitted: StepCost,
    fitted_error: CurveError,
    message_s: float | None,
    cores: int | None = None,
    num_threads: int = 1,
) -> dict[str, Any]:
    """`reported`: the linear cost that the worker learned of itself; the errors are those of both costs, as shares of
    what each step took. The last three are as of `WorkerProfile`."""
    return {
        "baton_profile": VERSION,
        "worker": asdict(worker),
        "steps": [{**step._asdict(), "tokens_before": 0} for step in steps],
        "fitted_cost": vars(fitted),
        "fitted_error": vars(fitted_error),
        "reported_cost": None if reported is None else vars(reported),
        "reported_error": None if reported_error is None else vars(reported_error),
        "message_s": message_s,
        "cores": cores,
        "threads": num_threads,
    }


def read_profile(path: Path) -> WorkerProfile:
    """Raises ConfigError that names the file and the field, the step, or the point at which its curve falls."""
    curve = read_curve(path)
    return _profile_of(path, json.loads(path.read_text(encoding="utf-8")) if path.suffix != ".csv" else {}, curve)


def profile_in(path: Path, document: Any) -> WorkerProfile:
    """The same of a document that has been read. `path` names it in errors."""
    return _profile_of(path, document, curve_in(path, document))


def _profile_of(path: Path, document: Any, curve: FileCurve) -> WorkerProfile:
    version = document.get("baton_profile") if isinstance(document, dict) else None
    if version is None:
        raise ConfigError(
            f"{path}: says nothing of the worker, only its steps: write a profile with `baton profile`; "
            "`baton simulate --steps` takes steps alone"
        )
    if version != VERSION:
        raise ConfigError(
            f"{path}: baton_profile is {version!r}; this program reads {VERSION}: write it again with `baton profile`"
        )
    message_s = document.get("message_s")
    if message_s is not None and not (type(message_s) in (int, float) and 0 <= message_s < math.inf):
        raise ConfigError(f"{path}: message_s must be a number of at least 0, or null (got {message_s!r:.60})")
    cores, num_threads = document.get("cores"), document.get("threads", 1)
    for name, value in (("cores", 1 if cores is None else cores), ("threads", num_threads)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{path}: {name} must be a whole number above 0 (got {value!r:.60})")
    worker = ProfiledWorker.from_document(path, document.get("worker"))
    return WorkerProfile(worker, curve, message_s, cores, num_threads)
