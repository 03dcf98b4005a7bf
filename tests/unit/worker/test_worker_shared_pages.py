"""Whole requests through real cores that read one another's pages, which tattle: no page is written too early."""

from __future__ import annotations

import pytest
from simulated_load import EVERY_FAULT, Load
from simulated_pages import Alarm
from simulation import World

import prefill_worker.sender
from prefill_worker.sender import Outgoing, Sender


@pytest.fixture(autouse=True, scope="module")
def layered_prompts() -> object:
    """Prompts here are short, and yet their last step is sent layer by layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_worker.sender, "MIN_LAYERED_TOKENS", 6)
        yield


def carried(seed: int, faults: dict[str, float]) -> World:
    """A load in pools so small that pages are used again at once; everything is given back in the end."""
    world = World(seed, faults, overlaps=seed % 2 == 1, shares_pages=True)
    for i in range(2):
        world.add(f"prefill-{i}", 16, 4, transfer_timeout_s=0.02)
        world.add(f"decode-{i}", 24, 4, transfer_timeout_s=0.02)
    Load(30, cancels=0.02, moves=0.05).carry(world)
    return world


@pytest.mark.parametrize("seed", range(10))
def test_what_is_read_is_what_was_computed_whatever_fails(seed: int) -> None:
    counts = carried(seed, EVERY_FAULT).counts
    assert counts["request done"] and counts["cells read"]


@pytest.mark.parametrize("fault", ["link cut", "worker died", "tick", "damaged", "receive failed", "gather failed"])
def test_each_fault_of_a_transfer_by_itself_leaves_nothing_behind(fault: str) -> None:
    rate = 0.01 if fault == "worker died" else 10 * EVERY_FAULT[fault]
    assert sum(carried(seed, {fault: rate}).counts[fault] for seed in range(6))


def early(self: Sender, out: Outgoing) -> bool:
    """In place of `Sender._is_shared`: pages are given back as if they had been gathered."""
    return False


def test_pages_that_are_given_back_before_they_are_read_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_is_shared", early)
    with pytest.raises(Alarm, match="reads"):
        for seed in range(10):
            carried(seed, {})


def test_pages_of_a_lost_link_that_are_given_back_before_it_is_closed_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Sender.connection_lost

    def connection_lost(self: Sender, epoch: str, *reason: object) -> list[object]:
        return original(self, epoch, *reason) + self.connection_closed(epoch)  # type: ignore[arg-type]

    monkeypatch.setattr(Sender, "connection_lost", connection_lost)
    with pytest.raises(Alarm, match="reads"):
        for seed in range(40):
            carried(seed, {"link cut": 10 * EVERY_FAULT["link cut"]})
