"""KV in a store while that fails: damaged, cut off, deleted from, full or vanished, in a pool with the real books and
copies. No block is wrong."""

from __future__ import annotations

import random
import resource
from pathlib import Path

from chaos_states import prompt_of
from test_chaos_tiers import flip, full_disk

from benchmarks.tier_pool import Shape, TieredPool

NUM_FLIPS, FLIPS_AT_ONCE, IN_ONE_FILE = 10_000, 200, 5
OBJECTS = 120


def objects_of(folder: Path) -> list[Path]:
    """All that are there, and what writers have under way."""
    return sorted(path for path in folder.glob("*/*/*") if path.is_file())


def test_ten_thousand_flipped_bits_and_a_store_that_is_cut_off_full_or_gone_make_no_block_wrong(tmp_path: Path) -> None:
    draw, folder, shape = random.Random(7), tmp_path / "kv", Shape(head_dim=64)
    limit = OBJECTS * (shape.block_bytes + 4096)
    prompts = [prompt_of(78_000 + number, 16 * 8 + 3) for number in range(24)]
    pools = [TieredPool(shape, 20, 20, 0, tmp_path / "none", (folder, limit)) for _ in range(2)]
    errors, fetched, found = list[str](), 0, 0
    for number in range(NUM_FLIPS // FLIPS_AT_ONCE):
        if number % 25 == 18:
            folder.rename(tmp_path / "gone")
        for at, prompt in enumerate(draw.sample(prompts, 6)):
            pool = pools[at % 2]
            with full_disk(100 if number % 25 in (20, 21) else resource.RLIM_INFINITY):
                found += pool.ask(prompt)
            pool.blocks.check()
        if number % 25 == 18:
            (tmp_path / "gone").rename(folder)
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
    print(f"{NUM_FLIPS} bits: {said}, {fetched} blocks fetched, {found} tokens found")
    assert sum(pool.wrong for pool in pools) == 0
    assert said["damaged"] > 50 and said["No such file"] and said["File too large"] and fetched > 100 and found
    for pool in pools:
        assert pool.blocks.num_free + pool.blocks.num_cached == pool.blocks.num_total
    assert not [file for file in objects_of(folder) if file.suffix == ".part"]
