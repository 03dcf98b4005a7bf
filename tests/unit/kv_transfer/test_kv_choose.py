"""Which transport a pair uses: pure decisions, and what this machine is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from cluster.errors import ConfigError, FailedPrecondition
from cluster.transports import BEST_FIRST, TRANSPORT_NAMES, pick, transports_of
from kv_transfer.transports import selection

ROOT = Path(__file__).resolve().parents[3]
CPU, GPU = transports_of("cpu"), transports_of("cuda")


def nothing(_: str) -> None:
    return None


def no_nccl(name: str) -> str | None:
    return "this build of torch has no NCCL" if name == "nccl" else None


@pytest.mark.parametrize(
    ("device", "wanted", "expected"),
    [
        ("cpu", "auto", ("shm", "gloo")),
        ("cuda", "auto", ("cuda_pages", "cuda_ipc", "nccl", "gloo")),
        ("cuda:3", "auto", ("cuda_pages", "cuda_ipc", "nccl", "gloo")),
        ("cpu", "gloo", ("gloo",)),
        ("cpu", "shm_pages", ("shm_pages",)),
        ("cuda", "gloo", ("gloo",)),
        ("cuda:1", "nccl", ("nccl",)),
    ],
)
def test_a_worker_offers_what_its_device_can_use_best_first(
    device: str, wanted: str, expected: tuple[str, ...]
) -> None:
    assert selection.supported(device, wanted, nothing) == expected


def test_auto_leaves_out_what_the_machine_cannot_do() -> None:
    assert selection.supported("cuda", "auto", no_nccl) == ("cuda_pages", "cuda_ipc", "gloo")


@pytest.mark.parametrize(
    ("device", "wanted", "message"),
    [
        ("cpu", "nccl", "nccl moves GPU memory, but the device is cpu; use one of auto, shm, shm_pages, gloo"),
        ("cpu", "cuda_ipc", "cuda_ipc moves GPU memory, but the device is cpu; use one of auto, shm, shm_pages, gloo"),
        (
            "cuda:1",
            "shm",
            "shm moves CPU memory, but the device is cuda:1; use one of auto, cuda_pages, cuda_ipc, nccl, gloo",
        ),
        ("cuda", "nccl", "nccl cannot be used here: this build of torch has no NCCL; use auto or gloo"),
        ("cuda", "rdma", "'rdma' is none of auto, shm, shm_pages, gloo, cuda_pages, cuda_ipc, nccl"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_remedy(device: str, wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selection.supported(device, wanted, no_nccl)


@pytest.mark.parametrize(
    ("sender", "receiver", "is_same_host", "expected"),
    [
        (CPU, CPU, True, "shm"),
        (CPU, CPU, False, "gloo"),
        (GPU, GPU, True, "cuda_pages"),
        (GPU, GPU, False, "nccl"),
        (GPU, CPU, True, "gloo"),
        (CPU, GPU, False, "gloo"),
        (GPU, ("cuda_ipc", "gloo"), False, "gloo"),
        (("gloo",), CPU, True, "gloo"),
        (("gloo", "shm"), CPU, True, "gloo"),  # the sender's order decides
    ],
)
def test_a_pair_uses_the_first_that_both_have_and_the_place_allows(
    sender: Sequence[str], receiver: Sequence[str], is_same_host: bool, expected: str
) -> None:
    name, reason = pick(sender, receiver, is_same_host=is_same_host)
    assert name == expected
    assert reason.startswith("both workers are on one host" if is_same_host else "the workers are on different hosts")


def test_the_reason_says_what_was_passed_over() -> None:
    _, reason = pick(GPU, ("cuda_ipc", "gloo"), is_same_host=False)
    passed_over = "the receiver has no cuda_pages; cuda_ipc needs one host; the receiver has no nccl"
    assert reason == f"the workers are on different hosts; {passed_over}"


def test_workers_of_unequal_layouts_share_no_pages_and_are_told_why() -> None:
    unequal = "block_size is 16 at the sender and 32 at the receiver"
    name, reason = pick(GPU, GPU, is_same_host=True, page_obstacle=unequal)
    assert name == "cuda_ipc"
    assert reason == f"both workers are on one host; cuda_pages needs equal layouts: {unequal}"
    with pytest.raises(FailedPrecondition, match=f"shm_pages needs equal layouts: {unequal}; set transport: auto"):
        pick(("shm_pages",), ("shm_pages",), is_same_host=True, page_obstacle=unequal)


@pytest.mark.parametrize(
    ("sender", "receiver", "is_same_host"),
    [(("shm",), CPU, False), (("shm",), ("gloo",), True), (("nccl",), CPU, True), ((), CPU, True)],
)
def test_workers_that_share_no_transport_are_refused_naming_both_lists(
    sender: Sequence[str], receiver: Sequence[str], is_same_host: bool
) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        pick(sender, receiver, is_same_host=is_same_host)
    for text in (
        f"the sender has {', '.join(sender) or 'none'}",
        f"the receiver {', '.join(receiver)}",
        "auto on both",
    ):
        assert text in caught.value.message


def test_what_this_machine_can_do_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert selection.supported("cuda", "auto") == ("cuda_pages", "cuda_ipc", "gloo")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert selection.supported("cuda", "auto") == ("cuda_pages", "cuda_ipc", "nccl", "gloo")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert selection.supported("cpu", "auto") == ("gloo",)
    with pytest.raises(ConfigError, match="shm cannot be used here: it shares memory in a way that darwin does not"):
        selection.supported("cpu", "shm")


def host_id_of(*command: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from kv_transfer.transports.selection import host_id; "
        "print(host_id()); assert 'torch' not in sys.modules"
    )
    return subprocess.run([*command, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_processes_of_one_host_have_one_id_and_asking_for_it_loads_no_torch() -> None:
    other = host_id_of()
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == selection.host_id() != ""


def test_a_process_in_another_network_namespace_has_another_id() -> None:
    other = host_id_of("unshare", "--net")
    if other.returncode:
        pytest.skip(f"no network namespace can be made here: {other.stderr.strip()}")
    assert other.stdout.strip() not in ("", selection.host_id())


def test_each_transport_that_is_named_is_a_module_that_makes_pairs() -> None:
    folder = ROOT / "kv_transfer" / "transports"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "interface", "selection", "ring"}

    assert set(TRANSPORT_NAMES) == set(BEST_FIRST) == modules
    for name in BEST_FIRST:
        module = selection.module_of(name)
        assert callable(module.make_pair) and callable(module.obstacle)
