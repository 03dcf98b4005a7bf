"""Records of the steps of one worker, on its engine thread: their cost (`StepClock`), a log of them (`StepLog`).

On a GPU a step is launched and computed later: there the device says when it began and ended it (`DeviceSpan`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence as Seq
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.lifecycle import RequestKey
from cluster.program import MOST_LOG_BYTES
from cluster.step_cost import StepCost, StepSize
from engine.kv.block_manager import BlockManager
from engine.sequence import ScheduledSequence, Sequence

logger = logging.getLogger(__name__)

HALF_LIFE_STEPS = 100
"""After so many that were taken in, a step counts half."""
LEAST_STEPS = 3
_EVERY = 8
"""One in so many steps without a prompt's tokens is taken in; the first ones all are."""
_KNOWN_FOR = 64
"""The cost by which a step is taken for held up is that of so many steps ago at most."""
_SLOWEST = 20.0
"""Times what was predicted: beyond that something else held the step up."""
_UNITS = np.array([1.0, 1e2, 1e5, 1e1, 1e4])
"""Units in which parts are counted, so that none drowns in another's size."""
_RIDGE = np.array([1e-4, 1e-6, 1e-3, 1e-4, 1e-3])
"""The weight by which each part is held to nothing. Where prompts were all of one size, what they cost is taken for the
cost of their tokens, so that what two workers learned can be compared."""


class DeviceSpan(Protocol):
    """A step on a device that runs behind the process, from its begin to its end; begun where it is made."""

    def end(self) -> None:
        """Ends it behind what has been launched so far; of several calls the last one counts."""
        ...

    def wait(self) -> None:
        """Until the device has come to its end."""
        ...

    def seconds(self) -> float | None:
        """From its begin to its end; None while the device has not come so far."""
        ...

    def seconds_until(self, following: DeviceSpan) -> float | None:
        """From its begin to that of the step behind it; None while the device has not come so far."""
        ...


class StepClock:
    """Learns from the steps of one worker how long a step takes: least squares in which old steps fade.

    A step takes until the next one begins, where one follows: meanwhile its tokens are reported, and requests come and
    go, which is a good part of a short step, and what clients see of it. What a device computes behind the process is
    taken in once the device has come so far: nobody waits for that.

    Each part's cost starts at nothing, and only what steps show moves it; one that would come out negative is left out,
    as two parts that always came together cannot be separated. Pure: whoever runs the steps says how long they took.
    Used on the engine thread, so it takes in few decode steps, which are many and alike.
    """

    def __init__(self) -> None:
        self._fade = 0.5 ** (1 / HALF_LIFE_STEPS)
        self._products = np.zeros((5, 5))
        self._sums = np.zeros(5)
        self._noted: list[tuple[float, ...]] = []
        """The parts and the seconds of steps that are not in the sums yet."""
        self._num_seen = 0
        self._num_taken = 0
        self._solved: StepCost | None = None
        """The cost when it was asked for last, or some steps ago: to solve takes longer than to take a step in."""
        self._is_solved = True
        self._size: StepSize | None = None
        """Size of the last step, if it is to be taken in."""
        self._begun_at = self._ended_at = 0.0
        self._behind: deque[tuple[StepSize | None, DeviceSpan]] = deque()
        """Steps of a device that are not taken in yet, in their order, with their sizes if they are to be."""
        self._is_resting = False

    def begins(self, now: float, step: StepSize | None) -> None:
        """The next step, or one that need not be taken in."""
        self._take_in(now)
        self._size, self._begun_at = step, now

    def ends(self, now: float, span: DeviceSpan | None = None) -> None:
        """The step is over; with a span: for this process, and the device says how long it takes."""
        self._ended_at = now
        if span is not None:
            if self._is_resting:
                self._settle()
                self._behind.clear()  # there is a gap behind what is left, which is no step's
                self._is_resting = False
            self._behind.append((self._size, span))
            self._size = None
            self._settle()

    def rests(self) -> None:
        """No step follows the last one."""
        self._take_in(self._ended_at)
        if self._behind:
            self._is_resting = True
            self._settle()

    def _settle(self) -> None:
        """Takes in the steps that the device has ended."""
        while self._behind:
            size, span = self._behind[0]
            if len(self._behind) > 1:
                seconds = span.seconds_until(self._behind[1][1])
            else:
                seconds = span.seconds() if self._is_resting else None
            if seconds is None:
                return
            self._behind.popleft()
            if size is not None:
                self.note(size, seconds)

    def _take_in(self, until: float) -> None:
        if self._size is not None:
            self.note(self._size, until - self._begun_at)
            self._size = None

    def wants(self, has_prompt: bool) -> bool:
        """Whether to take in the next step, which computes tokens of a prompt or does not."""
        return bool(self.wanted(1, has_prompt))

    def wanted(self, num_steps: int, has_prompt: bool) -> Seq[int]:
        """Which of the next steps to take in, of so many, counted from 0: all of the first ones, and of those that
        compute tokens of a prompt."""
        before = self._num_seen
        self._num_seen += num_steps
        if has_prompt or self._num_seen <= 4 * _EVERY:
            return range(num_steps)
        num_first = max(0, 4 * _EVERY - before)
        return [*range(num_first), *range(num_first + -(before + num_first + 1) % _EVERY, num_steps, _EVERY)]

    def note(self, step: StepSize, seconds: float) -> None:
        """A step of this size has taken so long."""
        if self._num_taken > 4 * LEAST_STEPS:
            known = self._solved if self._num_taken % _KNOWN_FOR else self.cost
            if known is not None and seconds > _SLOWEST * known.of(step):
                return
        self._noted.append(
            (1, step.num_prompt_tokens, step.num_attended, step.num_sequences, step.num_kv_tokens, seconds)
        )
        self._num_taken += 1
        self._is_solved = False

    def _sum_up(self) -> None:
        """Adds the steps that were noted since the last time to the sums, all in one go."""
        noted = np.array(self._noted, dtype=np.float64)
        self._noted.clear()
        parts, seconds = noted[:, :5] / _UNITS, noted[:, 5]
        fades = self._fade ** np.arange(len(noted) - 1, -1, -1)
        # A relative error counts the same in short steps and in long ones.
        weighted = (fades / np.maximum(seconds, 1e-6) ** 2)[:, None] * parts
        fade = self._fade ** len(noted)
        self._products = fade * self._products + weighted.T @ parts
        self._sums = fade * self._sums + seconds @ weighted

    @property
    def cost(self) -> StepCost | None:
        """None before there are enough steps to tell."""
        if not self._is_solved and self._num_taken >= LEAST_STEPS:
            self._sum_up()
            self._solved = StepCost(*(_solve(self._products, self._sums) / _UNITS).tolist())
            self._is_solved = True
        return self._solved

    def cost_of(self, step: StepSize) -> float:
        """Seconds that a step is expected to take; infinite while nothing is known."""
        cost = self.cost
        return float("inf") if cost is None else cost.of(step)


def _solve(products: npt.NDArray[np.float64], sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The least squares with no negative part: the most negative one is left out until there is none."""
    kept = np.arange(len(sums))
    found = np.zeros(len(sums))
    held = products.copy()
    held.flat[:: len(sums) + 1] += _RIDGE * max(float(products.trace()), 1e-12)
    while len(kept):
        part = np.linalg.solve(held[kept[:, None], kept], sums[kept])
        if part.min() >= 0:
            found[kept] = part
            break
        kept = np.delete(kept, int(part.argmin()))
    return found


class StepLog:
    """Appends a JSON line for each step to a file: who joined, ran and left. For operators and tests; nothing reads it
    back. A file that is full becomes NAME.1, in the place of the one before. Without a path it does nothing.

    A line that cannot be written, because the disk is full, say, is left out; the next one that can be says what has
    changed since the last one that was."""

    def __init__(self, path: str | None, most_bytes: int = MOST_LOG_BYTES) -> None:
        self._path, self._most_bytes, self._num_bytes = path, most_bytes, 0
        self._file: FileIO | None = None
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._failed: set[str] = set()
        self._num_missing = 0
        """Lines that could not be written since the last one that was."""
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._open(path)

    def cancelled(self, key: RequestKey) -> None:
        """The next step's line names this request: its router cancelled it before that step."""
        if self._file is not None:
            self._cancelled.add(key.request_id)

    def failed(self, key: RequestKey) -> None:
        """The next step's line names this request: it could not go on here, or the other worker gave it up first."""
        if self._file is not None:
            self._failed.add(key.request_id)

    def write(
        self, number: int, scheduled: Seq[ScheduledSequence], preempted: Seq[Sequence], blocks: BlockManager
    ) -> None:
        """Records a step that has just run; a sequence has left when it is not in the next step."""
        if self._file is None:
            return
        running = {_name(p.sequence) for p in scheduled}
        line = {
            "step": number,
            "time": time.time(),
            "tokens": sum(p.num_tokens for p in scheduled),
            "running": len(running),
            "joined": sorted(running - self._running),
            "left": sorted(self._running - running),
            "preempted": [_name(s) for s in preempted],
            "cancelled": sorted(self._cancelled),
            "failed": sorted(self._failed),
            "blocks": {"free": blocks.num_free, "held": blocks.num_held, "cached": blocks.num_cached},
        }
        data = json.dumps(line).encode() + b"\n"
        if not self._append(self._file, data):
            return
        self._running = running
        self._cancelled.clear()
        self._failed.clear()
        self._num_bytes += len(data)
        if self._path and self._num_bytes >= self._most_bytes:
            self._begin_anew(self._path)

    def _append(self, file: FileIO, line: bytes) -> bool:
        """Writes a whole line or nothing of it. False: nothing."""
        try:
            if (num_written := file.write(line)) < len(line):
                os.ftruncate(file.fileno(), file.tell() - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._num_missing:
                logger.warning("steps are not written to %s: %s", file.name, error.strerror)
            self._num_missing += 1
            return False
        if self._num_missing:
            logger.warning("steps are written to %s again; %d are missing", file.name, self._num_missing)
            self._num_missing = 0
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin_anew(self, path: str) -> None:
        """Without a file from then on where that fails: steps go on."""
        self.close()
        self._file = None
        try:
            os.replace(path, f"{path}.1")
            self._open(path)
        except OSError as error:
            logger.warning("the log of steps %s ends here: %s", path, error)

    def _open(self, path: str) -> None:
        self._file = FileIO(path, "a")
        self._num_bytes = os.fstat(self._file.fileno()).st_size


def _name(sequence: Sequence) -> str:
    return f"{sequence.request.key.request_id}/{sequence.index}"
