"""What names the weights of a folder: every byte of a small file, and samples of a large one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from workers import ROOT

from cluster.config.schema import ModelSection
from cluster.settings import WorkerSettings
from worker.resolved import checkpoint_digest, resolve

MIB = 1 << 20
BUNDLED = ROOT / "models" / "tiny-shakespeare"


def folder_of(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


@pytest.mark.parametrize("position", [0, 3 * MIB, 6 * MIB - 1])
def test_one_byte_of_a_small_checkpoint_makes_another_revision(tmp_path: Path, position: int) -> None:
    weights = bytearray(6 * MIB)
    before = checkpoint_digest(folder_of(tmp_path / "a", weights))
    assert checkpoint_digest(folder_of(tmp_path / "b", weights)) == before
    weights[position] = 1
    assert checkpoint_digest(folder_of(tmp_path / "c", weights)) != before


def test_a_tensor_anywhere_in_a_large_checkpoint_makes_another_revision(tmp_path: Path) -> None:
    weights = bytearray(64 * MIB)
    before = checkpoint_digest(folder_of(tmp_path / "a", weights))
    for number, mebibyte in enumerate((9, 33, 62)):
        trained = bytearray(weights)
        trained[mebibyte * MIB : (mebibyte + 1) * MIB] = b"\x01" * MIB
        assert checkpoint_digest(folder_of(tmp_path / str(number), trained)) != before


def test_weights_in_another_type_or_rounded_are_another_revision() -> None:
    settings = WorkerSettings("w", "decode", ModelSection(str(BUNDLED), dtype="float32"))
    settings = settings.with_values(device="cpu")
    rounded = replace(settings, model=replace(settings.model, quantization="int8"))
    bfloat16 = replace(settings, model=replace(settings.model, dtype="bfloat16"))
    names = [resolve(each).weights_revision for each in (settings, rounded, bfloat16)]
    digest = checkpoint_digest(BUNDLED)
    assert names == [f"{digest}+float32", f"{digest}+float32+int8", f"{digest}+bfloat16"]
    assert resolve(settings).layout.model == f"tiny-shakespeare@{digest}+float32"
