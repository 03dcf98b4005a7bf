"""Model folders that cannot be served are refused by their headers alone, before Ray starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from mxfp4_checkpoints import make_mxfp4
from packed_checkpoints import Format, make_packed
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cli.main import app
from cluster.errors import CheckpointError
from engine.gguf_files import open_tensor_files
from engine.models.folder import read_model
from engine.models.tensors import check_folder, declared_tensors

FORMATS = [
    *(Format("awq"), Format("gptq", is_shuffled=True), Format("fp8", block=(128, 128)), Format("fbgemm_fp8")),
    Format("compressed-tensors", layout="pack-quantized"),
    Format("compressed-tensors", layout="int-quantized", bits=8, strategy="channel", is_symmetric=True),
]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "model")


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_folder(folder, "native")
    return str(caught.value)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


_KINDS = [
    *("llama", "qwen2-moe", "qwen3", "gemma2", "phi3", "olmo2", "glm4", "deepseek-v2", "deepseek-v3"),
    *("glm4-moe", "qwen3-next", "gpt-oss"),
]


@pytest.mark.parametrize("kind", _KINDS)
def test_what_is_declared_is_what_a_checkpoint_of_the_family_has(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    assert dict(declared_tensors(read_model(folder))) == _shapes(folder)
    check_folder(folder)


def test_of_biased_latents_what_is_declared_is_what_a_checkpoint_has(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek-v3", tmp_path, attention_bias=True)
    assert dict(declared_tensors(read_model(folder))) == _shapes(folder)


def test_of_mxfp4_what_is_declared_is_what_a_checkpoint_has(tmp_path: Path) -> None:
    folder, _ = make_mxfp4(tmp_path / "mxfp4", plain=tmp_path / "plain")
    assert dict(declared_tensors(read_model(folder))) == _shapes(folder)
    check_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.2.mlp.experts.down_proj_scales")
    save_file(tensors, folder / "model.safetensors")
    assert "tensor model.layers.2.mlp.experts.down_proj_scales is missing" in _refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_a_tensor_of_a_type_that_is_not_read_is_refused(dtype: torch.dtype, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[K_PROJ] = tensors[K_PROJ].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    assert f"{folder / 'model.safetensors'}: tensor {K_PROJ} has type " in (message := _refusal(folder))
    assert message.endswith("; Baton reads F32, BF16, F16")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_of_gguf_what_is_declared_is_what_a_file_has(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path / "model")
    file = write_gguf(folder, tmp_path / "model.gguf")
    with open_tensor_files(file) as files:
        found = {name: files.shape_of(name) for name in files.names}
    assert dict(declared_tensors(read_model(file))) == found == _shapes(folder)
    check_folder(file)


def test_a_gguf_file_without_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(K_PROJ)
    save_file(tensors, folder / "model.safetensors")
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert f"{file}: tensor {K_PROJ} is missing" in _refusal(file)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.kv_b_proj.weight", "deepseek-v2"),
        ("model.layers.0.linear_attn.conv1d.weight", "qwen3-next"),
        ("model.layers.0.mlp.experts.gate_up_proj", "gpt-oss"),
    ],
)
def test_a_missing_tensor_of_any_kind_of_layer_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    assert f"tensor {name} is missing" in _refusal(folder)


def test_all_this_takes_no_torch(folder: Path, tmp_path: Path) -> None:
    mxfp4, _ = make_mxfp4(tmp_path / "mxfp4", plain=tmp_path / "plain")
    file = write_gguf(folder, tmp_path / "model.gguf")
    odd = shutil.copytree(folder, tmp_path / "odd")
    _edit(odd, architectures=["OddForCausalLM"])
    code = (
        "import sys; from pathlib import Path; from worker.check_model import main; "
        "print([main(path, 'auto') for path in sys.argv[1:]], {'torch', 'transformers'} & {*sys.modules})"
    )
    packed = [make_packed(Format(method), tmp_path / method)[0] for method in ("awq", "gptq")]
    mamba = tmp_path / "mamba"
    mamba.mkdir()
    (mamba / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    command = [sys.executable, "-c", code, *map(str, (folder, mxfp4, file, *packed, odd, mamba))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[0, 0, 0, 0, 0, 3, 3] set()", done.stderr
    assert "architecture 'OddForCausalLM' is not served by transformers' code" in done.stderr
    assert "has no such language model; by its own Baton serves Llama" in done.stderr
    assert "'MambaForCausalLM' is not served by transformers' code: it does not take attention" in done.stderr


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_packed_folder_is_taken_whole_and_refused_without_a_tensor(fmt: Format, tmp_path: Path) -> None:
    folder, _ = make_packed(fmt, tmp_path)
    check_folder(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layer = K_PROJ.removesuffix(".weight")
    for name in sorted(name for name in tensors if name.startswith(layer)):
        if not name.endswith(("input_scale", "weight_scale", "weight_scale_inv", "weight_shape", ".g_idx")):
            save_file({other: tensors[other] for other in tensors if other != name}, file)
            assert f"tensor {name} is missing (expected shape" in _refusal(folder)


@pytest.mark.parametrize("changes", [{"group_size": 48}, {"bits": 8}], ids=str)
def test_packed_tensors_of_another_shape_than_config_json_says_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder, _ = make_packed(Format("gptq"), tmp_path)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    _edit(folder, quantization_config=said | changes)
    assert "has shape [" in _refusal(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3-next"])
def test_a_tensor_that_has_no_place_is_refused_with_the_file(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, file)
    check_folder(folder)
    save_file({**tensors, "model.layers.0.self_attn.extra.weight": torch.zeros(2)}, file)
    assert f"{file}: tensor model.layers.0.self_attn.extra.weight has no place in the architecture" in _refusal(folder)
    if kind == "qwen3-next":
        save_file({**tensors, "mtp.layers.0.norm.weight": torch.zeros(2)}, file)
        check_folder(folder)


def test_a_folder_without_weights_is_enough_for_timed_steps(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors" in _refusal(folder)
    check_folder(folder, "native", needs_weights=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["OddForCausalLM"]}, "architecture 'OddForCausalLM' is not supported; Baton serves Llama"),
        ({"rope_parameters": {"rope_type": "odd"}}, "rope_type 'odd' is not supported; Baton computes default"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quant_method 'gguf' belongs to .gguf files"),
        ({"quantization_config": [1]}, "quantization_config must be an object (got [1])"),
        ({"quantization_config": {"quant_method": "odd"}}, "quant_method 'odd' is not supported; Baton reads awq"),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_its_key(folder: Path, changes: dict[str, Any], said: str) -> None:
    _edit(folder, **changes)
    assert said in _refusal(folder)


def test_end_tokens_that_are_none_are_refused_by_the_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    assert "generation_config.json: eos_token_id must be a token id" in _refusal(folder)


def test_a_missing_a_doubled_and_a_misshapen_tensor_are_refused_with_the_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, K_PROJ: torch.zeros(3, 64)}, file)
    assert f"{file}: tensor {K_PROJ} has shape [3, 64], but config.json asks for" in _refusal(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != K_PROJ}, file)
    assert f"{file}: tensor {K_PROJ} is missing (expected shape" in _refusal(folder)
    file.unlink()
    for number in (1, 2):
        save_file(tensors, folder / f"part-{number}.safetensors")
    assert "is in part-1.safetensors as well; remove one of the two files" in _refusal(folder)


def test_serve_refuses_such_a_folder_before_it_starts_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(**_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("controller.local_ray.started", started)
    _edit(folder, rope_parameters={"rope_type": "odd"})
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--model", str(folder)])
    assert done.exit_code == 3
    assert "rope_type 'odd' is not supported; Baton computes default" in done.output


def test_serve_takes_a_folder_without_weights_for_timed_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(**_: object) -> None:
        raise KeyboardInterrupt("Ray was started")

    monkeypatch.setattr("controller.local_ray.started", started)
    (folder / "model.safetensors").unlink()
    config = Path(__file__).parents[3] / "deploy" / "timed" / "cluster.yaml"
    done = CliRunner().invoke(app, ["serve", "--config", str(config), "--port", "0", "--model", str(folder)])
    assert "holds no *.safetensors" not in done.output and done.exit_code != 3, done.output
