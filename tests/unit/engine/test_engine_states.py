"""A model whose layers keep recurrent states: over ranks, in blocks of several sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, on_each_rank, run_in_chunks
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError, ConfigError
from cluster.kv_groups import StateShape
from engine.kv.states import StatePages
from engine.memory import resolve_block_size
from engine.model_runner import ModelRunner
from engine.models.folder import read_model

TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (75,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3-next", tmp_path_factory.mktemp("next"))


@pytest.fixture(scope="module")
def logits(folder: Path) -> torch.Tensor:
    return run_in_chunks(make_runner(folder), TOKEN_IDS, [len(TOKEN_IDS)])


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_share_out_the_heads_of_states(folder: Path, logits: torch.Tensor, tp_size: int) -> None:
    for found in on_each_rank(
        tp_size, lambda tp: run_in_chunks(make_runner(folder, tp=tp), TOKEN_IDS, [40, 1, 3, 1, 30])
    ):
        assert (found - logits).abs().max() < 1e-4


@pytest.mark.parametrize("block_size", [8, 12, 64])
@pytest.mark.parametrize("chunks", [[75], [1] * 75, [63, 2, 10], [8, 1, 7, 59]], ids=str)
def test_a_prompt_may_be_cut_anywhere_in_blocks_of_any_size(
    folder: Path, logits: torch.Tensor, block_size: int, chunks: list[int]
) -> None:
    runner = make_runner(folder, block_size=block_size)
    assert (run_in_chunks(runner, TOKEN_IDS, chunks) - logits).abs().max() < 3e-4


def test_states_keep_their_bits_where_keys_and_values_are_rounded(folder: Path) -> None:
    runner = make_runner(folder, block_size=64, kv_cache_dtype="int8")
    exact = make_runner(folder, block_size=64)
    run_in_chunks(runner, TOKEN_IDS[:20], [20], (3,))
    run_in_chunks(exact, TOKEN_IDS[:20], [20], (3,))
    group = next(group for group in runner.config.kv_groups if group.has_state)
    layer = group.layers[0]
    blocks = torch.tensor([3 * len(runner.config.kv_groups) + runner.config.kv_groups.index(group)])
    for found, expected in zip(_pages(runner, layer).read(blocks), _pages(exact, layer).read(blocks), strict=True):
        assert layer == 0 and found.dtype == torch.float32 and expected.abs().sum() > 0
        torch.testing.assert_close(found, expected)


def _pages(runner: ModelRunner, layer: int) -> StatePages:
    return runner._kv.states(layer)


def test_a_state_lies_in_planes_that_are_too_small_for_its_parts() -> None:
    planes = torch.zeros(2, 5, 3, 2, 4)  # 24 values of a block in each
    pages = StatePages(planes, StateShape(4, (14, 4)), num_heads=2)
    parts = [torch.rand(2, 28), torch.rand(2, 8)]
    blocks = torch.tensor([4, 1])
    pages.write(blocks, parts)
    for found, expected in zip(pages.read(blocks), parts, strict=True):
        assert torch.equal(found, expected)
    assert not planes[:, [0, 2, 3]].any()
    assert torch.equal(planes[:, 4].flatten()[:36], torch.cat([part[0] for part in parts]))


def test_a_block_without_room_for_a_state_is_refused_with_the_sizes_that_have_it(folder: Path) -> None:
    config = read_model(folder)
    assert config.delta_net is not None
    least = -(-config.delta_net.state.size_bytes(4) // (2 * 4 * 16 * 4))
    with pytest.raises(ConfigError, match=f"block_size: {least - 1} .* a multiple of 4 from {-(-least // 4) * 4} on"):
        resolve_block_size(config, 1, "float32", least - 1, 16)
    with pytest.raises(ConfigError, match="block_size: 4 tokens"):
        make_runner(folder, block_size=4)
    assert resolve_block_size(config, 1, "float32", None, 16) == 16
    assert resolve_block_size(config, 1, "int8", None, 16) == 32
    assert resolve_block_size(config, 1, "float32", None, 64) == 64


def test_one_block_of_the_model_that_is_served_holds_a_thousand_tokens(tmp_path: Path) -> None:
    """Qwen3-Next-80B-A3B: 2 MiB of matrices and 96 KiB of inputs in a layer, and 2 KiB for a token."""
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    config = read_model(tmp_path)
    assert config.delta_net is not None
    assert config.delta_net.state.size_bytes(16) == (2 << 20) + (96 << 10)
    assert resolve_block_size(config, 1, "bfloat16", None, 16) == 1072
    assert resolve_block_size(config, 4, "bfloat16", None, 16) == 544
    assert len(config.kv_groups) == 4 and all(len(group.layers) == 12 for group in config.kv_groups)


def test_deterministic_steps_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.deterministic: Qwen3NextForCausalLM .* set it to false"):
        make_runner(folder, deterministic=True)


def test_ranks_that_do_not_divide_the_key_heads_are_refused_with_those_that_do(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 key heads of states .* use 1, 2 or 4"):
        read_model(folder).check_tp_size(8)


def test_layers_that_predict_several_tokens_are_left_out_by_name(
    folder: Path, logits: torch.Tensor, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.gate.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    told: list[str] = []
    runner = make_runner(tmp_path, report=told.append)
    assert told[-1] == "2 tensors of mtp.* are left out: layers that predict several tokens are not used"
    assert torch.equal(run_in_chunks(runner, TOKEN_IDS, [len(TOKEN_IDS)]), logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide linear_num_value_heads 8"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must name 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must name 4"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor must be at most 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(
    folder: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **fields}))
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)


def test_config_json_of_transformers_4_is_read_alike(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    del values["layer_types"], values["rope_parameters"]
    older = {"full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps({**values, **older}))
    assert read_model(tmp_path) == read_model(folder)
