"""Another router goes on where the first one was lost; the store may lose everything, or be away, at any time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from author import ALONE, Author, Reading, again, resumable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_harness import Router, ids, refusal, running_router
from waiting import until_after

from benchmarks.redis_server import RedisServer, running_redis
from cluster.errors import Aborted, Cancelled, FailedPrecondition, NotFound, Unavailable
from cluster.file_store import FileStore
from cluster.pb import generation_pb2 as pb
from cluster.redis_store import RedisStore
from cluster.state import Claim, MemoryStore, Outcome, Store, StoreAway, Write

TEXT = "aéb🎉c ENDx"
STOP = ("END",)


@pytest.fixture(params=["memory", "file", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Called for each router: one content, however many stores."""
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "journal.db"))
    if request.param == "memory":
        shared = MemoryStore()
        return lambda: shared
    server: RedisServer = request.getfixturevalue("redis_of_session")
    return lambda: RedisStore(server.url)


@contextlib.asynccontextmanager
async def two_routers(folder: Path, author: Author, make_store: Callable[[], Store]) -> AsyncIterator[list[Router]]:
    """Over one worker and one store."""
    async with (
        running_router(folder, [author.worker], store=make_store(), **ALONE) as one,
        running_router(folder, [author.worker], store=make_store(), **ALONE) as two,
    ):
        yield [one, two]


@pytest.mark.parametrize("index", [0, 3, 7])
async def test_a_client_that_comes_to_another_router_gets_the_rest(
    tmp_path: Path, make_store: Callable[[], Store], index: int
) -> None:
    author = Author(TEXT)
    async with two_routers(tmp_path, author, make_store) as (one, two):
        undisturbed = await Reading.start(one, resumable(stop=STOP)).to_the_end()
        author.limit = 7
        first = Reading.start(one, resumable(stop=STOP))
        await first.until_tokens(7)
        await first.leave()
        rest = Reading.start(two, again(first.generation_id, index))
        await rest.until_tokens(7 - index) if index < 7 else await author.worker.next_admit()
        author.finish()
        await rest.to_the_end()
        admit = author.worker.admits[-1]
    assert [list(known.token_ids) for known in admit.known_tokens] == [ids(TEXT)[:7]], "told tokens were not journaled"
    assert admit.sampling == author.worker.admits[-2].sampling
    assert admit.key.attempt > 1, "an attempt of one router could be taken for one of another"
    assert rest.tokens[0] == undisturbed.tokens[0][index:]
    assert rest.logprobs[0] == undisturbed.logprobs[0][index:]
    assert undisturbed.texts[0].endswith(rest.texts.get(0, "")) and rest.ends == undisturbed.ends
    if index == 0:
        assert rest.texts == undisturbed.texts


class SlowStore(MemoryStore):
    """Answers after more time than a message may be felt to wait, and is shared by routers that outlive one another."""

    outlives_process = True

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        await asyncio.sleep(0.4)  # the time that its answer takes is what is looked at
        return await super().write(writes)


@pytest.mark.parametrize("has_ended", [False, True], ids=["while it runs", "when it has ended"])
async def test_what_a_client_has_been_told_can_be_resumed_however_slow_the_store(
    tmp_path: Path, has_ended: bool
) -> None:
    author, store = Author("hello", limit=5 if has_ended else 3), SlowStore()
    async with two_routers(tmp_path, author, lambda: store) as (one, two):
        first = Reading.start(one, resumable())
        await (first.to_the_end() if has_ended else first.until_tokens(3))
        assert first.resumable == [True]
        await first.leave()
        author.limit = 5
        rest = await Reading.start(two, again(first.generation_id, 2)).to_the_end()
    assert rest.texts == {0: "llo"}
    known = [list(tokens.token_ids) for admit in author.worker.admits[1:] for tokens in admit.known_tokens]
    assert known == [] if has_ended else [ids("hel")]


async def test_a_redis_that_stands_still_for_a_while_is_waited_for(tmp_path: Path, own_redis: RedisServer) -> None:
    author = Author("hello world", limit=3)
    async with two_routers(tmp_path, author, lambda: RedisStore(own_redis.url)) as (one, two):
        first = Reading.start(one, resumable())
        await first.until_tokens(3)
        own_redis.pause()
        asyncio.get_running_loop().call_later(0.6, own_redis.go_on)
        author.allow(6)
        await first.until_tokens(6)
        await first.leave()
        author.limit = 11
        await Reading.start(two, again(first.generation_id, 6)).to_the_end()
    assert first.resumable == [True]
    assert [list(known.token_ids) for known in author.worker.admits[1].known_tokens] == [ids("hello ")]


class HoldingStore(MemoryStore):
    """Deletes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_delete = asyncio.Event()

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        await self.may_delete.wait()
        await super().delete(keys)


async def test_what_is_cancelled_is_nobodys_before_its_record_is_gone(tmp_path: Path) -> None:
    author, store = Author("hello", limit=2), HoldingStore()
    async with running_router(tmp_path, [author.worker], store=store, **ALONE) as router:
        first = Reading.start(router, resumable())
        await first.until_tokens(2)
        request = pb.CancelGenerationRequest(generation_ids=[first.generation_id])
        assert list((await router.generation.CancelGeneration(request)).cancelled_ids) == [first.generation_id]
        assert isinstance(await refusal(Reading.start(router, again(first.generation_id, 0)).to_the_end()), NotFound)
        store.may_delete.set()


class RefusingStore(MemoryStore):
    """Refuses while it is told to."""

    outlives_process = True
    is_refusing = False

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        await self.probe()
        return await super().write(writes)

    async def probe(self) -> None:
        if self.is_refusing:
            raise StoreAway("refused")


async def test_a_stream_says_when_it_would_end_with_its_router_and_when_not_any_more(tmp_path: Path) -> None:
    text = 40 * "hello "
    author, store = Author(text, limit=1), RefusingStore()
    store.is_refusing = True
    async with running_router(tmp_path, [author.worker], store=store, **ALONE) as router:
        first = Reading.start(router, resumable(stopping=pb.StoppingCriteria(max_output_tokens=len(text))))
        await first.until_tokens(1)
        assert first.resumable == [False]
        guard = router.server.generation.resumables._journal._store
        store.is_refusing = False
        await until_after(guard, "on_back", lambda: not guard.is_away)
        count = 1
        while first.resumable == [False]:
            author.allow(count := count + 1)
            await first.until_tokens(count)
        store.is_refusing = True
        author.allow(count + 1)
        await first.until_tokens(count + 1)
        assert first.resumable == [False, True, False]
        author.finish()
        assert (await first.to_the_end()).texts == {0: text}


async def test_a_stream_in_memory_says_that_it_ends_with_its_router(tmp_path: Path) -> None:
    async with running_router(tmp_path, [(author := Author("hello")).worker], **ALONE) as router:
        assert (await Reading.start(router, resumable()).to_the_end()).resumable == [False]
        spec = resumable()
        spec.ClearField("resume")
        assert (await Reading.start(router, spec).to_the_end()).resumable == [], "nobody asked"
        assert len(author.worker.admits) == 2


async def test_a_router_that_lost_a_generation_cancels_its_run(tmp_path: Path, make_store: Callable[[], Store]) -> None:
    author = Author("hello world", limit=3)
    async with two_routers(tmp_path, author, make_store) as (one, two):
        first = Reading.start(one, resumable())
        await first.until_tokens(3)
        second = Reading.start(two, again(first.generation_id, 3))
        await author.worker.next_admit()
        while len(author.worker.admits) < 2:
            await author.worker.next_admit()
        author.allow(5)
        assert isinstance(await refusal(first.to_the_end()), Aborted)
        cancel = await author.worker.next_cancel()
        assert cancel.key == author.worker.admits[0].key
        author.finish()
        await second.to_the_end()
    assert second.texts == {0: "lo world"}


async def test_what_has_ended_is_told_by_another_router_without_a_worker(
    tmp_path: Path, make_store: Callable[[], Store]
) -> None:
    author = Author("hello", "wor")
    async with two_routers(tmp_path, author, make_store) as (one, two):
        first = await Reading.start(one, resumable(2)).to_the_end()
        rest = await Reading.start(two, again(first.generation_id, 2)).to_the_end()
    assert rest.texts == {0: "llo", 1: "r"} and rest.ends == first.ends
    assert len(author.worker.admits) == 1


async def test_a_cancelled_generation_is_nobodys(tmp_path: Path, make_store: Callable[[], Store]) -> None:
    """Told to the router that does not run it."""
    author = Author("hello", limit=2)
    async with two_routers(tmp_path, author, make_store) as (one, two):
        first = Reading.start(one, resumable())
        await first.until_tokens(2)
        request = pb.CancelGenerationRequest(generation_ids=[first.generation_id])
        assert list((await two.generation.CancelGeneration(request)).cancelled_ids) == [first.generation_id]
        author.allow(4)
        error = await refusal(first.to_the_end())
        assert isinstance(error, Cancelled) and "CancelGeneration" in error.message
        assert first.ends[0].finish_reason == pb.FINISH_REASON_CANCELLED
        await author.worker.next_cancel()
        for router in (one, two):
            resumed = Reading.start(router, again(first.generation_id, 0))
            assert isinstance(await refusal(resumed.to_the_end()), NotFound)


async def test_other_weights_do_not_go_on(tmp_path: Path) -> None:
    author, store = Author("hello", limit=2), MemoryStore()
    async with two_routers(tmp_path, author, lambda: store) as (one, two):
        serve_weights(one, "a"), serve_weights(two, "b")
        first = Reading.start(one, resumable())
        await first.until_tokens(2)
        resumed = Reading.start(two, again(first.generation_id, 0))
        error = await refusal(resumed.to_the_end())
        assert isinstance(error, FailedPrecondition) and "weights of revision a" in error.message
        author.finish()
        assert (await first.to_the_end()).texts == {0: "hello"}, "a refused resume disturbed it"
        whole = await Reading.start(two, again(first.generation_id, 0)).to_the_end()
        assert whole.texts == {0: "hello"}, "what is complete needs no weights"


async def test_before_its_first_token_a_generation_goes_on_with_any_weights(tmp_path: Path) -> None:
    author, store = Author("hello", limit=0), MemoryStore()
    async with two_routers(tmp_path, author, lambda: store) as (one, two):
        serve_weights(one, "a"), serve_weights(two, "b")
        first = Reading.start(one, resumable())
        await author.worker.next_admit()
        await first.until_started()
        resumed = Reading.start(two, again(first.generation_id, 0))
        await author.worker.next_admit()
        author.finish()
        assert (await resumed.to_the_end()).texts == {0: "hello"}
        assert isinstance(await refusal(first.to_the_end()), Aborted)


def serve_weights(router: Router, revision: str) -> None:
    """Has a router take its worker for one of these weights."""
    for worker in router.server.dispatcher.fleet:
        worker.weights_revision = revision


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flushes=st.sets(st.integers(0, 11)), leaves_at=st.integers(1, 11), held=st.integers(0, 11))
def test_a_store_that_forgets_between_any_two_messages_is_told_again(
    tmp_path_factory: pytest.TempPathFactory, flushes: set[int], leaves_at: int, held: int
) -> None:
    """As long as one message came after the last loss, nothing is missing."""

    async def play() -> None:
        author, store = Author("hello world", limit=0), MemoryStore()
        async with two_routers(tmp_path_factory.mktemp("model"), author, lambda: store) as (one, two):
            first = Reading.start(one, resumable())
            for count in range(1, leaves_at + 1):
                if count - 1 in flushes:
                    store._logs.clear()
                author.allow(count)
                await first.until_tokens(count)
            await first.leave()
            author.limit = 0
            rest = Reading.start(two, again(first.generation_id, min(held, leaves_at)))
            while len(author.worker.admits) < 2 and leaves_at < 11:
                await author.worker.next_admit()
            author.finish()
            await rest.to_the_end()
            if leaves_at < 11:
                (known,) = author.worker.admits[1].known_tokens
                assert list(known.token_ids) == ids("hello world")[:leaves_at]
            assert rest.texts.get(0, "") == "hello world"[min(held, leaves_at) :]

    asyncio.run(play())


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


FAULTS: dict[str, Callable[[RedisServer], None]] = {
    "killed": RedisServer.kill,
    "flushed": RedisServer.flush,
    "stopped": RedisServer.pause,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_stream_fails_whatever_happens_to_redis(tmp_path: Path, own_redis: RedisServer, fault: str) -> None:
    author = Author("hello world", limit=3)
    async with running_router(tmp_path, [author.worker], state=own_redis.url, **ALONE) as router:
        streams = [Reading.start(router, resumable()) for _ in range(8)]
        for stream in streams:
            await stream.until_tokens(3)
        FAULTS[fault](own_redis)
        author.allow(6)
        for stream in streams:
            await stream.until_tokens(6)
        late = Reading.start(router, resumable())
        await late.until_tokens(6)
        author.finish()
        for stream in [*streams, late]:
            assert (await stream.to_the_end()).texts == {0: "hello world"}


async def test_a_client_ahead_of_the_journal_is_told_nothing_twice(tmp_path: Path, own_redis: RedisServer) -> None:
    """Redis was away while it was told; what it holds is generated again, and not told."""
    author = Author("hello world", limit=3)
    async with running_router(tmp_path, [author.worker], state=own_redis.url, **ALONE) as one:
        first = Reading.start(one, resumable())
        await first.until_tokens(3)
        own_redis.pause()
        author.allow(4)
        await first.until_tokens(4)
        author.allow(6)
        await first.until_tokens(6)
        async with running_router(tmp_path, [author.worker], state=own_redis.url, **ALONE) as two:
            away = await refusal(Reading.start(two, again(first.generation_id, 6)).to_the_end())
            assert isinstance(away, Unavailable) and away.retry_after_s
        await one.server.stop()
        own_redis.go_on()
        author.limit = 0
        async with running_router(tmp_path, [author.worker], state=own_redis.url, **ALONE) as three:
            rest = Reading.start(three, again(first.generation_id, 6))
            while len(author.worker.admits) < 2:
                await author.worker.next_admit()
            author.finish()
            await rest.to_the_end()
    (known,) = author.worker.admits[1].known_tokens
    assert 3 <= len(known.token_ids) < 6, "the journal has what was told while Redis stood still"
    assert (rest.texts, rest.first) == ({0: "world"}, {0: 6})


async def test_what_a_store_missed_is_there_when_it_is_back(tmp_path: Path, own_redis: RedisServer) -> None:
    author = Author("hello world", limit=3)
    async with running_router(tmp_path, [author.worker], state=own_redis.url, **ALONE) as one:
        first = Reading.start(one, resumable())
        await first.until_tokens(3)
        own_redis.kill()
        author.allow(6)
        await first.until_tokens(6)
        own_redis.start()
        store = RedisStore(own_redis.url)
        async with asyncio.timeout(20):
            while await store.read(first.generation_id) is None:
                pass
        await store.close()
        async with running_router(tmp_path, [author.worker], state=own_redis.url, **ALONE) as two:
            rest = Reading.start(two, again(first.generation_id, 2))
            await rest.until_tokens(4)
            author.finish()
            assert (await rest.to_the_end()).texts == {0: "llo world"}
    assert [list(known.token_ids) for known in author.worker.admits[1].known_tokens] == [ids("hello ")]
