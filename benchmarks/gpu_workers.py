"""Two `python -m worker` on one GPU, with a hand-off between them, and a router in front: parts of `benchmarks.gpu`.

    python -m benchmarks.gpu_workers {handoff,router} --device cuda

The workers share the GPU in time, so that this shows what works, and not how fast it is.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.gpu_part import Clock, attempt, found, run_named
from benchmarks.plain_cluster import ROOT, ProgramFailed, running_router, running_workers
from benchmarks.worker_pair import WorkerPair, running_pair
from cluster.config.load import load_config
from cluster.transports import shares_pages
from controller.plan import plan_cluster

MODEL = ROOT / "models" / "tiny-shakespeare"
VOCAB_SIZE, MAX_MODEL_LEN = 1024, 1024
PROMPTS, OUTPUT_TOKENS = (5, 130, 500), 40
NUM_STREAMS = 8
SECOND_PAIR_S = 20.0
"""Two more workers are not started with less time left."""


def _values(device: str) -> dict[str, Any]:
    """Settings of each worker. Both find what the other has left of the GPU's memory, and capture few graphs."""
    if device == "cpu":
        return {"dtype": "float32"}
    return {"device": "cuda", "dtype": "bfloat16", "memory_utilization": 0.3, "max_num_seqs": 8}


def handoff(device: str, clock: Clock) -> None:
    """Prompts that are handed over by pages and by slots, against the same ones that the decode worker computes
    alone."""
    for transport in ("shm_pages", "shm") if device == "cpu" else ("cuda_pages", "cuda_ipc"):
        if clock.left_s < SECOND_PAIR_S and not shares_pages(transport):
            found(transport, skipped=f"{clock.left_s:.0f} s are left")
        else:
            _hand_off_all(transport, device)


def _hand_off_all(transport: str, device: str) -> None:
    began = time.perf_counter()
    with running_pair(MODEL, MAX_MODEL_LEN, transport=transport, **_values(device)) as pair:
        found(f"both workers are ready, {transport}", seconds=round(time.perf_counter() - began, 1))
        for size in PROMPTS:
            attempt(f"{size} tokens by {transport}", lambda size=size: _hand_off(pair, size))  # type: ignore[misc]


def _hand_off(pair: WorkerPair, size: int) -> dict[str, Any]:
    prompt = pair.random_prompt(size, VOCAB_SIZE)
    began = time.perf_counter()
    _, heard = pair.hand_off_of(prompt, OUTPUT_TOKENS)
    pair.wait("the output is whole", lambda: heard.ended is not None and 0 in heard.tokens)
    alone = pair.alone(prompt, OUTPUT_TOKENS)
    pair.wait("the output is whole", lambda: alone.ended is not None)
    if heard.token_ids != alone.token_ids:
        pairs = itertools.zip_longest(heard.token_ids, alone.token_ids)
        at = next(i for i, (one, other) in enumerate(pairs) if one != other)
        raise ProgramFailed(f"token {at} of {len(alone.token_ids)} differs from the one of a worker alone")
    pair.wait_idle()
    ttft_s = (heard.first_token or began) - began
    return {"tokens": len(heard.token_ids), "ttft_ms": round(1000 * ttft_s, 1)}


def router(device: str, clock: Clock) -> None:
    """Streams through a router in front of both workers, twice: every output is the same, and some were handed over."""
    from tools.client import BatonClient, make_spec

    plan = plan_cluster(load_config(ROOT / "cluster.yaml"), num_gpus=0, num_cores=None)
    values = {"model_path": str(MODEL), "max_model_len": MAX_MODEL_LEN, "kv_cache_tokens": 16 * MAX_MODEL_LEN}
    workers = [
        replace(worker, ranks=(worker.ranks[0].with_values(**values, **_values(device)),)) for worker in plan.workers
    ]

    def one(number: int) -> tuple[str, str]:
        words = "the lord of the castle spoke to the king " * 8
        spec = make_spec(
            f"{number} {words}", max_output_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, include_timing=True
        )
        answer = client.generate(spec, timeout_s=60)
        return answer.outputs[0].text, answer.timing.placement

    with (
        running_workers(workers) as flags,
        running_router(plan.router.with_values(workers=flags, model_path=str(MODEL), policy="round_robin")) as address,
        BatonClient(address) as client,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        rounds = [list(pool.map(one, range(NUM_STREAMS))) for _ in range(2)]
    texts = [[text for text, _ in each] for each in rounds]
    placements = Counter(placement.partition(":")[0] for each in rounds for _, placement in each)
    same = sum(one == other for one, other in zip(*texts, strict=True))
    told: dict[str, Any] = {
        "streams": 2 * NUM_STREAMS,
        "same_again": f"{same} of {NUM_STREAMS}",
        **placements,
    }
    if not any(texts[0]):
        told["error"] = "no stream had an output"
    found("streams", **told)


if __name__ == "__main__":
    run_named({"handoff": handoff, "router": router})
