"""Chunks of a small KV cache land when those of the model that it stands for would."""

import pytest

from kv_transfer.timed_wire import TimedWire


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wire_of(clock: Clock, bytes_per_s: float | None = 1e6, latency_s: float = 0.002) -> TimedWire:
    return TimedWire(100.0, bytes_per_s, latency_s, clock, clock.sleep)


def test_a_chunk_takes_the_latency_and_its_bytes() -> None:
    clock = Clock()
    wire_of(clock).carry(50)
    assert clock.now == pytest.approx(10 + 0.002 + 0.005)


def test_chunks_right_behind_one_another_share_the_latency() -> None:
    clock = Clock()
    wire = wire_of(clock)
    for _ in range(3):
        wire.carry(50)
        clock.now += 0.0005
    assert clock.now == pytest.approx(10 + 0.002 + 3 * 0.005 + 0.0005)


def test_a_chunk_after_a_rest_takes_the_latency_again() -> None:
    clock = Clock()
    wire = wire_of(clock)
    wire.carry(50)
    clock.now = 20.0
    wire.carry(50)
    assert clock.now == pytest.approx(20 + 0.002 + 0.005)


def test_without_a_bandwidth_only_the_latency_counts() -> None:
    clock = Clock()
    wire_of(clock, bytes_per_s=None).carry(10**9)
    assert clock.now == pytest.approx(10.002)
