"""Reading weights: only what a rank needs, from one file or many, and every defect named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, run_in_chunks
from safetensors.torch import load_file, save_file
from thread_group import ThreadGroup

from cluster.errors import CheckpointError, ConfigError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.model_runner import ModelRunner
from engine.tensor_files import INDEX_NAME

Q_PROJ = "model.layers.2.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "one-file")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "many-files", shard_size="100KB")


def _rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors (None: removes them); names are given with `__` for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, path, metadata={"format": "pt"})


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_runner(folder)
    return str(caught.value)


def test_several_files_hold_the_same_model_as_one(folder: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    ids = list(range(20))

    one, many = (run_in_chunks(make_runner(path), ids, [20]) for path in (folder, sharded))

    assert torch.equal(one, many)


def test_a_slice_along_either_dimension_is_what_slicing_the_whole_gives(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")[Q_PROJ]
    rows, columns = torch.empty(32, 64), torch.empty(128, 16)

    with Checkpoint(folder) as checkpoint:
        checkpoint.read(TensorSlice(Q_PROJ, (128, 64), 0, 96, 128), rows)
        checkpoint.read(TensorSlice(Q_PROJ, (128, 64), 1, 16, 32), columns)

    assert torch.equal(rows, whole[96:128]) and torch.equal(columns, whole[:, 16:32])


def test_a_rank_reads_its_own_slices_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    close = Checkpoint.close
    monkeypatch.setattr(Checkpoint, "close", lambda self: (read.append(self.bytes_read), close(self)))
    total = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    norms = sum(t.nbytes for name, t in load_file(folder / "model.safetensors").items() if "norm" in name)

    make_runner(folder)
    for group in ThreadGroup.create(4):
        make_runner(folder, tp=group)

    assert read[0] == total
    assert read[1:] == [(total - norms) // 4 + norms] * 4


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    message = _refusal(folder)

    assert str(path) in message and "truncated" in message


def test_a_file_that_ends_within_its_header_is_named(sharded: Path) -> None:
    path = sorted(sharded.glob("*.safetensors"))[2]
    path.write_bytes(path.read_bytes()[:5])

    assert str(path) in _refusal(sharded)


def test_a_missing_tensor_is_named_with_its_file_and_shape(folder: Path) -> None:
    _rewrite(folder, **{Q_PROJ.replace(".", "__"): None})

    message = _refusal(folder)

    assert str(folder / "model.safetensors") in message
    assert f"tensor {Q_PROJ} is missing" in message and "[128, 64]" in message


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    _rewrite(folder, **{Q_PROJ.replace(".", "__"): torch.zeros(96, 64)})

    message = _refusal(folder)

    assert str(folder / "model.safetensors") in message and Q_PROJ in message
    assert "[96, 64]" in message and "[128, 64]" in message


def test_a_tensor_of_whole_numbers_is_refused(folder: Path) -> None:
    _rewrite(folder, **{Q_PROJ.replace(".", "__"): torch.zeros(128, 64, dtype=torch.int8)})

    assert f"{Q_PROJ} has type I8" in _refusal(folder)


def test_a_tensor_that_the_architecture_would_ignore_is_refused(folder: Path) -> None:
    """A bias that config.json does not mention would otherwise be left out in silence."""
    _rewrite(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(128))

    assert "model.layers.0.self_attn.q_proj.bias has no place" in _refusal(folder)


def test_tensors_that_are_computed_here_or_tied_may_be_present(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    _rewrite(folder, model__rotary_emb__inv_freq=torch.zeros(8), lm_head__weight=torch.zeros(320, 128))

    assert make_runner(folder).config.tie_word_embeddings


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    _rewrite(folder, lm_head__weight=None)

    assert "tensor lm_head.weight is missing" in _refusal(folder)


def test_a_shard_that_is_not_there_is_named(sharded: Path) -> None:
    path = sorted(sharded.glob("*.safetensors"))[1]
    path.unlink()

    assert f"{path}: no such file" in _refusal(sharded)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_tensor_that_is_in_two_files_is_named_with_both(sharded: Path, has_index: bool) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name = min(load_file(first))
    save_file({**tensors, name: load_file(first)[name]}, second, metadata={"format": "pt"})
    if not has_index:
        (sharded / INDEX_NAME).unlink()

    assert f"{second}: tensor {name} is in {first.name} as well" in _refusal(sharded)


def test_a_tensor_that_is_not_where_the_index_places_it_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"][Q_PROJ] = index["weight_map"]["lm_head.weight"]
    (sharded / INDEX_NAME).write_text(json.dumps(index))

    message = _refusal(sharded)

    assert f"tensor {Q_PROJ} is missing" in message and INDEX_NAME in message


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../other.safetensors"}}'])
def test_an_index_that_makes_no_sense_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)

    assert INDEX_NAME in _refusal(sharded)


@pytest.mark.parametrize("name", ["..", "", "a" * 256, "pipe.safetensors"])
def test_an_index_that_names_what_is_no_file_is_refused(sharded: Path, name: str) -> None:
    os.mkfifo(sharded / "pipe.safetensors")
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"][Q_PROJ] = name
    (sharded / INDEX_NAME).write_text(json.dumps(index))

    assert "no such file" in (message := _refusal(sharded)) or "it must be a file in the same folder" in message


@pytest.mark.parametrize("text", ["[" * 200_000, '{"weight_map": ' * 200_000])
def test_an_index_that_is_nested_deeply_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)

    assert f"{sharded / INDEX_NAME}: cannot be read as JSON" in _refusal(sharded)


def test_a_folder_of_other_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    assert "holds no *.safetensors" in _refusal(folder)


def test_what_another_rank_reads_is_left_by_the_numbers_of_experts(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path, num_hidden_layers=1)
    prefix = "model.layers.0.block_sparse_moe"
    with Checkpoint(folder) as checkpoint:
        before = checkpoint.num_unread((f"{prefix}.experts.",))
        checkpoint.leave(f"{prefix}.experts", [1, 3])
        assert before == 6 * 3
        assert checkpoint.num_unread((f"{prefix}.experts.1.", f"{prefix}.experts.3.")) == 0
        assert (
            checkpoint.num_unread((f"{prefix}.experts.",)) == 4 * 3 and checkpoint.num_unread((f"{prefix}.gate",)) == 1
        )


def test_loading_says_how_far_it_is(folder: Path) -> None:
    lines: list[str] = []
    group = ThreadGroup.create(1)[0]

    ModelRunner(folder, tp=group, device="cpu", dtype="auto", num_blocks=4, block_size=16, report=lines.append)

    assert lines[0] == "loading weights: 1 of 4 layers" and lines[-1] == "loading weights: 4 of 4 layers"


def test_a_tensor_parallel_size_that_does_not_fit_is_refused_before_anything_is_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match="tensor_parallel: 3"):
        make_runner(folder, tp=ThreadGroup.create(3)[0])
