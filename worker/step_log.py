"""One JSON line for each step: who joined, ran and left. For operators and tests; nothing reads it back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TextIO

from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.sequence import ScheduledSequence, Sequence


class StepLog:
    """Appends to a file; without a path it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._file: TextIO | None = None
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._failed: set[str] = set()
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (closed by close)

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
        self._running = running
        self._cancelled.clear()
        self._failed.clear()
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _name(sequence: Sequence) -> str:
    return f"{sequence.request.key.request_id}/{sequence.index}"
