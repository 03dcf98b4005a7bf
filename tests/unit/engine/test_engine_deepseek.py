"""DeepSeek V2, V3 and R1: what a folder is refused for, what is left out, and the bytes that a latent takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, run_in_chunks
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError, ConfigError
from engine.json_fields import Fields
from engine.model_cost import kv_bytes_per_token
from engine.model_runner import ModelRunner
from engine.models.folder import read_model
from engine.models.registry import read_config
from engine.tp import SingleGroup
from kv_transfer.layout import KvLayout
from simulate.known_models import KNOWN_MODELS
from simulate.model_files import find_shape

IDS = [(i * 37) % (VOCAB_SIZE - 1) + 1 for i in range(40)]


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in ("deepseek-v2", "deepseek-v3")}


@pytest.fixture
def folders(written: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {kind: Path(shutil.copytree(folder, tmp_path / kind)) for kind, folder in written.items()}


def test_a_token_of_the_published_v3_takes_the_bytes_that_the_paper_says() -> None:
    """(512 + 64) values in each of 61 layers, whichever way they are counted and on however many ranks."""
    config = read_config(Fields(dict(KNOWN_MODELS["deepseek-v3"]), "config.json"))
    for tp_size in (1, 8, 16):
        assert kv_bytes_per_token(config, tp_size, "bfloat16") == (512 + 64) * 2 * 61 == 70_272
        assert find_shape("deepseek-v3").kv_bytes_per_token(tp_size, "bfloat16") == 70_272
    layout = KvLayout(61, config.num_key_value_heads, config.head_dim, "bfloat16", 8, 16, "m", config.num_kv_planes)
    assert layout.num_layers * layout.num_local_rows * layout.head_dim * 2 == 70_272


def test_the_pool_of_latents_has_one_plane_of_one_head(folders: dict[str, Path]) -> None:
    runner = make_runner(folders["deepseek-v3"], num_blocks=8)
    assert runner.kv.shape == (4, 1, 8, 16, 1, 32 + 8)
    assert runner.kv.nbytes == 8 * 16 * kv_bytes_per_token(runner.config, 1, "float32")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek-v3", {"n_group": 3}, "n_group 3 and topk_group 2 leave no 3 of n_routed_experts 8"),
        ("deepseek-v3", {"topk_group": 5}, "topk_group 5 leave"),
        ("deepseek-v3", {"topk_group": 1}, "topk_group 1 leave no 3"),
        ("deepseek-v3", {"n_group": 8}, "of 2 experts at least"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek-v3", {"scoring_func": 0}, "scoring_func 0 is not supported; Baton computes 'sigmoid'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; Baton computes 'noaux_tc'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 must be num_attention_heads 8"),
        ("deepseek-v3", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than n_routed_experts 8"),
        ("deepseek-v3", {"q_lora_rank": None, "attention_bias": True}, "attention_bias true is not supported where"),
        ("deepseek-v3", {"q_lora_rank": 0}, "q_lora_rank must be a positive integer"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer from 0 on"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias true is not supported"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek-v2", {"kv_lora_rank": "wide"}, "kv_lora_rank must be a positive integer"),
        ("deepseek-v2", {"kv_lora_rank": 33, "qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ("deepseek-v2", {"kv_lora_rank": 33}, "kv_lora_rank 33 is odd"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    folders: dict[str, Path], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model(edited(folders[kind], **changes))


def test_a_latent_of_another_width_than_the_weights_is_refused_with_the_tensor(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"kv_a_proj_with_mqa\.weight has shape \[40, 64\]"):
        make_runner(edited(folders["deepseek-v3"], kv_lora_rank=48))


def test_fixed_kernels_are_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="deterministic: latent attention computes a prompt's tokens in another way"):
        make_runner(folders["deepseek-v3"], deterministic=True)


def test_layers_that_predict_further_tokens_are_left_out_and_named(folders: dict[str, Path]) -> None:
    folder, lines = folders["deepseek-v3"], []
    file = folder / "model.safetensors"
    tensors = load_file(file)
    more = {
        name.replace("layers.3.", "layers.4."): value.clone() for name, value in tensors.items() if "layers.3." in name
    }
    more["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    expected = run_in_chunks(make_runner(folder), IDS, [40])
    save_file(tensors | more, file, metadata={"format": "pt"})

    def runner() -> ModelRunner:
        sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 8, "report": lines.append}
        return ModelRunner(folder, tp=SingleGroup(), device="cpu", dtype="float32", **sizes)

    edited(folder, num_nextn_predict_layers=1)
    assert torch.equal(run_in_chunks(runner(), IDS, [40]), expected)
    assert lines[-1].startswith(f"{len(more)} tensors of model.layers.4.* are left out")
    edited(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.4\.\S+ and \d+ more has no place"):
        runner()


def test_deepseeks_fp8_in_blocks_is_read_as_what_it_stands_for(folders: dict[str, Path]) -> None:
    """Blocks end within heads, and within the two projections that are fused."""
    folder, size = folders["deepseek-v3"], 24
    file = folder / "model.safetensors"
    held, plain = {}, {}
    for name, weight in load_file(file).items():
        held[name] = plain[name] = weight
        if not name.endswith("proj.weight") and "kv_a_proj" not in name:
            continue
        rows, columns = (torch.arange(length) // size for length in weight.shape)
        scales = 0.5 + torch.rand(int(rows.max()) + 1, int(columns.max()) + 1)
        held[name] = (weight / scales[rows][:, columns]).to(torch.float8_e4m3fn)
        held[name.replace("weight", "weight_scale_inv")] = scales
        plain[name] = held[name].float() * scales[rows][:, columns]
    save_file(plain, file, metadata={"format": "pt"})
    expected = run_in_chunks(make_runner(folder), IDS, [30, *[1] * 10])
    save_file(held, file, metadata={"format": "pt"})
    edited(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [size, size]})
    assert (run_in_chunks(make_runner(folder), IDS, [30, *[1] * 10]) - expected).abs().max() < 1e-4


def test_rounded_latents_change_logits_a_little(folders: dict[str, Path]) -> None:
    exact, rounded = (make_runner(folders["deepseek-v3"], kv_cache_dtype=kind) for kind in ("auto", "int8"))
    found, expected = (run_in_chunks(runner, IDS, [30, *[1] * 10]) for runner in (rounded, exact))
    assert rounded.kv.shape[-1] == 44
    error = (found - expected).abs().mean() / expected.abs().mean()
    assert 1e-4 < error < 0.1
