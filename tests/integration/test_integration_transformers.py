"""Workers whose model transformers' own code computes: through the hand-off, and refused at their start."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_steps import make_runner
from foreign_checkpoints import REFUSED, VOCAB_SIZE, architecture_of, foreign_config, make_foreign
from reference_engine import Engine
from workers import Process, Worker, hand_off, merged, running, sampling

from cluster.settings import WorkerSettings
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SamplingParams

NUM_TOKENS = 24


@pytest.mark.battery
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # those of transformers' own code
def test_a_model_of_transformers_is_handed_off_between_ranks_of_other_numbers(tmp_path: Path) -> None:
    """One rank computes the prompt, in steps that are sent while the next one runs, and two ranks go on."""
    folder = make_foreign("cohere2", tmp_path)
    prompt = [(i * 37) % (VOCAB_SIZE - 3) + 3 for i in range(300)]
    common = {"model_path": str(folder), "kv_cache_tokens": 2048, "max_model_len": 512, "transport": "shm"}
    workers = [
        Worker(worker_id="p", role="prefill", block_size=16, max_num_batched_tokens=64, chunk_tokens=32, **common),
        Worker(worker_id="d", role="decode", block_size=32, tp_size=2, **common),
    ]
    with running(*workers) as (prefill, decode):
        key = hand_off("one", prompt, prefill, decode, sampling(max_output_tokens=NUM_TOKENS))
        decode.wait_for(lambda: decode.outputs[key].finished or decode.outputs[key].failed, 120)
        prefill.wait_idle()
        decode.wait_idle()
        output = merged(key, prefill, decode)
    assert output.failed is None, output.failed

    runner = make_runner(folder, num_blocks=64)
    blocks = BlockManager(runner.kv.shape[2], 16, groups=runner.config.kv_groups)
    params = SamplingParams(max_output_tokens=NUM_TOKENS, temperature=0.0)
    ((expected,),) = Engine(runner, blocks, VOCAB_SIZE).generate([prompt], [params])
    assert tuple(output.tokens[0][i] for i in range(len(output.tokens[0]))) == expected.token_ids


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["stablelm", "minicpm3"])
def test_a_worker_whose_model_is_not_served_ends_with_the_reason(model_type: str, tmp_path: Path) -> None:
    config = foreign_config(model_type)
    config.architectures = [architecture_of(model_type)]
    config.save_pretrained(tmp_path)
    settings = WorkerSettings.from_values(worker_id="w", role="prefill", model_path=str(tmp_path), device="cpu")
    process = Process("worker", settings.to_json())
    try:
        process.popen.wait(120)
        assert REFUSED[model_type][1] in process.stderr()
        assert architecture_of(model_type) in process.stderr()
    finally:
        process.stop()
