"""What a role's workers could not serve of a model is refused before Ray starts, with the role and what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILY_CASES, make_checkpoint
from engine_steps import make_runner
from typer.testing import CliRunner

from cli.main import app
from engine.model_cost import weight_bytes
from engine.models.folder import read_model
from engine.models.shapes import least_weight_bytes
from worker import check_model

USUAL = {
    "tensor_parallel": 1,
    "expert_parallel": 1,
    "split_latents": False,
    "device": "cpu",
    "dtype": "auto",
    "quantization": "none",
    "memory_utilization": 0.5,
    "are_here": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 8 heads, 4 KV heads and 6 experts."""
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("model"))


def _refusal(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    roles = {"prefill": USUAL, "decode": {**USUAL, **changes}}
    code = check_model.main(str(folder), "auto", "weights", json.dumps(roles))
    said = capsys.readouterr().err
    assert (code == 3) == bool(said)
    return said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tensor_parallel": 3},
            "roles.decode.tensor_parallel: 3 does not divide 8 attention heads, 4 KV heads and MLPs of 48; use 1, 2, 4 "
            "or 8",
        ),
        (
            {"tensor_parallel": 4, "expert_parallel": 3},
            "roles.decode.expert_parallel: 3 groups of 4 ranks (tensor_parallel) cannot share 6 experts; use 1 or 2 or "
            "4",
        ),
        ({"tensor_parallel": 4, "expert_parallel": 2}, ""),
        ({"split_latents": True}, "roles.decode.split_latents: MixtralForCausalLM keeps no latents; use false"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused_with_the_numbers_that_can(
    changes: dict[str, int], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in _refusal(folder, capsys, **changes)


def test_weights_larger_than_the_machine_are_refused_with_what_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model(folder)
    size = least_weight_bytes(config, 1, "float32", "none")
    monkeypatch.setattr(check_model, "free_memory_bytes", lambda: 2 * size - 2_000_000)
    said = _refusal(folder, capsys, tensor_parallel=2)
    assert "roles.prefill: model.path: weights of at least " in said
    assert "with tensor_parallel 1 and engine.memory_utilization 0.5: free 2.0 MB more, or set model" in said
    monkeypatch.setattr(check_model, "free_memory_bytes", lambda: 2 * size)
    assert not _refusal(folder, capsys)
    monkeypatch.setattr(check_model, "free_memory_bytes", lambda: 0)
    elsewhere = {role: {**USUAL, "are_here": False} for role in ("prefill", "decode")}
    assert check_model.main(str(folder), "auto", "weights", json.dumps(elsewhere)) == 0


def test_weights_larger_than_a_gpu_are_refused_with_the_tensor_parallel_that_holds_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = read_model(folder)
    whole, half = (least_weight_bytes(config, size, "float32", "none") for size in (1, 2))
    tell = tmp_path / "nvidia-smi"
    monkeypatch.setattr(check_model, "_ASK_MEMORY", (str(tell),))
    assert not _refusal(folder, capsys, device="cuda"), "what nothing says is left to the workers"
    tell.write_text("#!/bin/sh\necho 8\necho 3\n")
    tell.chmod(0o755)
    assert not _refusal(folder, capsys, device="cuda")
    assert half < whole
    monkeypatch.setattr(check_model, "_gpu_bytes", lambda: 2 * half)
    said = _refusal(folder, capsys, device="cuda")
    assert "roles.decode: model.path: weights of at least " in said
    assert said.endswith("set tensor_parallel to at least 2, or model.quantization\n")
    monkeypatch.setattr(check_model, "_gpu_bytes", lambda: 1)
    assert "no tensor_parallel holds it on such GPUs" in _refusal(folder, capsys, device="cuda")


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "qwen3-next", "deepseek-v2", "gemma2"])
def test_the_least_that_weights_take_is_no_more_than_they_take(name: str, tmp_path: Path) -> None:
    kind, changes = FAMILY_CASES[name]
    path = make_checkpoint(kind, tmp_path, **changes)
    for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int4")):
        runner = make_runner(path, dtype=dtype, quantization=quantization)
        least = least_weight_bytes(runner.config, 1, dtype, quantization)
        taken = weight_bytes(runner.config, 1, runner.weight_form)
        assert 0.25 * taken < least <= taken, (dtype, quantization)  # where weights lie in tiles, small ones have rims


def test_serve_asks_for_its_roles_before_it_starts_ray(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"cluster_name: test\nmetadata:\n  serving:\n    model: {{path: {folder}}}\n    roles:\n"
        "      prefill: {devices: 3, tensor_parallel: 3}\n"
    )
    done = CliRunner().invoke(app, ["serve", "--config", str(config), "--port", "0"])
    assert done.exit_code == 3 and "roles.prefill.tensor_parallel: 3 does not divide" in done.output
