"""The state of a soak: a file of JSON lines that is written as things happen, so that a run that ends at any moment, by
Ctrl-C or SIGKILL, is gone on with by the next one.

    soak      first line: which phase it is, and of which load
    capacity  requests a second that were found
    segment   a cluster came up; times count from here on
    sample    what each process holds
    counts    how requests have ended and which faults were done since the line before
    quiet     nothing ran, and what was held then
    problem   what makes the soak fail

Each line is in the file before anything else happens. A last line that was cut off by the end of its writer is dropped.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plain_cluster import ProgramFailed
from benchmarks.slopes import Points

Processes = dict[str, dict[str, float]]
"""By the name of a process, what it holds, by the name of the quantity."""


@dataclass
class Segment:
    """One life of a cluster: what was sampled in it, and who ran it."""

    owner: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of its last sample."""
        return float(self.samples[-1]["t"]) if self.samples else 0.0

    def points(self, process: str, quantity: str) -> Points:
        """Of the samples that have it."""
        return [
            (sample["t"], sample["processes"][process][quantity])
            for sample in self.samples
            if quantity in sample["processes"].get(process, ())
        ]


class Record:
    """Reads what is in the file, then appends to it. One run at a time: the file is locked."""

    def __init__(self, path: Path, phase: str, **settings: Any) -> None:
        """`settings`: what all segments must share. Raises ProgramFailed where the file is another soak's or in use."""
        self.phase = phase
        self.segments: list[Segment] = []
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.num_quiet = 0
        self.capacity: float | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ProgramFailed(f"{path} is in use: another soak runs; end it, or name another --state") from None
        head = {"phase": phase, **settings}
        lines = self._read()
        if not lines:
            self.append("soak", **head)
        elif {"kind": "soak", **head} != lines[0]:
            self._file.close()
            raise ProgramFailed(f"{path} is the state of {lines[0]}, not of {head}; name another --state, or remove it")
        for line in lines:
            self._take(line)

    def close(self) -> None:
        self._file.close()

    @property
    def seconds(self) -> float:
        """Of all segments so far."""
        return sum(segment.seconds for segment in self.segments)

    def append(self, kind: str, **values: Any) -> None:
        """Writes one line, and counts it."""
        line = {"kind": kind, **values}
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._take(line)

    def _read(self) -> list[dict[str, Any]]:
        """Whole lines; what follows the last one is cut off."""
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            self._file.truncate(whole)
        return [json.loads(line) for line in data[:whole].splitlines()]

    def _take(self, line: dict[str, Any]) -> None:
        match line["kind"]:
            case "capacity":
                self.capacity = line["per_s"]
            case "segment":
                self.segments.append(Segment(line["owner"]))
            case "sample":
                self.segments[-1].samples.append(line)
            case "counts":
                self.counts.update(line["ended"])
                self.faults.update(line["faults"])
            case "quiet":
                self.num_quiet += 1
            case "problem":
                self.problems.append(line["what"])
