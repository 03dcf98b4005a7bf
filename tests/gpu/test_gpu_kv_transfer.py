"""The transfer on a GPU: page copies equal to the CPU's, their order against the model's kernels, both transports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kv_transfer import pages
from kv_transfer.layout import KvLayout
from kv_transfer.mover import KvMover
from kv_transfer.transport import serve_store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HEADS, DIM, POISON = 3, 4, 16, -77.0
LAYOUT = KvLayout(
    num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", tp_size=1, block_size=16, model="m"
)
TABLE = [5, 0, 3]

# Rank (0 sends), device, timeout, store, prefix. Ends with one line: what became of the pair.
NCCL_SIDE = """
import sys, torch
from kv_transfer.transport import NcclPair, TransferFailed, connect_store
rank, device, timeout_s = int(sys.argv[1]), torch.device(sys.argv[2]), float(sys.argv[3])
try:
    pair = NcclPair(connect_store(sys.argv[4], timeout_s), sys.argv[5], rank, device=device, timeout_s=timeout_s)
except TransferFailed as error:
    print("failed:", error)
    raise SystemExit
buffer = torch.full((1 << 20,), 7.0 if rank == 0 else 0.0, device=device)
(pair.send(buffer) if rank == 0 else pair.receive(buffer)).wait(timeout_s)
silent = pair.receive(torch.empty(8, device=device))
try:
    silent.wait(0.5)
    print("a receive without a send ended")
except TransferFailed:
    pair.close()
    print("moved:", buffer.eq(7.0).all().item())
"""


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = serve_store("127.0.0.1")
    yield address
    del store


def start_side(rank: int, device: str, timeout_s: float, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", NCCL_SIDE, str(rank), device, str(timeout_s), address, "e1/0-0"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("start", "end"), [(0, 48), (3, 4), (5, 37), (16, 32)])
@pytest.mark.parametrize("heads", [slice(0, HEADS), slice(1, 3)], ids=["all heads", "some heads"])
def test_page_copies_equal_those_of_the_cpu(dtype: torch.dtype, start: int, end: int, heads: slice) -> None:
    kv = torch.randn(LAYERS, 2, 7, 16, HEADS, DIM).to(dtype)
    out = torch.empty(LAYERS, 2, end - start, heads.stop - heads.start, DIM, dtype=dtype)
    gathered = out.cuda()
    pages.gather(kv, TABLE, start, end, heads, out)
    pages.gather(kv.cuda(), TABLE, start, end, heads, gathered)
    assert torch.equal(gathered.cpu(), out)
    target = torch.full_like(kv, POISON)
    scattered = target.cuda()
    pages.scatter(target, TABLE, start, end, heads, out)
    pages.scatter(scattered, TABLE, start, end, heads, gathered)
    assert torch.equal(scattered.cpu(), target)


def test_gloo_moves_gpu_pages_through_pinned_memory_in_order_with_the_models_kernels(store_address: str) -> None:
    truth = torch.randn(LAYERS, 2, 7, 16, HEADS, DIM).to(torch.bfloat16)
    sender_kv, receiver_kv = torch.full_like(truth, POISON).cuda(), torch.full_like(truth, POISON).cuda()
    movers = [
        KvMover(kv, LAYOUT, 0, num_slots=2, chunk_tokens=48, timeout_s=20, transport="gloo", host="127.0.0.1")
        for kv in (sender_kv, receiver_kv)
    ]
    with ThreadPoolExecutor(2) as pool:
        for opening in [pool.submit(m.open_pair, "e1", store_address, m is movers[0], LAYOUT) for m in movers]:
            opening.result(30)
    landing = movers[1].post_receive("e1", 0, 0, 48, TABLE)
    fresh = truth.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the step that writes the pages is still running when the gather is asked for
    sender_kv.copy_(fresh)
    movers[0].gather("e1", 0, 0, 48, TABLE)
    sender_kv.fill_(POISON)  # gathered pages may be used again at once
    movers[0].send("e1", 0, 48)
    movers[1].complete_receive(landing)
    expected = torch.full_like(truth, POISON)
    expected[:, :, TABLE] = truth[:, :, TABLE]
    assert torch.equal(receiver_kv.cpu(), expected)
    for mover in movers:
        mover.close()


@needs_nccl
def test_an_nccl_pair_without_a_peer_fails_in_time_and_leaves_its_process_alive(store_address: str) -> None:
    started = time.monotonic()
    with start_side(0, "cuda:0", 5.0, store_address) as side:
        output, _ = side.communicate(timeout=90)
    assert side.returncode == 0 and "failed: nccl pair e1/0-0 was not made" in output, output
    assert time.monotonic() - started < 60


@needs_nccl
def test_two_ranks_on_one_gpu_are_refused_with_the_remedy(store_address: str) -> None:
    with start_side(0, "cuda:0", 20.0, store_address) as first, start_side(1, "cuda:0", 20.0, store_address) as second:
        outputs = [side.communicate(timeout=100)[0] for side in (first, second)]
    assert all("two ranks on one GPU need transport: gloo" in output for output in outputs), outputs
    assert first.returncode == second.returncode == 0


@needs_nccl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one device: needs two GPUs")
def test_an_nccl_pair_moves_a_buffer_and_can_be_aborted_alone(store_address: str) -> None:
    with start_side(0, "cuda:0", 30.0, store_address) as first, start_side(1, "cuda:1", 30.0, store_address) as second:
        outputs = [side.communicate(timeout=110)[0] for side in (first, second)]
    assert all("moved: True" in output for output in outputs), outputs
    assert first.returncode == second.returncode == 0
