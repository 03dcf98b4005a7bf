"""A request whose worker is to fetch a prefix first: when it is sent, who waits with it, and what ends the wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_worker import PREFILL, failed, phase
from router_harness import ids
from wired_router import Client, ManualClock, WiredRouter, admit_of, cancelled, go_on, run

from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from router.routing.fetch_plan import LONGEST_S

SIZE = 2
HASHES = list(prefix_hashes(ids("hello"), SIZE, b""))


def caching(clock: ManualClock, *names: str, **settings: Any) -> WiredRouter:
    """The first decode worker has what can be cached of the prompt; the prefill workers have nothing of it."""
    router = WiredRouter(clock, names, **({"policy": "least_loaded", "prefix_fetch": "always"} | settings))
    for worker in router.workers.values():
        worker.lose()
        worker.open(block_size=SIZE, prefix_format="f")
        tell_cache(router, worker.worker_id, 1, HASHES if worker.worker_id == "d0" else [], snapshot=True)
    return router


def tell_cache(router: WiredRouter, worker_id: str, number: int, stored: list[bytes], **more: Any) -> None:
    events = worker_pb2.CacheEvents(sequence_number=number, stored=stored, **more)
    router.workers[worker_id].emit(worker_pb2.Event(cache=events))


def begin(router: WiredRouter) -> tuple[Client, worker_pb2.RequestKey]:
    """A request whose prefix p0 is told to fetch from d0, and the key of that."""
    client = router.submit()
    handed, taken = admit_of(router.workers["d0"]), admit_of(router.workers["p0"])
    assert handed.prefix_only and taken.prefix_only and handed.key == taken.key
    assert (handed.role, taken.role) == (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
    assert handed.decode_peer.worker_id == "p0" and taken.expect_handoff
    assert list(handed.prompt_token_ids) == list(taken.prompt_token_ids) == ids("hello")[: SIZE * len(HASHES)]
    return client, handed.key


def fetched(key: worker_pb2.RequestKey, num_tokens: int, num_before: int = 0) -> worker_pb2.Event:
    told = worker_pb2.Fetched(key=key, num_tokens=num_tokens, num_cached_tokens=num_before)
    return worker_pb2.Event(fetched=told)


def results(router: WiredRouter) -> dict[str, int]:
    return dict(router.dispatcher.counters.fetches)


def test_the_request_is_sent_when_its_prefix_has_come_and_its_timing_says_so() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "d0")
        client, key = begin(router)
        await clock.advance(0.1)
        assert not router.workers["p0"].take() and not router.workers["d0"].take()
        tell_cache(router, "p0", 2, HASHES)
        router.workers["p0"].emit(fetched(key, 4))
        own = admit_of(router.workers["p0"])
        assert not own.prefix_only and own.decode_peer.worker_id == "d0"
        assert admit_of(router.workers["d0"]).expect_handoff
        router.workers["p0"].emit(phase(own.key, PREFILL, 4))
        go_on(router, client, ("p0", "d0"))
        assert client.completed is not None and client.completed.timing.fetched_tokens == 0, "told anew, without any"
        assert results(router) == {"done": 1} and router.dispatcher.counters.fetched_tokens == 4
        assert not router.dispatcher.running.fetches

    run(scenario)


def test_cached_tokens_that_were_there_before_are_not_counted_as_fetched() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "d0")
        client, key = begin(router)
        router.workers["p0"].emit(fetched(key, 4, 2))
        own = admit_of(router.workers["p0"])
        router.workers["p0"].emit(phase(own.key, PREFILL, 4))
        assert (client.live.num_cached_tokens, client.live.num_fetched_tokens) == (4, 2)

    run(scenario)


def test_all_that_wait_for_the_same_prefix_wait_for_one_fetch() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "d0")
        first, key = begin(router)
        second = router.submit()
        assert not router.workers["p0"].take() and not router.workers["d0"].take()
        first.live.attempt.cancel()
        router.dispatcher.cancel(first.request_id, "its client left")
        assert cancelled(router.workers["p0"], key) == [], "another one still waits for it"
        router.workers["p0"].take()
        router.workers["p0"].emit(fetched(key, 4))
        assert admit_of(router.workers["p0"]).key.request_id == second.request_id
        assert results(router) == {"done": 1}

    run(scenario)


def late(router: WiredRouter, key: worker_pb2.RequestKey) -> None:
    """Time passes, below."""


def no_room(router: WiredRouter, key: worker_pb2.RequestKey) -> None:
    router.workers["p0"].emit(failed(key, worker_pb2.Failed.REASON_CAPACITY))


def evicted(router: WiredRouter, key: worker_pb2.RequestKey) -> None:
    router.workers["d1"].emit(failed(key, worker_pb2.Failed.REASON_CAPACITY))


def corrupt(router: WiredRouter, key: worker_pb2.RequestKey) -> None:
    router.workers["p0"].emit(failed(key, worker_pb2.Failed.REASON_CORRUPT))


def holder_lost(router: WiredRouter, key: worker_pb2.RequestKey) -> None:
    router.workers["d1"].lose()


@pytest.mark.parametrize(
    ("end", "result", "told"),
    [
        (late, "late", ("p0", "d1")),
        (no_room, "no_room", ("d1",)),
        (evicted, "evicted", ("p0",)),
        (corrupt, "failed", ("d1",)),
        (holder_lost, "worker_lost", ("p0",)),
    ],
)
def test_a_request_goes_on_at_once_when_its_fetch_fails(
    end: Callable[[WiredRouter, worker_pb2.RequestKey], None], result: str, told: tuple[str, ...]
) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "d0", "d1")
        tell_cache(router, "d0", 2, [], evicted=HASHES)
        tell_cache(router, "d1", 2, HASHES)
        client = router.submit()
        key = admit_of(router.workers["d1"]).key
        assert admit_of(router.workers["p0"]).prefix_only
        end(router, key)
        await clock.advance(LONGEST_S + 1 if end is late else 0)
        own = [c.admit for c in router.workers["p0"].take() if c.HasField("admit")]
        assert [admit.prefix_only for admit in own] == [False] and admit_of(router.workers["d0"]).expect_handoff
        router.workers["d1"].take()
        assert results(router) == {result: 1}
        for worker_id in told:
            assert cancelled(router.workers[worker_id], key) == [None]
        router.workers["p0"].emit(fetched(key, 4))  # too late: of nobody's
        go_on(router, client, ("p0", "d0"))

    run(scenario)


def test_a_request_that_ends_takes_its_fetch_along() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "d0")
        client, key = begin(router)
        router.dispatcher.cancel(client.request_id, "its client left")
        for worker_id in ("p0", "d0"):
            router.workers[worker_id].take()
            assert cancelled(router.workers[worker_id], key) == [None]
        assert results(router) == {"cancelled": 1} and not router.dispatcher.running.fetches
        router.check_idle()

    run(scenario)


def test_a_lost_target_is_replaced_and_its_fetch_with_it() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "p1", "d0")
        client, _ = begin(router)
        router.workers["p0"].lose()
        handed, taken = router.workers["d0"].take_admits()[-1], admit_of(router.workers["p1"])
        assert handed.prefix_only and taken.prefix_only and handed.decode_peer.worker_id == "p1"
        router.workers["p1"].emit(fetched(taken.key, 4))
        assert admit_of(router.workers["p1"]).key.request_id == client.request_id
        go_on(router, client, ("p1", "d0"))
        assert results(router) == {"worker_lost": 1, "done": 1}

    run(scenario)


def test_nothing_is_fetched_where_it_is_switched_off_or_for_prompts_that_share_nothing() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = caching(clock, "p0", "d0", prefix_fetch="off")
        router.submit()
        assert not admit_of(router.workers["p0"]).prefix_only
        router = caching(clock, "p0", "d0")
        router.submit(prompt_logprobs=0)
        assert not admit_of(router.workers["p0"]).prefix_only
        router = caching(clock, "p0", "d0", prefix_fetch="auto")
        router.submit()
        assert not admit_of(router.workers["p0"]).prefix_only, "what a step costs is not known yet"

    run(scenario)
