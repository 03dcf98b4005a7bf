"""Weights on their way to a GPU that copies late, and in any order that events leave open."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, run_in_chunks
from fake_cuda import DEVICE, EmptyCheckpoint, fake_cuda
from fake_streams import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import Format, make_packed
from thread_group import ThreadGroup

from cluster.errors import CheckpointError
from engine import weight_stream
from engine.checkpoint import Checkpoint, TensorSlice
from engine.model_runner import ModelRunner
from engine.models.folder import read_model
from engine.quantization.packed import read_codes
from engine.tensor_files import INDEX_NAME
from engine.tp import SingleGroup, TPGroup
from engine.weight_stream import FileRuns, WeightStream

CPU = torch.device("cpu")
BUFFER_BYTES = 64
Q_PROJ = "model.layers.2.self_attn.q_proj.weight"
DATA = np.random.default_rng(0).integers(0, 120, 4000, np.uint8).tobytes()
"""No four bytes of it are a float that is not a number."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Made before torch.cuda is another: transformers writes them."""
    made = {"": make_checkpoint("llama", tmp_path_factory.mktemp("plain"), shard_size="100KB")}
    for method in ("awq", "gptq"):
        how = Format(method, 32, is_shuffled=method == "gptq")
        made[method], _ = make_packed(how, tmp_path_factory.mktemp(method))
    return made


class LateCopies:
    """Streams whose copies find what lies in their source when they are made."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.sources: set[int] = set()
        self.num_made = 0
        """Copies to the device, not counting those from its buffers to their place."""

    def stream(self) -> WeightStream:
        return WeightStream(CPU, buffer_bytes=BUFFER_BYTES, num_threads=3, copy=self._launch)

    def finish(self) -> None:
        self.gpu.run_until(lambda: not any(stream.operations for stream in self.gpu.streams))

    def _launch(self, out: torch.Tensor, values: torch.Tensor) -> None:
        self.sources.add(values.untyped_storage().data_ptr())
        is_on_its_way = self.gpu.current is not self.gpu.compute

        def make() -> None:
            out.copy_(values)
            self.num_made += is_on_its_way

        self.gpu.current.launch(make)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    return LateCopies(gpu)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share small buffers, too."""
    monkeypatch.setattr(weight_stream, "_LEAST_PART_BYTES", 16)


def expected_values(runs: FileRuns, dtype: torch.dtype) -> torch.Tensor:
    parts = [DATA[runs.start + i * runs.stride :][: runs.run_bytes] for i in range(runs.num_runs)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=dtype)


@pytest.mark.parametrize("rows_bytes", [0, 200], ids=["run by run", "runs together"])
@given(
    st.integers(0, 50).map(lambda n: 8 * n),
    st.integers(1, 30).map(lambda n: 8 * n),
    st.integers(0, 5).map(lambda n: 8 * n),
    st.integers(1, 9),
    st.sampled_from([(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]),
    st.integers(0, 30),
)
@settings(max_examples=60)
def test_a_slice_arrives_as_it_is_in_the_file_however_late_it_is_copied(
    rows_bytes: int,
    start: int,
    run_bytes: int,
    gap: int,
    count: int,
    types: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    runs = FileRuns(os.memfd_create("weights"), start, run_bytes, run_bytes + gap, count)
    os.write(runs.file, DATA)
    expected = expected_values(runs, types[0]).to(types[1])
    again = expected_values(runs._replace(start=0), types[0]).to(types[1])
    gpu = FakeGpu(seed)
    copies, outs = LateCopies(gpu), (torch.zeros_like(expected), torch.zeros_like(expected))
    with pytest.MonkeyPatch.context() as patched:
        gpu.patch(patched)
        patched.setattr(weight_stream, "_LEAST_PART_BYTES", 16)
        patched.setattr(weight_stream, "_ROWS_BYTES", rows_bytes)
        stream = copies.stream()
        stream.read(runs, types[0], outs[0])
        stream.read(runs._replace(start=0), types[0], outs[1])
        stream.close()
        os.close(runs.file)
        copies.finish()

    assert torch.equal(outs[0], expected) and torch.equal(outs[1], again)
    assert len(copies.sources) <= 4, "more memory than two buffers and their twins"


@pytest.mark.usefixtures("small_parts")
def test_several_threads_fill_one_buffer(file: int, copies: LateCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, rooms, at: (sizes.append(len(rooms[0])), read(f, rooms, at))[1])
    runs, out = FileRuns(file, 8, 3200, 3200, 1), torch.zeros(800)
    stream = copies.stream()
    stream.read(runs, torch.float32, out)
    stream.close()
    copies.finish()

    assert torch.equal(out, expected_values(runs, torch.float32))
    assert sorted(set(sizes)) == [20, 22], "64 bytes in three parts"
    assert sum(sizes) == 3200


def test_a_buffer_is_filled_while_the_other_is_copied(
    file: int, copies: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before its own copy has ended."""
    made: list[int] = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (made.append(copies.num_made), read(*args))[1])
    stream, out = copies.stream(), torch.zeros(160)
    stream.read(FileRuns(file, 0, 640, 640, 1), torch.float32, out)
    stream.close()
    copies.finish()

    assert len(made) == 10 and made[:2] == [0, 0]
    assert all(count >= number - 1 for number, count in enumerate(made))


def test_weights_are_on_their_way_while_kernels_of_the_caller_run(file: int, copies: LateCopies) -> None:
    """As many as there are buffers and twins: the host need not wait for what was launched."""
    is_over, out = threading.Event(), torch.zeros(64)
    stream = copies.stream()
    copies.gpu.compute.launch(lambda: None, is_over.is_set)
    stream.read(FileRuns(file, 0, 256, 256, 1), torch.float32, out)
    copies.gpu.run_until(lambda: copies.num_made == 2)

    assert not out.any()
    is_over.set()
    stream.close()
    copies.finish()
    assert torch.equal(out, expected_values(FileRuns(file, 0, 256, 256, 1), torch.float32))


def test_memory_that_kernels_still_use_is_not_written(file: int, copies: LateCopies) -> None:
    """What was launched before the buffers were made may use the same memory."""
    found: list[int] = []
    for _ in range(5):
        copies.gpu.compute.launch(lambda: found.append(copies.num_made))
    stream = copies.stream()
    stream.read(FileRuns(file, 0, 256, 256, 1), torch.float32, torch.zeros(64))
    stream.close()
    copies.finish()

    assert found == [0] * 5 and copies.num_made == 4


def tensors_of(found: object, seen: set[int] | None = None) -> list[torch.Tensor]:
    """All that a runner holds, unpacked where oneDNN has packed them."""
    seen = set() if seen is None else seen
    if isinstance(found, torch.Tensor):
        return [found.to_dense() if found.is_mkldnn else found]
    if id(found) in seen or not (hasattr(found, "__dict__") or isinstance(found, (list, tuple))):
        return []
    seen.add(id(found))
    parts = found if isinstance(found, (list, tuple)) else vars(found).values()
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4", "fp8", "awq", "gptq"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_model_that_comes_through_a_stream_is_the_one_that_is_mapped(
    folders: dict[str, Path], copies: LateCopies, size: int, form: str
) -> None:
    """In each format, on one rank or four, of which each copies its own slices and no byte more."""
    folder = folders.get(form, folders[""])
    wanted = {"dtype": "float32" if form == "float32" else "bfloat16"}
    if form in ("int8", "int4", "fp8"):
        wanted["quantization"] = form
    copied: list[int] = []
    opened: list[Checkpoint] = []

    def copy(out: torch.Tensor, values: torch.Tensor) -> None:
        out.copy_(values)
        if copies.gpu.current is not copies.gpu.compute:
            copied.append(values.nbytes)

    def open_weights(path: Path) -> Checkpoint:
        opened.append(Checkpoint(path, WeightStream(CPU, buffer_bytes=1 << 12, copy=copy)))
        return opened[-1]

    def load(**how: Any) -> list[ModelRunner]:
        groups: list[TPGroup] = [SingleGroup()] if size == 1 else [*ThreadGroup.create(size)]
        return [make_runner(folder, tp=group, **how, **wanted) for group in groups]

    streamed, mapped = load(open_weights=open_weights), load()
    for ours, theirs in zip(streamed, mapped, strict=True):
        pairs = list(zip(tensors_of(ours), tensors_of(theirs), strict=True))
        assert len(pairs) > 15 and all(torch.equal(a, b) for a, b in pairs)
    assert sum(copied) == sum(checkpoint.bytes_read for checkpoint in opened) > 0
    if size == 1:
        ids = list(range(20))
        assert torch.equal(run_in_chunks(streamed[0], ids, [20]), run_in_chunks(mapped[0], ids, [20]))


def test_packed_layers_are_unpacked_on_the_device(folders: dict[str, Path]) -> None:
    folder = folders["awq"]
    packing = read_model(folder).packing
    assert packing is not None
    part = TensorSlice("model.layers.0.mlp.up_proj.weight", (384, 128), 0, 96, 192)
    with fake_cuda(), EmptyCheckpoint(folder) as checkpoint:
        device, out = torch.device(DEVICE), torch.empty(part.local_shape, dtype=torch.bfloat16, device=DEVICE)
        codes = read_codes(checkpoint, packing, part, device)
        codes.decode(out)

    assert {tensor.device for tensor in (codes.codes, codes.zeros, codes.scales)} == {device}
    assert codes.codes.shape == part.local_shape


def open_files() -> list[str]:
    return sorted(os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][tensor]


def test_a_file_that_became_shorter_while_it_was_read_is_named(
    folders: dict[str, Path], tmp_path: Path, copies: LateCopies
) -> None:
    folder = Path(shutil.copytree(folders[""], tmp_path / "copied"))
    path = file_of(folder, Q_PROJ)
    with Checkpoint(folder, copies.stream()) as checkpoint:
        os.truncate(path, 5000)
        with pytest.raises(CheckpointError, match=f"{path}: tensor {Q_PROJ} cannot be read: it ends at byte"):
            checkpoint.read(TensorSlice(Q_PROJ, (128, 64)), torch.empty(128, 64))


@pytest.mark.usefixtures("small_parts")
def test_a_disk_that_fails_half_way_is_named_and_leaves_nothing_open(
    folders: dict[str, Path], copies: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders[""]
    path, read, left = file_of(folder, Q_PROJ), os.preadv, [40]

    def fail(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    monkeypatch.setattr(os, "preadv", fail)
    message = f"{path}: tensor {Q_PROJ} cannot be read: .*Input/output error"
    with pytest.raises(CheckpointError, match=message), Checkpoint(folder, copies.stream()) as checkpoint:
        checkpoint.read(TensorSlice(Q_PROJ, (128, 64)), torch.empty(128, 64))

    assert str(path) not in open_files()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


@pytest.mark.usefixtures("small_parts")
def test_no_thread_writes_to_a_buffer_once_its_read_has_failed(
    file: int, copies: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    read = os.preadv

    def fail_first(descriptor: int, rooms: list[memoryview], at: int) -> int:
        if at == 0:
            raise OSError("the first")
        time.sleep(0.05)
        ended.append(at)
        return read(descriptor, rooms, at)

    monkeypatch.setattr(os, "preadv", fail_first)
    stream = copies.stream()
    with pytest.raises(OSError, match="the first"):
        stream.read(FileRuns(file, 0, 64, 64, 1), torch.float32, torch.zeros(16))
    assert sorted(ended) == [22, 44]
    stream.close()
