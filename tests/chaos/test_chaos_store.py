"""KV in a store while that fails: damaged, cut off, deleted from, full or vanished, in a pool with the real books and
copies. No block is wrong."""

from __future__ import annotations

import random
import resource
import shutil
import threading
from pathlib import Path

import pytest
from chaos_fleet import FAST, Fleet, Measured
from chaos_reference import ExactLoad, Reference
from chaos_states import prompt_of
from test_chaos_tiers import BLOCK_BYTES, HOST_BLOCKS, NAMES, POOL_BLOCKS, Tiers, flip, full_disk

from benchmarks.tier_pool import Shape, TieredPool
from cluster.errors import Corrupted
from kv_transfer import block_store
from kv_transfer.block_store import StoreObjects

FLIPS_AT_ONCE, IN_ONE_FILE = 200, 5
OBJECTS = 120
STORE_BYTES = 1000 * (BLOCK_BYTES + 4096)
ROUNDS = 4


def objects_of(folder: Path) -> list[Path]:
    """All that are there, and what writers have under way."""
    return sorted(path for path in folder.glob("*/*/*") if path.is_file())


def await_idle(pool: TieredPool) -> None:
    """Until nothing of a pool is under way to its store or from it: of a push that fails, the other blocks may still be
    written."""
    objects = pool._copies.store
    assert objects is not None
    all_free = threading.Barrier(block_store._THREADS + 1)
    for _ in range(block_store._THREADS):
        objects._calls.put(block_store._Call(all_free.wait))
    all_free.wait(60.0)


def check_each(folder: Path, reference: Path, shape: Shape) -> int:
    """Reads every object that is there, in a copy of the store: each is exactly the block that its name says, or is
    damaged and deleted, which none is that nobody has changed. Returns how many are damaged."""
    copy, num_damaged = reference.with_name("copy"), 0
    shutil.copytree(folder, copy)
    asked, pushed = store_of(copy, shape), store_of(reference, shape)
    for file in objects_of(copy):
        digest, group, _ = file.name.split(".")
        key = (int(group[1:]), bytes.fromhex(digest))
        payload = (key[1] * shape.block_bytes)[: shape.block_bytes]
        pushed.push([key], [payload])
        is_whole = file.read_bytes() == (reference / pushed.name_of(key)).read_bytes()
        try:
            [found] = asked.fetch([key])
        except Corrupted:
            assert not is_whole and not file.exists(), file.name
            num_damaged += 1
        else:
            assert bytes(found) == payload, file.name
    shutil.rmtree(copy)
    return num_damaged


def store_of(folder: Path, shape: Shape) -> StoreObjects:
    pool = TieredPool(shape, 1, 1, 0, folder, (folder, 1 << 30))
    assert pool._copies.store is not None
    return pool._copies.store


@pytest.mark.parametrize("num_flips", [5400, pytest.param(10_000, marks=pytest.mark.battery)])
def test_flipped_bits_and_a_store_that_is_cut_off_full_or_gone_make_no_block_wrong(
    num_flips: int, tmp_path: Path
) -> None:
    draw, folder, shape = random.Random(7), tmp_path / "kv", Shape(head_dim=64)
    limit = OBJECTS * (shape.block_bytes + 4096)
    prompts = [prompt_of(78_000 + number, 16 * 8 + 3) for number in range(24)]
    pools = [TieredPool(shape, 20, 20, 0, tmp_path / "none", (folder, limit)) for _ in range(2)]
    errors, fetched, found, damaged = list[str](), 0, 0, 0
    for number in range(num_flips // FLIPS_AT_ONCE):
        if number % 25 == 18:
            folder.rename(tmp_path / "gone")
        for at, prompt in enumerate(draw.sample(prompts, 6)):
            pool = pools[at % 2]
            with full_disk(100 if number % 25 in (20, 21) else resource.RLIM_INFINITY):
                found += pool.ask(prompt)
            pool.blocks.check()
        if number % 25 == 18:
            (tmp_path / "gone").rename(folder)
        for pool in pools:
            await_idle(pool)
        files = objects_of(folder)
        assert sum(file.stat().st_size for file in files) <= limit + limit // 32
        for _ in range(FLIPS_AT_ONCE // IN_ONE_FILE):
            flip(draw.choice(files), draw, IN_ONE_FILE)
        for file in draw.sample(files, 3):
            match number % 3:
                case 0:
                    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])
                case 1:
                    file.unlink()
        if number % 10 == 9:
            damaged += check_each(folder, tmp_path / "reference", shape)
        if number % 25 == 10:  # everything starts anew: the store is all that is left
            errors += [error for pool in pools for error in pool.errors]
            fetched += sum(pool.blocks.counts.fetched for pool in pools)
            pools = [pool.again() for pool in pools]
    errors += [error for pool in pools for error in pool.errors]
    fetched += sum(pool.blocks.counts.fetched for pool in pools)
    said = {
        text: sum(text in error for error in errors)
        for text in ("damaged", "No such file", "File too large", "no room")
    }
    print(f"{num_flips} bits: {said}, {fetched} blocks fetched, {found} tokens found, {damaged} damaged of each")
    assert [pool.wrong for pool in pools] == [0, 0] and damaged > 20
    assert said["damaged"] > 50 and said["No such file"] and said["File too large"] and found
    assert fetched > num_flips / 100
    for pool in pools:
        assert pool.blocks.num_free + pool.blocks.num_cached == pool.blocks.num_total
    assert not [file for file in objects_of(folder) if file.suffix == ".part"]


@pytest.mark.battery
@pytest.mark.timeout(400)
def test_a_fleet_whose_store_is_taken_away_and_given_back_again_and_again_is_exact(
    tmp_path: Path, reference: Reference, measured: Measured
) -> None:
    folder, away, prompts = tmp_path / "kv", tmp_path / "away", [prompt_of(79_000 + n, 150 + 8 * n) for n in range(30)]
    settings = {
        "kv_cache_tokens": 16 * POOL_BLOCKS,
        "kv_host_bytes": HOST_BLOCKS * BLOCK_BYTES,
        "kv_store_path": str(folder),
        "kv_store_bytes": STORE_BYTES,
        "kv_store_policy": "all",
        "max_model_len": 512,
    }
    with Fleet(dict.fromkeys(NAMES, settings), FAST, measured, {"metrics_port": 0}) as fleet:
        tiers = Tiers(fleet)
        how = {"num_tokens": 8, "num_streams": 6, "timeout_s": 120.0, "bypasses_cache": False}
        with ExactLoad(fleet.client, reference, prompts, **how) as load:
            tiers.load = load
            tiers.await_more("pushed", "fetched")
            for number in range(ROUNDS):
                folder.rename(away)
                tiers.await_more("failed")
                if number % 2:
                    tiers.kill(NAMES[number])
                away.rename(folder)
                if number % 2:
                    fleet.restart(NAMES[number])
                    fleet.await_ready()
                tiers.await_more("pushed", "fetched")
        assert load.problems == []
        fleet.settle()
        print(f"{load.num_done} outputs, {dict(tiers.counts())}")
        assert not any(w.count("baton_kv_tier_blocks", state="moving") for w in fleet.workers.values())
    files = objects_of(folder)
    killed = [file for file in files if file.suffix == ".part"]
    assert files and not away.exists() and len(killed) <= 8 * (ROUNDS // 2), "each had four writes under way at most"
    assert sum(file.stat().st_size for file in files) <= STORE_BYTES * (1 + len(NAMES) / 32)
