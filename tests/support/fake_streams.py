"""A GPU's streams and events without a GPU: what is launched runs later, in any order that the events leave open.

A `FakeGpu` has streams of operations. It moves on by itself while somebody waits for it: each look at an event runs a
few operations, of streams drawn by chance. Tensors are the CPU's. NCCL is two queues between two pairs of a process.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from kv_transfer import pages
from kv_transfer.actions import Range

STUCK_S = 10.0


class FakeStream:
    """What is to be done, in order: each operation with the condition on which it can begin."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self.operations: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def launch(self, work: Callable[[], None], when: Callable[[], bool] = lambda: True) -> None:
        with self.gpu.lock:
            self.operations.append((when, work))

    def wait_event(self, event: FakeEvent) -> None:
        """For what the event stands for now, as on a GPU: a later record changes nothing."""
        marked = event.mark
        self.gpu.waits.append((self.name, event))
        self.launch(lambda: None, lambda: marked is None or marked.is_set())

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.note_sync(self.name)
        self.gpu.run_until(lambda: not self.operations)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.mark: threading.Event | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self.mark = threading.Event()
        (stream or self.gpu.current).launch(self.mark.set)

    def query(self) -> bool:
        self.gpu.run_some()
        return self.mark is None or self.mark.is_set()

    def synchronize(self) -> None:
        self.gpu.note_sync("event")
        self.gpu.run_until(lambda: self.mark is None or self.mark.is_set())


class FakeGpu:
    """One device. `patch` puts it in the place of torch.cuda."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.waits: list[tuple[str, FakeEvent]] = []
        """Which stream was made to wait, and for what."""
        self.syncs: list[str] = []
        """Streams that a thread has waited for, or does; `event` where it is an event."""
        self._synced = threading.Condition()
        self._random = random.Random(seed)
        self._local = threading.local()
        self.compute = self.new_stream("compute")

    def new_stream(self, name: str = "") -> FakeStream:
        stream = FakeStream(self, name or f"stream {len(self.streams)}")
        self.streams.append(stream)
        return stream

    @property
    def current(self) -> FakeStream:
        """Of the calling thread."""
        stream: FakeStream = getattr(self._local, "stream", self.compute)
        return stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def note_sync(self, name: str) -> None:
        with self._synced:
            self.syncs.append(name)
            self._synced.notify_all()

    def await_sync(self) -> None:
        """Returns when some thread waits for a stream or an event, or has."""
        with self._synced:
            assert self._synced.wait_for(lambda: self.syncs, STUCK_S)

    def run_some(self) -> bool:
        """Up to three operations; False where none can begin."""
        with self.lock:
            for number in range(self._random.randint(1, 3)):
                able = [stream for stream in self.streams if stream.operations and stream.operations[0][0]()]
                if not able:
                    return number > 0
                self._random.choice(able).operations.popleft()[1]()
            return True

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_S
        while True:
            with self.lock:  # nothing is half done
                if condition():
                    return
                has_run = self.run_some()
            if not has_run:  # what it takes is up to another thread
                assert time.monotonic() < deadline, f"stuck: {[(s.name, len(s.operations)) for s in self.streams]}"
                time.sleep(0.0005)

    def copy_range(
        self,
        pool: torch.Tensor,
        blocks: Sequence[int],
        first_token: int,
        layers: slice,
        heads: slice,
        buffer: torch.Tensor,
        is_gather: bool,
    ) -> bool:
        """A `kv_transfer.pages.PageKernel` that is launched on the current stream."""
        what = Range(first_token, first_token + buffer.shape[2], layers.start, layers.stop)
        copy, table = pages.gather if is_gather else pages.scatter, list(blocks)
        self.current.launch(lambda: copy(pool, table, what, heads, buffer))
        return True

    def copy_between(
        self,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        target: torch.Tensor,
        target_blocks: Sequence[int],
        first_token: int,
        num_tokens: int,
        layers: slice,
    ) -> bool:
        """A `kv_transfer.pages.PoolKernel` that is launched on the current stream."""
        what = Range(first_token, first_token + num_tokens, layers.start, layers.stop)
        theirs, ours = list(source_blocks), list(target_blocks)
        self.current.launch(lambda: pages.copy_across(source, theirs, target, ours, what))
        return True

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: self.new_stream())
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", self._nccl(), raising=False)

    def _nccl(self) -> type:
        gpu = self
        wires: defaultdict[tuple[str, int], deque[torch.Tensor]] = defaultdict(deque)
        """By the pair and the rank that receives."""
        numbers = itertools.count()

        class Options:
            def __init__(self, is_high_priority_stream: bool) -> None:
                self.is_high_priority_stream = is_high_priority_stream
                self.config = type("Config", (), {})()

        class Group:
            """Two ranks of one process: what one sends is what the other receives, in order."""

            made: ClassVar[list[Group]] = []

            def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
                self.rank, self.size, self.options = rank, size, options
                if rank == 0:
                    store.set("name", f"pair {next(numbers)}")
                self._name = store.get("name").decode()
                self.stream = gpu.new_stream(f"nccl {rank}")
                self.made.append(self)

            def eager_connect_single_device(self, device: torch.device) -> None:
                """Nothing is to be connected."""

            def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
                wire = wires[self._name, peer]
                return self._post(lambda: wire.append(tensors[0].clone()), lambda: True)

            def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
                wire = wires[self._name, self.rank]
                return self._post(lambda: tensors[0].copy_(wire.popleft()), lambda: bool(wire))

            def _post(self, work: Callable[[], Any], when: Callable[[], bool]) -> Any:
                self.stream.wait_event(gpu.current.record_event())
                self.stream.launch(work, when)
                ended = self.stream.record_event()

                class Work:
                    def wait(self) -> None:
                        gpu.current.wait_event(ended)

                    def is_completed(self) -> bool:
                        return ended.query()

                return Work()

            def abort(self) -> None:
                self.stream.operations.clear()

        Group.Options = Options  # type: ignore[attr-defined]
        return Group
