"""What one process alone writes: the greedy outputs that a cluster must equal, whatever is done to it.

    python -m benchmarks.greedy_reference MODEL < requests

Reads [[prompt, number of tokens], ...] as JSON, and prints the outputs so.

The plainest way there is: each prompt in one step, then all sequences of a batch one token at a time, the most likely
one. No scheduler, no block manager, no prefix cache and no sampler of Baton takes part. Float32, in which steps of
every size agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.plain_cluster import ROOT, ProgramFailed

Request = tuple[list[int], int]
BATCH = 32
BLOCK_SIZE = 16


def outputs_of(model: str, requests: Sequence[Request]) -> list[list[int]]:
    """Computed by another process, so that this one does not load torch. Raises ProgramFailed."""
    command = [sys.executable, "-m", "benchmarks.greedy_reference", model]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # several wait for one another where others compute, too
    ended = subprocess.run(
        command, cwd=ROOT, env=one_thread, input=json.dumps(requests), capture_output=True, text=True
    )
    if ended.returncode:
        raise ProgramFailed(f"the reference could not be computed:\n{ended.stderr}")
    found: list[list[int]] = json.loads(ended.stdout)
    return found


def generate(model: str, requests: Sequence[Request]) -> list[list[int]]:
    from engine.model_runner import ModelRunner
    from engine.step_input import SequenceSlice, build_step
    from engine.tp import SingleGroup

    width = -(-max(len(prompt) + count for prompt, count in requests) // BLOCK_SIZE)
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": BATCH * width}
    runner = ModelRunner(model, tp=SingleGroup(), device="cpu", dtype="float32", **sizes)

    def run(slices: list[SequenceSlice]) -> list[int]:
        best: list[int] = runner.forward(build_step(slices, BLOCK_SIZE)).argmax(dim=-1).tolist()
        return best

    outputs: list[list[int]] = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        tables = [tuple(range(row * width, (row + 1) * width)) for row in range(len(batch))]
        found = [
            run([SequenceSlice(tuple(prompt), 0, table, True)])
            for (prompt, _), table in zip(batch, tables, strict=True)
        ]
        while rows := [row for row, (_, count) in enumerate(batch) if len(found[row]) < count]:
            slices = [
                SequenceSlice((found[row][-1],), len(batch[row][0]) + len(found[row]) - 1, tables[row], True)
                for row in rows
            ]
            for row, token in zip(rows, run(slices), strict=True):
                found[row].append(token)
        outputs += found
    return outputs


if __name__ == "__main__":
    json.dump(generate(sys.argv[1], json.load(sys.stdin)), sys.stdout)
