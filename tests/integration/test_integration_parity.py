"""The whole cluster against transformers: greedy tokens and their logprobs, for every architecture, over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from cluster_fixture import BUNDLED_MODEL, PlainCluster, Stream, token_spec

MODELS = ("tiny-shakespeare", "llama3-rope", "mistral", "qwen2", "qwen3")
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 1000)
NUM_TOKENS = 64
CLEAR_LEAD = 5e-4
"""How far the best token must lead the second, in every step of the reference: nearer ones are ties in float32."""


@dataclass(frozen=True)
class Reference:
    token_ids: list[int]
    logprobs: list[float]
    smallest_lead: float


class Transformers:
    """The reference implementation, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model.generation_config.eos_token_id = None
        self.vocab_size = int(self._model.config.vocab_size)

    def generate(self, prompt: list[int]) -> Reference:
        generated = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        token_ids = generated.sequences[0, len(prompt) :].tolist()
        logprobs = torch.log_softmax(torch.cat(generated.logits), dim=-1)
        best = logprobs.topk(2).values
        chosen = logprobs[range(NUM_TOKENS), token_ids]
        return Reference(token_ids, chosen.tolist(), float((best[:, 0] - best[:, 1]).min()))


@pytest.fixture(
    scope="module", params=[*MODELS[:2], *(pytest.param(name, marks=pytest.mark.battery) for name in MODELS[2:])]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == BUNDLED_MODEL.name:
        return BUNDLED_MODEL
    return make_checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Transformers:
    return Transformers(folder)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    """Steps overlap with every other model."""
    logs, is_async = tmp_path_factory.mktemp("cluster"), folder.name in MODELS[1::2]
    decode = {"async_steps": "on" if is_async else "off"}
    with PlainCluster(folder, logs, kv_cache_tokens=4096, max_num_batched_tokens=384, decode=decode) as cluster:
        yield cluster


def make_prompt(length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + length)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_the_cluster_generates_the_tokens_of_transformers(
    length: int, cluster: PlainCluster, reference: Transformers
) -> None:
    prompt = make_prompt(length, reference.vocab_size)
    expected = reference.generate(prompt)
    assert expected.smallest_lead > CLEAR_LEAD, "two tokens tie: this prompt proves nothing, choose another"

    stream = Stream(cluster, token_spec(prompt, NUM_TOKENS, top_logprobs=0))
    stream.result()

    assert stream.token_ids() == expected.token_ids
    assert stream.logprobs() == pytest.approx(expected.logprobs, abs=1e-4)
