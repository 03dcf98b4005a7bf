"""A GGUF file is a model like any other: it is served and handed off by workers, and read by routers."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import write_gguf
from reference_engine import Engine
from workers import ROOT, Worker, hand_off, merged, running, sampling

from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.tp import SingleGroup
from router.examine import examine

MODEL = ROOT / "models" / "tiny-shakespeare"
PROMPT = [(i * 37) % 1000 + 5 for i in range(77)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(MODEL, tmp_path_factory.mktemp("gguf") / "bard.gguf", "Q8_0")


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (1, 2)), ("bfloat16", (1, 1))])
def test_tokens_of_a_hand_off_are_those_of_one_process(dtype: str, sizes: tuple[int, int], file: Path) -> None:
    runner = ModelRunner(file, tp=SingleGroup(), device="cpu", dtype=dtype, num_blocks=64, block_size=16)
    engine = Engine(runner, BlockManager(64, 16), runner.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS, top_logprobs=0)
    (expected,) = (completions[0] for completions in engine.generate([PROMPT], [params]))
    common = {"model_path": str(file), "dtype": dtype, "kv_cache_tokens": 2048, "chunk_tokens": 24}
    prefill = Worker(worker_id="prefill-0", role="prefill", tp_size=sizes[0], **common)
    decode = Worker(worker_id="decode-0", role="decode", tp_size=sizes[1], **common)
    with running(prefill, decode) as (sender, receiver):
        key = hand_off("gguf", PROMPT, sender, receiver, sampling(max_output_tokens=NUM_TOKENS, top_logprobs=0))
        receiver.wait_for(lambda: receiver.outputs[key].finished)
        output = merged(key, sender, receiver)
    assert tuple(output.sequence()) == expected.token_ids


def test_a_router_reads_the_file_as_it_reads_the_folder(file: Path) -> None:
    found = examine(file)
    assert found == examine(MODEL)
    assert found["found"]["has_chat_template"]
