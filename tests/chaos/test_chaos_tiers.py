"""KV in host memory and on a disk while that fails: damaged, cut off, deleted, full, or gone with a worker."""

from __future__ import annotations

import os
import random
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos_fleet import FAST, Fleet, Measured, await_true, metrics_of
from chaos_reference import ExactLoad, Reference
from chaos_states import prompt_of
from small_disks import SmallDisks, missing

from benchmarks.tier_pool import Shape, TieredPool

FLIPS_AT_ONCE, SAMPLED_FLIPS = 40, 2000
MORE = 4
"""Blocks to which the same happens before the next thing is done to the disk."""
SKIP = missing()
DISK_BYTES = 96 << 20
BLOCK_BYTES = 16 * 4 * 2 * 4 * 32 * 4  # tokens, layers, k and v, heads, head_dim, float32
POOL_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 64, 40, 400
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def flip(file: Path, draw: random.Random, num_bits: int) -> int:
    size = file.stat().st_size
    with file.open("r+b", buffering=0) as damaged:
        for _ in range(num_bits):
            at = draw.randrange(size)
            byte = os.pread(damaged.fileno(), 1, at)[0]
            os.pwrite(damaged.fileno(), bytes([byte ^ 1 << draw.randrange(8)]), at)
    return num_bits


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond this size."""
    limit = resource.RLIMIT_FSIZE
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


@pytest.mark.parametrize("num_flips", [3000, pytest.param(10_000, marks=pytest.mark.battery)])
def test_flipped_bits_and_files_that_are_cut_off_deleted_or_full_make_no_block_wrong(
    num_flips: int, tmp_path: Path
) -> None:
    draw, file = random.Random(5), tmp_path / "kv" / "1.rank0"
    errors, found = list[str](), 0
    prompts = [prompt_of(76_000 + number, 16 * 8 + 3) for number in range(24)]
    pool = TieredPool(Shape(head_dim=64), num_blocks=20, num_slots=20, num_disk_slots=200, file=file)
    for number in range(num_flips // FLIPS_AT_ONCE):
        for prompt in draw.sample(prompts, 8):
            with full_disk(file.stat().st_size // 2 if number % 25 in (20, 21) else resource.RLIM_INFINITY):
                found += pool.ask(prompt)
        pool.blocks.check()
        flip(file, draw, FLIPS_AT_ONCE)
        match number % 25:
            case 5:
                os.truncate(file, draw.randrange(file.stat().st_size))
            case 10:
                pool, errors = pool.again(), errors + pool.errors
            case 15:
                file.unlink()
                pool, errors = pool.again(), errors + pool.errors
    errors += pool.errors
    num_damaged = sum("damaged" in error or "does not hold" in error for error in errors)
    counts = pool.blocks.counts
    num_full = len(errors) - num_damaged
    print(f"{num_flips} bits: {num_damaged} reads found damage, {num_full} writes found no room; {counts}")
    assert pool.wrong == 0
    assert num_damaged > 50 and counts.read > 0 and found > 0 and num_full > 0
    assert pool.blocks.num_free + pool.blocks.num_cached == pool.blocks.num_total
    pool.close()
    assert [left.name for left in file.parent.iterdir()] == [file.name]


@pytest.mark.battery
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(SKIP), reason=SKIP)
def test_workers_whose_disk_is_full_damaged_cut_off_or_deleted_and_that_are_killed_while_they_copy_are_exact(
    tmp_path: Path, reference: Reference, measured: Measured
) -> None:
    draw, prompts = random.Random(6), [prompt_of(77_000 + number, 150 + 8 * number) for number in range(30)]
    with SmallDisks({tmp_path: DISK_BYTES}) as disks:
        settings = {
            "namespace": disks.namespace,
            "kv_cache_tokens": 16 * POOL_BLOCKS,
            "kv_host_bytes": HOST_BLOCKS * BLOCK_BYTES,
            "kv_disk_bytes": DISK_BLOCKS * (BLOCK_BYTES + 4096),
            "kv_disk_path": str(tmp_path),
            "max_model_len": 512,
        }
        router = {"prefix_fetch": "always", "metrics_port": 0}
        with Fleet(dict.fromkeys(NAMES, settings), FAST, measured, router) as fleet:
            tiers = Tiers(fleet)
            how = {"num_tokens": 8, "num_streams": 6, "timeout_s": 120.0, "bypasses_cache": False}
            with ExactLoad(fleet.client, reference, prompts, **how) as load:
                tiers.load = load
                tiers.await_more("spilled", "read")
                disks.fill(tmp_path)
                tiers.await_more("failed")
                assert "No space left" in tiers.said()
                disks.free(tmp_path)
                tiers.await_more("spilled")
                files = sorted(disks.path(tmp_path).glob("*/*.rank0"))
                num_flips = 0
                while num_flips < SAMPLED_FLIPS:
                    for file in files:
                        num_flips += flip(file, draw, 25)
                    tiers.await_more("failed")
                assert "is damaged" in tiers.said()
                for file in files:
                    os.truncate(file, draw.randrange(file.stat().st_size))
                tiers.await_more("failed", "spilled")
                for number, name in enumerate(2 * NAMES):
                    tiers.kill_while_it_copies(name)
                    if number >= len(NAMES):
                        draw.choice(files).unlink(missing_ok=True)
                    fleet.restart(name)
                    fleet.await_ready()
                tiers.await_more("spilled", "read")
            assert load.problems == []
            fleet.settle()
            print(f"{num_flips} bits, {load.num_done} outputs, {dict(tiers.counts())}, fetches {tiers.fetches()}")
            assert not any(w.count("baton_kv_tier_blocks", state="moving") for w in fleet.workers.values())
            assert tiers.fetches()["done"] and set(tiers.fetches()) - {"done"}
            numbers = range(1, len(NAMES) + 1)
            left = {file.name for file in disks.path(tmp_path).glob("*/*")}
            assert left <= {f"{number}.{kind}" for number in numbers for kind in ("lock", "rank0")}


class Tiers:
    """What all workers say of theirs, those that were killed as well."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self._before = fleet, Counter[str]()
        self.load: ExactLoad | None = None

    def counts(self, *workers: str) -> Counter[str]:
        found = Counter(self._before if not workers else {})
        for name in workers or NAMES:
            for (sample, labels), value in self.fleet[name].metrics().items():
                if sample == "baton_kv_tier_events_total":
                    found[dict(labels)["event"]] += int(value)
        return found

    def await_more(self, *events: str) -> None:
        """Until there are more of each."""
        before = self.counts()
        await_true(lambda: self._problems() or all(self.counts()[e] >= before[e] + MORE for e in events), self.story)
        assert not self._problems()

    def kill_while_it_copies(self, name: str) -> None:
        await_true(lambda: self.fleet[name].count("baton_kv_tier_blocks", state="moving"), self.story)
        self.kill(name)

    def kill(self, name: str) -> None:
        self._before += self.counts(name)
        self.fleet[name].kill()

    def fetches(self) -> Counter[str]:
        """By what became of them."""
        page = metrics_of(self.fleet.client.status().router.metrics_address)
        found = {dict(has)["result"]: n for (name, has), n in page.items() if name == "baton_prefix_fetches_total"}
        return Counter({result: int(number) for result, number in found.items() if number})

    def said(self) -> str:
        return "".join(rank.stderr() for worker in self.fleet.workers.values() for rank in worker.ranks)

    def story(self) -> object:
        return self.counts(), self.fetches()

    def _problems(self) -> list[str]:
        return [] if self.load is None else self.load.problems
