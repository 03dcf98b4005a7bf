"""Which GPU a rank takes, where it sees one, several, or not enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.pb import rank_pb2
from cluster.settings import WorkerSettings
from engine.attention.triton import TritonAttention
from worker.loading import memory_obstacle, overlaps_steps, rank_hello, use_device
from worker.resolved import Resolved, resolve

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny-shakespeare"


def device_of(monkeypatch: pytest.MonkeyPatch, num_gpus: int, tp_rank: int = 0, gpu: int | None = None) -> str:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    values = {"worker_id": "w", "role": "decode", "model_path": str(MODEL), "dtype": "float32", "device": "cuda"}
    return resolve(WorkerSettings.from_values(**values, tp_rank=tp_rank, gpu=gpu)).device


def test_a_rank_takes_the_gpu_that_it_was_given_else_that_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(monkeypatch, 1) == device_of(monkeypatch, 1, gpu=0) == "cuda"
    assert device_of(monkeypatch, 4) == "cuda:0"
    assert device_of(monkeypatch, 4, tp_rank=1) == "cuda:1"
    assert device_of(monkeypatch, 4, tp_rank=1, gpu=3) == "cuda:3"
    assert device_of(monkeypatch, 4, gpu=0) == "cuda:0"


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "gpu: tensor-parallel rank 2 of w is to use GPU 2, and this process sees 2; see CUDA_VISIBLE_DEVICES"
    with pytest.raises(ConfigError, match=message):
        device_of(monkeypatch, 2, tp_rank=2)
    with pytest.raises(ConfigError, match="is to use GPU 1, and this process sees 1"):
        device_of(monkeypatch, 1, gpu=1)


@pytest.mark.parametrize(
    ("wanted", "device", "is_on", "why_not"),
    [
        ("off", "cuda", False, "not wanted"),
        ("auto", "cuda:1", True, ""),
        ("auto", "cpu", False, "on cpu it would only compute what is thrown away"),
        ("on", "cpu", True, ""),
    ],
)
def test_steps_overlap_where_that_is_wanted_and_every_rank_takes_unread_tokens(
    wanted: str, device: str, is_on: bool, why_not: str
) -> None:
    values = {"worker_id": "w", "role": "decode", "model_path": str(MODEL), "tp_size": 4}
    hellos = [rank_hello(WorkerSettings.from_values(**values, tp_rank=rank), device) for rank in range(4)]
    assert overlaps_steps(wanted, device, hellos[:1]) == overlaps_steps(wanted, device, hellos) == (is_on, why_not)
    for rank in (1, 3):
        hellos[rank].ClearField("takes_unread_tokens")
    older = (False, "rank 1, 3 runs an older Baton, which takes no tokens from rank 0's device")
    assert overlaps_steps(wanted, device, hellos) == (older if is_on else (False, why_not))


def resolved(**values: object) -> Resolved:
    given = {"worker_id": "w", "role": "decode", "model_path": str(MODEL), "dtype": "float32", **values}
    return resolve(WorkerSettings.from_values(**given))


def test_sizes_that_are_left_to_the_device_are_numbers_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = resolved(device="cpu")
    assert (cpu.block_size, cpu.settings.engine.num_seqs) == (16, 64)
    assert resolved(device="cpu", block_size=48).layout.block_size == 48

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = resolved(device="auto")
    assert (gpu.block_size, gpu.settings.engine.num_seqs) == (TritonAttention.block_size, 256)


def test_every_rank_has_blocks_of_the_size_that_rank_0_has_resolved() -> None:
    own = resolved(device="cpu", tp_rank=1)
    assert own.led_by(rank_pb2.Start(block_size=256)).layout.block_size == 256
    assert own.led_by(rank_pb2.Start()).block_size == 16, "of an older build, which says nothing"


def test_ranks_share_memory_unless_one_knows_of_none_or_torch_computes() -> None:
    ours, start = resolved(device="cpu", tp_size=2).settings, rank_pb2.Start(shares_memory=True)
    assert rank_hello(ours, "cpu").shares_memory and memory_obstacle(ours, start) == ""
    assert memory_obstacle(ours, rank_pb2.Start()) == "a rank runs an older Baton"
    assert memory_obstacle(resolved(device="cpu", kernels="torch").settings, start) == "engine.kernels is torch"


def test_threads_that_compute_take_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for device in ("cpu", "cuda", "cuda:2"):
        use_device(device)
    assert taken == ["cuda:2"]
