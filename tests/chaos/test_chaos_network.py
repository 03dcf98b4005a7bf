"""A network that loses packets, is slow, or goes away again and again between the router and its workers, under load.

Loss and blackouts: prefill-0 and decode-0 have a network namespace each, and the timers that ship. What the links do is
shown by the counters of their rules. Delay: a relay in front of every worker, and timers that are shorter than those.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from chaos_fleet import FAST, Fleet, Measured, await_true
from chaos_reference import ExactLoad, Reference
from chaos_states import POOL_TOKENS, WORKERS, prompt_of
from namespaces import Namespaces, missing
from relay import delayed

from cluster.pb import admin_pb2

SKIP = missing()
needs_namespaces = pytest.mark.skipif(bool(SKIP), reason=SKIP)
pytestmark = [pytest.mark.battery, pytest.mark.timeout(400)]

NUM_STREAMS, NUM_PROMPTS, OUTPUT_TOKENS = 8, 16, 24
NUM_REQUESTS = 240
LOST_PERCENT = 3
LEAST_DELAY_S, MOST_DELAY_S = 0.05, 0.2
NUM_BLACKOUTS = 10
VICTIMS = (("prefill-0",), ("decode-0",), ("prefill-0", "decode-0"))
"""Who is cut off from the router, in turn."""
BETWEEN_BLACKOUTS = 16
"""Requests that end between two of them."""
WAIT_S = 60.0
SAID_LOST, SAID_SUSPECT = "taken as lost", "is suspected to stall"


def load_of(fleet: Fleet, reference: Reference, seed: int) -> ExactLoad:
    """Prompts of one chunk and of many."""
    prompts = [prompt_of(seed + number, 30 + 37 * number) for number in range(NUM_PROMPTS)]
    return ExactLoad(
        fleet.client, reference, prompts, num_tokens=OUTPUT_TOKENS, num_streams=NUM_STREAMS, timeout_s=WAIT_S
    )


def run(fleet: Fleet, reference: Reference, seed: int) -> str:
    """So many requests, all of them exact; what their times were."""
    with load_of(fleet, reference, seed) as load:
        load.wait_for_more(NUM_REQUESTS)
    assert load.problems == []
    return load.story()


def num_said(fleet: Fleet, what: str) -> int:
    """By the router, in its log."""
    return fleet.router.stderr().count(what)


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    with Namespaces() as spaces:
        yield spaces


@pytest.fixture(scope="module")
def _apart(spaces: Namespaces, measured: Measured) -> Iterator[Fleet]:
    places = {
        "prefill-0": {"namespace": spaces.near, "host": spaces.near_host},
        "decode-0": {"namespace": spaces.far, "host": spaces.far_host},
        "prefill-1": {"host": spaces.here_host},
        "decode-1": {"host": spaces.here_host},
    }
    with Fleet(places, {**WORKERS, "kv_cache_tokens": POOL_TOKENS, "insecure": True}, measured) as fleet:
        yield fleet


@pytest.fixture
def apart(_apart: Fleet, spaces: Namespaces) -> Iterator[Fleet]:
    yield _apart
    spaces.heal()
    _apart.repair()


@needs_namespaces
def test_links_that_lose_packets_lose_no_request(apart: Fleet, reference: Reference, spaces: Namespaces) -> None:
    run(apart, reference, 60_000)  # opens every pair
    without = run(apart, reference, 61_000)
    num_before = num_said(apart, SAID_LOST)
    spaces.lose(LOST_PERCENT)
    lossy = run(apart, reference, 62_000)
    num_packets = spaces.num_lost()
    spaces.heal()
    apart.settle()
    print(f"without loss: {without}")
    print(f"{num_packets} packets lost: {lossy}; {num_said(apart, SAID_LOST) - num_before} workers taken as lost")
    assert num_packets > 100


@needs_namespaces
def test_workers_that_are_cut_off_again_and_again_lose_no_request(
    apart: Fleet, reference: Reference, spaces: Namespaces
) -> None:
    """In turn one, the other and both; short enough to be suspects alone, or until they are taken as lost."""
    processes = [psutil.Process(pid) for pid in (_pid(apart, name) for name in ("router", *apart.workers))]
    with load_of(apart, reference, 63_000) as load:
        load.wait_for_more(2 * BETWEEN_BLACKOUTS)
        num_files = [process.num_fds() for process in processes]
        for number in range(NUM_BLACKOUTS):
            cut_off(apart, spaces, VICTIMS[number % len(VICTIMS)], is_long=number % 2 == 1)
            load.wait_for_more(BETWEEN_BLACKOUTS)
    assert load.problems == []
    apart.settle()
    print(f"{load.num_done} requests, {NUM_BLACKOUTS} blackouts: {load.story()}")

    def files_left() -> list[int]:
        return [process.num_fds() - before for process, before in zip(processes, num_files, strict=True)]

    await_true(lambda: max(files_left()) <= 2, files_left)


def cut_off(fleet: Fleet, spaces: Namespaces, names: tuple[str, ...], *, is_long: bool) -> None:
    """Until the router suspects each of these workers, or has taken it as lost; then they are ready again."""
    where = {"prefill-0": spaces.near, "decode-0": spaces.far}
    what = SAID_LOST if is_long else SAID_SUSPECT
    num_before = num_said(fleet, what)
    spaces.cut_off(*(where[name] for name in names))
    await_true(lambda: num_said(fleet, what) >= num_before + len(names), fleet.client.status)
    assert spaces.num_lost() > 0
    if not is_long:
        assert {w.state for w in fleet.client.status().workers} == {admin_pb2.WorkerStatus.STATE_READY}
    spaces.heal()
    fleet.await_ready()


def _pid(fleet: Fleet, name: str) -> int:
    process = fleet.router if name == "router" else fleet[name].ranks[0]
    return process.popen.pid


def test_a_router_far_from_its_workers_takes_none_of_them_as_lost(fleet: Fleet, reference: Reference) -> None:
    """The workers of this fleet are taken as lost after 1 s."""
    assert float(FAST["dead_after_s"]) < 3 * 2 * MOST_DELAY_S
    num_before = num_said(fleet, SAID_LOST)
    with delayed([worker.address for worker in fleet.workers.values()], LEAST_DELAY_S, MOST_DELAY_S) as addresses:
        fleet.set_workers(fleet.workers, at=dict(zip(fleet.workers, addresses, strict=True)))
        try:
            fleet.await_ready()
            run(fleet, reference, 64_000)
            print(f"delayed by 50 to 200 ms each way: {run(fleet, reference, 65_000)}")
            fleet.settle()
            assert num_said(fleet, SAID_LOST) == num_before
        finally:
            fleet.set_workers(fleet.workers)
            fleet.await_ready()
