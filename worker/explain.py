"""`python -m worker.explain`: the memory of workers that would start now, as they would plan it themselves.

Reads `{"mean_tokens": N or null, "workers": [WorkerSettings, ...]}` from stdin and writes one JSON list to stdout: for
each worker the fields of its `MemoryPlan`, and what follows from them. Reads no weights. Ends with an error and an exit
code as `cluster.program` has them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from cluster.errors import BatonError, CheckpointError, ConfigError
from cluster.program import ExitCode
from cluster.settings import WorkerSettings
from worker.loading import expect_memory, resolve

DEFAULT_MEAN_TOKENS = 1024


def explain(settings: WorkerSettings, mean_tokens: int | None) -> dict[str, Any]:
    """One worker's memory, of each of its ranks. `mean_tokens`: of a request, prompt and output together.

    Raises ConfigError and CheckpointError for what could not be served, like the worker itself.
    """
    resolved = resolve(settings)
    resolved.config.check_tp_size(settings.tp_size)
    if mean_tokens is None:
        mean_tokens = min(DEFAULT_MEAN_TOKENS, resolved.max_model_len)
    if mean_tokens > resolved.max_model_len:
        raise ConfigError(f"--mean-tokens: {mean_tokens} is more than max_model_len {resolved.max_model_len}")
    demand = resolved.demand
    plan = expect_memory(demand)
    return {
        "device": resolved.device,
        "dtype": resolved.dtype,
        "quantization": settings.model.quantization,
        "keeps_codes": demand.form.keeps_codes,
        "kv_dtype": resolved.kv_dtype,
        "tensor_parallel": settings.tp_size,
        "memory_utilization": settings.engine.memory_utilization,
        "max_num_seqs": settings.engine.max_num_seqs,
        "max_num_batched_tokens": settings.engine.max_num_batched_tokens,
        **dataclasses.asdict(plan),
        "num_tokens": plan.num_tokens,
        "pool_bytes": plan.pool_bytes,
        "tokens_that_fit": plan.tokens_that_fit,
        "mean_tokens": mean_tokens,
        "requests_at_mean": plan.num_requests(mean_tokens),
    }


def main() -> int:
    asked = json.load(sys.stdin)
    explained = []
    for values in asked["workers"]:
        settings = WorkerSettings.from_json(json.dumps(values))
        try:
            explained.append(explain(settings, asked["mean_tokens"]))
        except BatonError as error:
            print(f"error: {settings.role} workers: {error}", file=sys.stderr)
            is_config = isinstance(error, ConfigError | CheckpointError)
            return ExitCode.BAD_CONFIG if is_config else ExitCode.FAILED
    print(json.dumps(explained))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
