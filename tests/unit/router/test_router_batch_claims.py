"""How long a claim on a batch lasts in the file of batches: by a clock that nobody sets, and no longer than a boot."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.batches.sqlite_store import SqliteStore
from router.batches.store import StoredRecord

LATER = 4e9
LONG_S, SHORT_S = 60.0, 0.05
BATCH = StoredRecord(kind="batch", record_id="batch-1", tenant="acme", data=b"{}", ends_at=LATER)


@pytest.mark.parametrize("step_s", [-5 * 3600.0, 5 * 3600.0], ids=["back", "forth"])
async def test_a_wall_clock_that_is_set_neither_ends_a_claim_nor_keeps_one(tmp_path: Path, step_s: float) -> None:
    wall, monotonic = [LATER / 2], [1000.0]
    stores = [SqliteStore(str(tmp_path / "b.db"), lambda: wall[0], lambda: monotonic[0]) for _ in range(2)]
    await stores[0].add(BATCH)
    assert await stores[0].claim("a", SHORT_S) is not None
    wall[0] += step_s
    assert await stores[1].claim("b", SHORT_S) is None, "its owner lives"
    monotonic[0] += 2 * SHORT_S
    assert await stores[1].claim("b", SHORT_S) is not None, "its owner has not renewed it"


async def test_a_claim_of_an_earlier_boot_holds_nothing(tmp_path: Path) -> None:
    """The monotonic clock begins again with each boot."""
    path = str(tmp_path / "b.db")
    before = SqliteStore(path, monotonic=lambda: 100_000.0)
    await before.add(BATCH)
    assert await before.claim("a", LONG_S) is not None
    after = SqliteStore(path, monotonic=lambda: 10.0)
    found = await after.claim("b", LONG_S)
    assert found is not None and found[0].epoch == 2
