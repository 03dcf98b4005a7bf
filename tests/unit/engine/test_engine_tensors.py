"""Model folders that cannot be served are refused by their headers alone, before Ray starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cli.main import app
from cluster.errors import CheckpointError
from engine.models.folder import read_model
from engine.models.tensors import check_folder, declared_tensors

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


@pytest.mark.parametrize("kind", ["llama", "qwen2-moe", "qwen3", "gemma2", "phi3", "olmo2", "glm4"])
def test_what_is_declared_is_what_a_checkpoint_of_the_family_has(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    found = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert dict(declared_tensors(read_model(folder))) == found
    check_folder(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["OddForCausalLM"]}, "architecture 'OddForCausalLM' is not supported; Baton serves Llama"),
        ({"rope_parameters": {"rope_type": "odd"}}, "rope_type 'odd' is not supported; Baton computes default"),
        ({"quantization_config": {"quant_method": "odd"}}, "quant_method 'odd' is not supported; Baton reads awq"),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_its_key(folder: Path, changes: dict[str, Any], said: str) -> None:
    _edit(folder, **changes)
    assert said in _refusal(folder)


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
