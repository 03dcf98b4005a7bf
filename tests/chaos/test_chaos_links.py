"""A link that drops or resets while KV is on its way, between two network namespaces; another path stays.

prefill-0 reaches decode-0 only over that link, prefill-1 over another; the router reaches all. What the link does is
shown by the counters of its rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from chaos_fleet import FAST, Fleet, Measured, await_true
from chaos_reference import Reference
from chaos_states import LONG_TOKENS, OUTPUT_TOKENS, POOL_TOKENS, SHORT_TOKENS, WORKERS, prompt_of
from cluster_fixture import Stream
from namespaces import Namespaces, missing

SKIP = missing()
pytestmark = [pytest.mark.battery, pytest.mark.skipif(bool(SKIP), reason=SKIP)]

NEAR, FAR, OTHER = "prefill-0", "decode-0", "prefill-1"
BOUND_S = 4 * max(float(FAST["dead_after_s"]), 2 * float(FAST["transfer_timeout_s"]))
"""A request that loses its link ends within it."""


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    with Namespaces() as spaces:
        yield spaces


@pytest.fixture(scope="module")
def _linked(spaces: Namespaces, measured: Measured) -> Iterator[Fleet]:
    places = {
        NEAR: {"namespace": spaces.near, "host": spaces.near_host},
        FAR: {"namespace": spaces.far, "host": spaces.far_host},
        OTHER: {"host": spaces.here_host},
    }
    common = {**WORKERS, **FAST, "kv_cache_tokens": POOL_TOKENS, "insecure": True}
    with Fleet(places, common, measured) as fleet:
        yield fleet


@pytest.fixture
def linked(_linked: Fleet, spaces: Namespaces) -> Iterator[Fleet]:
    yield _linked
    spaces.heal()
    _linked.repair()


def hand_over(fleet: Fleet, reference: Reference, seed: int) -> None:
    """A request that goes the whole way over the link, and warms its pair."""
    sent = fleet[NEAR].ask().kv_bytes_sent
    prompt = prompt_of(seed, SHORT_TOKENS)
    check(fleet.submit(prompt, OUTPUT_TOKENS), prompt, reference)
    assert fleet[NEAR].ask().kv_bytes_sent > sent


def check(stream: Stream, prompt: list[int], reference: Reference) -> None:
    assert stream.ends_within(BOUND_S)
    stream.result()
    assert stream.token_ids() == reference(prompt, OUTPUT_TOKENS)


def drop_data(spaces: Namespaces, fleet: Fleet) -> None:
    spaces.drop_data(fleet[FAR].port)


def hold_in_flight(fleet: Fleet, spaces: Namespaces, seed: int) -> tuple[Stream, list[int]]:
    """A request whose chunks are granted and never arrive: their packets are dropped."""
    drop_data(spaces, fleet)
    prompt = prompt_of(seed, LONG_TOKENS)
    stream = fleet.submit(prompt, OUTPUT_TOKENS, include_timing=True)
    await_true(lambda: fleet[FAR].slots("receive", "posted") > 0, fleet[FAR].metrics)
    await_true(lambda: spaces.num_hit() > 0, spaces.num_hit)
    return stream, prompt


def keep_dropping(spaces: Namespaces) -> None:
    """The data alone goes on being dropped: both workers hear of one another, and nothing arrives."""


FAULTS: dict[str, tuple[Callable[[Namespaces], None], str]] = {
    "data-dropped": (keep_dropping, "Timed out"),
    "all-dropped": (Namespaces.drop_all, "silent|Timed out"),
    "reset": (Namespaces.reset, "Connection reset by peer"),
}
"""Each with what the workers say of it, one or the other."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_link_that_fails_in_mid_transfer_sends_the_request_another_way(
    linked: Fleet, reference: Reference, spaces: Namespaces, name: str
) -> None:
    fault, noticed = FAULTS[name]
    seed = 30_000 + 10 * list(FAULTS).index(name)
    hand_over(linked, reference, seed)
    stream, prompt = hold_in_flight(linked, spaces, seed + 1)
    num_hit, already_said = spaces.num_hit(), said(linked)
    fault(spaces)
    check(stream, prompt, reference)
    assert stream.timing().placement.startswith(("retried", "local prefill"))
    assert spaces.num_hit() > num_hit
    news = [now.removeprefix(before) for now, before in zip(said(linked), already_said, strict=True)]
    assert any(re.search(noticed, each) for each in news), news
    spaces.heal()
    linked.settle()
    hand_over(linked, reference, seed + 2)
    linked.settle()


def said(fleet: Fleet) -> list[str]:
    """By the workers at both ends of the link."""
    return [fleet[name].ranks[0].stderr() for name in (NEAR, FAR)]


def test_a_pair_that_cannot_open_sends_the_request_another_way(
    linked: Fleet, reference: Reference, spaces: Namespaces
) -> None:
    linked.restart(NEAR)  # so that no pair is open
    linked.await_ready()
    drop_data(spaces, linked)
    prompt = prompt_of(31_000, LONG_TOKENS)
    check(linked.submit(prompt, OUTPUT_TOKENS), prompt, reference)
    assert spaces.num_hit() > 0
    spaces.heal()
    linked.settle()
    hand_over(linked, reference, 31_001)
    linked.settle()


def test_without_another_path_the_decode_worker_prefills_itself(
    linked: Fleet, reference: Reference, spaces: Namespaces
) -> None:
    hand_over(linked, reference, 32_000)
    linked.set_workers([NEAR, FAR])
    try:
        stream, prompt = hold_in_flight(linked, spaces, 32_001)
        check(stream, prompt, reference)
    finally:
        linked.set_workers(linked.workers)
    assert stream.timing().placement.startswith("local prefill")
    spaces.heal()
    linked.await_ready()
    linked.settle()
    hand_over(linked, reference, 32_002)
    linked.settle()
