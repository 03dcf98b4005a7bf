"""What `baton config explain` tells before a start is what a started worker reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL
from scripted_router import baton
from workers import Worker, running

from cluster.config.load import load_config
from cluster.text import format_bytes
from controller.plan import plan_worker
from engine import profiling

CONFIGS = {
    "float32": "{model: {path: PATH, dtype: float32}, engine: {device: cpu, threads: 1}}",
    "two ranks": (
        "{model: {path: PATH, dtype: bfloat16, max_model_len: 700}, engine: {device: cpu, threads: 1}, "
        "roles: {decode: {devices: 2, tensor_parallel: 2, block_size: 32}}}"
    ),
    "int8": (
        "{model: {path: PATH, quantization: int8}, "
        "engine: {device: cpu, threads: 1, kv_cache_dtype: int8, kv_cache_tokens: 5000, max_num_batched_tokens: 512}}"
    ),
    "int4, decode alone": (
        "{model: {path: PATH, quantization: int4}, engine: {device: cpu, threads: 1}, "
        "roles: {prefill: {devices: 0, min_workers: 0}}}"
    ),
}


IN_SHORT = ("two ranks", "int4, decode alone")
"""What `make test` has; the rest is a battery's."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_SHORT else [pytest.mark.battery]) for name in CONFIGS]
)
def test_a_started_worker_reports_the_explained_figures(name: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"metadata:\n  serving: {CONFIGS[name].replace('PATH', str(BUNDLED_MODEL))}\n")
    done = baton("config", "explain", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)["roles"]["decode"]
    settings = plan_worker(load_config(str(file)), "decode").ranks[0]

    with running(Worker(**{**vars(settings), "metrics_port": None})) as (worker,):
        info, said = worker.info, worker.ranks[0].stderr()
        worker.wait_for(lambda: worker.stats.blocks_total)
        assert worker.stats.blocks_total == info.num_blocks == told["num_blocks"]
        assert (info.block_size, info.max_model_len) == (told["block_size"], told["max_model_len"])

    (line,) = re.findall(r"^memory of each rank: .*$", said, flags=re.MULTILINE)
    assert f"weights {format_bytes(told['weight_bytes'])}," in line
    assert f"KV pool {format_bytes(told['pool_bytes'])}, " in line
    blocks = f"KV pool: {told['num_blocks']} blocks of {told['block_size']} tokens"
    assert f"{blocks}, {told['kv_bytes_per_token']} bytes a token" in line
    if not profiling._reset_peak():
        assert re.search(r"activations \d+\.\d [kM]B \(measured\)", line), line
