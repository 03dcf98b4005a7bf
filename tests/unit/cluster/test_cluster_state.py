"""The stores: logs with one writer each. What holds for one in memory holds for a file and for Redis."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.redis_server import RedisServer, running_redis
from cluster.file_store import FileStore
from cluster.redis_store import RedisStore
from cluster.state import Claim, Guard, Log, MemoryStore, Outcome, Store, StoreAway, Write

A, B = Claim("a", 1), Claim("b", 2)
TTL_S = 60.0


def write(key: str, number: int, data: bytes = b"x", *, claim: Claim = A, is_whole: bool = False) -> Write:
    return Write(key, claim, number, data, is_whole, TTL_S)


@pytest.fixture(params=["memory", "file", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Called in the test's own event loop."""
    if request.param == "memory":
        return MemoryStore
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "journal.db"))
    server: RedisServer = request.getfixturevalue("redis_of_session")
    return lambda: RedisStore(server.url)


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


async def test_a_log_is_what_was_written_in_its_order(make_store: Callable[[], Store], key: str) -> None:
    store = make_store()
    outcomes = await store.write([write(key, 1, b"a\0\xff", is_whole=True), write(key, 2, b"b"), write(key, 3, b"")])
    assert outcomes == [Outcome.DONE] * 3
    assert await store.read(key) == Log(A, 3, (b"a\0\xff", b"b"))
    assert await store.read(key + "other") is None
    await store.close()


async def test_an_append_to_what_is_not_there_is_missing(make_store: Callable[[], Store], key: str) -> None:
    store = make_store()
    assert await store.write([write(key, 1)]) == [Outcome.MISSING]
    assert await store.write([write(key, 2, is_whole=True), write(key, 4)]) == [Outcome.DONE, Outcome.MISSING]
    assert await store.read(key) == Log(A, 2, (b"x",))
    await store.close()


async def test_a_write_that_comes_late_changes_nothing(make_store: Callable[[], Store], key: str) -> None:
    store = make_store()
    await store.write([write(key, 5, b"new", is_whole=True)])
    late = [write(key, 4, b"old", is_whole=True), write(key, 5, b"old")]
    assert await store.write(late) == [Outcome.MISSING, Outcome.MISSING]
    assert await store.read(key) == Log(A, 5, (b"new",))
    await store.close()


async def test_whoever_lost_a_log_is_fenced(make_store: Callable[[], Store], key: str) -> None:
    store = make_store()
    await store.write([write(key, 1, is_whole=True)])
    assert not await store.take(key, Claim("c", 1), B, TTL_S)
    assert await store.take(key, A, B, TTL_S)
    assert not await store.take(key, A, Claim("c", 2), TTL_S), "it was taken twice"
    assert await store.write([write(key, 2), write(key, 3, is_whole=True)]) == [Outcome.FENCED, Outcome.FENCED]
    assert await store.write([write(key, 1, b"y", claim=B)]) == [Outcome.DONE]
    await store.delete([(key, A)])
    assert await store.read(key) == Log(B, 1, (b"x", b"y"))
    await store.delete([(key, B)])
    assert await store.read(key) is None
    await store.close()


async def test_a_log_ends_by_itself_and_lives_on_with_each_write(redis_of_session: RedisServer, key: str) -> None:
    now = 0.0
    store = MemoryStore(lambda: now)
    await store.write([write(key, 1, is_whole=True)])
    now = 59.0
    await store.write([write(key, 2, b"")])
    now = 118.0
    assert await store.read(key) == Log(A, 2, (b"x",))
    now = 119.0
    assert await store.read(key) is None
    await store.write([write("another", 1, is_whole=True)])
    assert list(store._logs) == ["another"], "what has ended is kept"

    real = RedisStore(redis_of_session.url)
    await real.write([Write(key, A, 1, b"x", True, 60.0)])
    assert 59_000 < await real._client.pttl("baton:log:" + key) <= 60_000
    await real.close()


OWNERS = st.builds(Claim, st.sampled_from(["a", "b"]), st.integers(1, 3))
STEPS = st.lists(
    st.one_of(
        st.builds(Write, st.just("k"), OWNERS, st.integers(1, 4), st.sampled_from([b"", b"1", b"2"]), st.booleans(),
                  st.just(TTL_S)),
        st.tuples(st.just("take"), OWNERS, OWNERS),
        st.tuples(st.just("delete"), OWNERS),
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_redis_and_memory_say_the_same(redis_of_session: RedisServer, steps: list[object]) -> None:
    async def play(store: Store, key: str) -> list[object]:
        told: list[object] = []
        for step in steps:
            match step:
                case Write():
                    own = Write(key, step.claim, step.number, step.data, step.is_whole, step.ttl_s)
                    told += await store.write([own])
                case ("take", held, wanted):
                    told.append(await store.take(key, held, wanted, TTL_S))
                case ("delete", claim):
                    await store.delete([(key, claim)])
            told.append(await store.read(key))
        await store.close()
        return told

    key = uuid.uuid4().hex
    assert asyncio.run(play(MemoryStore(), key)) == asyncio.run(play(RedisStore(redis_of_session.url), key))


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def test_a_redis_that_started_again_is_written_to_again(own_redis: RedisServer, key: str) -> None:
    """It does not know the scripts any more."""
    store = RedisStore(own_redis.url)
    assert await store.write([write(key, 1, is_whole=True)]) == [Outcome.DONE]
    own_redis.kill()
    with pytest.raises(StoreAway):
        await store.write([write(key, 2)])
    own_redis.start()
    assert await store.write([write(key, 3), write(key, 4, is_whole=True)]) == [Outcome.MISSING, Outcome.DONE]
    await store.close()


@dataclass
class FaultyStore(MemoryStore):
    """Hangs or refuses while it is told to."""

    num_calls: int = 0
    is_hanging: bool = False
    is_refusing: bool = False
    probed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__()

    async def write(self, writes: object) -> list[Outcome]:
        await self._suffer()
        return []

    async def probe(self) -> None:
        self.probed.set()
        await self._suffer()

    async def _suffer(self) -> None:
        self.num_calls += 1
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.is_refusing:
            raise StoreAway("refused")


@pytest.mark.parametrize("fault", ["is_hanging", "is_refusing"])
async def test_a_store_that_fails_is_left_alone_until_a_probe_succeeds(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, back = FaultyStore(), asyncio.Event()
    guard = Guard(store, back.set, timeout_s=0.01)
    setattr(store, fault, True)
    for _ in range(3):
        with pytest.raises(StoreAway):
            await guard.write([])
    assert guard.is_away and store.num_calls == 1, "it was asked although it is away"
    await store.probed.wait()
    setattr(store, fault, False)
    await asyncio.wait_for(back.wait(), 20)
    assert not guard.is_away and await guard.write([]) == []
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "the state store is away",
        "the state store is back",
    ]
    await guard.close()


class ThreadedStore(MemoryStore):
    """Its answer comes from a thread, whatever the loop does."""

    async def probe(self) -> None:
        await asyncio.to_thread(time.sleep, 0.01)  # longer than the first turn of the loop


async def test_a_loop_that_stands_still_does_not_take_the_store_for_gone() -> None:
    guard = Guard(ThreadedStore(), timeout_s=0.1)
    call = asyncio.create_task(guard.probe())
    await asyncio.sleep(0)
    time.sleep(0.5)  # the loop stands still for longer than a call may take
    await call
    assert not guard.is_away
    await guard.close()


async def test_a_stopped_redis_costs_one_call_its_time_and_is_used_again_when_it_goes_on(
    own_redis: RedisServer, key: str
) -> None:
    back = asyncio.Event()
    guard = Guard(RedisStore(own_redis.url), back.set)
    assert await guard.write([write(key, 1, b"1", is_whole=True)]) == [Outcome.DONE]
    own_redis.pause()
    for _ in range(2):
        with pytest.raises(StoreAway):
            await guard.write([write(key, 2, b"late")])
    own_redis.go_on()
    await asyncio.wait_for(back.wait(), 20)
    assert await guard.write([write(key, 3, b"2", is_whole=True)]) == [Outcome.DONE]
    assert await guard.read(key) == Log(A, 3, (b"2",)), "a write that was given up came late and counted"
    await guard.close()
