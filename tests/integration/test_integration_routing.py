"""The default policy over real workers: it predicts from what they have measured, and outputs stay what they are."""

from __future__ import annotations

import random
from pathlib import Path

from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Stream, single_process, token_spec

from cluster.pb import generation_pb2
from engine.sampling.params import SamplingParams

NUM_TOKENS = 8


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(4, 1000), k=num_tokens)


def run(cluster: PlainCluster, prompt: list[int]) -> tuple[list[int], generation_pb2.Timing]:
    stream = Stream(cluster, token_spec(prompt, NUM_TOKENS, include_timing=True))
    stream.result()
    return stream.token_ids(), stream.timing()


def test_requests_are_placed_by_what_workers_have_measured_and_their_outputs_are_the_same(tmp_path: Path) -> None:
    prompts = [prompt_of(seed, 40 * (seed + 1)) for seed in range(8)]
    params = [SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)] * len(prompts)
    expected = [list(completions[0].token_ids) for completions in single_process(prompts, params)]
    with PlainCluster(BUNDLED_MODEL, tmp_path, router={"policy": "predicted"}) as cluster:
        tokens, timing = run(cluster, prompts[0])
        assert tokens == expected[0]
        assert timing.placement == f"disaggregated: {PREFILL} -> {DECODE}, least work", "nobody has measured anything"
        for prompt, right in zip(prompts[1:4], expected[1:4], strict=True):
            assert run(cluster, prompt)[0] == right
        cluster.wait_for(lambda status: any(w.stats.HasField("step_cost") for w in status.workers))
        placements = []
        for prompt, right in zip(prompts[4:], expected[4:], strict=True):
            tokens, timing = run(cluster, prompt)
            assert tokens == right
            placements.append(timing.placement)
        assert all("first token predicted after" in placement for placement in placements), placements
