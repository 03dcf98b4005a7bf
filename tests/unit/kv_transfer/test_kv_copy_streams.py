"""Copies of pages on a GPU that runs what is launched late and in any order that events leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_streams import FakeGpu
from transfer_harness import HOST, chunk

from cluster.pb import handoff_pb2, rank_pb2
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_engine import TransferEngine
from kv_transfer.transports.interface import serve_store
from kv_transfer.transports.shm_pages import HostPool

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", tp_size=1, block_size=4, model="m")
BLOCKS, SLOTS, CHUNK = 6, 2, 4
GARBAGE, POISON = -1.0, -77.0
SOON_S = 8.0


class Side:
    """One worker's rank, its GPU and its pages; a step is an operation on the compute stream."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.compute = gpu.new_stream("compute")
        shape, memory = (2, 2, BLOCKS, CHUNK, 1, 4), HostPool()
        raw = memory.allocate(torch.Size(shape).numel() * 4)
        self.kv = raw.view(torch.float32).view(shape).fill_(POISON)
        self.engine = TransferEngine(
            self.kv,
            LAYOUT,
            0,
            timeout_s=SOON_S,
            host=HOST,
            digest="off",  # the CPU would compute it before the copy has begun
            compute_stream=self.compute,  # type: ignore[arg-type]
            page_kernel=gpu.copy_range,
            pool_kernel=gpu.copy_between,
            memory=memory,
        )

    def open(self, address: str, transport: str, epoch: str, *, is_sender: bool) -> None:
        agreed = handoff_pb2.ReceiverHello(
            store_address=address, transport=transport, wire_format="native", chunk_tokens=CHUNK, num_slots=SLOTS
        )
        spec = rank_pb2.OpenPair(pair_epoch=epoch, is_sender=is_sender, remote=LAYOUT.to_proto(), agreed=agreed)
        self.engine.open_pair(self.engine.add_pair(spec))

    def step(self, block: int, value: float, when: Callable[[], bool] = lambda: True) -> Any:
        """Launches a step that writes a block; returns the event of its end."""
        self.engine.before_step()
        self.compute.launch(lambda: self.kv[:, :, block].fill_(value), when)
        return self.compute.record_event()

    def block(self, block: int) -> set[float]:
        return set(self.kv[:, :, block].flatten().tolist())


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = serve_store(HOST)
    yield address
    del store


@pytest.fixture(params=["shm", "nccl"])
def transport(request: pytest.FixtureRequest) -> str:
    """A ring, as `cuda_ipc` is one, and NCCL."""
    name: str = request.param
    return name


def connect(sender: Side, receiver: Side, address: str, transport: str, epoch: str = "e") -> None:
    with ThreadPoolExecutor(2) as pool:
        for opening in [
            pool.submit(side.open, address, transport, epoch, is_sender=side is sender) for side in (sender, receiver)
        ]:
            opening.result(SOON_S)


def opened(gpu: FakeGpu, address: str, transport: str) -> tuple[Side, Side]:
    sides = Side(gpu), Side(gpu)
    connect(*sides, address, transport)
    return sides


@pytest.mark.parametrize("seed", range(6))
def test_pages_that_are_written_again_at_once_arrive_as_they_were(
    seed: int, store_address: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk's pages are given back when its gather is launched, and the next step writes garbage to them. On the
    other side, pages are landed on while the step that had them before has not begun."""
    gpu = FakeGpu(seed)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, transport)
    num_chunks = 5
    with ThreadPoolExecutor(1) as sends, ThreadPoolExecutor(1) as receives:
        sendings, landings = [], []
        for index in range(num_chunks):
            what = chunk("e", index % SLOTS, 0, CHUNK, index=index)
            old = receiver.step(index, GARBAGE)
            ready = sender.step(index % 2, float(index))
            if index >= SLOTS:
                landings[index - SLOTS].result(SOON_S)
                sendings[index - SLOTS].result(SOON_S)
            sender.engine.gather(what, [index % 2], ready)
            sender.step(index % 2, GARBAGE)
            landing = receiver.engine.post_receive(what, [index])
            landings.append(receives.submit(receiver.engine.complete_receive, landing, old))
            sendings.append(sends.submit(sender.engine.complete_send, sender.engine.send("e", what.slot)))
        for each in (*landings, *sendings):
            each.result(SOON_S)
    assert [receiver.block(index) for index in range(num_chunks)] == [{float(index)} for index in range(num_chunks)]
    assert "compute" not in gpu.syncs
    for side in (sender, receiver):
        side.engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_shared_pages_that_are_written_again_when_they_are_read_arrive_as_they_were(
    seed: int, store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is offered before the step that writes its pages has begun, and the step that writes garbage to them
    is launched when the receiver has read them. The copy overtakes no step that had the receiver's pages before."""
    gpu = FakeGpu(seed)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, "shm_pages")
    num_chunks = 5
    with ThreadPoolExecutor(1) as sends, ThreadPoolExecutor(1) as receives:
        sendings, landings = [], []
        for index in range(num_chunks):
            what = chunk("e", index % SLOTS, 0, CHUNK, index=index)
            old = receiver.step(index, GARBAGE)
            if index >= SLOTS:
                landings[index - SLOTS].result(SOON_S)
                sendings[index - SLOTS].result(SOON_S)
                sender.step(index % SLOTS, GARBAGE)
            ready = sender.step(index % SLOTS, float(index))
            sender.engine.gather(what, [index % SLOTS], ready)
            landing = receiver.engine.post_receive(what, [index])
            landings.append(receives.submit(receiver.engine.complete_receive, landing, old))
            sendings.append(sends.submit(sender.engine.complete_send, sender.engine.send("e", what.slot)))
        for each in (*landings, *sendings):
            each.result(SOON_S)
    assert [receiver.block(index) for index in range(num_chunks)] == [{float(index)} for index in range(num_chunks)]
    assert "compute" not in gpu.syncs
    for side in (sender, receiver):
        side.engine.close()


def test_shared_pages_are_said_to_be_read_when_the_copy_has_ended(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, "shm_pages")
    may_run: list[bool] = []
    what = chunk("e", 0, 0, CHUNK)
    sender.engine.gather(what, [0], sender.step(0, 3.0))
    landing = receiver.engine.post_receive(what, [1])
    named = receiver.step(1, GARBAGE, lambda: bool(may_run))
    gpu.syncs.clear()
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(sender.engine.complete_send, sender.engine.send("e", 0))
        landed = pool.submit(receiver.engine.complete_receive, landing, named)
        gpu.await_sync()  # the copy is launched
        while gpu.run_some():
            assert not sent.done()
        may_run.append(True)
        landed.result(SOON_S)
        sent.result(SOON_S)
    assert receiver.block(1) == {3.0}
    for side in (sender, receiver):
        side.engine.close()


def test_a_gather_returns_before_its_step_has_run_and_its_slot_is_sent_after_it(
    store_address: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, transport)
    may_run: list[bool] = []
    what = chunk("e", 0, 0, CHUNK)
    gpu.syncs.clear()

    sender.engine.gather(what, [0], sender.step(0, 3.0, lambda: bool(may_run)))
    sending = sender.engine.send("e", 0)
    landing = receiver.engine.post_receive(what, [1])
    assert gpu.syncs == [] and sender.block(0) == {POISON}
    with ThreadPoolExecutor(2) as pool:
        sent, landed = (
            pool.submit(sender.engine.complete_send, sending),
            pool.submit(receiver.engine.complete_receive, landing),
        )
        while gpu.run_some():
            assert not landed.done()
        may_run.append(True)
        sent.result(SOON_S)
        landed.result(SOON_S)
    assert receiver.block(1) == {3.0}
    for side in (sender, receiver):
        side.engine.close()


def test_what_lands_waits_for_the_steps_that_it_names_and_for_no_later_one(
    store_address: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, transport)
    what = chunk("e", 0, 0, CHUNK)
    sender.engine.gather(what, [0], sender.step(0, 3.0))
    may_run: list[bool] = []
    named = receiver.step(1, GARBAGE, lambda: bool(may_run))
    receiver.step(2, 5.0, lambda: len(may_run) > 1)  # decodes others, and takes its time
    landing = receiver.engine.post_receive(what, [1])
    gpu.syncs.clear()
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(sender.engine.complete_send, sender.engine.send("e", 0))
        landed = pool.submit(receiver.engine.complete_receive, landing, named)
        gpu.await_sync()  # the scatter is launched
        while gpu.run_some():
            assert not landed.done()
        may_run.append(True)
        landed.result(SOON_S)
        sent.result(SOON_S)
    named.synchronize()
    assert (receiver.block(1), receiver.block(2)) == ({3.0}, {POISON})
    for side in (sender, receiver):
        side.engine.close()


def test_what_lands_on_pages_that_a_gather_still_reads_waits_for_it(
    store_address: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that sends to one and receives from another has given the pages back when the gather was launched."""
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    worker, other = opened(gpu, store_address, transport)
    connect(other, worker, store_address, transport, "f")
    may_run: list[bool] = []
    worker.engine.gather(chunk("e", 0, 0, CHUNK), [0], worker.step(0, 3.0, lambda: bool(may_run)))
    sending, landing = worker.engine.send("e", 0), other.engine.post_receive(chunk("e", 0, 0, CHUNK), [4])
    other.kv[:, :, 5] = 5.0
    written = gpu.new_stream("idle").record_event()
    other.engine.gather(chunk("f", 0, 0, CHUNK), [5], written)
    gpu.syncs.clear()
    with ThreadPoolExecutor(4) as pool:
        new = worker.engine.post_receive(chunk("f", 0, 0, CHUNK), [0])
        landed = pool.submit(worker.engine.complete_receive, new, written)
        others = [
            pool.submit(other.engine.complete_send, other.engine.send("f", 0)),
            pool.submit(worker.engine.complete_send, sending),
            pool.submit(other.engine.complete_receive, landing),
        ]
        gpu.await_sync()  # the scatter is launched
        while gpu.run_some():
            assert not landed.done()
        may_run.append(True)
        for each in (landed, *others):
            each.result(SOON_S)
    assert (worker.block(0), other.block(4)) == ({5.0}, {3.0})
    for side in (worker, other):
        side.engine.close()


def test_steps_wait_for_gathers_that_have_not_ended_only(
    store_address: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, transport)
    sender.engine.gather(chunk("e", 0, 0, CHUNK), [0], sender.step(0, 3.0))
    gpu.waits.clear()
    sender.step(1, 4.0)
    assert [stream for stream, _ in gpu.waits] == ["compute"]
    gpu.run_until(lambda: not any(stream.operations for stream in gpu.streams))
    gpu.waits.clear()
    for value in (5.0, 6.0):
        sender.step(1, value)
    assert gpu.waits == []
    for side in (sender, receiver):
        side.engine.close()


def test_the_kernel_is_compiled_both_ways_before_the_first_hand_off_and_pages_stay_as_they_are() -> None:
    gpu = FakeGpu(0)
    side = Side(gpu)
    ways: list[bool] = []

    def kernel(*arguments: Any) -> bool:
        ways.append(arguments[-1])
        return gpu.copy_range(*arguments)

    TransferEngine(side.kv, LAYOUT, 0, timeout_s=SOON_S, host=HOST).warm_up()
    TransferEngine(side.kv, LAYOUT, 0, timeout_s=SOON_S, host=HOST, page_kernel=kernel).warm_up()
    assert ways == [True, False]
    gpu.compute.synchronize()
    assert {value for block in range(BLOCKS) for value in side.block(block)} == {POISON}


def test_nccl_takes_few_thread_blocks_on_a_stream_of_its_own(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(0)
    gpu.patch(monkeypatch)
    sender, receiver = opened(gpu, store_address, "nccl")
    groups: list[Any] = dist.ProcessGroupNCCL.made  # type: ignore[attr-defined]
    assert sorted(group.rank for group in groups) == [0, 1]
    for group in groups:
        config = vars(group.options.config)
        assert config == {"blocking": 0, "min_ctas": 1, "max_ctas": 4} and group.options.is_high_priority_stream
    gpu.waits.clear()
    sender.engine.gather(chunk("e", 0, 0, CHUNK), [0], sender.step(0, 3.0))
    receiver.engine.post_receive(chunk("e", 0, 0, CHUNK), [1])
    sender.engine.send("e", 0)
    assert "compute" not in {stream for stream, _ in gpu.waits}
    for side in (sender, receiver):
        side.engine.close()
