"""What a worker learns of its steps is what they took, whatever kinds come, and follows when that changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from device_spans import FakeDevice

from cluster.step_cost import StepCost, StepSize
from worker.steps import LEAST_STEPS, StepClock

TRUE = StepCost(fixed_s=0.004, prompt_token_s=0.0002, attended_s=2e-8, sequence_s=0.0003, kv_token_s=2e-7)


def steps(seed: int, count: int) -> list[StepSize]:
    """Prompts, batches of sequences, and both together."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        size = StepSize()
        if draw.random() < 0.5:
            size += StepSize.of_prompt(draw.randrange(16, 2048), draw.randrange(0, 4096))
        if draw.random() < 0.7 or not size.num_prompt_tokens:
            num_sequences = draw.randrange(1, 33)
            size += StepSize(num_sequences=num_sequences, num_kv_tokens=num_sequences * draw.randrange(20, 2000))
        found.append(size)
    return found


def test_before_there_are_steps_nothing_is_known() -> None:
    clock = StepClock()
    for size in steps(1, LEAST_STEPS - 1):
        clock.note(size, TRUE.of(size))
        assert clock.cost is None and clock.cost_of(size) == float("inf")


def test_what_is_predicted_is_what_steps_take() -> None:
    clock, draw = StepClock(), random.Random(0)
    for size in steps(2, 300):
        clock.note(size, TRUE.of(size) * draw.uniform(0.95, 1.05))
    for size in steps(3, 50):
        assert clock.cost_of(size) == pytest.approx(TRUE.of(size), rel=0.1)


def test_one_kind_of_step_alone_is_predicted_and_nothing_is_negative() -> None:
    only = StepSize(num_sequences=8, num_kv_tokens=1600)
    clock = StepClock()
    for _ in range(50):
        clock.note(only, 0.010)
    assert clock.cost_of(only) == pytest.approx(0.010, rel=0.01)
    cost = clock.cost
    assert cost is not None and min(vars(cost).values()) >= 0


def test_it_follows_when_steps_become_slower() -> None:
    clock = StepClock()
    slower = replace(TRUE, fixed_s=0.008, sequence_s=0.0006)
    for cost in (TRUE, slower):
        for size in steps(4, 1500):
            clock.note(size, cost.of(size))
    for size in steps(5, 50):
        assert clock.cost_of(size) == pytest.approx(slower.of(size), rel=0.1)


def test_a_step_that_something_else_held_up_teaches_nothing() -> None:
    clock = StepClock()
    size = StepSize(num_sequences=4, num_kv_tokens=400)
    for _ in range(50):
        clock.note(size, 0.005)
    clock.note(size, 10.0)
    assert clock.cost_of(size) == pytest.approx(0.005, rel=0.02)


def test_most_decode_steps_are_passed_over() -> None:
    clock = StepClock()
    wanted = sum(clock.wants(has_prompt=False) for _ in range(1000))
    assert 100 < wanted < 200
    assert clock.wants(has_prompt=True)


def test_of_steps_that_are_only_queued_it_learns_the_devices_time() -> None:
    """Steps that sampled nothing were over once they were launched: a prompt of 100 ms seemed to cost 1 ms."""
    clock, sizes = StepClock(), steps(6, 300)
    device = FakeDevice(TRUE.of(size) for size in sizes)
    host_s = 0.0
    for size in sizes:
        clock.begins(host_s, size)
        span = device.begin()
        host_s += 0.001
        clock.ends(host_s, span)
        device.now = max(device.now, span.begun_at)  # one step ahead of the device, as a worker is
    for size in steps(7, 50):
        assert clock.cost_of(size) == pytest.approx(TRUE.of(size), rel=0.1)


def test_the_time_between_two_bursts_is_no_steps() -> None:
    size = StepSize(num_sequences=4, num_kv_tokens=400)
    clock, device = StepClock(), FakeDevice([0.010] * 60)
    for burst in range(20):
        for _ in range(3):
            clock.begins(device.now, size)
            clock.ends(device.now, device.begin())
        device.now = (burst + 1) * 5.0
        for _ in range(2):
            clock.rests()
    assert clock.cost_of(size) == pytest.approx(0.010, rel=0.02)


def test_nothing_is_learned_of_what_the_device_has_not_ended() -> None:
    size = StepSize(num_sequences=4, num_kv_tokens=400)
    clock, device = StepClock(), FakeDevice([0.010] * 8)
    for _ in range(8):
        clock.begins(0.0, size)
        clock.ends(0.0, device.begin())
    assert clock.cost is None
    device.now = 0.035
    clock.rests()
    assert clock.cost_of(size) == pytest.approx(0.010, rel=0.02)
