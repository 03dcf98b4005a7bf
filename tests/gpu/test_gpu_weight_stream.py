"""On a GPU: tensors that come through page-locked buffers are those that safetensors reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, run_in_chunks
from packed_checkpoints import Format, make_packed
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.weight_stream import BUFFER_BYTES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DEVICE = torch.device("cuda")
COLUMNS = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor that takes both buffers several times, a small one, and one of another type."""
    made = tmp_path_factory.mktemp("large")
    rows = 5 * BUFFER_BYTES // (2 * COLUMNS) + 7
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(rows, COLUMNS, generator=generator).bfloat16(),
        "small": torch.randn(COLUMNS, generator=generator).bfloat16(),
        "exact": torch.randn(rows // 4, COLUMNS, generator=generator),
    }
    save_file(tensors, made / "model.safetensors")
    return made


def test_tensors_and_slices_are_those_of_safetensors_and_nobody_waits_for_kernels(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    rows = len(expected["large"])
    parts = [
        TensorSlice("large", (rows, COLUMNS)),
        TensorSlice("small", (COLUMNS,)),
        TensorSlice("exact", tuple(expected["exact"].shape)),
        TensorSlice("large", (rows, COLUMNS), 0, 100, rows - 3),
        TensorSlice("large", (rows, COLUMNS), 1, 512, 1024),
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Checkpoint(folder) as checkpoint:
            outs = []
            for part in parts:
                outs.append(torch.empty(part.local_shape, dtype=torch.bfloat16, device=DEVICE))
                checkpoint.read(part, outs[-1])
                torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=DEVICE).add_(1)  # takes what was freed
    finally:
        torch.cuda.set_sync_debug_mode("default")

    for part, out in zip(parts, outs, strict=True):
        stop = part.shape[part.dim] if part.stop is None else part.stop
        wanted = expected[part.name].narrow(part.dim, part.start, stop - part.start).bfloat16()
        assert torch.equal(out.cpu(), wanted), part


def test_a_file_that_became_shorter_while_it_was_read_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((folder / "model.safetensors").read_bytes())
    shape = tuple(load_file(folder / "model.safetensors")["large"].shape)
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(path, 3 * BUFFER_BYTES)
        with pytest.raises(CheckpointError, match=f"{path}: tensor large cannot be read: it ends at byte"):
            checkpoint.read(TensorSlice("large", shape), torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))


@pytest.mark.parametrize("fmt", [Format("awq"), Format("gptq", 32, is_shuffled=True), Format("gptq", bits=8)], ids=str)
def test_packed_layers_that_are_unpacked_on_the_device_say_the_same(fmt: Format, tmp_path: Path) -> None:
    packed, plain = make_packed(fmt, tmp_path)
    ids = list(range(1, 41))

    ours, theirs = (
        run_in_chunks(make_runner(folder, device="cuda", dtype="float32", kernels="torch"), ids, [40])
        for folder in (packed, plain)
    )

    assert (ours - theirs).abs().max() < 1e-3


def test_a_model_in_bfloat16_is_the_one_that_is_mapped(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype="bfloat16", shard_size="100KB")
    weights = load_file(next(folder.glob("*-00001-of-*.safetensors")))
    with Checkpoint(folder) as checkpoint:
        for name, weight in weights.items():
            out = torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE)
            checkpoint.read(TensorSlice(name, tuple(weight.shape)), out)
            assert torch.equal(out.cpu(), weight)
