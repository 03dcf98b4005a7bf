"""The transfer on a GPU: page copies equal to the CPU's, their order against the model's kernels, every transport."""

from __future__ import annotations

import gc
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster.errors import TransferFailed
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2
from engine.kv.pool import choose_page_copies, choose_pool_copies
from kv_transfer import pages
from kv_transfer.actions import Chunk, Range
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_engine import TransferEngine
from kv_transfer.transports.interface import serve_store

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
from cluster.errors import TransferFailed
from kv_transfer.transports.nccl import make_pair
from kv_transfer.transports.interface import Meeting, StoreClients
rank, device, timeout_s = int(sys.argv[1]), torch.device(sys.argv[2]), float(sys.argv[3])
try:
    pair = make_pair(Meeting(
        store_address=sys.argv[4], stores=StoreClients(timeout_s), prefix=sys.argv[5], is_sender=rank == 0,
        host="127.0.0.1", device=device, num_slots=2, slot_bytes=1 << 20, timeout_s=timeout_s,
    ))
except TransferFailed as error:
    print("failed:", error)
    raise SystemExit
pair.slots[0].fill_(7 if rank == 0 else 0)
torch.cuda.synchronize(device)
(pair.send if rank == 0 else pair.receive)(0, 1 << 20).wait(timeout_s)
has_moved = pair.slots[0].eq(7).all().item()
silent = pair.receive(1, 8)
try:
    silent.wait(0.5)
    print("a receive without a send ended")
except TransferFailed:
    pair.close()
    print("moved:", has_moved)
"""

# Layers, tokens, tokens of a chunk, slots, store, transport. Sends its pages, which count from 0, again for each line.
IPC_SENDER = """
import sys, threading, queue, torch
from cluster.pb import handoff_pb2, rank_pb2
from cluster.lifecycle import RequestKey
from engine.kv.pool import choose_page_copies
from kv_transfer.actions import Chunk, Range
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_engine import TransferEngine
from kv_transfer.transports.selection import pool_memory
layers, tokens, chunk, slots = map(int, sys.argv[1:5])
layout = KvLayout(
    num_layers=layers, num_kv_heads=8, head_dim=128, dtype="bfloat16", tp_size=1, block_size=16, model="m"
)
kv = torch.arange(layers * 2 * tokens * 8 * 128, device="cuda", dtype=torch.int32).view(torch.int16)[::2]
kv = kv.contiguous().view(torch.bfloat16).view(layers, 2, tokens // 16, 16, 8, 128)
kernel, memory = choose_page_copies("auto", kv.device), pool_memory([sys.argv[6]], kv.device)
if memory is not None:
    kv = memory.allocate(kv.nbytes).view(kv.dtype).view(kv.shape).copy_(kv)
engine = TransferEngine(
    kv, layout, 0, timeout_s=60, host="127.0.0.1", digest="sampled", page_kernel=kernel, memory=memory
)
agreed = handoff_pb2.ReceiverHello(
    store_address=sys.argv[5], transport=sys.argv[6], wire_format="native", chunk_tokens=chunk, num_slots=slots
)
spec = rank_pb2.OpenPair(pair_epoch="e1", is_sender=True, remote=layout.to_proto(), agreed=agreed)
engine.open_pair(engine.add_pair(spec))
print("open", flush=True)
table = range(tokens // 16)
for line in sys.stdin:
    free, sent = queue.SimpleQueue(), queue.SimpleQueue()
    starts = range(0, int(line), chunk)
    for slot in range(slots):
        free.put(slot)
    def complete():
        for _ in starts:
            sending = sent.get()
            engine.complete_send(sending)
            free.put(sending.slot)
    waiter = threading.Thread(target=complete)
    waiter.start()
    for number, start in enumerate(starts):
        slot = free.get()
        engine.gather(Chunk(RequestKey("r", 1), "e1", number, slot, Range(start, start + chunk, 0, layers)), table)
        sent.put(engine.send("e1", slot))
        print("sent", flush=True)
    waiter.join()
"""


def spec(
    address: str,
    is_sender: bool,
    remote: KvLayout,
    transport: str,
    chunk_tokens: int,
    num_slots: int,
    wire_format: str = "native",
) -> rank_pb2.OpenPair:
    agreed = handoff_pb2.ReceiverHello(
        store_address=address,
        transport=transport,
        wire_format=wire_format,
        chunk_tokens=chunk_tokens,
        num_slots=num_slots,
    )
    return rank_pb2.OpenPair(pair_epoch="e1", is_sender=is_sender, remote=remote.to_proto(), agreed=agreed)


def a_chunk(index: int, token_start: int, token_end: int, num_layers: int, slot: int = 0) -> Chunk:
    return Chunk(RequestKey("r", 1), "e1", index, slot, Range(token_start, token_end, 0, num_layers))


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = serve_store("127.0.0.1")
    yield address
    del store


def start_side(rank: int, device: str, timeout_s: float, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", NCCL_SIDE, str(rank), device, str(timeout_s), address, "e1/0-0"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", [Range(0, 48, 0, 3), Range(3, 4, 0, 1), Range(5, 37, 1, 3)], ids=str)
@pytest.mark.parametrize("heads", [slice(0, HEADS), slice(1, 3)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_page_copies_equal_those_of_the_cpu(dtype: torch.dtype, what: Range, heads: slice, kernels: str) -> None:
    kernel = choose_page_copies(kernels, torch.device("cuda"))
    kv = torch.randn(LAYERS, 2, 7, 16, HEADS, DIM).to(dtype)
    shape = (what.layer_end - what.layer_start, 2, what.num_tokens, heads.stop - heads.start, DIM)
    out = torch.empty(shape, dtype=dtype)
    gathered = out.cuda()
    pages.gather(kv, TABLE, what, heads, out)
    pages.gather(kv.cuda(), TABLE, what, heads, gathered, kernel)
    assert torch.equal(gathered.cpu(), out)
    target = torch.full_like(kv, POISON)
    scattered = target.cuda()
    pages.scatter(target, TABLE, what, heads, out)
    pages.scatter(scattered, TABLE, what, heads, gathered, kernel)
    assert torch.equal(scattered.cpu(), target)


@contextmanager
def launching_only() -> Iterator[None]:
    """Within it, an operation that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("transport", ["gloo", "cuda_ipc"])
@pytest.mark.parametrize("wire_format", ["native", "int8"])
@pytest.mark.parametrize("digest", ["on", "off"])
def test_gpu_pages_move_in_order_with_the_models_kernels(
    store_address: str, transport: str, wire_format: str, digest: str
) -> None:
    truth = torch.randn(LAYERS, 2, 7, 16, HEADS, DIM).to(torch.bfloat16)
    sender_kv, receiver_kv = torch.full_like(truth, POISON).cuda(), torch.full_like(truth, POISON).cuda()
    kernel = choose_page_copies("auto", sender_kv.device)
    engines = [
        TransferEngine(kv, LAYOUT, 0, timeout_s=20, host="127.0.0.1", digest=digest, page_kernel=kernel)
        for kv in (sender_kv, receiver_kv)
    ]
    specs = [spec(store_address, side, LAYOUT, transport, 48, 2, wire_format) for side in (True, False)]
    with ThreadPoolExecutor(2) as pool:
        for opening in [pool.submit(m.open_pair, m.add_pair(its)) for m, its in zip(engines, specs, strict=True)]:
            opening.result(30)
    what = a_chunk(0, 0, 48, LAYERS)
    landing = engines[1].post_receive(what, TABLE)
    fresh = truth.cuda()
    for engine in engines:
        engine.warm_up()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the step that writes the pages is still running when the gather is asked for
    sender_kv.copy_(fresh)
    ready = torch.cuda.default_stream().record_event()
    assert not ready.query()
    is_launched_only = transport == "cuda_ipc"  # slots in host memory are filled when the gather returns
    with launching_only() if is_launched_only else nullcontext():
        engines[0].gather(what, TABLE, ready)
        engines[0].before_step()
        sender_kv.fill_(POISON)  # gathered pages may be used again at once
        sending = engines[0].send("e1", 0)
    assert ready.query() is not is_launched_only
    engines[1].complete_receive(landing)
    engines[0].complete_send(sending)
    expected = torch.full_like(truth, POISON)
    expected[:, :, TABLE] = truth[:, :, TABLE]
    if wire_format == "native":
        assert torch.equal(receiver_kv.cpu(), expected)
    else:
        assert torch.allclose(receiver_kv.cpu().float(), expected.float(), atol=0.05)
    for engine in engines:
        engine.close()


@contextmanager
def ipc_pair(
    address: str, layers: int, tokens: int, chunk: int, slots: int, transport: str = "cuda_ipc"
) -> Iterator[tuple[subprocess.Popen[str], TransferEngine, torch.Tensor]]:
    """A sending process, and this process's engine and pages."""
    layout = KvLayout(
        num_layers=layers, num_kv_heads=8, head_dim=128, dtype="bfloat16", tp_size=1, block_size=16, model="m"
    )
    kv = torch.zeros(layers, 2, tokens // 16, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    kernels = choose_page_copies("auto", kv.device), choose_pool_copies("auto", kv.device)
    engine = TransferEngine(
        kv, layout, 0, timeout_s=60, host="127.0.0.1", page_kernel=kernels[0], pool_kernel=kernels[1]
    )
    command = [sys.executable, "-c", IPC_SENDER, *map(str, (layers, tokens, chunk, slots)), address, transport]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        try:
            engine.open_pair(engine.add_pair(spec(address, False, layout, transport, chunk, slots)))
            assert sender.stdout is not None and sender.stdout.readline() == "open\n"
            yield sender, engine, kv
        finally:
            engine.close()
            sender.kill()


def receive_all(engine: TransferEngine, tokens: int, chunk: int, slots: int, layers: int) -> int:
    """Bytes that arrived."""
    table = range(tokens // 16)
    chunks = [
        a_chunk(number, start, start + chunk, layers, number % slots)
        for number, start in enumerate(range(0, tokens, chunk))
    ]
    landings = [engine.post_receive(what, table) for what in chunks[:slots]]
    moved = 0
    for number in range(len(chunks)):
        moved += engine.complete_receive(landings[number])
        if number + slots < len(chunks):
            landings.append(engine.post_receive(chunks[number + slots], table))
    return moved


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_pages"])
def test_pages_move_between_two_processes_at_a_rate(
    store_address: str, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    layers, tokens, chunk, slots = 32, 8192, 512, 4
    with ipc_pair(store_address, layers, tokens, chunk, slots, transport) as (sender, engine, kv):
        assert sender.stdin is not None
        rates = []
        for _ in range(6):
            started = time.perf_counter()
            sender.stdin.write(f"{tokens}\n")
            sender.stdin.flush()
            moved = receive_all(engine, tokens, chunk, slots, layers)
            rates.append(moved / (time.perf_counter() - started) / 1e9)
        expected = torch.arange(kv.numel(), device="cuda", dtype=torch.int32).view(torch.int16)[::2]
        assert torch.equal(kv.view(torch.int16).flatten(), expected)
        copy, times = torch.empty_like(kv), []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            copy.copy_(kv)
            torch.cuda.synchronize()
            times.append(kv.nbytes / (time.perf_counter() - started) / 1e9)
    rate, plain = statistics.median(rates[1:]), statistics.median(times[1:])
    with capsys.disabled():
        share = (1 if transport == "cuda_pages" else 2) * rate / plain  # each byte is copied once, or twice
        print(f"\n{transport}: {rate:.1f} GB/s, {share:.0%} of a device-to-device copy ({plain:.1f} GB/s)")
    assert rate > 1


def test_what_a_killed_sender_had_sent_still_lands_and_its_memory_is_given_back(store_address: str) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with ipc_pair(store_address, 4, 1024, 1024, 1) as (sender, engine, kv):
        assert sender.stdin is not None and sender.stdout is not None
        landing = engine.post_receive(a_chunk(0, 0, 1024, 4), range(64))
        sender.stdin.write("1024\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == "sent\n"
        sender.send_signal(signal.SIGKILL)
        assert sender.wait(30) == -signal.SIGKILL
        engine.complete_receive(landing)
        expected = torch.arange(kv.numel(), device="cuda", dtype=torch.int32).view(torch.int16)[::2]
        assert torch.equal(kv.view(torch.int16).flatten(), expected)
        with pytest.raises(TransferFailed):
            engine.complete_receive(engine.post_receive(a_chunk(1, 0, 16, 4), range(64)))
        del landing
        mapped = torch.cuda.mem_get_info()[0]
        engine.close()
        gc.collect()
        assert torch.cuda.mem_get_info()[0] >= mapped


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
    assert all("two ranks on one GPU need transport: cuda_ipc or gloo" in output for output in outputs), outputs
    assert first.returncode == second.returncode == 0


@needs_nccl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one device: needs two GPUs")
def test_an_nccl_pair_moves_a_buffer_and_can_be_aborted_alone(store_address: str) -> None:
    with start_side(0, "cuda:0", 30.0, store_address) as first, start_side(1, "cuda:1", 30.0, store_address) as second:
        outputs = [side.communicate(timeout=110)[0] for side in (first, second)]
    assert all("moved: True" in output for output in outputs), outputs
    assert first.returncode == second.returncode == 0
