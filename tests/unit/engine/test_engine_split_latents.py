"""Latents whose tokens the ranks divide among them: against transformers, and against ranks that keep them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import generate, make_runner, on_each_rank, run_in_chunks, step_of, with_all_logits
from transformers import AutoModelForCausalLM

from cluster.errors import ConfigError
from engine.attention.registry import choose_attention
from engine.memory import MemoryDemand, resolve_block_size
from engine.model_cost import kv_block_bytes, kv_bytes_per_token
from engine.models.folder import read_model
from engine.step_input import SequenceSlice
from engine.tp import TPGroup

IDS = [(i * 37) % (VOCAB_SIZE - 1) + 1 for i in range(70)]
CHUNKS = [25, 1, 7, 1, 1, 20, *[1] * 15]
KINDS = ("deepseek-v2", "deepseek-v3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + length) % (VOCAB_SIZE - 1) + 1 for i in range(length)]


def logits_of(folder: Path, size: int, **how: Any) -> list[torch.Tensor]:
    """Each rank's logits of all positions."""
    return on_each_rank(size, lambda tp: run_in_chunks(make_runner(folder, tp=tp, **how), IDS, CHUNKS))


@pytest.mark.parametrize(("size", "groups", "block_size"), [(2, 1, 8), (4, 1, 16), (2, 2, 16), (4, 2, 8), (8, 1, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_split_latents_give_what_transformers_give(
    folders: dict[str, Path], kind: str, size: int, groups: int, block_size: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].float()
    found = logits_of(folders[kind], size, block_size=block_size, split_latents=True, expert_parallel=groups)
    assert all(torch.equal(each, found[0]) for each in found), "ranks disagree"
    assert (found[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("size", [2, 4])
def test_rounded_latents_are_split_as_they_are(folders: dict[str, Path], size: int, kernels: str) -> None:
    how = {"kv_cache_dtype": "int8", "kernels": kernels}
    whole, split = (
        logits_of(folders["deepseek-v3"], size, **how, split_latents=is_split) for is_split in (False, True)
    )
    assert (split[0] - whole[0]).abs().mean() < 1e-4  # of a sum in another order a code may be the next one


def test_in_sixteen_bits_split_latents_are_as_near_as_whole_ones(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek-v3", tmp_path, dtype="bfloat16")
    exact = run_in_chunks(make_runner(folder), IDS, CHUNKS)
    whole, split = (logits_of(folder, 2, dtype="bfloat16", split_latents=is_split)[0] for is_split in (False, True))
    errors = [(logits.float() - exact).abs().mean() for logits in (whole, split)]
    assert errors[1] < 1.2 * errors[0]


def test_sequences_of_all_lengths_in_one_step(folders: dict[str, Path]) -> None:
    """Of short ones most ranks keep nothing; prompts and generated tokens share a step."""
    lengths = [1, 2, 3, 4, 5, 15, 16, 17, 33]

    def logits(tp: TPGroup, is_split: bool) -> torch.Tensor:
        runner = make_runner(folders["deepseek-v3"], tp=tp, split_latents=is_split, num_blocks=64)
        tables = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(lengths))]
        first = [
            SequenceSlice(tuple(IDS[:n]), 0, table, wants_logits=True) for n, table in zip(lengths, tables, strict=True)
        ]
        rows = [runner.forward(step_of(runner, first)).clone()]
        later = [
            SequenceSlice(tuple(IDS[n : n + 1 + 5 * (i == 3)]), n, table, wants_logits=True)
            for i, (n, table) in enumerate(zip(lengths, tables, strict=True))
        ]
        rows.append(runner.forward(with_all_logits(step_of(runner, later, copies=[(0, 60)]))).clone())
        moved = [SequenceSlice((7,), 1, (60,), wants_logits=True)]
        rows.append(runner.forward(step_of(runner, moved)).clone())
        return torch.cat(rows)

    whole, split = (on_each_rank(4, lambda tp, how=is_split: logits(tp, how)) for is_split in (False, True))
    for each in split:
        assert (each - whole[0]).abs().max() < 1e-4


@pytest.mark.parametrize(("kind", "size", "groups"), [("deepseek-v2", 2, 1), ("deepseek-v3", 4, 2)])
def test_greedy_tokens_are_those_of_transformers(folders: dict[str, Path], kind: str, size: int, groups: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    prompts = [prompt_of(n) for n in (1, 15, 16, 17, 100)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        expected.append(found[0, len(prompt) :].tolist())

    def greedy(tp: TPGroup) -> list[list[int]]:
        runner = make_runner(folders[kind], tp=tp, split_latents=True, expert_parallel=groups, num_blocks=64)
        tables = [tuple(range(11 * i, 11 * i + 11)) for i in range(len(prompts))]
        outputs: list[list[int]] = [[] for _ in prompts]
        new = prompts
        while len(outputs[0]) < 64:
            parts = zip(new, prompts, outputs, tables, strict=True)
            slices = [
                SequenceSlice(tuple(ids), (len(p) + len(o) - 1) * bool(o), table, True) for ids, p, o, table in parts
            ]
            tokens = runner.forward(step_of(runner, slices)).argmax(1).tolist()
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
            new = [[token] for token in tokens]
        return outputs

    assert on_each_rank(size, greedy) == [expected] * size


def test_tokens_are_drawn_as_of_whole_latents(folders: dict[str, Path]) -> None:
    prompts = [IDS[:n] for n in (1, 15, 16, 17, 60)]
    for kind in KINDS:
        (whole,) = on_each_rank(
            1, lambda tp, kind=kind: generate(make_runner(folders[kind], num_blocks=64), prompts, 64, False)
        )
        split = on_each_rank(
            4,
            lambda tp, kind=kind: generate(
                make_runner(folders[kind], tp=tp, split_latents=True, num_blocks=64), prompts, 64, False
            ),
        )
        assert split == [whole] * 4


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_each_rank_keeps_its_part_of_the_bytes(folders: dict[str, Path], kv_cache_dtype: str) -> None:
    folder = folders["deepseek-v3"]
    how = {"num_blocks": 8, "kv_cache_dtype": kv_cache_dtype}
    whole = make_runner(folder, **how).kv.nbytes
    for size in (2, 4, 8):
        runners = on_each_rank(size, lambda tp: make_runner(folder, tp=tp, split_latents=True, **how))
        assert {runner.kv.nbytes for runner in runners} == {whole // size}
        kv_dtype = "int8" if kv_cache_dtype == "int8" else "float32"
        assert 8 * kv_block_bytes(runners[0].config, size, kv_dtype, 16) == whole // size
        assert kv_bytes_per_token(runners[0].config, size, kv_dtype) == -(-whole // (8 * 16 * size))


def test_what_memory_is_planned_with_is_what_the_pool_takes(folders: dict[str, Path]) -> None:
    (config,) = (read_model(folders["deepseek-v3"]).divided(4, 2, True),)
    runner = on_each_rank(4, lambda tp: make_runner(folders["deepseek-v3"], tp=tp, split_latents=True, num_blocks=8))[0]
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "memory_utilization": 0.9}
    demand = MemoryDemand(config, runner.weight_form, 4, "float32", 16, None, **sizes)
    assert 8 * demand.block_bytes == runner.kv.nbytes


def test_what_cannot_be_split_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    llama = read_model(make_checkpoint("llama", tmp_path))
    with pytest.raises(ConfigError, match="split_latents: LlamaForCausalLM keeps no latents; use false"):
        llama.divided(2, 1, True)
    split = read_model(folders["deepseek-v3"]).divided(8, 1, True)
    with pytest.raises(ConfigError, match=r"block_size: 12 tokens are not divided by tensor_parallel 8.*multiple of 8"):
        resolve_block_size(split, 8, "float32", 12, 16)
    assert resolve_block_size(split, 8, "float32", None, 12) == 16
    for name in ("triton", "varlen", "flash_attn"):
        with pytest.raises(ConfigError, match="takes no latents and no split latents"):
            choose_attention(name, torch.device("cpu"), torch.float32, extras=split.attention_extras)
