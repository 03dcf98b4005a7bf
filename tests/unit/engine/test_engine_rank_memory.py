"""Collectives of ranks that share memory, and of the same by Gloo: any of them in any order, and what ends a group.

Sums in shared memory have the bits of terms added in float32 in the order of ranks, whatever the size; Gloo's do not.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_steps import join, on_joined_ranks
from torch.distributed import FileStore, HashStore
from waiting import wait_stopped

from cluster.errors import InternalError, Unavailable
from engine import rank_memory
from engine.rank_memory import CHUNK_BYTES
from engine.tp import JoinedGroup, ProcessGroupTP, TPGroup, make_process_group

KINDS = ["memory", "gloo"]
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
SMALL_BYTES = 32 << 10
"""Larger tensors are summed in parts."""
BORDERS = [0, 4, 1 << 10, SMALL_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES]
FAILURES = (RuntimeError, Unavailable)
"""Gloo's, and those of shared memory."""


def tensor_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype in SUMMED:
        return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype)
    return torch.from_numpy(rng.integers(0, 100, shape)).to(dtype)


def length(draw: random.Random, item_bytes: int) -> int:
    """A number of elements near one at which a collective changes its way."""
    return max(0, draw.choice(BORDERS) // item_bytes + draw.choice((-1, 0, 1, 33)))


class Call:
    """One collective, as all ranks draw it alike: what each rank gives, and what each must get."""

    def __init__(self, seed: int, size: int) -> None:
        draw, rng = random.Random(seed), np.random.default_rng(seed)
        self.name = draw.choice(("all_reduce", "all_gather", "broadcast", "exchange", "all_to_all"))
        dtypes = SUMMED if self.name == "all_reduce" else (*SUMMED, torch.int32, torch.int64, torch.uint8)
        dtype = torch.uint8 if self.name == "exchange" else draw.choice(dtypes)
        shape = (length(draw, dtype.itemsize),)
        self.dim = 0
        if self.name == "all_gather":
            self.dim = draw.choice((0, 1, -1, 2))
            shape = draw.choice([(1, shape[0] // 4, 4), (5, 7, 1 + shape[0] // 35), (max(1, shape[0] // 8), 2, 4)])
        if self.name == "all_to_all":
            shape = (size, max(1, shape[0] // 4), 2)
        self.given = [tensor_of(rng, shape, dtype) for _ in range(size)]
        order = draw.sample(range(size), size)
        self.to = {rank: order[(i + 1) % size] for i, rank in enumerate(order)}
        if self.name == "exchange" and draw.random() < 0.5:  # one looks on
            alone = order.pop()
            self.to = {rank: order[(i + 1) % len(order)] for i, rank in enumerate(order)} | {alone: alone}
            self.given[alone] = self.given[alone][:0]
        self.source = {to: rank for rank, to in self.to.items()}

    def run(self, tp: TPGroup) -> torch.Tensor:
        mine = self.given[tp.rank].clone()
        match self.name:
            case "all_reduce":
                tp.all_reduce(mine)
            case "broadcast":
                tp.broadcast(mine)
            case "all_gather":
                return tp.all_gather(mine, dim=self.dim)
            case "exchange":
                return tp.exchange(mine, self.to[tp.rank], self.source[tp.rank])
            case _:
                return tp.all_to_all(mine)
        return mine

    def expected(self, rank: int) -> torch.Tensor:
        match self.name:
            case "all_reduce":
                total = self.given[0].float()
                for term in self.given[1:]:
                    total = total + term.float()
                return total.to(self.given[0].dtype)
            case "broadcast":
                return self.given[0]
            case "all_gather":
                return torch.cat(self.given, dim=self.dim)
            case "exchange":
                return self.given[self.source[rank]]
        return torch.stack([given[rank] for given in self.given])

    def __str__(self) -> str:
        return f"{self.name} of {self.given[0].dtype} {tuple(self.given[0].shape)} in dim {self.dim}"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("by", KINDS)
def test_any_collectives_in_any_order_give_what_they_should(by: str, size: int) -> None:
    calls = [Call(1000 * size + seed, size) for seed in range(80 if by == "memory" else 30)]
    if by == "gloo":  # which knows no sums and no exchange of nothing
        calls = [call for call in calls if all(given.numel() for given in call.given)]

    found = on_joined_ranks(by, size, lambda tp: [call.run(tp) for call in calls])

    assert {call.name for call in calls} == {"all_reduce", "all_gather", "broadcast", "exchange", "all_to_all"}
    for number, call in enumerate(calls):
        for rank in range(size):
            one, expected = found[rank][number], call.expected(rank)
            assert one.shape == expected.shape and one.dtype == expected.dtype, call
            if by == "gloo" and call.name == "all_reduce":
                tolerance = 1e-5 if one.dtype == torch.float32 else 0.1
                assert torch.allclose(one.float(), expected.float(), atol=tolerance, rtol=tolerance), call
            else:
                assert torch.equal(one, expected), call


@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("length", [600, 300_000])
def test_a_row_has_the_same_bits_whatever_is_summed_with_it(dtype: torch.dtype, length: int) -> None:
    rng = np.random.default_rng(7)
    terms = [tensor_of(rng, (length,), dtype) for _ in range(4)]

    def work(tp: TPGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole, part = terms[tp.rank].clone(), terms[tp.rank][77:590].clone()
        tp.all_reduce(whole)
        tp.all_reduce(part)
        return whole, part

    ranks = on_joined_ranks("memory", 4, work)
    for whole, part in ranks:
        assert torch.equal(whole, ranks[0][0]) and torch.equal(part, whole[77:590])


def test_every_float16_keeps_its_value_and_sums_round_as_torch_does() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    other = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(3))]
    other = torch.where(torch.rand(len(every)) < 0.5, other, every * torch.rand(len(every)).half())

    def work(tp: TPGroup) -> tuple[torch.Tensor, torch.Tensor]:
        alone, both = (every if tp.rank else torch.zeros_like(every)).clone(), (other if tp.rank else every).clone()
        tp.all_reduce(alone)
        tp.all_reduce(both)
        return alone, both

    for alone, both in on_joined_ranks("memory", 2, work):
        assert torch.equal(alone.nan_to_num(nan=-7.0), every.nan_to_num(nan=-7.0))
        expected = (every.float() + other.float()).half()
        assert torch.equal(both.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))


@pytest.mark.parametrize(("by", "count"), [("memory", 3000), ("gloo", 100)])
def test_ranks_that_come_at_any_time_read_nothing_too_early_and_overwrite_nothing_too_soon(by: str, count: int) -> None:
    """Each number is in one collective only: an old one, or one of the next, would make another sum."""
    size = 3

    def work(tp: TPGroup) -> None:
        draw = random.Random(tp.rank)
        for number in range(count):
            large = number % 100 == 50
            tensor = torch.full((100_000 if large else 5,), float(number * size + tp.rank))
            if draw.random() < 0.05:
                time.sleep(draw.random() / 500)
            if number % 3:
                tp.all_reduce(tensor)
                assert (tensor == 3 * number * size + 3).all()
            else:
                joined = tp.all_gather(tensor.view(1, -1), dim=0)
                assert (joined == number * size + torch.arange(3.0)[:, None]).all()

    on_joined_ranks(by, size, work)


RANK = """
import sys, torch
from torch.distributed import FileStore
from engine.native import native
from engine_steps import join
(by, path, timeout_s), _ = sys.argv[1:], native()
print("here", flush=True)
group = join(by, FileStore(path, 3), 2, 3, float(timeout_s))
group.all_reduce(torch.ones(1))
print("joined", flush=True)
sys.stdin.readline()
try:
    group.all_reduce(torch.ones(1))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@contextmanager
def third_rank(by: str, path: Path, timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], list[Future[None]]]]:
    """A third rank in a process of its own, and the calls of the first two, in which these wait for it."""
    command = [sys.executable, "-c", RANK, by, str(path), str(timeout_s)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(rank: int) -> None:
        group = join(by, FileStore(str(path), 3), rank, 3, timeout_s)
        try:
            group.all_reduce(torch.ones(1))
            group.all_reduce(torch.ones(1))
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            calls = [pool.submit(run, rank) for rank in range(2)]
            assert process.stdout.readline() == "joined\n"
            yield process, calls
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("by", KINDS)
def test_those_that_wait_for_a_killed_rank_fail_soon(by: str, tmp_path: Path) -> None:
    """By Gloo, one of the two may find out by its timeout only."""
    with third_rank(by, tmp_path / "store", timeout_s=60.0 if by == "memory" else 5.0) as (process, calls):
        process.kill()
        for call in calls:
            with pytest.raises(FAILURES) as failed:
                call.result(20.0)
            if by == "memory":
                assert "the process of rank 2 has ended; rank" in str(failed.value)


@pytest.mark.parametrize("by", KINDS)
def test_those_that_wait_for_a_stopped_rank_fail_in_time_and_so_does_that_one(by: str, tmp_path: Path) -> None:
    with third_rank(by, tmp_path / "store", timeout_s=4.0) as (process, calls):
        process.send_signal(signal.SIGSTOP)
        wait_stopped(process.pid)
        for call in calls:
            with pytest.raises(FAILURES) as failed:
                call.result(30.0)
            if by == "memory":
                assert "rank 2 was awaited for 4 s; rank" in str(failed.value)
                assert "in all_reduce of torch.float32 of 4 bytes" in str(failed.value)
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("\n", timeout=30.0)
        assert said.startswith("Unavailable: the others waited 4 s for rank 2" if by == "memory" else "RuntimeError"), (
            said
        )


@pytest.mark.parametrize("by", KINDS)
def test_a_closed_group_ends_the_waits_of_the_others_and_serves_nobody(by: str) -> None:
    """By Gloo, one of the two may find out by its timeout only."""
    timeout_s = 60.0 if by == "memory" else 3.0
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: join(by, store, rank, 3, timeout_s), range(3)))
        waiting = [pool.submit(group.all_reduce, torch.ones(1)) for group in groups[:2]]
        groups[2].close()
        for call in waiting:
            with pytest.raises(FAILURES) as failed:
                call.result(10.0)
            if by == "memory":
                assert "rank 2 has closed the group; rank" in str(failed.value)
        for group in groups:
            with pytest.raises(FAILURES):
                group.all_reduce(torch.ones(1))
            group.close()


def test_a_rank_may_leave_behind_its_last_collective() -> None:
    """The others read what it gave all the same."""

    def run(rank: int) -> list[torch.Tensor]:
        group = join("memory", store, rank, 3)
        found = [group.all_gather(torch.full((50_000,), float(rank + number)), dim=0) for number in range(4)]
        group.close()
        return found

    for _ in range(20):
        store = HashStore()
        with ThreadPoolExecutor(3) as pool:
            for found in pool.map(run, range(3)):
                assert [one[::50_000].tolist() for one in found] == [[n, n + 1.0, n + 2.0] for n in range(4)]


WRONG: dict[str, Callable[[TPGroup], Any]] = {
    "other sizes": lambda tp: tp.all_reduce(torch.ones(2 + tp.rank)),
    "sizes of many rounds": lambda tp: tp.broadcast(torch.ones(400_000 + 4 * tp.rank)),
    "other types": lambda tp: tp.all_reduce(torch.ones(4, dtype=(torch.bfloat16, torch.float16)[tp.rank])),
    "other collectives": lambda tp: (tp.broadcast, tp.all_gather)[tp.rank](torch.ones(4)),
    "a rank that skips one": lambda tp: [tp.rank or tp.broadcast(torch.ones(4)), tp.all_gather(torch.ones(4))],
    "another partner": lambda tp: tp.exchange(torch.ones(4, dtype=torch.uint8), 1, 1 - tp.rank),
    "more for the partner": lambda tp: tp.exchange(torch.ones(4 + tp.rank, dtype=torch.uint8), *[1 - tp.rank] * 2),
}


@pytest.mark.parametrize("what", WRONG)
def test_ranks_that_call_different_collectives_are_told(what: str) -> None:
    store = HashStore()

    def run(rank: int) -> BaseException | None:
        group = join("memory", store, rank, 2)
        try:
            WRONG[what](group)
        except (InternalError, Unavailable, AssertionError) as error:
            return error
        finally:
            group.close()
        return None

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert any(isinstance(error, InternalError) and " where rank " in str(error) for error in found), found


class Once:
    """A function that gives a value to whoever calls it first, and the rest what another function gives."""

    def __init__(self, value: Any, rest: Callable[..., Any]) -> None:
        self._value, self._rest, self._is_given = value, rest, threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        return self._value if self._is_given.acquire(blocking=False) else self._rest(*arguments)


class WithoutPidfd:
    """The module `os` on a kernel before 5.3."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pidfd_open(self, pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ({"native": lambda: (None, "no g++")}, "rank 0 says that it has none of Baton's own kernels: no g++"),
        ({"_library": Once((None, "it is alone"), rank_memory._library)}, "rank"),
        ({"_host": lambda: os.urandom(4).hex()}, "they are on several machines"),
        ({"_open": lambda *_: os.open("/proc/none", os.O_RDWR)}, "rank 1 says that it cannot open what rank 0 shares"),
        ({"MAX_RANKS": 2}, "rank 0 says that at most 2 ranks share memory"),
        ({"os": WithoutPidfd()}, "rank 0 says that its kernel cannot watch processes: Function not implemented"),
    ],
    ids=["no compiler", "one without", "several machines", "no access", "too many", "old kernel"],
)
def test_ranks_that_cannot_share_memory_use_gloo_and_say_why(
    planted: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in planted.items():
        monkeypatch.setattr(rank_memory, name, value)
    store, tensors = HashStore(), [torch.ones(3) for _ in range(3)]

    def run(rank: int) -> JoinedGroup:
        group = make_process_group(store, rank, 3, "cpu", timeout_s=20.0)
        group.all_reduce(tensors[rank])
        return group

    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(run, range(3)))
    for group in groups:
        assert isinstance(group, ProcessGroupTP) and group.origin.startswith(f"by Gloo over 127.0.0.1, since {why}")
        group.close()
    assert all(tensor.tolist() == [3.0] * 3 for tensor in tensors)


def test_a_group_that_is_dropped_leaves_nothing() -> None:
    def held() -> list[str]:
        """Mappings of such memory in this process, and descriptors of it or of a process."""
        mapped = [
            line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "baton-ranks" in line
        ]
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(descriptor))
        return sorted([*mapped, *(link for link in links if "baton-ranks" in link or "pidfd" in link)])

    gc.collect()
    before = held()
    group_held = on_joined_ranks("memory", 3, lambda tp: held())
    assert all(len(during) > len(before) for during in group_held)
    gc.collect()
    assert held() == before
