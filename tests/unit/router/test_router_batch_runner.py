"""Batches from status to status: retries, cancels, time that is over, and routers that die in the middle."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_world import ENDPOINT, LEASE_S, OK, WatchedStore, World

from cluster.state import StoreAway
from router.batches.lines import LineResult, write_results
from router.batches.runner import MOST_FAILURES, MOST_OF_A_TENANT, BatchRunner
from router.batches.store import Batch, BatchClaim, LineAnswer, StoredRecord


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    store = WatchedStore(str(tmp_path / "b.db"))
    yield World(store)
    await store.close()


async def test_a_batch_ends_with_each_line_answered_in_its_order(world: World) -> None:
    world.replies["b"] = [LineResult(400, {"error": {"message": "no"}})]
    await world.add("a", "b", "c")
    async with world.running():
        batch = await world.over()
        await world.until_answered(lambda numbers: not numbers)  # they are dropped once the batch is over
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 3, 2, 1)
    good, bad = await world.lines(batch.output_file_id), await world.lines(batch.error_file_id)
    assert [line["custom_id"] for line in good] == ["c-a", "c-c"] and good[0]["error"] is None
    assert good[0]["response"] == {"status_code": 200, "request_id": good[0]["id"], "body": OK.body}
    assert [(line["custom_id"], line["response"]["status_code"]) for line in bad] == [("c-b", 400)]
    assert batch.usage is not None
    assert (batch.usage["total_tokens"], batch.usage["input_tokens_details"]["cached_tokens"]) == (10, 2)
    assert list(batch.reached) == ["in_progress", "finalizing", "completed"]
    assert world.counts == {"completed": 2, "failed": 1}
    assert await world.store.answered("batch_1") == frozenset()


async def test_a_batch_whose_lines_all_fail_has_no_output_file(world: World) -> None:
    world.replies["a"] = [LineResult(400, {})]
    await world.add("a")
    async with world.running():
        batch = await world.over()
    assert (batch.status, batch.output_file_id) == ("completed", None) and batch.error_file_id is not None


async def test_a_file_that_is_wrong_fails_the_batch_and_runs_nothing(world: World) -> None:
    await world.add(raw=b'{"custom_id": "a"}\nnothing\n')
    async with world.running():
        batch = await world.over()
    assert batch.status == "failed" and [problem["line"] for problem in batch.problems] == [1, 2]
    assert not world.runs


async def test_what_is_refused_for_load_is_tried_again_for_as_long_as_it_takes(world: World) -> None:
    refused = LineResult(429, {}, 1e-6, is_refusal=True)
    world.replies["a"] = [refused] * (3 * MOST_FAILURES)
    await world.add("a")
    async with world.running():
        batch = await world.over()
    assert (batch.completed, world.runs["a"], world.counts["retried"]) == (1, 31, 30)


async def test_a_line_that_workers_are_lost_with_is_answered_with_that_in_the_end(world: World) -> None:
    world.replies["a"] = [LineResult(503, {"error": {}}, 1e-6)] * 99
    await world.add("a", "b")
    async with world.running():
        batch = await world.over()
    assert (batch.completed, batch.failed, world.runs["a"]) == (1, 1, MOST_FAILURES)
    assert (await world.lines(batch.error_file_id))[0]["response"]["status_code"] == 503


async def test_no_more_lines_run_than_there_is_capacity_for_and_batches_take_turns(world: World) -> None:
    first, second = [f"a{n}" for n in range(30)], [f"b{n}" for n in range(30)]
    world.most, world.holds = 2, {*first, *second}
    await world.add(*first, batch_id="batch_1", tenant="acme")
    await world.add(*second, batch_id="batch_2", tenant="other")

    def two_running() -> list[str]:
        running = [prompt for prompt in world.runs if prompt in world.holds]
        assert len(running) <= 2
        return running if len(running) == 2 else []

    async with world.running():
        seen: list[str] = []
        while len(seen) < 20:
            running = await world.changes.until(two_running)
            if {prompt[0] for prompt in world.runs} == {"a", "b"}:  # both batches have been taken up
                seen.append(running[0][0])
            world.free(running[0])
        assert abs(seen.count("a") - seen.count("b")) <= 4
        world.free()
        assert (await world.over("batch_1")).completed == 30
        assert (await world.over("batch_2", "other")).completed == 30
    assert world.most_at_once == 2


async def test_who_is_refused_leaves_the_place_to_others_meanwhile(world: World) -> None:
    world.most, world.replies = 1, {"a": [LineResult(429, {}, 30.0, is_refusal=True)]}
    await world.add("a", batch_id="batch_1")
    await world.add("b", batch_id="batch_2", tenant="other")
    async with world.running():
        assert (await world.over("batch_2", "other")).completed == 1
        assert (await world.batch("batch_1")).status == "in_progress" and world.runs == {"a": 1, "b": 1}


async def test_one_tenants_many_batches_do_not_keep_anothers_from_being_worked_on(world: World) -> None:
    world.holds = {"a"}
    for number in range(MOST_OF_A_TENANT + 3):
        await world.add("a", batch_id=f"batch_{number}")
    await world.add("b", batch_id="batch_other", tenant="other")
    world.most = 100
    async with world.running() as runner:
        assert (await world.over("batch_other", "other")).completed == 1
        assert sum(held.batch.tenant == "acme" for held in runner._held.values()) == MOST_OF_A_TENANT
        world.free()
        for number in range(MOST_OF_A_TENANT + 3):
            assert (await world.over(f"batch_{number}")).completed == 1


async def test_a_cancelled_batch_tells_what_was_answered_and_what_was_not(world: World) -> None:
    world.holds = {"b"}
    await world.add("a", "b")
    async with world.running() as runner:
        await world.until_answered(lambda numbers: numbers == {1})
        await world.cancel()
        runner.wake("batch_1")
        batch = await world.over()
    assert (batch.status, batch.completed, batch.failed) == ("cancelled", 1, 0)
    assert [line["custom_id"] for line in await world.lines(batch.output_file_id)] == ["c-a"]
    left = await world.lines(batch.error_file_id)
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in left] == [
        ("c-b", None, "batch_cancelled")
    ]


async def test_a_cancel_at_another_router_is_heard_of(world: World) -> None:
    world.holds = {"a"}
    await world.add("a")
    async with world.running():
        await world.until(lambda batch: batch.status == "in_progress")
        await world.cancel()
        assert (await world.over()).status == "cancelled"


async def test_a_batch_that_was_cancelled_before_anybody_looked_runs_nothing(world: World) -> None:
    await world.add(raw=b"x" * 5000)
    await world.cancel()
    async with world.running():
        batch = await world.over()
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", None, None)


async def test_what_runs_when_the_time_is_over_is_dropped_and_told_to_have_expired(world: World) -> None:
    world.holds = {"a"}
    await world.add("a", expires_at=int(time.time()) + 1)
    async with world.running():
        batch = await world.over()
    assert (batch.status, batch.completed, batch.output_file_id) == ("expired", 0, None)
    assert [line["error"]["code"] for line in await world.lines(batch.error_file_id)] == ["batch_expired"]


async def test_what_was_answered_before_the_time_was_over_is_told(world: World) -> None:
    world.holds = {"b"}
    await world.add("a", "b", "c")
    async with world.running():
        await world.until_answered(lambda numbers: numbers == {1, 3})
    record = await world.store.find("batch", "acme", "batch_1")
    assert record is not None
    past = replace(Batch.from_json(record.data), expires_at=int(time.time()) - 1)
    assert await world.store.replace(replace(record, data=past.to_json()))
    async with world.running():
        batch = await world.over()
    assert (batch.status, batch.completed, batch.failed, world.runs["b"]) == ("expired", 2, 0, 1)
    assert [line["custom_id"] for line in await world.lines(batch.output_file_id)] == ["c-a", "c-c"]
    assert [line["custom_id"] for line in await world.lines(batch.error_file_id)] == ["c-b"]


async def test_a_file_that_is_gone_fails_its_batch(world: World) -> None:
    await world.add("a")
    await world.store.remove("file", "acme", "file-batch_1")
    async with world.running():
        batch = await world.over()
    assert batch.status == "failed" and batch.problems[0]["code"] == "input_file_gone"


async def test_another_router_goes_on_from_the_answers_of_one_that_died(world: World) -> None:
    prompts = [f"p{n}" for n in range(12)]
    world.holds = set(prompts[6:])
    await world.add(*prompts)
    dead = world.runner()
    dead.start()
    await world.until_answered(lambda numbers: len(numbers) >= 6)
    for task in list(dead._tasks):  # nothing is given back
        task.cancel()
    world.free()
    async with world.running():
        batch = await world.over()
    assert (batch.status, batch.completed) == ("completed", 12)
    assert [line["custom_id"] for line in await world.lines(batch.output_file_id)] == [f"c-{p}" for p in prompts]
    assert {prompt: world.runs[prompt] for prompt in prompts[:6]} == dict.fromkeys(prompts[:6], 1)


def lose(router: BatchRunner) -> None:
    """As a lost process: nothing is given back."""
    for task in list(router._tasks):
        task.cancel()


async def test_a_line_with_which_two_routers_are_lost_is_answered_with_that_and_no_other_line_is(world: World) -> None:
    prompts = ["a", "poison", "b", "c"]
    world.holds = set(prompts)
    await world.add(*prompts)
    first = world.runner()
    first.start()
    await world.changes.until(lambda: sum(world.runs.values()) >= len(prompts))
    lose(first)
    world.holds = {"poison"}
    second = world.runner()
    second.start()
    await world.changes.until(lambda: world.runs["poison"] >= 2)
    assert await world.store.answered("batch_1") <= {1}, "it is computed beside no other line"
    lose(second)
    async with world.running():
        batch = await world.over()
    assert (batch.status, batch.completed, batch.failed, world.runs["poison"]) == ("completed", 3, 1, 2)
    (bad,) = await world.lines(batch.error_file_id)
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == ("c-poison", None, "router_lost")
    assert bad["error"]["message"].startswith("2 routers were lost while they computed this line")


async def test_lines_of_a_router_that_lives_do_not_count_as_lost(world: World) -> None:
    """It stops three times, and is refused three times."""
    world.holds = {"a"}
    await world.add("a")
    for number in range(1, 4):
        async with world.running(lease_s=60.0):
            await world.changes.until(lambda number=number: world.runs["a"] >= number)
    world.free()
    world.replies["a"] = [LineResult(429, {}, 1e-6, is_refusal=True)] * 3
    async with world.running():
        assert (await world.over()).completed == 1


async def test_one_that_stands_still_and_comes_back_changes_nothing(world: World) -> None:
    """Its claim is over, and its answer comes late."""
    world.holds = {"a"}
    await world.add("a")
    async with world.running() as slow:
        await world.began.wait()
        world.store.renew = _never  # type: ignore[method-assign]  # it hears nothing of the store for a while
        claim = next(iter(slow._held.values())).claim
        world.store.ahead_s = 2 * LEASE_S
        found = await world.store.claim("other", 60.0)
        assert found is not None
        assert await world.store.answer(found[0], LineAnswer(1, True, b"theirs"))
        world.free()
        await world.until_let_go(slow)
        assert claim.epoch < found[0].epoch
        assert [each.data for each in await world.store.answers("batch_1", [1])] == [b"theirs"]


async def test_one_that_stood_still_while_it_wrote_the_result_spoils_nothing(world: World) -> None:
    """Another one has ended the batch and dropped its answers; what is read now would be that nobody answered."""
    world.replies["b"] = [LineResult(400, {})]
    await world.add("a", "b")
    read, goes_on = world.store.answers, asyncio.Event()

    async def late(batch_id: str, numbers: Sequence[int]) -> list[LineAnswer]:
        await goes_on.wait()
        return await read(batch_id, numbers)

    world.store.answers = late  # type: ignore[method-assign]
    async with world.running() as slow:
        await world.until(lambda batch: batch.status == "finalizing")
        world.store.renew = _never  # type: ignore[method-assign]
        world.store.ahead_s = 2 * LEASE_S
        found = await world.store.claim("other", 60.0)
        assert found is not None
        world.store.answers = read  # type: ignore[method-assign]
        other = Batch.from_json(found[1].data)
        over = await write_results(world.store, found[0], other, 1000, time.time())
        assert await world.store.replace(replace(found[1], data=over.to_json()), found[0])
        await world.store.close_batch(found[0])
        goes_on.set()
        await world.until_let_go(slow)
    batch = await world.batch()
    assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)
    assert [line["custom_id"] for line in await world.lines(batch.output_file_id)] == ["c-a"]
    assert [line["response"]["status_code"] for line in await world.lines(batch.error_file_id)] == [400]


async def _never(claim: BatchClaim, ttl_s: float) -> bool:
    await asyncio.Event().wait()
    return False


async def test_a_stop_gives_a_batch_back_at_once(world: World) -> None:
    world.holds = {"b"}
    await world.add("a", "b")
    async with world.running(lease_s=60.0):
        await world.until_answered(lambda numbers: numbers == {1} and world.runs["b"] > 0)
    world.free()
    async with world.running(lease_s=60.0):
        assert (await world.over()).completed == 2
    assert world.runs == {"a": 1, "b": 2}


class Flaky(WatchedStore):
    """Away for as long as it is set to be."""

    is_away = False

    def __init__(self, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(where)
        self.refused = asyncio.Event()
        run = self._file.run

        async def run_unless_away(work: Any) -> Any:
            if self.is_away:
                self.refused.set()
                raise StoreAway("it is away")
            return await run(work)

        monkeypatch.setattr(self._file, "run", run_unless_away)


async def test_answers_wait_for_a_store_that_is_away_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Flaky(str(tmp_path / "b.db"), monkeypatch)
    world = World(store)
    world.holds = {"a"}
    await world.add("a", "b")
    async with world.running():
        await world.until(lambda batch: batch.status == "in_progress")
        await world.changes.until(lambda: len(world.runs) >= 2)
        store.is_away = True
        world.free()
        await asyncio.wait_for(store.refused.wait(), 20)
        store.is_away = False
        assert (await world.over()).completed == 2
    assert world.runs == {"a": 1, "b": 1}
    await store.close()


async def test_what_has_ended_long_ago_is_swept_away(world: World) -> None:
    await world.store.add(StoredRecord("file", "file-old", "acme", b"{}", time.time() - 1))
    await world.store.put_piece("file-old", 0, b"x")

    async def is_gone() -> bool:
        return await world.store.find("file", "acme", "file-old") is None

    async with world.running():
        await world.changes.until(is_gone)
    assert await world.store.piece("file-old", 0) is None


def test_a_batch_takes_no_way_that_is_not_there() -> None:
    batch = Batch("batch_1", "t", "k", "file-1", ENDPOINT, "24h", 1, 2)
    with pytest.raises(ValueError, match="cannot go from validating to completed; allowed: in_progress"):
        batch.to("completed", 3.0)
    assert batch.to("failed", 3.7).reached == {"failed": 3} and batch.to("failed", 3.7).is_over


def test_records_of_another_version_are_read() -> None:
    batch = Batch("batch_1", "t", "k", "file-1", ENDPOINT, "24h", 1, 2, {"a": "é"})
    reply = json.loads(batch.to_json())
    assert Batch.from_json(json.dumps(reply | {"new": 1}).encode()) == batch
    del reply["usage"]
    assert Batch.from_json(json.dumps(reply).encode()) == batch
